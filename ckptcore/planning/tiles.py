"""Cut a file into steps that each fit a buffer and cover it from its first to its last byte.

A `Budget` sets the size of a buffer, and the bytes of a step. A file is cut into
*jobs*: ranges of at most one tile buffer. A job is a list of parts: pieces of literals, and boxes of
tensors that are each one run of the file. Small tensors share a job; large ones are cut into complete
rows. Jobs come in file order and tile the file exactly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box, flat_start
from ckptcore.core.dequantize import FUNCTIONS, most_elements
from ckptcore.core.dtype import BY_NAME
from ckptcore.errors import BudgetTooSmall
from ckptcore.fingerprints.device_sums import ROOM
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.request import Settings
from ckptcore.reading.gather import Bytes, StoredOrder, stored_order
from ckptcore.utils.memory import untouched
from ckptcore.utils.row_wise import prod_rows

# Bytes of the usual tiles of a few workers together: large enough to hide per-call costs, small enough to
# stay in cache, and the same memory for 1 to 4 workers.
TILES = 4 << 20
# More workers wait for each other's turns with Python's lock, so each call moves as much as theirs together.
# Those of several processes count together: they have the cores of many workers.
_FEW = 4
_READ = 256 << 10  # bytes that strided chunks should give all workers' tiles, if the budget allows it
_RUN = 4 << 10  # bytes that a read should have where dims are stored in another order: a page
_MIN_TILE = 64 << 10
_MAX_TILE = 256 << 20
# Bytes of a device's memory that all workers take together: slots that they share, each with a tile for what
# comes and one for what goes back, and twice the room of sums, which torch rounds up.
DEVICE_BYTES = 256 << 20
DEVICE_SLOTS = 2
_BATCH = (DEVICE_BYTES // DEVICE_SLOTS - 2 * ROOM) // 2
# Bytes of the host that a device copies from and to: pinned memory is taken from everybody else. A worker has
# two tiles for output there, and one for a batch.
PINNED_BYTES = 256 << 20
_PINNED_TILES = 3

Strides = Callable[[int, int], "tuple[int, ...] | None"]


@dataclass(frozen=True, slots=True)
class Budget:
    """How memory is divided.

    Attributes:
        tile: Bytes of one tile buffer, the most that one step may take.
        threads: Number of workers with such buffers.
        on_device: Tiles pass through a device: a step is a batch for it, as large as a tile.
        processes: Number of processes that each have such buffers.
    """

    tile: int
    threads: int = 1
    on_device: bool = False
    processes: int = 1

    @classmethod
    def of(cls, settings: Settings) -> Budget:
        """Return the buffers that settings allow.

        Raises:
            BudgetTooSmall: A worker's share is less than it needs.
        """
        # Per worker two tiles in flight, one to cast from, one to read strided data into.
        size = min(settings.memory // (4 * settings.threads), _MAX_TILE) // 4096 * 4096
        if size < _MIN_TILE:
            raise BudgetTooSmall(
                f"memory must be at least {4 * _MIN_TILE * settings.threads} bytes for {settings.threads} "
                f"workers: each needs 4 tiles of {_MIN_TILE} bytes (got {settings.memory})"
            )
        if settings.device == "cpu":
            return cls(size, settings.threads, processes=settings.processes)
        # A device has its own bounds. At least a small tile, even where many threads share it.
        most = min(PINNED_BYTES // (_PINNED_TILES * settings.threads), _BATCH) // 4096 * 4096
        return cls(min(size, max(most, _MIN_TILE)), settings.threads, on_device=True)

    @property
    def usual(self) -> int:
        """Return the bytes of a step without special needs."""
        if self.on_device:
            return self.tile
        few = self.threads * self.processes <= _FEW
        return min(self.tile, TILES // self.threads if few else TILES)

    @property
    def decoded(self) -> int:
        """Return the bytes of memory for decoded items, which `beside_decoded` leaves."""
        return 4 * self.threads * (self.tile - self.beside_decoded.tile)

    @property
    def beside_decoded(self) -> Budget:
        """Return the tiles of a file of compressed items: a quarter is for these, if tiles allow it."""
        least = min(self.tile, _MIN_TILE)
        return replace(self, tile=max(self.tile * 3 // 4 // 4096 * 4096, least))

    def step(self, order: StoredOrder, shape: tuple[int, ...], width: int) -> int:
        """Return the bytes of a step of a tensor: enough for a large read of each chunk that it crosses.

        Where dims are stored in another order, a step of more rows has longer runs in storage.

        Args:
            order: How the tensor is stored.
            shape: Of the box that is cut into steps.
            width: Bytes of an element.
        """
        # Chunks side by side share a step: each of them should give it a read of useful size.
        step = min(self.tile, max(self.usual, order.across * max(_READ // self.threads, 64 << 10)))
        if order.strides is None:
            return step
        box = Box.full(shape)

        def run(nbytes: int) -> int:
            return order.run(next(box.tiles(nbytes // width)).shape)

        least = min(_RUN // width, run(self.tile))
        # Twice as large until runs in storage are a page long, or the budget ends it.
        while run(step) < least:
            step = min(2 * step, self.tile)
        return step


@dataclass(frozen=True, slots=True)
class LiteralPart:
    """Bytes [begin, end) of a literal."""

    literal: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Count its bytes."""
        return self.end - self.begin


