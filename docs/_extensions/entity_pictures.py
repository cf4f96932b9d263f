"""Draw Mermaid entity diagrams as SVG when the site is built.

A forge draws a `mermaid` block itself; the site needs no script for it. Tables with columns and relations are
hubs. Tables that relate to two hubs are between them, and unrelated tables are below. The text of a small
table's relation is displayed as its columns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

RELATION = re.compile(r"^\s*(\w+)\s+\S*--\S*\s+(\w+)\s*:\s*\"(.*)\"$", re.MULTILINE)
TABLE = re.compile(r"^\s*(\w+) \{\n(.*?)^\s*\}", re.MULTILINE | re.DOTALL)
COLUMN = re.compile(r"^\s*\w+ (\w+)(?: \"(.*)\")?$", re.MULTILINE)
LINE, GAP, CHARACTER = 16, 22, 5.9  # heights, distances and widths in units of the picture
MOST_CHARACTERS = 34


@dataclass
class Box:
    """A table of the picture: its name, the texts of its columns, and its place."""

    name: str
    lines: list[str] = field(default_factory=list)
    x: float = 0
    y: float = 0

    @property
    def width(self) -> float:
        return 16 + CHARACTER * max(len(self.name) + 3, *(len(text) for text in self.lines), 8)

    @property
    def height(self) -> float:
        return 26 + LINE * len(self.lines)


def setup(sphinx: Sphinx) -> dict[str, Any]:
    """Register the drawing of diagrams as pages are read."""
    sphinx.connect("doctree-read", _draw)
    return {"parallel_read_safe": True}


def _draw(_: Sphinx, doctree: nodes.document) -> None:
    for block in list(doctree.findall(nodes.literal_block)):
        if block.get("language") == "mermaid" and block.astext().startswith("erDiagram"):
            block.replace_self(nodes.raw("", picture(block.astext()), format="html"))


def picture(text: str) -> str:
    """Return the SVG of a Mermaid `erDiagram`."""
    relations = RELATION.findall(text)
    boxes = {name: Box(name, _columns(body)) for name, body in TABLE.findall(text)}
    hubs = [name for name in boxes if any(name in (a, b) for a, b, _ in relations)]
    for parent, child, label in relations:
        for name in (parent, child):
            boxes.setdefault(name, Box(name))
        small = child if child not in hubs else parent
        if label and small not in hubs and label not in boxes[small].lines:
            boxes[small].lines.append(label)
    width, height = _place(boxes, relations, hubs)
    lines = [_edge(boxes[a], boxes[b]) for a, b, _ in relations]
    drawn = [_box(box) for box in boxes.values()]
    head = (
        '<div class="entities"><svg xmlns="http://www.w3.org/2000/svg" '
        f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
        'role="img" font-family="sans-serif" '
        'aria-label="tables and their relations">'
    )
    return "\n".join([head, *lines, *drawn, "</svg></div>"])


def _columns(body: str) -> list[str]:
    texts = [f"{name}: {note}" if note else name for name, note in COLUMN.findall(body)]
    return [t if len(t) <= MOST_CHARACTERS else f"{t[: MOST_CHARACTERS - 1].rstrip()}…" for t in texts]


def _place(
    boxes: dict[str, Box], relations: list[tuple[str, str, str]], hubs: list[str]
) -> tuple[float, float]:
    """Place every box; return the size of the picture."""
    columns: dict[float, list[Box]] = {}
    alone = []
    for name, box in boxes.items():
        related = {hubs.index(h) for a, b, _ in relations for h in (a, b) if name in (a, b) and h in hubs}
        if name in hubs:
            columns.setdefault(2 * hubs.index(name), []).append(box)
        elif related:
            column = sum(related) / len(related) * 2 if len(related) > 1 else 2 * min(related) - 1
            columns.setdefault(column, []).append(box)
        else:
            alone.append(box)
    heights = {c: sum(b.height + GAP for b in members) - GAP for c, members in columns.items()}
    x, tallest = 8.0, max(heights.values())
    for column in sorted(columns):
        y = 8 + (tallest - heights[column]) / 2
        for box in columns[column]:
            box.x, box.y = x, y
            y += box.height + GAP
        x += max(box.width for box in columns[column]) + 1.5 * GAP
    width, x, y, row = x - 1.5 * GAP + 8, 8.0, tallest + 3 * GAP, 0.0
    for box in alone:
        if x + box.width > width:
            x, y, row = 8.0, y + row + GAP, 0.0
        box.x, box.y = x, y
        x, row = x + box.width + GAP, max(row, box.height)
    return width, y + row + 8


def _edge(one: Box, other: Box) -> str:
    left, right = sorted((one, other), key=lambda box: box.x)
    y1, y2 = left.y + left.height / 2, right.y + right.height / 2
    x1, x2 = left.x + left.width, right.x
    middle = (x1 + x2) / 2
    return f'<path d="M{x1:.1f} {y1:.1f}C{middle:.1f} {y1:.1f} {middle:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"/>'


def _box(box: Box) -> str:
    texts = [
        f'<text x="{box.x + 8:.1f}" y="{box.y + 36 + LINE * n:.1f}">{escape(text)}</text>'
        for n, text in enumerate(box.lines)
    ]
    return (
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="4"/>'
        f'<text class="name" x="{box.x + 8:.1f}" y="{box.y + 18:.1f}">{box.name}</text>' + "".join(texts)
    )
