"""Walk over the boxes of many tensors in several threads, for comparing and fingerprinting.

A tensor is cut into boxes that fit the budget; workers share the boxes, also those of one large tensor. A
tensor is opened before its first box is read, and closed after its last one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec
from ckptcore.planning.tiles import Budget
from ckptcore.reading.box_reader import BoxReader
from ckptcore.reading.gather import StoredOrder
from ckptcore.utils.workers import ProgressMeter, run_jobs


class _Readable(Protocol):
    """A checkpoint that is read."""

    def stored_order(self, row: int, reader: BoxReader) -> StoredOrder:
        """Return how a tensor is stored."""


class OpenTensor:
    """A tensor, or a pair of equal ones, while its boxes are read.

    Args:
        spec: Its dtype and shape.
        sides: The checkpoints that have it.
        rows: Its number in each.
        readers: One for each side, there when the walk comes to it; closed after the last box.
    """

    def __init__(
        self,
        spec: TensorSpec,
        sides: Sequence[_Readable],
        rows: Sequence[int],
        readers: Sequence[BoxReader] = (),
    ) -> None:
        self.spec, self.readers = spec, readers
        self._sides, self._rows = sides, rows
        self.under_way = 1  # the walk itself, and every box

    def step(self, budget: Budget) -> int:
        """Return the bytes of its boxes."""
        spec = self.spec
        if spec.nbytes <= budget.usual:
            return budget.usual
        stored = zip(self._sides, self._rows, self.readers, strict=True)
        width = BY_NAME[spec.dtype].itemsize
        return max(
            budget.step(side.stored_order(row, reader), spec.shape, width) for side, row, reader in stored
        )

    def close(self) -> None:
        """Close the readers."""
        for reader in self.readers:
            reader.close()


Open = TypeVar("Open", bound=OpenTensor)


def walk_boxes(
    tensors: Iterable[Open],
    worker: Callable[[], Callable[[Open, Box], None]],
    budget: Budget,
    meter: ProgressMeter,
) -> None:
    """Read every box of the tensors.

    Args:
        tensors: Opened one after the other, when it is their turn.
        worker: Called once in each thread; returns a function that reads one box into buffers of its own.
        budget: The size of boxes and the number of threads.
        meter: Counts the bytes that are read.

    Raises:
        CkptError: The first error of any worker; all tensors are closed then.
    """
    lock, under_way = threading.Lock(), set[Open]()

    def release(tensor: Open) -> None:
        with lock:
            tensor.under_way -= 1
            last = not tensor.under_way
            if last:
                under_way.discard(tensor)
        if last:
            tensor.close()

    def boxes() -> Iterator[tuple[Open, Box]]:
        for tensor in tensors:
            with lock:
                under_way.add(tensor)
            spec = tensor.spec
            # The walk keeps its own count until the last box is out: workers that finish the boxes
            # before that must not close the tensor.
            for box in Box.full(spec.shape).tiles(tensor.step(budget) // BY_NAME[spec.dtype].itemsize):
                with lock:
                    tensor.under_way += 1
                yield tensor, box
            release(tensor)

    def prepare() -> Callable[[tuple[Open, Box]], None]:
        read = worker()

        def do(job: tuple[Open, Box]) -> None:
            tensor, box = job
            read(tensor, box)
            meter.add(box.numel * BY_NAME[tensor.spec.dtype].itemsize)
            release(tensor)

        return do

    try:
        run_jobs(boxes(), prepare, threads=budget.threads)
    finally:
        for tensor in under_way:
            tensor.close()
