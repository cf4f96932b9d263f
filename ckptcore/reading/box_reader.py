"""Read any box of one tensor of a manifest, stored or computed, verified on the way.

A reader serves one tensor; several threads may request its boxes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from ckptcore.core.box import Box, flat_start
from ckptcore.core.dequantize import FUNCTIONS, most_elements
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Chunks, Derived, Manifest, view_of
from ckptcore.errors import DamagedCheckpoint, finding
from ckptcore.reading.casting import derive_into
from ckptcore.reading.checksums import Records
from ckptcore.reading.chunk_reader import COPY, READ, SKIP, ChunkedTensor, ChunkReader, Tile
from ckptcore.reading.gather import Bytes, tile_view
from ckptcore.reading.payload import StoredChunk
from ckptcore.utils.workers import run_jobs

_Open = TypeVar("_Open")


def walk(
    tensors: Iterable[_Open],
    boxes_of: Callable[[_Open], Iterable[Box]],
    close: Callable[[_Open], None],
    prepare: Callable[[], Callable[[_Open, Box], None]],
    threads: int,
) -> None:
    """Share the boxes of many tensors among threads.

    Args:
        tensors: Taken one after the other, when it is their turn.
        boxes_of: Called then; returns the boxes of a tensor.
        close: Called for each tensor after its last box; after an error, for all that were taken.
        prepare: Called once in each thread; returns a function that reads one box.
        threads: Number of threads.
    """
    lock, under_way = threading.Lock(), dict[_Open, int]()

    def release(tensor: _Open) -> None:
        with lock:
            under_way[tensor] -= 1
            if under_way[tensor]:
                return
            del under_way[tensor]
        close(tensor)

    def boxes() -> Iterator[tuple[_Open, Box]]:
        for tensor in tensors:
            # The walk keeps its own count until the last box is out: workers that finish the boxes before
            # that must not close the tensor.
            with lock:
                under_way[tensor] = 1
            for box in boxes_of(tensor):
                with lock:
                    under_way[tensor] += 1
                yield tensor, box
            release(tensor)

    def prepare_worker() -> Callable[[tuple[_Open, Box]], None]:
        read = prepare()

        def do(job: tuple[_Open, Box]) -> None:
            read(*job)
            release(job[0])

        return do

    try:
        run_jobs(boxes(), prepare_worker, threads=threads)
    finally:
        for tensor in under_way:
            close(tensor)


class BoxReader:
    """Reads one tensor of a manifest.

    Args:
        manifest: The checkpoint's manifest.
        row: The tensor's number in it.
        records: The checkpoint's records.
        once: Whether every element is requested at most once, so that a chunk can be dropped after its last
            element; otherwise chunks are kept until `close`.
        copies: Whether to compare copies.
    """

    def __init__(
        self, manifest: Manifest, row: int, records: Records, *, once: bool = True, copies: bool = True
    ) -> None:
        spec = manifest.tensors[row]
        self._tensor = ChunkedTensor(row, spec.fqn, spec.dtype, once)
        self._chunks = ChunkReader(_ManifestChunks(manifest, row), records, compare=copies)
        self._node: Derived | None = manifest.derived.get(row)
        self._below: list[BoxReader] = []
        if self._node is not None:
            assert manifest.inputs is not None  # a manifest with derived tensors has inputs
            # Several boxes of the output need the same scales: chunks of inputs are not dropped in between.
            self._below = [
                BoxReader(manifest.inputs, i, records, once=False, copies=copies) for i in self._node.inputs
            ]

    def read(self, want: Box, tile: Tile, scratch: Bytes) -> None:
        """Fill ``tile``, a row-major array over ``want`` from `tile_view`.

        Args:
            want: Box of the tensor.
            tile: Receives its elements.
            scratch: Working memory; computed tensors take as much again.

        Raises:
            DamagedCheckpoint: There are holes, wrong checksums, or copies that differ.
        """
        if self._node is not None:
            self._derive(self._node, want, tile, scratch)
        else:
            self._chunks.read(self._tensor, want, tile, scratch)

    def strides(self, row: int) -> tuple[int, ...] | None:
        """Return the strides, elements, of a chunk as its item has them; None when it is row-major."""
        return self._chunks.strides(self._tensor, row)

    def close(self) -> None:
        """Drop every chunk."""
        self._chunks.close()
        for reader in self._below:
            reader.close()

    def _derive(self, node: Derived, want: Box, tile: Tile, scratch: Bytes) -> None:
        """Compute a box piece by piece, so that the inputs of a piece fit a buffer like ``scratch``."""
        function = FUNCTIONS[node.fn]
        dtypes = [reader._tensor.dtype for reader in self._below]
        itemsize = BY_NAME[self._tensor.dtype].itemsize
        flat = tile.reshape(-1).view(np.uint8)
        spare = np.empty(0, np.uint8)
        for box in want.tiles(most_elements(node, len(scratch), want.shape, itemsize, dtypes)):
            inputs = []
            for reader, needed in zip(self._below, function.needs(box, node.params), strict=True):
                dtype = reader._tensor.dtype
                filled = tile_view(
                    np.empty(needed.numel * BY_NAME[dtype].itemsize, np.uint8), needed.shape, dtype
                )
                reader.read(needed, filled, scratch)
                inputs.append((filled, dtype))
            start = flat_start(want.shape, box.within(want).offset) * itemsize
            target = flat[start : start + box.numel * itemsize]
            derive_into(node, box, inputs, target, self._tensor.dtype, spare)


class _ManifestChunks:
    """The chunks of one tensor of a manifest, as a `ckptcore.reading.chunk_reader.ChunkTable`."""

    def __init__(self, manifest: Manifest, row: int) -> None:
        self._manifest = manifest
        self._copies, self._skipped = _repeated(manifest, row)

    @property
    def chunks(self) -> Chunks:
        return self._manifest.chunks

    def role(self, row: int) -> int:
        if row in self._skipped:
            return SKIP
        return COPY if row in self._copies else READ

    def asked(self, tensor: ChunkedTensor) -> Box:
        return Box.full(self._manifest.tensors[tensor.number].shape)

    def stored(self, tensor: ChunkedTensor, row: int, shape: tuple[int, ...]) -> StoredChunk:
        manifest = self._manifest
        index, fqn = int(manifest.chunks.item[row]), tensor.fqn
        if index < 0:
            message = f"{fqn}: a chunk is in no file"
            raise DamagedCheckpoint(message, findings=(finding("no-place", "coverage", message, fqn=fqn),))
        item, view = manifest.items[index], view_of(manifest.chunks, row, len(shape))
        return StoredChunk(index, manifest.files[item.file].path, item, tensor.dtype, shape, view, fqn)


def _repeated(manifest: Manifest, tensor: int) -> tuple[set[int], set[int]]:
    """Return (rows of copies in other items, rows that repeat an earlier chunk's box and item)."""
    chunks, copies, repeats = manifest.chunks, set[int](), set[int]()
    begin, end = (int(n) for n in chunks.first[tensor : tensor + 2])
    if end - begin > 1:
        row_of_box: dict[bytes, int] = {}
        for row in range(begin, end):
            first = row_of_box.setdefault(chunks.lo[row].tobytes() + chunks.shape[row].tobytes(), row)
            if first != row:
                (repeats if chunks.item[first] == chunks.item[row] else copies).add(row)
    return copies, repeats
