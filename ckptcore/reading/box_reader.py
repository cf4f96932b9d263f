"""Box readers: the elements of any box of one tensor, stored or computed, verified on the way.

A reader belongs to one tensor and may be asked for its boxes by several threads. What was found of a
chunk is remembered until all of the chunk has been read. Copies of a chunk are compared with it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box, flat_start
from ckptcore.core.dequantize import FUNCTIONS
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Derived, Manifest, view_of
from ckptcore.errors import DamagedCheckpoint, finding
from ckptcore.reading.casting import derive_into
from ckptcore.reading.checksums import Place, Records
from ckptcore.reading.equality import require_equal
from ckptcore.reading.gather import Bytes, overlaps, sub_tile, tile_view
from ckptcore.reading.interleave import Interleaver
from ckptcore.reading.payload import Payload
from ckptcore.store import Store

Tile = npt.NDArray[Any]


class BoxReader:
    """One tensor of a manifest.

    once: whether every element is asked for once at most, so that a chunk can be forgotten when all of
    it was read; otherwise chunks are kept until `close`. copies: whether copies are compared.
    """

    def __init__(
        self,
        manifest: Manifest,
        row: int,
        store: Store,
        records: Records,
        *,
        once: bool = True,
        copies: bool = True,
    ) -> None:
        self._manifest, self._row, self._store, self._records = manifest, row, store, records
        self._spec = manifest.tensors[row]
        self._node: Derived | None = manifest.derived.get(row)
        self._once, self._lock = once, threading.Lock()
        self._payloads: dict[int, Payload] = {}
        self._left: dict[int, int] = {}  # chunk -> elements that nobody has read yet
        self._first, self._end = (int(n) for n in manifest.chunks.first[row : row + 2])
        self._copies, again = self._repeated()
        self._skipped = again if copies else again | self._copies
        self._below: list[BoxReader] = []
        if self._node is not None:
            assert manifest.inputs is not None  # whoever derives has inputs
            self._below = [
                BoxReader(manifest.inputs, i, store, records, once=False, copies=copies)
                for i in self._node.inputs
            ]

    def read(self, want: Box, tile: Tile, scratch: Bytes) -> None:
        """Fills ``tile``, a row-major array over ``want``, as `tile_view` makes it.

        scratch: working memory; computed tensors take as much again.
        Raises `DamagedCheckpoint` for holes, checksums that fail, and copies that differ.
        """
        if self._node is not None:
            self._derive(self._node, want, tile, scratch)
            return
        held, copies = 0, []
        into = Interleaver(tile, want, self._spec.dtype, scratch)
        for row, chunk, common in self._overlaps(want):
            if row in self._skipped:
                continue
            if row in self._copies:
                copies.append((row, chunk, common))
                continue
            self._gather(row, chunk, common, into)
            held += common.numel
        into.flush()
        if held != want.numel:
            message = f"{self._spec.fqn}: {want.numel - held} of {want.numel} elements are in no file"
            raise DamagedCheckpoint(
                message, findings=(finding("hole", "cover", message, fqn=self._spec.fqn),)
            )
        for row, chunk, common in copies:
            self._compare(row, chunk, common, sub_tile(tile, common, want), scratch)

    def close(self) -> None:
        """Forgets every chunk."""
        for payload in self._payloads.values():
            payload.close()
        self._payloads.clear()
        for reader in self._below:
            reader.close()

    def _repeated(self) -> tuple[set[int], set[int]]:
        """(copies: chunks with the box of an earlier one in another item, chunks that are named again)."""
        copies: set[int] = set()
        again: set[int] = set()
        if self._end - self._first > 1:
            chunks = self._manifest.chunks
            seen: dict[bytes, int] = {}
            for row in range(self._first, self._end):
                first = seen.setdefault(chunks.lo[row].tobytes() + chunks.shape[row].tobytes(), row)
                if first != row:
                    (again if chunks.item[first] == chunks.item[row] else copies).add(row)
        return copies, again

    def _overlaps(self, want: Box) -> Iterator[tuple[int, Box, Box]]:
        chunks = self._manifest.chunks
        return overlaps(chunks.lo, chunks.shape, self._first, self._end, want)

    def _gather(self, row: int, chunk: Box, common: Box, into: Interleaver) -> None:
        place = self._place(row, chunk)
        with self._lock:
            payload = self._payloads.get(row)
        if payload is None:
            fresh = place.resolve(self._store)
            with self._lock:
                payload = self._payloads.setdefault(row, fresh)
            if payload is not fresh:
                fresh.close()
        into.put(payload, chunk, common, self._records.seen(payload, place))
        if self._once:
            with self._lock:
                left = self._left.get(row, chunk.numel) - common.numel
                self._left[row] = left
                gone = self._payloads.pop(row, None) if left <= 0 else None
            if gone is not None:
                gone.close()

    def _place(self, row: int, chunk: Box) -> Place:
        manifest = self._manifest
        index = int(manifest.chunks.item[row])
        fqn = self._spec.fqn
        if index < 0:
            message = f"{fqn}: a chunk has no place in any file"
            raise DamagedCheckpoint(message, findings=(finding("no-place", "cover", message, fqn=fqn),))
        item = manifest.items[index]
        view = view_of(manifest.chunks, row, len(chunk.shape))
        path = manifest.files[item.file].path
        return Place(index, path, item, self._spec.dtype, chunk.shape, view, fqn)

    def _compare(self, row: int, chunk: Box, common: Box, tile: Tile, scratch: Bytes) -> None:
        """Holds a copy against what its first chunk gave, half a scratch buffer at a time."""
        half = len(scratch) // 2 // 16 * 16
        for piece in common.tiles(half // BY_NAME[self._spec.dtype].itemsize):
            other = tile_view(scratch[:half], piece.shape, self._spec.dtype)
            into = Interleaver(other, piece, self._spec.dtype, scratch[half:])
            self._gather(row, chunk, piece, into)
            into.flush()
            mine = sub_tile(tile, piece, common)
            require_equal(mine, other, piece, self._spec.fqn, partial(self._files, row, chunk))

    def _files(self, copy: int, chunk: Box) -> tuple[str, str]:
        """The file of the chunk that is read of those with this box, and that of a copy."""
        row = next(row for row, box, _ in self._overlaps(chunk) if box == chunk)
        return self._place(row, chunk).path, self._place(copy, chunk).path

    def _derive(self, node: Derived, want: Box, tile: Tile, scratch: Bytes) -> None:
        """Computes a box piece by piece, so that the inputs of a piece fit a buffer like ``scratch``."""
        function = FUNCTIONS[node.fn]
        dtypes = [reader._spec.dtype for reader in self._below]
        itemsize = BY_NAME[self._spec.dtype].itemsize
        flat = tile.reshape(-1).view(np.uint8)
        spare = np.empty(0, np.uint8)
        for box in want.tiles(len(scratch) // (function.width(dtypes) + itemsize)):
            inputs = []
            for reader, needed in zip(self._below, function.needs(box, node.params), strict=True):
                dtype = reader._spec.dtype
                held = tile_view(
                    np.empty(needed.numel * BY_NAME[dtype].itemsize, np.uint8), needed.shape, dtype
                )
                reader.read(needed, held, scratch)
                inputs.append((held, dtype))
            start = flat_start(want.shape, box.within(want).offset) * itemsize
            target = flat[start : start + box.numel * itemsize]
            derive_into(node, box, inputs, target, self._spec.dtype, "cpu", spare)
