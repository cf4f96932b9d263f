"""Compare tensors bit for bit, and measure what differs, read side by side in bounded memory.

A tensor is cut into boxes; a box is read from both sides and compared as bits. Workers share the boxes, also
those of one large tensor. At the end every record with a checksum of which a part was read is verified, and
the files must still be those that were opened. Tensors of two float dtypes are compared after the cast of the
wider one, too.

Peak memory: the interpreter, torch where it is needed, and ``Settings.memory``: per worker, two tiles, a
buffer for strided reads, and a buffer for comparing or computing. It does not grow with a tensor's size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ckptcore.comparison.box_walk import OpenTensor, read_boxes
from ckptcore.comparison.measures import Sums, is_measured, sums_of
from ckptcore.comparison.opened import OpenSide, labelled
from ckptcore.comparison.result import DTYPE, VALUES, Element, TensorDifference
from ckptcore.comparison.tensor_processes import read_shared
from ckptcore.core.box import Box, flat_start
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import Budget, Tiles
from ckptcore.reading.casting import cast_into
from ckptcore.reading.equality import differing
from ckptcore.reading.gather import Bytes, tile_view
from ckptcore.utils.workers import Progress, ProgressMeter


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor to compare: its name, its spec on each side, its rows in both manifests.

    The two shapes are equal, and so are the dtypes, or both are floats.
    """

    name: str
    a: TensorSpec
    b: TensorSpec
    rows: tuple[int, int]


def walk(
    a: OpenSide, b: OpenSide, pairs: Sequence[Pair], settings: Settings, progress: Progress | None = None
) -> list[TensorDifference]:
    """Compare pairs of tensors.

    Args:
        a: The first checkpoint.
        b: The second checkpoint.
        pairs: Tensors to compare.
        settings: Memory and threads.
        progress: Called with the number of bytes read.

    Returns:
        The pairs that differ in bits or dtype, in order.

    Raises:
        CkptError: The first error of any worker.
    """
    sizes = [max(pair.a.nbytes, pair.b.nbytes) for pair in pairs]
    meter = ProgressMeter(progress, "compare", sum(sizes))
    compared = read_shared(compare_pairs, (a, b), pairs, sizes, settings, meter)
    a.finish()
    b.finish()
    return [difference for difference in compared if difference is not None]


def compare_pairs(
    sides: Sequence[OpenSide], pairs: Sequence[Pair], settings: Settings, meter: ProgressMeter
) -> list[TensorDifference | None]:
    """Compare pairs in the threads of this process.

    Args:
        sides: Both checkpoints.
        pairs: Tensors to compare.
        settings: Memory and threads.
        meter: Counts the bytes that are read.

    Returns:
        The difference of each pair, None where there is none.
    """
    lock, open_pairs = threading.Lock(), [_Pair(pair, sides) for pair in pairs]
    read_boxes(sides, open_pairs, lambda tiles: _compares_box(tiles, lock), settings, meter)
    for open_pair in open_pairs:
        open_pair.sum_rest(Budget.of(settings).tile)
    return [open_pair.result() if open_pair.differing or open_pair.cast else None for open_pair in open_pairs]


