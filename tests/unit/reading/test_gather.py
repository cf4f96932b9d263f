"""Gathering: any box of any layout is right, with any buffer, and every byte is accounted for."""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import partitions, shapes

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import CONJ, NEG, Chunks
from ckptcore.reading import gather
from ckptcore.reading.gather import overlaps
from ckptcore.reading.interleave import Interleaver
from ckptcore.reading.payload import Payload
from ckptcore.utils.crc32 import CrcPieces, combine


def payload_of(raw: bytes, start: int, strides: tuple[int, ...] | None) -> Payload:
    def read_into(at: int, into: memoryview) -> None:
        into[:] = raw[at : at + len(into)]

    return Payload(read_into, None, start, strides, 0, start, len(raw) - start, None)


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from([0, 64, 4096]), st.sampled_from([1, 4]), st.sampled_from([2, 128]))
def test_any_box_of_any_permutation(data: st.DataObject, page: int, overread: int, side: int) -> None:
    """Pages of nothing keep runs apart, as in large tensors: they are read side by side."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    order = data.draw(st.permutations(range(len(shape))))
    padding = data.draw(st.integers(0, 5))
    values = np.arange(int(np.prod(shape)), dtype=np.uint16).reshape(shape)
    stored = np.ascontiguousarray(values.transpose(order))
    strides = [0] * len(shape)
    for place, dim in enumerate(order):
        strides[dim] = stored.strides[place] // 2
    raw = b"x" * padding + stored.tobytes()
    row_major = list(order) == sorted(order)
    payload = payload_of(raw, padding, None if row_major else tuple(strides))
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    tile = np.zeros(extent, np.uint16)
    scratch = np.empty(data.draw(st.sampled_from([2, 4, 16, 64, 4096])), np.uint8)
    ranges: list[tuple[int, int, int]] = []
    want = Box(offset, extent)
    with mock.patch.multiple(gather, _PAGE=page, _OVERREAD=overread, _SIDE=side):
        into = Interleaver(tile, want, "bfloat16", scratch)
        into.put(payload, Box.full(shape), want, lambda *r: ranges.append(r))
        into.flush()
    assert (tile == values[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))]).all()
    assert all(zlib.crc32(raw[at : at + n]) == crc for at, n, crc in ranges)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64", "complex128"])
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((300, 290), (1, 0)),
        ((1, 300, 1, 290), (3, 0, 2, 1)),
        ((70, 5, 140), (2, 1, 0)),
        ((3, 200, 150), (0, 2, 1)),
        ((20_000, 2, 2), (2, 1, 0)),
        ((2, 3, 20_000), (2, 0, 1)),
    ],
)
def test_dims_in_another_order_are_copied_in_blocks(
    shape: tuple[int, ...], order: tuple[int, ...], dtype: str
) -> None:
    unit = gather.UNITS[BY_NAME[dtype].itemsize]
    values = np.random.default_rng(0).integers(0, 256, (*shape, np.dtype(unit).itemsize), np.uint8)
    values = values.view(unit)[..., 0]
    stored = np.ascontiguousarray(values.transpose(order))
    strides = tuple(stored.strides[order.index(d)] // stored.itemsize for d in range(len(shape)))
    tile = np.zeros(shape, unit)
    gather._assign(tile, stored.reshape(-1).view(np.uint8), shape, strides, dtype, 0)
    assert tile.tobytes() == values.tobytes()


@pytest.mark.parametrize("lead", [0, 8])
@pytest.mark.parametrize("flags", [CONJ, NEG, CONJ | NEG])
@pytest.mark.parametrize("turned", [False, True])
def test_signs_of_complex128_at_any_address(lead: int, flags: int, turned: bool) -> None:
    """Torch ends the process with a fault where they are not at a multiple of 16 bytes."""
    stored = np.random.default_rng(0).integers(0, 256, 33 * 17 * 16, np.uint8)
    room = np.zeros(len(stored) + 16, np.uint8)
    skew = (lead - room.ctypes.data) % 16
    tile = room[skew : skew + len(stored)].view(np.complex128).reshape(33, 17)
    strides = (1, 33) if turned else (17, 1)
    gather._assign(tile, stored.copy(), (33, 17), strides, "complex128", flags)
    halves = stored.view(np.uint64).reshape(-1, 2).copy()
    halves[:, 1] ^= np.uint64(0 if flags == CONJ | NEG else 1 << 63)
    halves[:, 0] ^= np.uint64(1 << 63 if flags & NEG else 0)
    values = halves.reshape(17, 33, 2).swapaxes(0, 1) if turned else halves
    assert tile.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("shape", "order", "want", "few"),
    [
        ((40_000, 5), (0, 1), Box((0, 2), (40_000, 1)), True),  # a column of many
        ((40_000, 64), (0, 1), Box((9, 8), (39_000, 8)), True),  # a shard of the last dim
        ((64, 90, 200), (2, 1, 0), Box((7, 0, 0), (1, 90, 200)), True),  # one of 64 experts, stored innermost
        ((12, 50_000), (0, 1), Box((0, 70), (12, 80)), False),  # runs in pages of their own
    ],
)
@pytest.mark.parametrize("verified", [True, False])
def test_runs_on_one_page_are_read_together(
    shape: tuple[int, ...], order: tuple[int, ...], want: Box, few: bool, verified: bool
) -> None:
    """A read of each run took hours for tensors of gigabytes."""
    values = np.random.default_rng(0).integers(0, 1 << 16, shape, np.uint16)
    stored = np.ascontiguousarray(values.transpose(order))
    strides = tuple(stored.strides[order.index(d)] // 2 for d in range(len(shape)))
    reads: list[int] = []

    def read_into(at: int, into: memoryview) -> None:
        reads.append(len(into))
        into[:] = stored.reshape(-1).view(np.uint8)[at : at + len(into)].data

    plain = list(order) == sorted(order)
    payload = Payload(read_into, None, 0, None if plain else strides, 0, 0, stored.nbytes, None)
    tile = np.zeros(want.shape, np.uint16)
    into = Interleaver(tile, want, "bfloat16", np.empty(1 << 20, np.uint8))
    into.put(payload, Box.full(shape), want, (lambda *_: None) if verified else None)
    into.flush()
    assert (tile == values[tuple(slice(o, e) for o, e in zip(want.offset, want.end, strict=True))]).all()
    if few:
        assert len(reads) < 20
    else:
        assert sum(reads) == tile.nbytes


@pytest.mark.parametrize(
    ("wants", "room"),
    [
        ([Box((0, 0, c), (6, 300, 200)) for c in (0, 200)], 300 << 10),  # a slice takes most of the buffer
        ([Box((0, b, c), (6, 60, 200)) for b in range(0, 300, 60) for c in (0, 200)], 1 << 20),  # wide gaps
    ],
)
def test_rows_cut_in_slices_add_up_to_the_record(wants: list[Box], room: int) -> None:
    """Shards of the last dim read complete rows: the record need not be read once more for its checksum."""
    values = np.random.default_rng(0).integers(0, 1 << 16, (6, 300, 400), np.uint16)
    raw = values.tobytes()
    payload, pieces, found = payload_of(raw, 0, None), CrcPieces(len(raw)), list[int | None]()
    for want in wants:
        tile = np.zeros(want.shape, np.uint16)
        into = Interleaver(tile, want, "bfloat16", np.empty(room, np.uint8))
        into.put(payload, Box.full(values.shape), want, lambda *r: found.append(pieces.add(*r)))
        into.flush()
        box = tuple(slice(o, e) for o, e in zip(want.offset, want.end, strict=True))
        assert (tile == values[box]).all()
    assert [f for f in found if f is not None] == [zlib.crc32(raw)]


class Copies(np.ndarray[Any, Any]):
    """An array that counts the copies into it."""

    count = 0

    def __setitem__(self, index: Any, value: Any) -> None:
        type(self).count += 1
        super().__setitem__(index, value)


@pytest.mark.parametrize(
    ("strides", "copies"),
    [
        ((0, 0, 1), 1),  # one row for all
        ((512, 0, 1), 1),  # rows that are repeated
        ((1, 0, 0), 1),  # each element repeated
        ((0, 0, 0), 1),
        ((0, 1, 256), 200 * 2 * 4),  # a repeated transpose: each block is square
    ],
)
def test_repeated_elements_are_copied_in_long_rows(strides: tuple[int, int, int], copies: int) -> None:
    shape = (200, 256, 512)
    source = np.lib.stride_tricks.as_strided(
        np.arange(1 << 17).astype(np.uint16), shape, tuple(2 * s for s in strides)
    )
    tile = np.zeros(shape, np.uint16).view(Copies)
    Copies.count = 0
    gather._assign_blocks(tile, source, 2)
    assert Copies.count == copies
    assert np.array_equal(tile, source)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_chunks_that_share_elements(data: st.DataObject) -> None:
    """Of few and of many chunks, before and behind those of other tensors."""
    shape = data.draw(shapes)
    boxes = data.draw(partitions(shape, pieces=20))
    rank, before = len(shape), data.draw(st.integers(0, 3))
    table = np.zeros((2, before + len(boxes) + 1, max(rank, 2)), np.int64)
    for n, box in enumerate(boxes):
        table[0, before + n, :rank], table[1, before + n, :rank] = box.offset, box.shape
    first = np.array([0, before, before + len(boxes), before + len(boxes) + 1])
    chunks = Chunks(first, table[0], table[1], np.arange(table.shape[1]))
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    want = Box(offset, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))
    shared = [(before + n, box, box.intersect(want)) for n, box in enumerate(boxes)]
    assert [tuple(each) for each in overlaps(chunks, 1, want)] == [s for s in shared if s[2] is not None]


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_crc_of_two_parts(a: bytes, b: bytes) -> None:
    assert combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_crc_of_pieces_in_any_order(record: bytes, data: st.DataObject) -> None:
    cuts = sorted({0, len(record), *data.draw(st.lists(st.integers(0, len(record)), max_size=6))})
    parts = data.draw(st.permutations(list(pairwise(cuts))))
    pieces = CrcPieces(len(record))
    found = [pieces.add(a, b - a, zlib.crc32(record[a:b])) for a, b in parts]
    assert found[:-1] == [None] * (len(found) - 1)
    assert found[-1] == zlib.crc32(record)
