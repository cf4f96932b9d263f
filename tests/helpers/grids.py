"""Choose of a test's grid of parameters a slice that has every value of every parameter.

A test with the marker `grid` is a product: its rows go the same way through the code, with other values.
`make test` runs the slice, `make soak` all other rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import pytest

Values = set[tuple[int, Hashable]]


def beyond(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the rows of all marked grids that their slices do not need.

    A row that is a soak by itself counts for no slice.
    """
    grids: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("grid") and not item.get_closest_marker("soak"):
            grids[item.nodeid.partition("[")[0]].append(item)
    for rows in grids.values():
        needed = slice_of([values(row) for row in rows])
        yield from (row for number, row in enumerate(rows) if number not in needed)


def values(row: pytest.Item) -> Values:
    """Return the values of a row: for each decorator or fixture that has parameters, which of them it is."""
    return set(enumerate(row.callspec._idlist))  # type: ignore[attr-defined]


def sliced(rows: Sequence[Any], parts: Callable[[Any], tuple[Hashable, ...]]) -> list[Any]:
    """Rows of one decorator; those that a slice with every part does not need are a soak."""
    needed = slice_of([set(enumerate(parts(row))) for row in rows])
    return [
        pytest.param(*row, marks=[] if number in needed else [pytest.mark.soak])
        for number, row in enumerate(rows)
    ]


def slice_of(rows: list[Values]) -> set[int]:
    """Return the numbers of rows that together have every value, each the one with most that are missing."""
    missing = set().union(*rows)
    needed: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda number: len(rows[number] & missing))
        needed.add(best)
        missing -= rows[best]
    return needed