class _Pair(OpenTensor):
    """A pair while it is read, and its result."""

    sums: Sums | None = None

    def __init__(self, pair: Pair, sides: Sequence[OpenSide]) -> None:
        super().__init__(sides, pair.rows)
        self.pair, self.differing = pair, 0
        # The dtype of the narrower one, where they have two.
        self.cast = next((s.dtype for s in self.specs if s.dtype != self.spec.dtype), "")
        self.first: tuple[int, bytes, bytes] | None = None  # row-major position, both elements
        self.unsummed = list[Box]()  # equal boxes, as long as no box differs

    def open(self) -> None:
        """Open the readers, and begin with no sums."""
        super().open()
        self.sums = Sums() if is_measured(self.pair.a.dtype) else None

    def add(self, place: int, count: int, element_a: bytes, element_b: bytes) -> None:
        """Record ``count`` elements that differ, the first of them at row-major position ``place``."""
        self.differing += count
        if self.first is None or place < self.first[0]:
            self.first = place, element_a, element_b

    def close(self) -> None:
        """Close the readers; the sums of equal tensors are of no use."""
        super().close()
        if not self.differing and not self.cast:
            self.sums = None
            self.unsummed.clear()

    def sum_rest(self, most: int) -> None:
        """Read the boxes once more that were equal before another differed: A's norm is that of all.

        most: bytes of a box.
        """
        if self.sums is None or not self.unsummed:
            return
        tile, scratch = (np.empty(most, np.uint8) for _ in range(2))
        a, dtype = self.sides[0], self.pair.a.dtype
        with labelled(a.label):
            reader = a.reader(self.pair.rows[0])
            try:
                for box in self.unsummed:
                    reader.read(box, tile_view(tile, box.shape, dtype), scratch)
                    elements = tile[: box.numel * BY_NAME[dtype].itemsize]
                    self.sums.add(sums_of(elements, dtype, elements, dtype, equal=True))
            finally:
                reader.close()

    def result(self) -> TensorDifference:
        """Return the difference of a pair that is not equal."""
        pair, dtype = self.pair, self.cast or self.pair.a.dtype
        element = None
        if self.first is not None:
            place, bits_a, bits_b = self.first
            index = tuple(int(i) for i in np.unravel_index(place, pair.a.shape)) if pair.a.shape else ()
            element = Element(
                index, _element(bits_a, dtype), _element(bits_b, dtype), _hex(bits_a), _hex(bits_b)
            )
        kinds = (DTYPE,) * bool(self.cast) + (VALUES,) * bool(self.differing)
        measures = self.sums.measures() if self.sums is not None else None
        return TensorDifference(
            pair.name, kinds, pair.a, pair.b, self.differing, element, measures, self.cast
        )


def _compares_box(buffers: Tiles, lock: threading.Lock) -> Callable[[_Pair, Box], None]:
    """Return a function that compares one box; it is used in one thread."""
    *tile_buffers, scratch = (buffers.take() for _ in range(3))

    def compare(open_pair: _Pair, box: Box) -> None:
        specs, tiles = open_pair.specs, open_pair.read(box, tile_buffers, scratch)
        bits_a, bits_b = (
            _cast(tile, spec.dtype, open_pair.cast, scratch)
            if open_pair.cast not in ("", spec.dtype)
            else tile
            for tile, spec in zip(tiles, specs, strict=True)
        )
        itemsize = BY_NAME[open_pair.cast or specs[0].dtype].itemsize
        first_and_count = differing(bits_a, bits_b, itemsize)
        same_bits = first_and_count is None and not open_pair.cast
        if same_bits and not open_pair.differing:  # equal tensors are not measured, and need no torch
            with lock:
                open_pair.unsummed.append(box)
            return
        sums = None
        if open_pair.sums is not None:
            sums = sums_of(tiles[0], specs[0].dtype, tiles[1], specs[1].dtype, equal=same_bits)
        with lock:
            if sums is not None and open_pair.sums is not None:
                open_pair.sums.add(sums)
            if first_and_count is not None:
                first, count = first_and_count
                span = slice(first * itemsize, (first + 1) * itemsize)
                place = flat_start(open_pair.spec.shape, box.offset) + first
                open_pair.add(place, count, bytes(bits_a[span]), bytes(bits_b[span]))

    return compare


def _cast(tile: Bytes, dtype: str, target_dtype: str, target: Bytes) -> Bytes:
    """Cast elements into the first bytes of ``target``, and return these."""
    width = BY_NAME[dtype].itemsize
    into = target[: len(tile) // width * BY_NAME[target_dtype].itemsize]
    cast_into(tile.view(f"u{width}"), dtype, into, target_dtype)
    return into


def _element(raw: bytes, dtype: str) -> bool | int | float | complex:
    """Return the element of little-endian bytes."""
    import torch

    element = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    if BY_NAME[dtype].kind != "p":  # torch has no number for one of these
        element = element.view(getattr(torch, dtype))
    wide = {"f": torch.float64, "c": torch.complex128}.get(BY_NAME[dtype].kind)
    value: bool | int | float | complex = (element if wide is None else element.to(wide))[0].item()
    return value


def _hex(raw: bytes) -> str:
    return raw[::-1].hex()
