"""Compute where a box is in the rows of a tensor, and the multipliers of its words.

`ckptcore.fingerprints.sums` defines a row. The sums on a host and on a device share this arithmetic: how a
tensor is cut into rows, which words of which rows a box has elements in, and the multipliers.
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
from ckptcore.utils.distinct_values import unique

Qwords = npt.NDArray[np.uint64]
Shape = tuple[int, ...]
Grid = TypeVar("Grid", bound=Any)  # an array, of numpy or of torch
WORD = 8  # bytes
ROW = 4096  # words


@dataclass(frozen=True, slots=True)
class Rows:
    """How a tensor is cut into rows.

    Attributes:
        shape: Shape of the tensor.
        dim: The dim that is cut.
        segment: Indices of that dim that make up a row, with everything behind them.
        inner: Elements behind one index of that dim.
        per: Elements per word.
    """

    shape: Shape
    dim: int
    segment: int
    inner: int
    per: int

    @property
    def across(self) -> int:
        """Count the rows in one index of the dims before ``dim``."""
        return -(-self.shape[self.dim] // self.segment)


@lru_cache(1024)
def rows_of(shape: Shape, width: int) -> Rows:
    """Return the rows of a tensor with elements of 1, 2, 4 or 8 bytes and at least one dim."""
    per = WORD // width
    most, inner, dim = ROW * per, 1, len(shape) - 1
    while dim and inner * shape[dim] <= most:
        inner *= shape[dim]
        dim -= 1
    segment = min(shape[dim], most // inner)
    if per < segment < shape[dim]:
        segment -= segment % per  # rows of complete words, whatever the dims behind are
    return Rows(shape, dim, segment, inner, per)


@dataclass(frozen=True, slots=True)
class RowSpan:
    """A box's part of ``count`` neighbouring rows, in each of its indices of the dims before the cut one.

    Attributes:
        row: Number of the first row.
        skipped: First index of the cut dim, counted within a row.
        count: Number of rows.
        length: Indices of the cut dim per row.
        box_start: First index of the cut dim, counted within the box.
    """

    row: int
    skipped: int
    count: int
    length: int
    box_start: int


class RowLayout:
    """How a box of a tensor is distributed over its rows.

    Attributes:
        behind: Shape of the box in the dims behind the one that is cut.
        full: Whether the box has all of those dims.
        lead: Indices of the box in the dims before.
    """

    def __init__(self, rows: Rows, box: Box) -> None:
        self.rows, self.box = rows, box
        self.behind = box.shape[rows.dim + 1 :]
        self.full = self.behind == rows.shape[rows.dim + 1 :]
        self.lead = prod(box.shape[: rows.dim])

    def pieces(self) -> Iterator[RowSpan]:
        """Yield at most three spans: the rest of a row, complete rows, the beginning of one."""
        segment, dim = self.rows.segment, self.rows.dim
        begin, end = self.box.offset[dim], self.box.offset[dim] + self.box.shape[dim]
        index = begin
        while index < end:
            row, skipped = divmod(index, segment)
            count = 1 if skipped else max((end - index) // segment, 1)
            length = min(segment - skipped, end - index) if count == 1 else segment
            yield RowSpan(row, skipped, count, length, index - begin)
            index += count * length

    def leads(self, indices: slice) -> npt.NDArray[np.int64]:
        """Return the first row of some of the box's indices in the dims before the cut one; [indices, 1]."""
        dim = self.rows.dim
        shape, box = self.rows.shape[:dim], Box(self.box.offset[:dim], self.box.shape[:dim])
        if dim < 2:
            number = np.arange(indices.start, indices.stop) + (box.offset[0] if dim else 0)
        else:
            inside = np.unravel_index(np.arange(indices.start, indices.stop), box.shape)
            number = np.zeros(indices.stop - indices.start, np.int64)
            for n, o, index in zip(shape, box.offset, inside, strict=True):
                number = number * n + index + o
        return number[:, None] * self.rows.across

    def fits(self, begin: int, count: int) -> bool:
        """Report whether runs of the box begin and end at word boundaries, in the tensor and in the box.

        Args:
            begin: Where a piece begins in its rows, elements.
            count: Elements of the piece per row.
        """
        per, shape = self.rows.per, self.rows.shape
        if self.full:
            return begin % per == 0 and count % per == 0
        return all(n % per == 0 for n in (shape[-1], self.box.shape[-1], self.box.offset[-1]))

    def picked(self, piece: RowSpan, group: int) -> slice | npt.NDArray[np.int64]:
        """Return the positions of a piece's elements in its rows, in groups of ``group`` elements.

        A group is one element, or a word's elements where the box `fits`.
        """
        rows, dim = self.rows, self.rows.dim
        if self.full:
            begin = piece.skipped * rows.inner
            return slice(begin // group, -(-(begin + piece.length * rows.inner) // group))
        behind, offset = rows.shape[dim + 1 :], self.box.offset[dim + 1 :]
        shape = (rows.segment, *behind[:-1], behind[-1] // group)
        start = (piece.skipped, *offset[:-1], offset[-1] // group)
        return _element_numbers(shape, start, (piece.length, *self.behind[:-1], self.behind[-1] // group))


def blocks(values: Grid, most: int) -> Iterator[tuple[Grid, slice, slice]]:
    """Cut ``values`` [lead, rows, elements] into parts of at most ``most`` rows: (part, leads, rows)."""
    lead, rows, _ = values.shape
    # Several leads at once only where a part has all of their rows: a part is a box.
    rows_per_part = max(1, min(rows, most))
    leads_per_part = max(1, most // rows) if rows_per_part == rows else 1
    for a in range(0, lead, leads_per_part):
        for b in range(0, rows, rows_per_part):
            part = values[a : a + leads_per_part, b : b + rows_per_part]
            yield part, slice(a, a + part.shape[0]), slice(b, b + part.shape[1])


def row_factors(number: npt.NDArray[np.int64]) -> tuple[Qwords, Qwords]:
    """Return U0 and U1 of rows; ``number`` is [indices, rows], in order."""
    first, last = int(number[0, 0]) // ROW, int(number[-1, -1]) // ROW
    if first == last:
        rows = page("row", first)[:, number - first * ROW]
        return rows[0], rows[1]
    factors = np.empty((2, *number.shape), np.uint64)
    pages = number // ROW
    # Rows at the end of one page and the beginning of the next, in one piece.
    for page_number in unique(pages.reshape(-1)).tolist():
        in_page = pages == page_number
        factors[:, in_page] = page("row", page_number)[:, number[in_page] - page_number * ROW]
    return factors[0], factors[1]


@lru_cache(64)
def page(table: str, number: int) -> Qwords:
    """Return a page of the multipliers of both lanes, [2, 4096]: of words, or (odd ones) of rows."""
    start, size = number * ROW * WORD, ROW * WORD
    raw = [
        blake3(derive_key_context=f"ckptcore fingerprint 1 {table} {lane}").digest(size, seek=start)
        for lane in range(2)
    ]
    numbers = np.frombuffer(b"".join(raw), "<u8").astype(np.uint64).reshape(2, ROW)
    if table == "row":
        numbers |= np.uint64(1)  # odd, so that a difference in one row alone is not lost
    numbers.flags.writeable = False
    return numbers


def _element_numbers(shape: Shape, offset: Shape, extent: Shape) -> npt.NDArray[np.int64]:
    """Return the row-major numbers of a box's indices, in order."""
    if prod(extent) == 1:
        return np.array([flat_start(shape, offset)])
    numbers = np.zeros(1, np.int64)
    for n, o, k in zip(shape, offset, extent, strict=True):
        numbers = (numbers[:, None] * n + np.arange(o, o + k)).reshape(-1)
    return numbers
