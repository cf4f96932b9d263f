"""Draws the rooms of ckptcore from their own docstrings and imports: a table and a picture.

`make docs` writes the table into CONTRIBUTING.md and the picture to `docs/pictures/rooms.svg`; `make check`
fails when either drifted, or when there are more floors than before.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "pictures" / "rooms.svg"
ABOVE = ("tasks", "flows", "deployments")  # packages above ckptcore, lowest first
TITLE = "Rooms of ckptcore: each imports only from floors below it"
MOST_FLOORS = 15  # an import that needs one more belongs elsewhere
CONTRACT = "rooms of ckptcore"


@dataclass(frozen=True, slots=True)
class Room:
    """One room: a package or a module right below ckptcore, or a package above it.

    purpose: the first paragraph of its docstring. imports: names of other rooms.
    """

    name: str
    purpose: str
    imports: frozenset[str]


@dataclass(frozen=True, slots=True)
class House:
    """All rooms by name, and the floors that the import contract gives them, lowest first.

    The packages above ckptcore are one floor above what they import.
    """

    rooms: Mapping[str, Room]
    floors: Sequence[Sequence[str]]


def measure(root: Path = ROOT) -> House:
    """The house as the code has it.

    Raises KeyError when the import contract names a room that the code does not have.
    """
    contracts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = next(c["layers"] for c in contracts["contracts"] if c["name"] == CONTRACT)
    floors = [[name.strip() for name in layer.split("|")] for layer in reversed(layers)]
    rooms = {name: _room(root, name) for name in (*(name for floor in floors for name in floor), *ABOVE)}
    for name in ABOVE:
        level = 1 + max(n for n, floor in enumerate(floors) if rooms[name].imports & set(floor))
        floors += [[]] * (level == len(floors))
        floors[level] = [*floors[level], name]
    return House(rooms, floors)


def _room(root: Path, name: str) -> Room:
    place = root / name if name in ABOVE else root / "ckptcore" / name
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    face = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    docstring = ast.get_docstring(trees[files.index(face)]) or ""
    imported = {one for tree in trees for one in _imported(tree)} - {name}
    return Room(name, docstring.split("\n\n")[0].replace("\n", " "), frozenset(imported))


def _lines(texts: Sequence[str]) -> int:
    return sum(text.count("\n") for text in texts)


def _imported(tree: ast.AST) -> Iterator[str]:
    """Rooms that a module imports from, also inside functions and for types only."""
    for node in blocks(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top in ABOVE:
                yield top
            elif top == "ckptcore" and rest:
                yield rest.split(".")[0]


def blocks(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node with statements in it: expressions, most of a module, have none."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, name, ())
            left += inside if isinstance(inside, list) else ()


def direct(house: House) -> list[tuple[str, str]]:
    """The imports that no other import implies: the least arrows that keep the order visible."""
    known = {n: {m for m in r.imports if m in house.rooms} for n, r in house.rooms.items()}
    reach: dict[str, set[str]] = {}
    for floor in house.floors:
        for name in floor:
            reach[name] = set(known[name]).union(*(reach.get(m, set()) for m in known[name]))
    return [
        (name, to)
        for name in known
        for to in sorted(known[name])
        if not any(to in reach[via] for via in known[name] if via != to)
    ]


def table(house: House) -> str:
    """Every room, highest floor first, as the rows of a markdown table."""
    below: dict[str, list[str]] = {name: [] for name in house.rooms}
    for source, target in direct(house):
        below[source].append(f"`{target}`")
    rows = ["| room | what it is for | right below it |", "| --- | --- | --- |"]
    for floor in reversed(house.floors):
        for name in floor:
            where = f"`{name}/`" if name in ABOVE else f"`ckptcore/{name}`"
            rows.append(f"| {where} | {house.rooms[name].purpose} | {', '.join(below[name])} |")
    return "\n".join(rows) + "\n"


# Measures of the picture, in pixels.
WIDTH, HEIGHT, GAP, LEFT, TOP = 300, 62, 34, 30, 60


def picture(house: House) -> str:
    """The house as SVG: floors from top to bottom, and the arrows of `direct`."""
    widest = max(len(floor) for floor in house.floors)
    wide = 2 * LEFT + widest * WIDTH + (widest - 1) * 40
    tall = TOP + len(house.floors) * (HEIGHT + GAP)
    at: dict[str, tuple[float, float]] = {}
    for level, floor in enumerate(reversed(house.floors)):
        start = (wide - len(floor) * WIDTH - (len(floor) - 1) * 40) / 2
        for n, name in enumerate(floor):
            at[name] = (start + n * (WIDTH + 40), TOP + level * (HEIGHT + GAP))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"',
        'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#64748b"/></marker></defs>',
        f'<rect width="{wide}" height="{tall}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="32" font-size="17" fill="#0f172a">{TITLE}</text>',
    ]
    arrows = direct(house)
    for source, target in arrows:
        x1 = _door(at, source, [b for a, b in arrows if a == source], target)
        x2 = _door(at, target, [a for a, b in arrows if b == target], source)
        y1, y2 = at[source][1] + HEIGHT, at[target][1]
        bend = (y2 - y1) / 2
        curve = f"C{x1:.0f},{y1 + bend:.0f} {x2:.0f},{y2 - bend:.0f} {x2:.0f},{y2:.0f}"
        parts.append(
            f'<path d="M{x1:.0f},{y1:.0f} {curve}" fill="none" stroke="#94a3b8" stroke-width="1.3"'
            ' marker-end="url(#tip)"/>'
        )
    for name, (x, y) in at.items():
        room = house.rooms[name]
        fill = "#fef3c7" if name in ABOVE else "#e0f2fe"
        parts.append(
            f'<g><title>{escape(room.purpose)}</title><rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}"'
            f' height="{HEIGHT}" rx="6" fill="{fill}" stroke="#475569"/>'
            f'<text x="{x + WIDTH / 2:.0f}" y="{y + 21:.0f}" text-anchor="middle" font-size="15"'
            f' fill="#0f172a">{escape(name)}</text>'
            + "".join(
                f'<text x="{x + WIDTH / 2:.0f}" y="{y + 38 + 14 * n:.0f}" text-anchor="middle" font-size="11"'
                f' fill="#475569">{escape(line)}</text>'
                for n, line in enumerate(wrap(room.purpose, 52)[:2])
            )
            + "</g>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _door(at: Mapping[str, tuple[float, float]], room: str, others: Sequence[str], other: str) -> float:
    """Where on its edge a room's arrow to or from another one ends: side by side, in the others' order."""
    row = sorted(others, key=lambda name: at[name])
    return at[room][0] + WIDTH * (row.index(other) + 1) / (len(row) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="draw the picture")
    action.add_argument("--check", action="store_true", help="exit with 1 when the picture drifted")
    action.add_argument("--table", action="store_true", help="print the table of rooms")
    arguments = parser.parse_args()
    house = measure()
    if arguments.table:
        print(table(house), end="")
        return 0
    if len(house.floors) > MOST_FLOORS:
        print(
            f"the rooms have {len(house.floors)} floors, {MOST_FLOORS} at most: turn an import",
            file=sys.stderr,
        )
        return 1
    drawn = picture(house)
    if PICTURE.is_file() and PICTURE.read_text(encoding="utf-8") == drawn:
        return 0
    if arguments.check:
        print(f"{PICTURE.relative_to(ROOT)}: the rooms changed; run `make docs`", file=sys.stderr)
        return 1
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
