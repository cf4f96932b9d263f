"""Read boxes of stored tensors from their chunks, verified on the way, and compare copies.

One reader serves all chunks of a checkpoint or of an output file, and several threads. It keeps
a resolved chunk until all its requested elements have been read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Chunks
from ckptcore.errors import CkptError, DamagedCheckpoint, Interrupted, finding
from ckptcore.reading.checksums import Records
from ckptcore.reading.equality import require_equal
from ckptcore.reading.gather import Bytes, Overlap, index_of, overlaps, tile_view
from ckptcore.reading.interleave import Interleaver
from ckptcore.reading.payload import Payload, StoredChunk

READ, COPY, SKIP = 0, 1, 2
Tile = npt.NDArray[Any]
ResolvedChunk = tuple[StoredChunk, Payload]


class ChunkedTensor(NamedTuple):  # made for every part of a file: a dataclass takes three times as long
    """A tensor and its dtype in storage.

    Attributes:
        number: The tensor's number in its table, which groups chunks by it.
        fqn: Its name, for messages.
        dtype: Dtype of the stored elements.
        once: Whether each element is requested once; otherwise chunks are kept until the reader is closed.
    """

    number: int
    fqn: str
    dtype: str
    once: bool = False


class ChunkTable(Protocol):
    """The chunks of a manifest or a file plan: rows, grouped by tensor."""

    @property
    def chunks(self) -> Chunks:
        """Return the rows."""

    def role(self, row: int) -> int:
        """Return READ for a tensor's elements, COPY for what must equal them, SKIP for unused chunks."""

    def asked(self, tensor: ChunkedTensor) -> Box:
        """Return the box that is requested of a tensor in total."""

    def stored(self, tensor: ChunkedTensor, row: int, shape: tuple[int, ...]) -> StoredChunk:
        """Return where a chunk is stored."""


