"""The slice of a grid has every value of every parameter; all other rows, and no more, are a soak."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from grids import beyond, slice_of, sliced, spread


@pytest.mark.parametrize("sizes", [(1,), (5,), (2, 3), (3, 2), (4, 4), (2, 3, 8), (3, 3, 2, 2)])
def test_every_value_is_in_the_slice(sizes: tuple[int, ...]) -> None:
    rows = [set(enumerate(map(str, values))) for values in product(*map(range, sizes))]
    needed = slice_of(rows)
    assert set().union(*(rows[number] for number in needed)) == set().union(*rows)
    assert len(needed) == max(sizes)


def row(function: str, *values: str, marks: tuple[str, ...] = ("grid",)) -> Any:
    """A row; the mark of ``alike(3)`` is that text."""
    found = {mark.partition("(")[0]: mark.partition("(")[2] for mark in marks}
    closest: Callable[[str], object] = lambda name: (  # noqa: E731
        SimpleNamespace(args=[int(n) for n in found[name].strip(")")]) if name in found else None
    )
    return SimpleNamespace(
        nodeid=f"test_file.py::{function}[{'-'.join(values)}]",
        callspec=SimpleNamespace(_idlist=values),
        get_closest_marker=closest,
    )


def test_only_what_a_slice_does_not_need_is_left_to_soak() -> None:
    grid = [row("test_a", x, y) for x in "ab" for y in "pq"]
    others = [row("test_b", x, y, marks=()) for x in "ab" for y in "pq"]
    lone = row("test_c", "a", "p")
    assert list(beyond([*others, lone])) == []
    assert list(beyond([*grid, *others, lone])) == [grid[1], grid[2]]


def test_a_row_that_is_a_soak_gives_a_slice_no_value() -> None:
    grid = [row("test_a", x, y) for x in "ab" for y in "pq"]
    grid[0] = row("test_a", "a", "p", marks=("grid", "soak"))
    assert list(beyond(grid)) == [grid[3]]


def test_rows_that_are_alike_are_spread_evenly() -> None:
    rows = [row("test_a", str(n), marks=("alike(3)",)) for n in range(8)]
    assert [r.callspec._idlist for r in rows if r not in list(beyond(rows))] == [("0",), ("2",), ("5",)]
    assert list(beyond(rows[:3])) == []
    assert [len(spread(rows, count)) for rows, count in ((9, 4), (4, 9), (7, 7), (1, 1))] == [4, 4, 7, 1]


def test_one_row_that_is_asked_for_by_name_runs() -> None:
    assert list(beyond([row("test_a", "b", "q")])) == []


def test_rows_of_one_decorator_are_sliced_by_their_parts() -> None:
    rows = list(product("ab", "pq"))
    default = [row.values for row in sliced(rows, lambda row: row) if not row.marks]
    assert default == [("a", "p"), ("b", "q")]
    assert [row.values for row in sliced(rows, lambda row: row)] == rows
