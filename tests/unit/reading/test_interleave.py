"""Interleaving: chunks side by side get into a tile bit by bit, few copies at a time."""

from __future__ import annotations

import zlib
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore.core.box import Box
from ckptcore.reading import interleave
from ckptcore.reading.gather import LINE, SLOTS
from ckptcore.reading.interleave import Interleaver
from ckptcore.reading.payload import Payload

DTYPES = {
    "uint8": np.uint8,
    "bfloat16": np.uint16,
    "float32": np.uint32,
    "float64": np.uint64,
    "complex128": np.complex128,
}


class Stored:
    """A chunk as it is in a file, behind some other bytes."""

    def __init__(self, values: np.ndarray, box: Box, padding: int) -> None:
        part = values[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
        self.raw, self.box = b"x" * padding + part.tobytes(), box
        self.payload = Payload(self._read, None, padding, None, 0, padding, part.nbytes, None)
        self.reads: list[tuple[int, int, int]] = []

    def _read(self, at: int, into: memoryview) -> None:
        into[:] = self.raw[at : at + len(into)]

    def seen(self, at: int, length: int, crc: int) -> None:
        self.reads.append((at, length, crc))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_neighbours(data: st.DataObject) -> None:
    """Chunks of any widths along any dim, in any order, into a tile over any box, with any buffer."""
    dtype = data.draw(st.sampled_from(sorted(DTYPES)))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    values = np.arange(prod(shape)).astype(DTYPES[dtype]).reshape(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    even = data.draw(st.sampled_from([1, 2, 3, None]))
    inner = (
        data.draw(st.lists(st.integers(0, shape[dim]), max_size=4))
        if even is None
        else range(0, shape[dim], even)
    )
    cuts = sorted({0, shape[dim], *inner})
    chunks = []
    for begin, end in data.draw(st.permutations(list(pairwise(cuts)))) if even is None else pairwise(cuts):
        box = Box(
            (*(0,) * dim, begin, *(0,) * (len(shape) - dim - 1)),
            (*shape[:dim], end - begin, *shape[dim + 1 :]),
        )
        chunks.append(Stored(values, box, data.draw(st.integers(0, 3))))
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    of = Box(offset, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))
    tile = np.full(of.shape, 77, DTYPES[dtype])
    into = Interleaver(tile, of, dtype, np.empty(data.draw(st.sampled_from([16, 512, 4096])), np.uint8))
    verified = data.draw(st.booleans())
    for chunk in chunks:
        common = chunk.box.intersect(of)
        if common is not None:
            into.put(chunk.payload, chunk.box, common, chunk.seen if verified else None)
    into.flush()
    assert (tile == values[tuple(slice(o, o + n) for o, n in zip(of.offset, of.shape, strict=True))]).all()
    for chunk in chunks:
        assert all(zlib.crc32(chunk.raw[at : at + n]) == crc for at, n, crc in chunk.reads)


@pytest.mark.parametrize(("width", "together"), [(32, True), (4096, False)])
def test_short_runs_are_copied_together(width: int, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    alone: list[Box] = []

    def gather(payload, chunk, want, dtype, tile, scratch, seen):  # type: ignore[no-untyped-def]
        alone.append(want)
        found(payload, chunk, want, dtype, tile, scratch, seen)

    found = interleave.gather
    monkeypatch.setattr(interleave, "gather", gather)
    values = np.random.default_rng(0).integers(0, 1 << 16, (64, 16 * width), np.uint16)
    chunks = [Stored(values, Box((0, n * width), (64, width)), 8) for n in range(16)]
    tile = np.zeros(values.shape, np.uint16)
    into = Interleaver(tile, Box.full(values.shape), "bfloat16", np.empty(1 << 20, np.uint8))
    for chunk in chunks:
        into.put(chunk.payload, chunk.box, chunk.box, chunk.seen)
    if together:
        assert not tile.any()  # nothing is copied before there is a lot
    into.flush()
    assert (tile == values).all()
    assert len(alone) == (0 if together else 16)
    assert [c.reads for c in chunks] == [[(8, 128 * width, zlib.crc32(c.raw[8:]))] for c in chunks]


@pytest.mark.parametrize("room", [1 << 18, 1 << 20, 2 * SLOTS])
@pytest.mark.parametrize("width", [32, 128, 129])  # the last are runs of more bytes than are copied together
def test_as_many_slots_as_fit(room: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots end where the buffer does, or where a core's cache does: then all are copied, and it goes on."""
    rows, count = 256, 80
    values = np.random.default_rng(0).integers(0, 1 << 16, (rows, count * width), np.uint16)
    tile = np.zeros(values.shape, np.uint16)
    into = Interleaver(tile, Box.full(values.shape), "bfloat16", np.empty(room, np.uint8))
    copies: list[int] = []
    flush = Interleaver.flush

    def noted(self: Interleaver) -> None:
        copies.append(self._count)
        flush(self)

    monkeypatch.setattr(Interleaver, "flush", noted)
    for n in range(count):
        chunk = Stored(values, Box((0, n * width), (rows, width)), 8)
        into.put(chunk.payload, chunk.box, chunk.box, None)
    into.flush()
    assert (tile == values).all()
    pitch = rows * width * 2 + LINE
    together = min(room, SLOTS) // pitch if 2 * width <= interleave._RUN else 0
    assert max(copies) == min(together, count)
    assert len([n for n in copies if n]) == (-(-count // together) if together else 0)
