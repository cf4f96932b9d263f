"""Lay out tables whose columns hold names of tensors: names wrap at their dots, never inside a word."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, starmap
from typing import TYPE_CHECKING, Any

from ckptcore.utils import terminal

if TYPE_CHECKING:
    from rich.console import Console

_PADDING = 3  # columns between two cells, rules included
_MIN_NAME = 24  # columns that a name gets at least before it wraps
_MAX_WORD = 12  # columns that the longest word of another cell keeps at most
_PARTS = re.compile(r"[^./]*[./]?")


def print_table(
    out: Console, heads: Sequence[str], rows: Sequence[Sequence[str]], names: Collection[int] = (0,)
) -> None:
    """Print a table in which no cell can start a line of its own.

    Where a part of a name is wider than the terminal, the table is, too.

    Args:
        out: Where to print.
        heads: The titles of the columns.
        rows: The cells of each row, as many as there are titles.
        names: The columns that hold names.
    """
    cleaned = {cell: terminal.clean(cell) for cell in dict.fromkeys(chain.from_iterable(rows))}
    cells = [[*map(cleaned.__getitem__, row)] for row in rows]
    if out.width == terminal.PIPE:
        terminal.cleaned_lines(_aligned(heads, cells))
        return
    widths = _name_widths(out.width, heads, cells, names)
    table = new_table()
    for n, head in enumerate(heads):
        one_word = not any(" " in row[n] or len(row[n]) > _MIN_NAME for row in cells)
        table.add_column(head, overflow="fold", no_wrap=n in widths or one_word)
    least = _PADDING * (len(heads) - 1)
    for n in range(len(heads)):
        if n in widths:
            for row in cells:
                row[n] = wrap_name(row[n], widths[n])
            least += max(len(line) for row in [*cells, heads] for line in row[n].split("\n"))
        else:
            least += min(_MAX_WORD, max(len(word) for row in [*cells, heads] for word in row[n].split(" ")))
    for row in cells:
        table.add_row(*(terminal.text(cell, lines=n in widths) for n, cell in enumerate(row)))
    out.width = max(out.width, least)
    out.print(table)


def _aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table as wide as its cells: rich takes 0.4 ms for each row."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    form = (" " * _PADDING).join(f"{{:<{width}}}" for width in widths).format
    yield form(*heads)
    yield "─" * (sum(widths) + _PADDING * (len(widths) - 1))
    yield from starmap(form, rows)


def new_table() -> Any:
    """Return an empty table in the style of all commands."""
    from rich.box import SIMPLE
    from rich.table import Table

    return Table(box=SIMPLE, pad_edge=False, show_edge=False)


def wrap_name(name: str, width: int) -> str:
    """Return a name with line breaks behind its dots and slashes, such that lines keep to a width.

    A part that is wider than that stays in one piece.

    >>> wrap_name("model.layers.0.self_attn.q_proj.weight", 20).splitlines()
    ['model.layers.0.', 'self_attn.q_proj.', 'weight']
    """
    lines = [""]
    for part in _PARTS.findall(name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _name_widths(
    width: int, heads: Sequence[str], cells: Sequence[Sequence[str]], names: Collection[int]
) -> dict[int, int]:
    """Return how wide each column of names may be: what the other columns leave, in proportion."""
    natural = [max(len(row[n]) for row in [*cells, heads]) for n in range(len(heads))]
    # Texts give way to names down to half of the width.
    text_width = min(sum(w for n, w in enumerate(natural) if n not in names), width // 2)
    room = width - text_width - _PADDING * (len(heads) - 1)
    name_width = sum(natural[n] for n in names)
    if name_width <= room:
        return {n: natural[n] for n in names}
    return {n: max(_MIN_NAME // len(names), room * natural[n] // name_width) for n in names}
