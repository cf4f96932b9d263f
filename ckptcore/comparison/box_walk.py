"""Walk over the boxes of many tensors in several threads, for comparing and fingerprinting.

A tensor is cut into boxes that fit the budget; workers share the boxes, also those of one large tensor. A
tensor is opened before its first box is read, and closed after its last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from ckptcore.comparison.opened import OpenSide, labelled
from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import Budget, Tiles, paged_buffer
from ckptcore.reading.box_reader import BoxReader, walk
from ckptcore.reading.gather import Bytes, stored_order, tile_view
from ckptcore.utils.workers import ProgressMeter


class OpenTensor:
    """A tensor of one checkpoint, or of two in one shape, while its boxes are read.

    Attributes:
        sides: The checkpoints that have it.
        rows: Its number in each.
        specs: Its dtype and shape in each.
        spec: The one of the widest dtype: boxes of all fit where its boxes fit.
        readers: One for each side, from the walk's coming to it until the last box.
    """

    def __init__(self, sides: Sequence[OpenSide], rows: Sequence[int]) -> None:
        self.sides, self.rows = sides, rows
        self.specs = [side.manifest.tensors[row] for side, row in zip(sides, rows, strict=True)]
        self.spec = max(self.specs, key=lambda spec: BY_NAME[spec.dtype].itemsize)
        self.readers: Sequence[BoxReader] = ()

    def open(self) -> None:
        """Open the readers, right before the first box."""
        self.readers = [side.reader(row) for side, row in zip(self.sides, self.rows, strict=True)]

    def step(self, budget: Budget) -> int:
        """Return the bytes of its boxes."""
        spec = self.spec
        if spec.nbytes <= budget.usual:
            return budget.usual
        orders = (
            stored_order(side.manifest.chunks, row, len(spec.shape), reader.strides)
            for side, row, reader in zip(self.sides, self.rows, self.readers, strict=True)
        )
        return max(budget.step(order, spec.shape, BY_NAME[spec.dtype].itemsize) for order in orders)

    def read(self, box: Box, buffers: Sequence[Bytes], scratch: Bytes) -> list[Bytes]:
        """Read a box of each side into the first bytes of its buffer, and return these."""
        tiles = []
        for side, reader, spec, buffer in zip(self.sides, self.readers, self.specs, buffers, strict=True):
            with labelled(side.label):
                reader.read(box, tile_view(buffer, box.shape, spec.dtype), scratch)
            tiles.append(buffer[: box.numel * BY_NAME[spec.dtype].itemsize])
        return tiles

    def close(self) -> None:
        """Close the readers."""
        for reader in self.readers:
            reader.close()


Open = TypeVar("Open", bound=OpenTensor)


def read_boxes(
    sides: Sequence[OpenSide],
    tensors: Iterable[Open],
    worker: Callable[[Tiles], Callable[[Open, Box], None]],
    settings: Settings,
    meter: ProgressMeter,
) -> None:
    """Read every box of the tensors.

    Args:
        sides: The checkpoints that have them. The first lends its buffers, if it keeps some; there is none
            where two checkpoints have no tensor to compare.
        tensors: Opened one after the other, when it is their turn.
        worker: Called once in each thread, with the buffers of all; returns a function that reads one box.
        settings: Memory and threads.
        meter: Counts the bytes that are read.

    Raises:
        CkptError: The first error of any worker; all tensors are closed then.
    """
    budget = Budget.of(settings)
    for side in sides:
        # An eighth of the memory, as two may be open, and tiles have three quarters.
        side.records.limit_decoded(settings.memory // 8)
    tiles = next((side.tiles for side in sides[:1]), None) or Tiles(partial(paged_buffer, budget.tile))

    def boxes_of(tensor: Open) -> Iterable[Box]:
        tensor.open()
        return Box.full(tensor.spec.shape).tiles(tensor.step(budget) // BY_NAME[tensor.spec.dtype].itemsize)

    def prepare() -> Callable[[Open, Box], None]:
        read = worker(tiles)

        def metered(tensor: Open, box: Box) -> None:
            read(tensor, box)
            meter.add(box.numel * BY_NAME[tensor.spec.dtype].itemsize)

        return metered

    try:
        walk(tensors, boxes_of, lambda tensor: tensor.close(), prepare, budget.threads)
    finally:
        tiles.take_back()
