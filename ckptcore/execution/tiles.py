"""Cut a file into the steps, each within a buffer, in which it is written from its first to its last byte.

A `Budget` says how large a buffer is, and how much of a tensor is worth a step. A file is cut into
*jobs*: ranges of at most one tile buffer. A job is a list of parts: pieces of literals, and boxes of
tensors that are each one run of the file. Small tensors share a job; large ones are cut into whole
rows. Jobs come in file order and tile the file exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptcore.core.box import Box, flat_start
from ckptcore.core.dequantize import FUNCTIONS
from ckptcore.core.dtype import BY_NAME
from ckptcore.errors import BudgetTooSmall
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.request import Settings
from ckptcore.reading.gather import beside

# Bytes of usual tiles of all workers together: large enough to hide per-call costs, small enough to
# stay in cache, and the same memory however many workers share it.
TILES = 4 << 20
_READ = 256 << 10  # bytes that strided chunks should give all workers' tiles, where the budget allows
_MIN_TILE = 64 << 10
_MAX_TILE = 256 << 20


@dataclass(frozen=True, slots=True)
class Budget:
    """How memory is shared out.

    Attributes:
        tile: Bytes of one tile buffer, the most that one step may take.
        threads: How many workers have such buffers.
    """

    tile: int
    threads: int = 1

    @classmethod
    def of(cls, settings: Settings) -> Budget:
        """The buffers that settings allow.

        Raises:
            BudgetTooSmall: When a worker's share is less than it can work with.
        """
        # Two tiles in flight a worker, one to cast from, one to read strided data into.
        size = min(settings.memory // (4 * settings.threads), _MAX_TILE) // 4096 * 4096
        if size < _MIN_TILE:
            raise BudgetTooSmall(
                f"{settings.memory} bytes are too little for {settings.threads} workers: "
                f"each needs 4 tiles of at least {_MIN_TILE} bytes"
            )
        return cls(size, settings.threads)

    @property
    def usual(self) -> int:
        """Bytes of a step where nothing asks for more."""
        return min(self.tile, max(TILES // self.threads, 1 << 20))

    def step(self, across: int) -> int:
        """Bytes of a step where so many chunks lie beside each other: each of them gives a decent read."""
        return min(self.tile, max(self.usual, across * max(_READ // self.threads, 64 << 10)))


@dataclass(frozen=True, slots=True)
class LiteralPart:
    """Bytes [begin, end) of a literal."""

    literal: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """How many these are."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A box of a tensor; ``offset`` is its first byte in the slot."""

    tensor: int
    box: Box
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Job:
    """Bytes [start, start + nbytes) of a file. parts: each with its first byte in the job."""

    sequence: int
    start: int
    nbytes: int
    parts: tuple[tuple[int, LiteralPart | TensorPart], ...]


def jobs(plan: FilePlan, budget: Budget) -> Iterator[Job]:
    """The jobs of a file, none larger than a tile of the budget."""
    parts: list[tuple[int, LiteralPart | TensorPart]] = []
    start = size = sequence = 0
    usual = budget.usual
    for part in _parts_of_file(plan, budget):
        if parts and size + part.nbytes > usual:
            yield Job(sequence, start, size, tuple(parts))
            start, sequence, size, parts = start + size, sequence + 1, 0, []
        parts.append((size, part))
        size += part.nbytes
    if parts or plan.nbytes == 0:
        yield Job(sequence, start, size, tuple(parts))


def _parts_of_file(plan: FilePlan, budget: Budget) -> Iterator[LiteralPart | TensorPart]:
    """Every part, in file order."""
    usual = budget.usual
    pieces: list[tuple[int, int, int]] = [(x.start, 0, n) for n, x in enumerate(plan.literals)]
    pieces += [(t.start, 1, n) for n, t in enumerate(plan.tensors)]
    # At equal starts an empty tensor comes before what follows it.
    for _, kind, n in sorted(pieces, key=lambda p: (p[0], -p[1])):
        if kind == 0:
            length = len(plan.literals[n].data)
            for begin in range(0, length, usual):
                yield LiteralPart(n, begin, min(begin + usual, length))
            continue
        tensor = plan.tensors[n]
        if not tensor.nbytes:
            continue
        itemsize = BY_NAME[tensor.dtype].itemsize
        widest = max(itemsize, BY_NAME[tensor.source_dtype].itemsize)
        limit = budget.step(beside(plan.reads, n, len(tensor.shape)))
        if n in plan.derived:
            limit = min(limit, (budget.tile - 64) // (widest + _input_bytes(plan, n)) * widest)
        for box in tensor.box.tiles(limit // widest):
            offset = flat_start(tensor.shape, box.within(tensor.box).offset) * itemsize
            yield TensorPart(n, box, box.numel * itemsize, offset)


def _input_bytes(plan: FilePlan, tensor: int) -> int:
    """Bytes that one element of a derived tensor is computed from, at most; they lie in the buffer of
    the cast, behind what is cast."""
    node = plan.derived[tensor]
    return FUNCTIONS[node.fn].width([plan.inputs[i].dtype for i in node.inputs])