class TensorPart(NamedTuple):  # made for every tensor of a file: a dataclass takes three times as long
    """A box of a tensor; ``offset`` is its first byte in the slot."""

    tensor: int
    box: Box
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Job:
    """Bytes [start, start + nbytes) of a file; ``parts`` has each with its first byte in the job."""

    sequence: int
    start: int
    nbytes: int
    parts: tuple[tuple[int, LiteralPart | TensorPart], ...]


def jobs(plan: FilePlan, budget: Budget, strides: Strides | None = None) -> Iterator[Job]:
    """Yield the jobs of a file, none larger than a tile of the budget.

    Args:
        plan: Plan of the file.
        budget: Bounds a job.
        strides: Finds the strides of a chunk of a tensor, by their numbers, that only its item says. Other
            processes that cut the same file must give the same.
    """
    parts: list[tuple[int, LiteralPart | TensorPart]] = []
    start = size = sequence = 0
    if plan.items.codec.any():
        budget = budget.beside_decoded
    usual = budget.usual
    for part in _parts_of_file(plan, budget, strides):
        # A job is closed before it would be larger than a step; one part alone may be larger.
        if parts and size + part.nbytes > usual:
            yield Job(sequence, start, size, tuple(parts))
            start, sequence, size, parts = start + size, sequence + 1, 0, []
        parts.append((size, part))
        size += part.nbytes
    # A file without bytes still has a job: its writer must be opened and committed.
    if parts or plan.nbytes == 0:
        yield Job(sequence, start, size, tuple(parts))


