"""Choose of a test's grid of parameters a slice that has every value of every parameter.

A test with the marker `grid` is a product: its rows go the same way through the code, with other values.
The rows of one with the marker `alike(n)` do, too, but are no product: its slice is n of them, spread evenly.
`make test` runs the slice, `make soak` all other rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import pytest

Values = set[tuple[int, Hashable]]


def beyond(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the rows of all marked tests that their slices do not need.

    A row that is a soak by itself counts for no slice.
    """
    rows_of_test: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        marked = item.get_closest_marker("grid") or item.get_closest_marker("alike")
        if marked and not item.get_closest_marker("soak"):
            rows_of_test[item.nodeid.partition("[")[0]].append(item)
    for rows in rows_of_test.values():
        alike = rows[0].get_closest_marker("alike")
        needed = spread(len(rows), *alike.args) if alike else slice_of([values(row) for row in rows])
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


def spread(rows: int, count: int) -> set[int]:
    """Return the numbers of ``count`` rows at even distances, from the first one on, or of all there are."""
    return {number * rows // count for number in range(count)} if count < rows else set(range(rows))


def slice_of(rows: list[Values]) -> set[int]:
    """Return the numbers of rows that together have every value, each the one with most that are missing."""
    missing = set().union(*rows)
    needed: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda number: len(rows[number] & missing))
        needed.add(best)
        missing -= rows[best]
    return needed
