"""Tiles: in which steps, each within a buffer, is a file written from its first to its last byte?

A file is cut into *jobs*: ranges of at most one tile buffer. A job is a list of parts: pieces of
literals, and boxes of tensors that are each one run of the file. Small tensors share a job; large
ones are cut into whole rows. Jobs come in file order and tile the file exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptcore.core.box import Box, flat_start
from ckptcore.core.dequantize import FUNCTIONS
from ckptcore.core.dtype import BY_NAME
from ckptcore.planning.file_plan import FilePlan
from ckptcore.reading.gather import beside

# Bytes of usual tiles of all workers together: large enough to hide per-call costs, small enough to
# stay in cache, and the same memory however many workers share it.
TILES = 4 << 20
READ = 256 << 10  # bytes that strided chunks should give all workers' tiles, where the budget allows


@dataclass(frozen=True, slots=True)
class LiteralPart:
    """Bytes [begin, end) of a literal, at byte ``at`` of the job."""

    literal: int
    begin: int
    end: int
    at: int


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A box of a tensor, at byte ``at`` of the job; ``offset`` is its first byte in the slot."""

    tensor: int
    box: Box
    at: int
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Job:
    """Bytes [start, start + nbytes) of a file."""

    sequence: int
    start: int
    nbytes: int
    parts: tuple[LiteralPart | TensorPart, ...]


def jobs(plan: FilePlan, max_bytes: int, workers: int = 1) -> Iterator[Job]:
    """The jobs of a file, none larger than ``max_bytes``; usual ones are cut for so many workers."""
    parts: list[LiteralPart | TensorPart] = []
    start = size = sequence = 0
    usual = min(max(TILES // workers, 1 << 20), max_bytes)
    for part, nbytes in _parts(plan, max_bytes, usual, max(READ // workers, 64 << 10)):
        if parts and size + nbytes > usual:
            yield Job(sequence, start, size, tuple(parts))
            start, sequence, size, parts = start + size, sequence + 1, 0, []
        parts.append(_placed(part, size))
        size += nbytes
    if parts or plan.nbytes == 0:
        yield Job(sequence, start, size, tuple(parts))


def _placed(part: LiteralPart | TensorPart, at: int) -> LiteralPart | TensorPart:
    if isinstance(part, LiteralPart):
        return LiteralPart(part.literal, part.begin, part.end, at)
    return TensorPart(part.tensor, part.box, at, part.nbytes, part.offset)


def _parts(
    plan: FilePlan, max_bytes: int, usual: int, read: int
) -> Iterator[tuple[LiteralPart | TensorPart, int]]:
    pieces: list[tuple[int, int, int]] = [(x.start, 0, n) for n, x in enumerate(plan.literals)]
    pieces += [(t.start, 1, n) for n, t in enumerate(plan.tensors)]
    # At equal starts an empty tensor comes before what follows it.
    for _, kind, n in sorted(pieces, key=lambda p: (p[0], -p[1])):
        if kind == 0:
            length = len(plan.literals[n].data)
            for begin in range(0, length, usual):
                end = min(begin + usual, length)
                yield LiteralPart(n, begin, end, 0), end - begin
            continue
        tensor = plan.tensors[n]
        if not tensor.nbytes:
            continue
        itemsize = BY_NAME[tensor.dtype].itemsize
        widest = max(itemsize, BY_NAME[tensor.source_dtype].itemsize)
        limit = min(max_bytes, max(usual, _wanted(plan, n) * read))
        if n in plan.derived:
            limit = min(limit, (max_bytes - 64) // (widest + _input_bytes(plan, n)) * widest)
        for box in tensor.box.tiles(limit // widest):
            nbytes = box.numel * itemsize
            offset = flat_start(tensor.shape, box.within(tensor.box).offset) * itemsize
            yield TensorPart(n, box, 0, nbytes, offset), nbytes


def _input_bytes(plan: FilePlan, tensor: int) -> int:
    """Bytes that one element of a derived tensor is computed from, at most; they lie in the buffer of
    the cast, behind what is cast."""
    node = plan.derived[tensor]
    return FUNCTIONS[node.fn].width([plan.inputs[i].dtype for i in node.inputs])


def _wanted(plan: FilePlan, tensor: int) -> int:
    first, last = int(plan.reads.first[tensor]), int(plan.reads.first[tensor + 1])
    return beside(plan.reads.lo, first, last, len(plan.tensors[tensor].shape))
