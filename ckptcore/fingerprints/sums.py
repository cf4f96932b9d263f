"""Fingerprint tensors, to compare copies without having both.

A tensor's fingerprint is a sum over its elements, so that any partition into boxes, in any order, on any
worker, adds up to the same; a checkpoint's is a digest over its tensors. Format, topology, file split
and ties do not matter; names, dtypes, shapes and every bit do (NaN payloads, -0.0).

The sum. A tensor in row-major order is cut into *rows* (`Rows`): as many complete indices of one dim as make
up at most 4096 words of 8 bytes. The elements of a row fill its words as in little-endian memory, and zeros
fill the rest of the last word. A complex128 is two elements of 8 bytes. Modulo 2**64, over rows q and words
r:

    lane 0    sum of U0[q] * V0[r] * word[q, r]
    lane 1    sum of U1[q] * V1[r] * reversed[q, r], the word with its 8 bytes in reverse order

Elements own distinct bits of their words, so both are sums over elements. U (odd) and V are fixed public
numbers from BLAKE3's extendable output, one stream per table.

The probability that two different tensors of equal dtype and shape have equal sums, with the numbers taken as
random: let v be the lowest bit in which they differ anywhere, counted within words, and w the same of the
reversed words. Lane 0 misses the difference with probability at most (65 - v) / 2**(64 - v), and lane 1
independently with w for v. Unrelated numbers have v = w = 0: below 2**-115. The worst case is a difference in
only the highest bit of one and the same byte of words (signs of every fourth bfloat16, for example):
v + w = 70, below 2**-48. This protects against accidents. It does not protect against an attacker who
constructs two tensors with one sum: the multipliers are public. Files have BLAKE3 digests for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckptcore.core.box import Box, flat_start
from ckptcore.core.columnar_file import canonical_json
from ckptcore.core.dtype import BY_NAME
from ckptcore.utils.distinct_values import unique

Qwords = npt.NDArray[np.uint64]
Shape = tuple[int, ...]
Grid = TypeVar("Grid", bound=Any)  # an array, of numpy or of torch
WORD = 8  # bytes
ROW = 4096  # words
Bytes = npt.NDArray[np.uint8]
Sum = tuple[int, int]  # the two lanes, each below 2**64
Fingerprinted = tuple[str, str, Shape, str]  # (FQN, dtype, shape, fingerprint) of a tensor

ZERO: Sum = (0, 0)
ROOM = 512 << 10  # bytes of working memory that are used
_MASK = (1 << 64) - 1
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


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


def box_sum(dtype: str, shape: Shape, box: Box, elements: Bytes, room: Bytes | None = None) -> Sum:
    """Return what the elements ``box`` of a tensor add to its sum.

    Args:
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
        box: The box.
        elements: Bytes of its elements, row-major over the box, little-endian.
        room: Working memory, uint8, at least 64 KiB (`ROOM` is used if available); it is overwritten.
    """
    if not len(elements):
        return ZERO
    width = BY_NAME[dtype].itemsize
    if len(elements) <= ROW * WORD and box.shape == shape:
        return _one_row(elements)
    if width > WORD:
        shape, box = (*shape, 2), Box((*box.offset, 0), (*box.shape, 2))
        width = WORD
    # An even number of words: `_piece` splits it into two halves.
    scratch = room[: len(room) // 2 // WORD * WORD * 2] if room is not None else np.empty(ROOM, np.uint8)
    return _Box(rows_of(shape, width), box, elements.view(_UNITS[width]), scratch[:ROOM]).sum()


def add(first: Sum, second: Sum) -> Sum:
    """Return the sum of two disjoint parts of a tensor.

    >>> add((1, (1 << 64) - 1), (2, 3))
    (3, 2)
    """
    return (first[0] + second[0]) & _MASK, (first[1] + second[1]) & _MASK


def pack(sums: Iterable[Sum]) -> bytes:
    """Pack sums as 16 bytes each, both lanes little-endian: a large job has millions of them."""
    return b"".join(lane.to_bytes(WORD, "little") for total in sums for lane in total)


def tensor_fingerprint(dtype: str, shape: Shape, total: Sum) -> str:
    """Return the fingerprint of a full tensor, hex: BLAKE3 over its dtype, shape and sum."""
    lanes = [f"{lane:016x}" for lane in total]
    return _keyed_digest("tensor", [dtype, [int(n) for n in shape], lanes])


def checkpoint_fingerprint(tensors: Iterable[Fingerprinted]) -> str:
    """Return the fingerprint of a checkpoint of these tensors, hex, in any order."""
    rows = sorted(
        [fqn, dtype, [int(n) for n in shape], fingerprint] for fqn, dtype, shape, fingerprint in tensors
    )
    return _keyed_digest("checkpoint", rows)


def map_digest(
    renamed: Iterable[tuple[str, str]],
    dropped: Iterable[str],
    ties: Iterable[tuple[str, str]],
    name_map: tuple[str, Iterable[Sequence[Any]]] = ("", ()),
) -> str:
    """Return the digest of the changes of names between a source and what a fingerprint covers, hex.

    Args:
        renamed: (old, new) names.
        dropped: Tensors that are not written.
        ties: (dropped, kept) names.
        name_map: The digest of a map of names, and the tensors that it made, in JSON form; empty without
            a map.
    """
    changes = [sorted(map(list, renamed)), sorted(set(dropped)), sorted(map(list, ties))]
    rules, tensors = name_map
    if rules:
        changes.append([rules, *sorted(map(list, tensors))])
    return _keyed_digest("map", changes)


class _Box:
    """One box of a tensor during its sum."""

    def __init__(self, rows: Rows, box: Box, elements: npt.NDArray[Any], room: Bytes) -> None:
        self._rows, self._cut = rows, RowLayout(rows, box)
        self._room = room.view(np.uint64)
        self._elements = elements.reshape(self._cut.lead, box.shape[rows.dim], prod(self._cut.behind))
        self._total = ZERO

    def sum(self) -> Sum:
        """Return both lanes."""
        for piece in self._cut.pieces():
            part = self._elements[:, piece.box_start : piece.box_start + piece.count * piece.length]
            self._piece(piece, part.reshape(len(part), piece.count, -1))
        return self._total

    def _piece(self, piece: RowSpan, values: npt.NDArray[Any]) -> None:
        """Add a piece, ``values`` [lead, rows, elements]."""
        rows, row, length = self._rows, piece.row, piece.length
        begin, per = piece.skipped * rows.inner, rows.per
        first, end = begin // per, -(-(begin + length * rows.inner) // per)
        fits = self._cut.fits(begin, values.shape[2])
        picked = self._cut.picked(piece, per) if fits else slice(first, end)
        factors = tuple(v[picked] for v in page("word", 0))
        count = len(factors[0])
        ready = fits and values.view(np.uint64).flags.aligned  # words that can be read in place
        laid, swapped = (self._room[:0], self._room) if ready else np.split(self._room, 2)
        for group, lead, across in blocks(values, ROW):  # rows whose multipliers are made at once
            lane0, lane1 = np.empty((2, *group.shape[:2]), np.uint64)
            for part, *where in blocks(group, len(swapped) // count):
                if fits:
                    block = part.view(np.uint64) if ready else _copied(part, laid)
                else:
                    block = self._lay(part, laid, count, begin - first * per, length)
                turned = swapped[: block.size].reshape(block.shape)
                np.copyto(turned, block.view(">u8"))
                np.einsum("ijk,k->ij", block, factors[0], out=lane0[*where])
                np.einsum("ijk,k->ij", turned, factors[1], out=lane1[*where])
            number = self._cut.leads(lead) + np.arange(row + across.start, row + across.stop)
            u0, u1 = row_factors(number)
            self._total = add(self._total, (int((lane0 * u0).sum()), int((lane1 * u1).sum())))

    def _lay(self, part: npt.NDArray[Any], room: Qwords, count: int, begin: int, length: int) -> Qwords:
        """Return rows of zeros with the values at their positions, for boxes that are not word-aligned."""
        rows, box_behind = self._rows, self._cut.behind
        behind, offset = rows.shape[rows.dim + 1 :], self._cut.box.offset[rows.dim + 1 :]
        laid = room[: part.shape[0] * part.shape[1] * count].reshape(*part.shape[:2], count)
        # The room was used before, and zeros fill what the box does not have of a word.
        laid[...] = 0
        inside = laid.view(part.dtype)[:, :, begin : begin + length * rows.inner]
        target = inside.reshape(*part.shape[:2], length, *behind)
        place = tuple(slice(o, o + n) for o, n in zip(offset, box_behind, strict=True))
        target[(slice(None),) * 3 + place] = part.reshape(*part.shape[:2], length, *box_behind)
        return laid


def _one_row(elements: Bytes) -> Sum:
    """Return the sum of a full tensor of at most one row: most tensors are."""
    if len(elements) % WORD:
        elements = np.concatenate([elements, np.zeros(-len(elements) % WORD, np.uint8)])
    qwords = elements.view(np.uint64)
    if not qwords.flags.aligned:
        qwords = qwords.copy()
    v, u = page("word", 0), page("row", 0)
    lane0 = int(np.dot(qwords, v[0, : len(qwords)]))
    lane1 = int(np.dot(qwords.byteswap(), v[1, : len(qwords)]))
    return lane0 * int(u[0, 0]) & _MASK, lane1 * int(u[1, 0]) & _MASK


def _copied(part: npt.NDArray[Any], room: Qwords) -> Qwords:
    """Return the same bytes as aligned words."""
    qwords = part.view(np.uint64)
    copy = room[: qwords.size].reshape(qwords.shape)
    np.copyto(copy, qwords)
    return copy


def _keyed_digest(kind: str, value: Sequence[Any]) -> str:
    return blake3(canonical_json(value), derive_key_context=f"ckptcore fingerprint 1 {kind}").hexdigest()
