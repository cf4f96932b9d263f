"""Fingerprint rows: where in the rows of a tensor does a box lie, and which numbers multiply it there?

`ckptcore.fingerprints.sums` says what a row is. Here is the arithmetic that the sums on a host and on a
device
share: how a tensor is cut into rows, which words of which rows a box has elements in, and the multipliers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckptcore.core.box import Box, flat_start

Words = npt.NDArray[np.uint64]
Shape = tuple[int, ...]
Grid = TypeVar("Grid", bound=Any)  # an array, of numpy or of torch
WORD = 8  # bytes
ROW = 4096  # words


@dataclass(frozen=True, slots=True)
class Rows:
    """How a tensor is cut into rows.

    dim: the dim that is cut; ``segment`` of its indices, with everything behind them, are a row.
    inner: elements behind one index of it. per: elements in a word.
    """

    shape: Shape
    dim: int
    segment: int
    inner: int
    per: int

    @property
    def across(self) -> int:
        """Rows in one index of the dims before ``dim``."""
        return -(-self.shape[self.dim] // self.segment)


@lru_cache(1024)
def rows_of(shape: Shape, width: int) -> Rows:
    """The rows of a tensor with elements of 1, 2, 4 or 8 bytes and at least one dim."""
    per = WORD // width
    most, inner, dim = ROW * per, 1, len(shape) - 1
    while dim and inner * shape[dim] <= most:
        inner *= shape[dim]
        dim -= 1
    segment = min(shape[dim], most // inner)
    if per < segment < shape[dim]:
        segment -= segment % per  # rows of whole words, whatever the dims behind are
    return Rows(shape, dim, segment, inner, per)


@dataclass(frozen=True, slots=True)
class RowSpan:
    """What a box has of ``count`` rows beside each other, from the one numbered ``row`` on, in each of its
    indices of the dims before the cut one: ``length`` indices of the cut dim, from the one numbered
    ``skipped`` of a row on. at: its first index of that dim, counted within the box."""

    row: int
    skipped: int
    count: int
    length: int
    at: int


class RowLayout:
    """How a box of a tensor lies across its rows.

    behind: shape of the box in the dims behind the one that is cut. whole: whether that is all of them.
    lead: indices of the box in the dims before.
    """

    def __init__(self, rows: Rows, box: Box) -> None:
        self.rows, self.box = rows, box
        self.behind = box.shape[rows.dim + 1 :]
        self.whole = self.behind == rows.shape[rows.dim + 1 :]
        self.lead = prod(box.shape[: rows.dim])

    def pieces(self) -> Iterator[RowSpan]:
        """At most three: what is left of a row, whole rows, the beginning of one."""
        segment, dim = self.rows.segment, self.rows.dim
        begin, end = self.box.offset[dim], self.box.offset[dim] + self.box.shape[dim]
        at = begin
        while at < end:
            row, skipped = divmod(at, segment)
            count = 1 if skipped else max((end - at) // segment, 1)
            length = min(segment - skipped, end - at) if count == 1 else segment
            yield RowSpan(row, skipped, count, length, at - begin)
            at += count * length

    def leads(self, some: slice) -> npt.NDArray[np.int64]:
        """The first row of some of the box's indices in the dims before the cut one; [indices, 1]."""
        dim = self.rows.dim
        shape, box = self.rows.shape[:dim], Box(self.box.offset[:dim], self.box.shape[:dim])
        if dim < 2:
            number = np.arange(some.start, some.stop) + (box.offset[0] if dim else 0)
        else:
            inside = np.unravel_index(np.arange(some.start, some.stop), box.shape)
            number = np.zeros(some.stop - some.start, np.int64)
            for n, o, index in zip(shape, box.offset, inside, strict=True):
                number = number * n + index + o
        return number[:, None] * self.rows.across

    def fits(self, begin: int, count: int) -> bool:
        """Whether runs of the box begin and end where words do, in the tensor and in the box.

        begin: where a piece begins in its rows, counted in elements. count: elements that it has of a row.
        """
        per, shape = self.rows.per, self.rows.shape
        if self.whole:
            return begin % per == 0 and count % per == 0
        return all(n % per == 0 for n in (shape[-1], self.box.shape[-1], self.box.offset[-1]))

    def picked(self, piece: RowSpan, group: int) -> slice | npt.NDArray[np.int64]:
        """Where in its rows a piece has elements, counted in groups of so many: of one, or of a word's where
        the box fits."""
        rows, dim = self.rows, self.rows.dim
        if self.whole:
            begin = piece.skipped * rows.inner
            return slice(begin // group, -(-(begin + piece.length * rows.inner) // group))
        behind, offset = rows.shape[dim + 1 :], self.box.offset[dim + 1 :]
        shape = (rows.segment, *behind[:-1], behind[-1] // group)
        start = (piece.skipped, *offset[:-1], offset[-1] // group)
        return _element_numbers(shape, start, (piece.length, *self.behind[:-1], self.behind[-1] // group))


def blocks(values: Grid, most: int) -> Iterator[tuple[Grid, slice, slice]]:
    """``values`` [lead, rows, elements] in parts of at most ``most`` rows; (part, its leads, its rows)."""
    lead, rows, _ = values.shape
    each = max(1, min(rows, most))
    several = max(1, most // rows) if each == rows else 1
    for a in range(0, lead, several):
        for b in range(0, rows, each):
            part = values[a : a + several, b : b + each]
            yield part, slice(a, a + part.shape[0]), slice(b, b + part.shape[1])


def row_factors(number: npt.NDArray[np.int64]) -> tuple[Words, Words]:
    """U0 and U1 of rows; number: [indices, rows], in order."""
    first, last = int(number[0, 0]) // ROW, int(number[-1, -1]) // ROW
    if first == last:
        rows = page("row", first)[:, number - first * ROW]
        return rows[0], rows[1]
    found = np.empty((2, *number.shape), np.uint64)
    pages = number // ROW
    for each in np.unique(pages).tolist():
        here = pages == each
        found[:, here] = page("row", each)[:, number[here] - each * ROW]
    return found[0], found[1]


@lru_cache(64)
def page(table: str, number: int) -> Words:
    """A page of the multipliers of both lanes, [2, 4096]: of words, or (odd ones) of rows."""
    start, size = number * ROW * WORD, ROW * WORD
    raw = [
        blake3(derive_key_context=f"ckptcore fingerprint 1 {table} {lane}").digest(size, seek=start)
        for lane in range(2)
    ]
    numbers = np.frombuffer(b"".join(raw), "<u8").astype(np.uint64).reshape(2, ROW)
    if table == "row":
        numbers |= np.uint64(1)  # what differs in one row alone is not lost here
    numbers.flags.writeable = False
    return numbers


def _element_numbers(shape: Shape, offset: Shape, extent: Shape) -> npt.NDArray[np.int64]:
    """The row-major numbers of a box's indices, in order."""
    if prod(extent) == 1:
        return np.array([flat_start(shape, offset)])
    found = np.zeros(1, np.int64)
    for n, o, k in zip(shape, offset, extent, strict=True):
        found = (found[:, None] * n + np.arange(o, o + k)).reshape(-1)
    return found
