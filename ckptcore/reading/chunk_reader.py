"""Read boxes of stored tensors from their chunks, verified on the way, and compare copies.

One reader serves a whole table of chunks, a checkpoint's or an output file's, and several threads. It keeps
what it found of a chunk until all elements that are asked for of it have been read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Chunks
from ckptcore.errors import DamagedCheckpoint, finding
from ckptcore.reading.checksums import Records
from ckptcore.reading.equality import require_equal
from ckptcore.reading.gather import Bytes, Placed, overlaps, sub_tile, tile_view
from ckptcore.reading.interleave import Interleaver
from ckptcore.reading.payload import Payload, StoredChunk

READ, COPY, SKIP = 0, 1, 2
Tile = npt.NDArray[Any]
Found = tuple[StoredChunk, Payload]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it is stored.

    Attributes:
        number: Of the tensor in its table: chunks are grouped by it.
        fqn: Its name, for messages.
        dtype: Of the stored elements.
        box: What will be asked for of it, each element once; None where elements may be asked for again,
            and chunks are kept until the reader is closed.
    """

    number: int
    fqn: str
    dtype: str
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class Overlap:
    """A chunk that shares elements with a box. row: of the chunk. chunk: its box. common: what is shared."""

    row: int
    chunk: Box
    common: Box


class ChunkTable(Protocol):
    """Whose chunks are read: a manifest's or a file plan's. chunks: rows, grouped by tensor."""

    @property
    def chunks(self) -> Chunks: ...

    def role(self, row: int) -> int:
        """READ: its elements are the tensor's. COPY: they must equal what was read. SKIP: of no use."""

    def stored(self, tensor: StoredTensor, row: int, shape: tuple[int, ...]) -> StoredChunk:
        """Where a chunk is stored."""


class ChunkReader:
    """Reads the chunks of a table.

    Args:
        table: Whose chunks.
        records: Of the checkpoint that they lie in.
        compare: Whether copies are compared with what they are copies of.
    """

    def __init__(self, table: ChunkTable, records: Records, *, compare: bool = True) -> None:
        self._table, self._records, self._compares = table, records, compare
        self._lock = threading.Lock()
        self._found: dict[int, Found] = {}
        self._left: dict[int, int] = {}  # chunk -> elements that nobody has read yet

    def read(self, tensor: StoredTensor, want: Box, tile: Tile, scratch: Bytes) -> None:
        """Fill a tile with the elements ``want`` of a tensor, and hold copies against it.

        Args:
            tensor: Whose elements.
            want: Box of the tensor.
            tile: Row-major array over ``want``, as `tile_view` makes it.
            scratch: Working memory.

        Raises:
            DamagedCheckpoint: For holes, checksums that fail, and copies that differ.
        """
        self.compare(tensor, want, self.fill(tensor, want, tile, scratch), tile, scratch)

    def fill(self, tensor: StoredTensor, want: Box, tile: Tile | Placed, scratch: Bytes) -> list[Overlap]:
        """As `read`, of a tile that may lie elsewhere; gives the copies, which are not read yet."""
        copies: list[Overlap] = []
        into = Interleaver(tile, want, tensor.dtype, scratch)
        held = 0
        for each in self.overlaps(tensor, want):
            role = self._table.role(each.row)
            if role == READ:
                self._put(tensor, each, into)
                held += each.common.numel
            elif role == COPY and self._compares:
                copies.append(each)
        into.flush()
        if held != want.numel:
            message = f"{tensor.fqn}: {want.numel - held} of {want.numel} elements are in no file"
            raise DamagedCheckpoint(message, findings=(finding("hole", "cover", message, fqn=tensor.fqn),))
        return copies

    def compare(
        self, tensor: StoredTensor, want: Box, copies: list[Overlap], tile: Tile, scratch: Bytes
    ) -> None:
        """Hold copies against what `fill` has read, half a scratch buffer at a time."""
        half = len(scratch) // 2 // 16 * 16
        for copy in copies:
            for piece in copy.common.tiles(half // BY_NAME[tensor.dtype].itemsize):
                other = tile_view(scratch[:half], piece.shape, tensor.dtype)
                into = Interleaver(other, piece, tensor.dtype, scratch[half:])
                self._put(tensor, Overlap(copy.row, copy.chunk, piece), into)
                into.flush()
                paths = partial(self._paths, tensor, piece, copy)
                require_equal(sub_tile(tile, piece, want), other, piece, tensor.fqn, paths)

    def overlaps(self, tensor: StoredTensor, want: Box) -> Iterator[Overlap]:
        """Every chunk of a tensor that shares elements with a box of it."""
        chunks = self._table.chunks
        first, last = int(chunks.first[tensor.number]), int(chunks.first[tensor.number + 1])
        for row, chunk, common in overlaps(chunks.lo, chunks.shape, first, last, want):
            yield Overlap(row, chunk, common)

    def find(self, tensor: StoredTensor, each: Overlap) -> Found:
        """Where a chunk is stored, and its bytes; the reader's own, which closes them."""
        known = self._found.get(each.row)
        if known is not None:
            return known
        stored = self._table.stored(tensor, each.row, each.chunk.shape)
        fresh = stored, self._records.resolve(stored)
        found = self._found.setdefault(each.row, fresh)  # atomic, as `get` is
        if found is not fresh:
            fresh[1].close()
        return found

    def done(self, tensor: StoredTensor, each: Overlap) -> None:
        """Count elements that were read; a chunk of which none is left is forgotten."""
        if tensor.box is None:
            return
        with self._lock:
            left = self._left.get(each.row)
            if left is None:
                asked = each.chunk.intersect(tensor.box)
                left = asked.numel if asked is not None else 0
            self._left[each.row] = left - each.common.numel
            gone = self._found.pop(each.row, None) if left <= each.common.numel else None
        if gone is not None:
            gone[1].close()

    def close(self) -> None:
        """Forget every chunk."""
        for _, payload in self._found.values():
            payload.close()
        self._found.clear()

    def _put(self, tensor: StoredTensor, each: Overlap, into: Interleaver) -> None:
        stored, payload = self.find(tensor, each)
        into.put(payload, each.chunk, each.common, self._records.seen(payload, stored))
        self.done(tensor, each)

    def _paths(self, tensor: StoredTensor, piece: Box, copy: Overlap) -> tuple[str, str]:
        """The file that a piece was read from, or the first of several, and that of its copy."""
        read = next(e for e in self.overlaps(tensor, piece) if self._table.role(e.row) == READ)
        one, other = (self._table.stored(tensor, e.row, e.chunk.shape).path for e in (read, copy))
        return one, other
