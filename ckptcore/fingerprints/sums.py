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

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckptcore.core.box import Box
from ckptcore.core.columnar_file import canonical_json
from ckptcore.core.dtype import BY_NAME
from ckptcore.fingerprints.sum_weights import (
    ROW,
    WORD,
    Qwords,
    RowLayout,
    Rows,
    RowSpan,
    Shape,
    blocks,
    page,
    row_factors,
    rows_of,
)

Bytes = npt.NDArray[np.uint8]
Sum = tuple[int, int]  # the two lanes, each below 2**64
Fingerprinted = tuple[str, str, Shape, str]  # (FQN, dtype, shape, fingerprint) of a tensor

ZERO: Sum = (0, 0)
ROOM = 512 << 10  # bytes of working memory that are used
_MASK = (1 << 64) - 1
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


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