def _parts_of_file(
    plan: FilePlan, budget: Budget, strides: Strides | None
) -> Iterator[LiteralPart | TensorPart]:
    """Yield every part, in file order."""
    usual, columns, count = budget.usual, plan.columns, len(plan.literal_columns.start)
    starts = np.concatenate((plan.literal_columns.start, columns.start))
    # At equal starts an empty tensor comes before what follows it.
    order = np.lexsort((np.arange(len(starts)) < count, starts))
    entire, nbytes, boxes = _entire(plan, usual).tolist(), columns.nbytes.tolist(), columns.boxes
    for piece in order.tolist():
        if piece < count:
            length = len(plan.literals[piece].data)
            # Literals of a large job may be longer than a step, too.
            for begin in range(0, length, usual):
                yield LiteralPart(piece, begin, min(begin + usual, length))
            continue
        n = piece - count
        if not nbytes[n]:
            continue
        if entire[n]:
            yield TensorPart(n, boxes[n], nbytes[n], 0)
            continue
        tensor = plan.tensors[n]
        itemsize = BY_NAME[tensor.dtype].itemsize
        # The buffer holds the elements before and after the cast: the wider of both counts.
        widest = max(itemsize, BY_NAME[tensor.source_dtype].itemsize)
        of_item = None if strides is None else partial(strides, n)
        limit = budget.step(stored_order(plan.reads, n, len(tensor.shape), of_item), tensor.shape, widest)
        # Inputs of computed tensors need room in the same buffer.
        if n in plan.derived:
            computed = _computed_elements(plan, budget, n, widest) * widest
            # Where each tile needs more than its own part of an input, large tiles read that less often.
            reads_more = FUNCTIONS[plan.derived[n].fn].most is not None
            limit = min(max(limit, budget.tile) if reads_more else limit, computed)
        for box in tensor.box.tiles(limit // widest):
            offset = flat_start(tensor.shape, box.within(tensor.box).offset) * itemsize
            yield TensorPart(n, box, box.numel * itemsize, offset)


def _entire(plan: FilePlan, usual: int) -> npt.NDArray[np.bool_]:
    """Report which tensors fit a step of ``usual`` bytes, before and after a cast: they are not cut."""
    columns = plan.columns
    width = np.array([BY_NAME[d].itemsize for d in columns.dtypes], np.int64)
    widest = np.maximum(width[columns.dtype], width[columns.source_dtype])
    fits: npt.NDArray[np.bool_] = prod_rows(columns.shape) * widest <= usual
    fits[list(plan.derived)] = False
    return fits


def _computed_elements(plan: FilePlan, budget: Budget, tensor: int, widest: int) -> int:
    """Return the most elements of a derived tensor that a buffer of the cast holds, with all of their inputs.

    The inputs are behind what is cast, each at a multiple of 16 bytes. Raises `BudgetTooSmall`.
    """
    node = plan.derived[tensor]
    dtypes = [plan.inputs[i].dtype for i in node.inputs]
    room, shape = budget.tile - max(64, 16 * (len(node.inputs) + 1)), plan.tensors[tensor].box.shape
    count = most_elements(node, room, shape, widest, dtypes)
    if count < 1:
        needs = FUNCTIONS[node.fn].needs(Box((0,) * len(shape), (1,) * len(shape)), node.params)
        element_bytes = widest + sum(
            box.numel * BY_NAME[d].itemsize for box, d in zip(needs, dtypes, strict=True)
        )
        raise BudgetTooSmall(
            f"memory must be at least {4 * budget.threads * 2 * element_bytes} bytes for {budget.threads} "
            f"workers and {len(node.inputs)} inputs of a tensor (got tiles of {budget.tile} bytes)"
        )
    return count


def paged_buffer(nbytes: int) -> Bytes:
    """Allocate memory with small pages for usual tiles, and huge pages behind them.

    Small pages take only what tiles touch; numpy's allocator would round up to 2 MiB each. Strided writes
    over large tiles need huge pages.
    """
    try:
        return np.frombuffer(untouched(nbytes, huge_from=TILES), np.uint8)
    except OSError as error:
        raise BudgetTooSmall(f"cannot allocate a buffer of {nbytes} bytes: {error.strerror}") from error


class Tiles:
    """The buffers of runs that follow each other in a process: fresh memory costs as much as a copy.

    Args:
        allocate: Returns a new buffer.
    """

    def __init__(self, allocate: Callable[[], Bytes]) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._made: list[Bytes] = []
        self._idle: list[Bytes] = []

    def take(self) -> Bytes:
        """Return a buffer that no worker has."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            self._made.append(buffer := self._allocate())
        return buffer

    def take_back(self) -> None:
        """Take back all buffers, at the end of a run."""
        with self._lock:
            self._idle = list(self._made)
