"""Fingerprints: do two copies hold the same numbers, told without holding either?

A tensor's fingerprint is a sum over its elements, so that any partition into boxes, in any order, on any
worker, adds up to the same; a checkpoint's is a digest over its tensors. Which format, topology, file split
and tie the numbers lie in does not matter; names, dtypes, shapes and every bit do (NaN payloads, -0.0).

The sum. A tensor in row-major order is cut into *rows* (`_Rows`): as many whole indices of one dim as make up
at most 4096 words of 8 bytes. The elements of a row stand in its words as in little-endian memory, the last
word filled up with zeros; a complex128 is two elements of 8 bytes. Modulo 2**64, over rows q and words r:

    lane 0    sum of U0[q] * V0[r] * word[q, r]
    lane 1    sum of U1[q] * V1[r] * reversed[q, r], the word with its 8 bytes in reverse order

Elements own distinct bits of their words, so both are sums over elements. U (odd) and V are fixed public
numbers out of BLAKE3's extendable output, a stream a table.

How probably do two different tensors of equal dtype and shape have equal sums, the numbers taken as random?
Let v be the lowest bit in which they differ anywhere, counted within words, and w the same of the reversed
words. Lane 0 misses the difference with probability at most (65 - v) / 2**(64 - v), lane 1 with w for v,
independently. Unrelated numbers have v = w = 0: below 2**-115. The worst case is a difference in the
highest bit of one and the same byte of words alone (signs of every fourth bfloat16, say): v + w = 70, below
2**-48. That is proof against accidents. It is none against somebody who looks for two tensors with one sum:
the multipliers are public. Files have BLAKE3 digests for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckptcore.box import Box, flat_start
from ckptcore.dtype import BY_NAME
from ckptcore.frame import canonical_json

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Shape = tuple[int, ...]
Sum = tuple[int, int]  # the two lanes, each below 2**64
Fingerprinted = tuple[str, str, Shape, str]  # (FQN, dtype, shape, fingerprint) of a tensor

ZERO: Sum = (0, 0)
ROOM = 512 << 10  # bytes of working memory that are put to use
_WORD = 8
_ROW = 4096  # words
_MASK = (1 << 64) - 1
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def box_sum(dtype: str, shape: Shape, box: Box, elements: Bytes, room: Bytes | None = None) -> Sum:
    """What the elements ``box`` of a tensor add to its sum.

    elements: their bytes, row-major over the box, little-endian. room: working memory, uint8, at least
    64 KiB (`ROOM` is used if it is there); whatever is in it is lost.
    """
    if not len(elements):
        return ZERO
    width = BY_NAME[dtype].itemsize
    if len(elements) <= _ROW * _WORD and box.shape == shape:
        return _one_row(elements)
    if width > _WORD:
        shape, box = (*shape, 2), Box((*box.offset, 0), (*box.shape, 2))
        width = _WORD
    held = room[: len(room) // 2 // _WORD * _WORD * 2] if room is not None else np.empty(ROOM, np.uint8)
    return _Box(_rows(shape, width), box, elements.view(_UNITS[width]), held[:ROOM]).sum()


def add(one: Sum, other: Sum) -> Sum:
    """The sum of two disjoint parts of a tensor.

    >>> add((1, (1 << 64) - 1), (2, 3))
    (3, 2)
    """
    return (one[0] + other[0]) & _MASK, (one[1] + other[1]) & _MASK


def pack(sums: Iterable[Sum]) -> bytes:
    """Sums as 16 bytes each, both lanes little-endian: a large job has millions of them."""
    return b"".join(lane.to_bytes(_WORD, "little") for total in sums for lane in total)


def tensor_fingerprint(dtype: str, shape: Shape, total: Sum) -> str:
    """The fingerprint of a whole tensor, hex: BLAKE3 over its dtype, shape and sum."""
    lanes = [f"{lane:016x}" for lane in total]
    return _digest("tensor", [dtype, [int(n) for n in shape], lanes])


def checkpoint_fingerprint(tensors: Iterable[Fingerprinted]) -> str:
    """The fingerprint of a checkpoint of these tensors, hex, in whatever order they come."""
    rows = sorted([fqn, dtype, [int(n) for n in shape], found] for fqn, dtype, shape, found in tensors)
    return _digest("checkpoint", rows)


def map_digest(renamed: Iterable[tuple[str, str]], dropped: Iterable[str],
               ties: Iterable[tuple[str, str]]) -> str:  # fmt: skip
    """What was done to names on the way from a source to what a fingerprint is of, hex.

    renamed: (old, new). dropped: tensors that do not go on. ties: (dropped, kept).
    """
    gone = sorted(set(dropped))
    return _digest("map", [sorted(map(list, renamed)), gone, sorted(map(list, ties))])


@dataclass(frozen=True, slots=True)
class _Rows:
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
def _rows(shape: Shape, width: int) -> _Rows:
    per = _WORD // width
    most, inner, dim = _ROW * per, 1, len(shape) - 1
    while dim and inner * shape[dim] <= most:
        inner *= shape[dim]
        dim -= 1
    segment = min(shape[dim], most // inner)
    if per < segment < shape[dim]:
        segment -= segment % per  # rows of whole words, whatever the dims behind are
    return _Rows(shape, dim, segment, inner, per)


class _Box:
    """One box of a tensor while it is summed."""

    def __init__(self, rows: _Rows, box: Box, elements: npt.NDArray[Any], room: Bytes) -> None:
        self._rows, self._box = rows, box
        self._room = room.view(np.uint64)
        dim = rows.dim
        self._behind = box.shape[dim + 1 :]  # of the box, in the dims behind the one that is cut
        self._whole = self._behind == rows.shape[dim + 1 :]
        lead = prod(box.shape[:dim])
        self._elements = elements.reshape(lead, box.shape[dim], prod(self._behind))
        self._total = ZERO

    def sum(self) -> Sum:
        """Both lanes."""
        rows, dim = self._rows, self._rows.dim
        begin, end = self._box.offset[dim], self._box.offset[dim] + self._box.shape[dim]
        at = begin
        while at < end:  # at most three pieces: what is left of a row, whole rows, the beginning of one
            row, skipped = divmod(at, rows.segment)
            count = 1 if skipped else max((end - at) // rows.segment, 1)
            length = min(rows.segment - skipped, end - at) if count == 1 else rows.segment
            piece = self._elements[:, at - begin : at - begin + count * length]
            self._piece(row, skipped, piece.reshape(len(piece), count, -1), length)
            at += count * length
        return self._total

    def _piece(self, row: int, skipped: int, values: npt.NDArray[Any], length: int) -> None:
        """Adds ``length`` indices of the cut dim, from the one numbered ``skipped`` on, of each of some rows.

        values: [lead, rows, elements].
        """
        rows = self._rows
        begin, per = skipped * rows.inner, rows.per
        first, end = begin // per, -(-(begin + length * rows.inner) // per)
        picked: slice | npt.NDArray[np.int64] = slice(first, end)
        fits = self._fits(begin, values.shape[2])
        if fits and not self._whole:
            picked = self._picked(skipped, length)
        factors = tuple(v[picked] for v in _page("word", 0))
        words = len(factors[0])
        ready = fits and values.view(np.uint64).flags.aligned  # words as they are, to be read in place
        laid, swapped = (self._room[:0], self._room) if ready else np.split(self._room, 2)
        for group, lead, across in _blocks(values, _ROW):  # so many rows have their multipliers at once
            one, two = np.empty((2, *group.shape[:2]), np.uint64)
            for some, *where in _blocks(group, len(swapped) // words):
                if fits:
                    block = some.view(np.uint64) if ready else _copied(some, laid)
                else:
                    block = self._lay(some, laid, words, begin - first * per, length)
                turned = swapped[: block.size].reshape(block.shape)
                np.copyto(turned, block.view(">u8"))
                np.einsum("ijk,k->ij", block, factors[0], out=one[*where])
                np.einsum("ijk,k->ij", turned, factors[1], out=two[*where])
            number = self._leads(lead) + np.arange(row + across.start, row + across.stop)
            u0, u1 = _row_factors(number)
            self._total = add(self._total, (int((one * u0).sum()), int((two * u1).sum())))

    def _leads(self, some: slice) -> npt.NDArray[np.int64]:
        """The first row of some of the box's indices in the dims before the cut one; [indices, 1]."""
        dim = self._rows.dim
        shape, box = self._rows.shape[:dim], Box(self._box.offset[:dim], self._box.shape[:dim])
        if dim < 2:
            number = np.arange(some.start, some.stop) + (box.offset[0] if dim else 0)
        else:
            inside = np.unravel_index(np.arange(some.start, some.stop), box.shape)
            number = np.zeros(some.stop - some.start, np.int64)
            for n, o, index in zip(shape, box.offset, inside, strict=True):
                number = number * n + index + o
        return number[:, None] * self._rows.across

    def _fits(self, begin: int, count: int) -> bool:
        """Whether runs of the box begin and end where words do, in the tensor and in the box."""
        per, shape = self._rows.per, self._rows.shape
        if self._whole:
            return begin % per == 0 and count % per == 0
        return all(n % per == 0 for n in (shape[-1], self._box.shape[-1], self._box.offset[-1]))

    def _picked(self, skipped: int, length: int) -> npt.NDArray[np.int64]:
        """The words of a row that a box holds which is cut behind the cut dim, too."""
        rows, dim = self._rows, self._rows.dim
        behind, offset = rows.shape[dim + 1 :], self._box.offset[dim + 1 :]
        shape = (rows.segment, *behind[:-1], behind[-1] // rows.per)
        start = (skipped, *offset[:-1], offset[-1] // rows.per)
        return _numbers(shape, start, (length, *self._behind[:-1], self._behind[-1] // rows.per))

    def _lay(self, some: npt.NDArray[Any], room: Words, words: int, begin: int, length: int) -> Words:
        """Rows of zeros with the values at their places: for boxes that do not lie on words."""
        rows = self._rows
        behind, offset = rows.shape[rows.dim + 1 :], self._box.offset[rows.dim + 1 :]
        laid = room[: some.shape[0] * some.shape[1] * words].reshape(*some.shape[:2], words)
        laid[...] = 0
        inside = laid.view(some.dtype)[:, :, begin : begin + length * rows.inner]
        target = inside.reshape(*some.shape[:2], length, *behind)
        place = tuple(slice(o, o + n) for o, n in zip(offset, self._behind, strict=True))
        target[(slice(None),) * 3 + place] = some.reshape(*some.shape[:2], length, *self._behind)
        return laid


def _one_row(elements: Bytes) -> Sum:
    """The sum of a whole tensor that is not more than one row: most tensors are."""
    if len(elements) % _WORD:
        elements = np.concatenate([elements, np.zeros(-len(elements) % _WORD, np.uint8)])
    words = elements.view(np.uint64)
    if not words.flags.aligned:
        words = words.copy()
    v, u = _page("word", 0), _page("row", 0)
    one = int(np.dot(words, v[0, : len(words)]))
    two = int(np.dot(words.byteswap(), v[1, : len(words)]))
    return one * int(u[0, 0]) & _MASK, two * int(u[1, 0]) & _MASK


def _blocks(values: npt.NDArray[Any], most: int) -> Iterable[tuple[npt.NDArray[Any], slice, slice]]:
    """``values`` [lead, rows, elements] in parts of at most ``most`` rows; (part, its leads, its rows)."""
    lead, rows, _ = values.shape
    each = max(1, min(rows, most))
    several = max(1, most // rows) if each == rows else 1
    for a in range(0, lead, several):
        for b in range(0, rows, each):
            part = values[a : a + several, b : b + each]
            yield part, slice(a, a + part.shape[0]), slice(b, b + part.shape[1])


def _copied(some: npt.NDArray[Any], room: Words) -> Words:
    """The same bytes as words that lie where the machine likes them."""
    words = some.view(np.uint64)
    copy = room[: words.size].reshape(words.shape)
    np.copyto(copy, words)
    return copy


def _numbers(shape: Shape, offset: Shape, extent: Shape) -> npt.NDArray[np.int64]:
    """The row-major numbers of a box's indices, in order."""
    if prod(extent) == 1:
        return np.array([flat_start(shape, offset)])
    found = np.zeros(1, np.int64)
    for n, o, k in zip(shape, offset, extent, strict=True):
        found = (found[:, None] * n + np.arange(o, o + k)).reshape(-1)
    return found


def _row_factors(number: npt.NDArray[np.int64]) -> tuple[Words, Words]:
    """U0 and U1 of rows."""
    first, last = int(number[0, 0]) // _ROW, int(number[-1, -1]) // _ROW  # rows come in order
    if first == last:
        page = _page("row", first)[:, number - first * _ROW]
        return page[0], page[1]
    found = np.empty((2, *number.shape), np.uint64)
    pages = number // _ROW
    for page in np.unique(pages).tolist():
        here = pages == page
        found[:, here] = _page("row", page)[:, number[here] - page * _ROW]
    return found[0], found[1]


@lru_cache(64)
def _page(table: str, number: int) -> Words:
    """A page of the multipliers of both lanes, [2, 4096]: of words, or (odd ones) of rows."""
    start, size = number * _ROW * _WORD, _ROW * _WORD
    raw = [
        blake3(derive_key_context=f"ckptcore fingerprint 1 {table} {lane}").digest(size, seek=start)
        for lane in range(2)
    ]
    page = np.frombuffer(b"".join(raw), "<u8").astype(np.uint64).reshape(2, _ROW)
    if table == "row":
        page |= np.uint64(1)  # what differs in one row alone is not lost here
    page.flags.writeable = False
    return page


def _digest(kind: str, value: Sequence[Any]) -> str:
    return blake3(canonical_json(value), derive_key_context=f"ckptcore fingerprint 1 {kind}").hexdigest()