class ChunkReader:
    """Reads the chunks of a table.

    Args:
        table: The chunks.
        records: Records of their checkpoint.
        compare: Whether to compare copies with the elements they repeat.
    """

    def __init__(self, table: ChunkTable, records: Records, *, compare: bool = True) -> None:
        self._table, self._records, self._compares = table, records, compare
        self._lock = threading.Lock()
        self._resolved: dict[int, ResolvedChunk] = {}
        self._left: dict[int, int] = {}  # elements still to be read of partly read chunks
        self._closed = False

    def read(self, tensor: ChunkedTensor, want: Box, tile: Tile, scratch: Bytes) -> None:
        """Fill a tile with the elements ``want`` of a tensor, and compare copies with it.

        Args:
            tensor: The tensor.
            want: Box of the tensor.
            tile: Row-major array over ``want``, from `tile_view`.
            scratch: Working memory.

        Raises:
            DamagedCheckpoint: There are holes, wrong checksums, or copies that differ.
        """
        copies = self._fill(tensor, want, tile, scratch)
        if copies:
            self._compare(tensor, want, copies, tile, scratch)

    def _fill(self, tensor: ChunkedTensor, want: Box, tile: Tile, scratch: Bytes) -> list[Overlap]:
        """Fill a tile; return the copies, which are not read yet."""
        copies: list[Overlap] = []
        into = Interleaver(tile, want, tensor.dtype, scratch)
        filled = 0
        for overlap in self.overlaps(tensor, want):
            role = self._table.role(overlap.row)
            if role == READ:
                self._put(tensor, overlap, into)
                filled += overlap.common.numel
            elif role == COPY and self._compares:
                copies.append(overlap)
        into.flush()
        if filled != want.numel:
            message = f"{tensor.fqn}: {want.numel - filled} of {want.numel} elements are in no file"
            raise DamagedCheckpoint(message, findings=(finding("hole", "coverage", message, fqn=tensor.fqn),))
        return copies

    def _compare(
        self, tensor: ChunkedTensor, want: Box, copies: list[Overlap], tile: Tile, scratch: Bytes
    ) -> None:
        """Compare copies with the elements that `_fill` has read, half a scratch buffer at a time."""
        half = len(scratch) // 2 // 16 * 16
        for copy in copies:
            for piece in copy.common.tiles(half // BY_NAME[tensor.dtype].itemsize):
                copy_tile = tile_view(scratch[:half], piece.shape, tensor.dtype)
                into = Interleaver(copy_tile, piece, tensor.dtype, scratch[half:])
                self._put(tensor, Overlap(copy.row, copy.chunk, piece), into)
                into.flush()
                paths = partial(self._paths, tensor, piece, copy)
                require_equal(tile[index_of(piece, want)], copy_tile, piece, tensor.fqn, paths)

    def overlaps(self, tensor: ChunkedTensor, want: Box) -> Iterator[Overlap]:
        """Yield every chunk of a tensor that shares elements with a box of it."""
        return overlaps(self._table.chunks, tensor.number, want)

    def find(self, tensor: ChunkedTensor, overlap: Overlap) -> ResolvedChunk:
        """Return a chunk's location and payload; the reader owns and closes the payload."""
        resolved = self._resolved.get(overlap.row)
        if resolved is not None:
            return resolved
        stored = self._table.stored(tensor, overlap.row, overlap.chunk.shape)
        fresh = stored, self._records.resolve(stored)
        # Two threads may resolve one chunk at once: the second closes its payload, and uses the first one's.
        first = self._resolved.setdefault(overlap.row, fresh)  # atomic, as `get` is
        if first is not fresh:
            fresh[1].close()
        if self._closed:  # a second Ctrl-C waits for no thread
            self._close_all()
            raise Interrupted(f"{tensor.fqn} is not read: its reader was closed")
        return first

    def strides(self, tensor: ChunkedTensor, row: int) -> tuple[int, ...] | None:
        """Return the strides, elements, of a chunk as its item has them; None when it is row-major.

        The chunk stays open, as for a read. None, too, for one that cannot be read: its read says why.
        """
        shape = self._table.chunks.shape[row, : len(self._table.asked(tensor).shape)]
        chunk = Box((0,) * len(shape), tuple(shape.tolist()))
        with suppress(CkptError):
            return self.find(tensor, Overlap(row, chunk, chunk))[1].strides
        return None

    def done(self, tensor: ChunkedTensor, overlap: Overlap) -> None:
        """Count elements that were read, and drop a chunk after its last element."""
        if not tensor.once:
            return
        if overlap.common is not overlap.chunk:  # else the complete chunk was read at once
            with self._lock:
                left = self._left.pop(overlap.row, None)
                if left is None:
                    asked = overlap.chunk.intersect(self._table.asked(tensor))
                    left = asked.numel if asked is not None else 0
                left -= overlap.common.numel
                if left > 0:
                    self._left[overlap.row] = left
                    return
        gone = self._resolved.pop(overlap.row, None)
        if gone is not None:
            gone[1].close()

    def close(self) -> None:
        """Drop every chunk, and those that threads still open."""
        self._closed = True
        self._close_all()

    def _close_all(self) -> None:
        while self._resolved:
            with suppress(KeyError):  # another thread was faster
                self._resolved.popitem()[1][1].close()

    def _put(self, tensor: ChunkedTensor, overlap: Overlap, into: Interleaver) -> None:
        stored, payload = self.find(tensor, overlap)
        into.put(payload, overlap.chunk, overlap.common, self._records.verifier(payload, stored))
        self.done(tensor, overlap)

    def _paths(self, tensor: ChunkedTensor, piece: Box, copy: Overlap) -> tuple[str, str]:
        """Return the file that a piece was read from, or the first of several, and the file of its copy."""
        read = next(e for e in self.overlaps(tensor, piece) if self._table.role(e.row) == READ)
        read_path, copy_path = (self._table.stored(tensor, e.row, e.chunk.shape).path for e in (read, copy))
        return read_path, copy_path
