"""Verify stored records: which were read as a whole, and do they hold what their checksum says?

A record may be read in pieces, for several tensors, by several threads. What the pieces do not make
up (a part that nobody asked for, a transpose that is read with gaps) is read once more at the end:
whether damage is seen must not depend on how something was read.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from ckptcore.errors import DamagedCheckpoint, finding
from ckptcore.reading.gather import Seen
from ckptcore.reading.payload import DecodedItems, Payload, StoredChunk, resolve
from ckptcore.store import Readable
from ckptcore.utils.crc32 import CrcPieces, crc32

_BLOCK = 1 << 20
_UNTOUCHED, _UNPROVEN, _VERIFIED = 0, 1, 2


class Records:
    """The stored records of one checkpoint, and what their checksums have proven. Safe for threads.

    Memory: a byte an item, and what is known of records that are partly read.

    Args:
        store: The checkpoint's folder.
        items: How many items its manifest has.
        verify: Whether checksums are looked at.
        scratch: Folder for decoded items, None for the default.
    """

    def __init__(self, store: Readable, items: int, verify: bool = True, scratch: str | None = None) -> None:
        self._store, self._verify, self._scratch = store, verify, scratch
        self._state = bytearray(items)
        self._partly: dict[int, tuple[CrcPieces | None, StoredChunk]] = {}
        self._lock = threading.Lock()
        self._decoded = DecodedItems()

    @property
    def unverified(self) -> int:
        """Items that were read and could not be proven, for want of a checksum."""
        return self._state.count(_UNPROVEN)

    def verified(self, index: int) -> bool:
        """Whether an item's checksum has been found right."""
        return self._state[index] == _VERIFIED

    def pending(self, index: int) -> bool:
        """Whether an item was read in part, so that `finish` has to read it."""
        return index in self._partly

    def resolve(self, chunk: StoredChunk) -> Payload:
        """Find a chunk's payload; see `ckptcore.reading.payload.resolve`."""
        return resolve(chunk, self._store, self._scratch, self._decoded)

    def expect(self, chunk: StoredChunk) -> None:
        """Asks for an item to be proven by `finish`, unless reading proves it before."""
        with self._lock:
            if self._state[chunk.index] != _VERIFIED:
                self._partly.setdefault(chunk.index, (None, chunk))

    def seen(self, payload: Payload, chunk: StoredChunk) -> Seen | None:
        """What to call with every range that is read of a payload; None when it proves nothing."""
        with self._lock:
            if self._state[chunk.index] == _VERIFIED:
                return None
            self._state[chunk.index] = _UNPROVEN
        if not self._verify or payload.crc32 is None:
            return None

        def tell(start: int, length: int, crc: int) -> None:
            if length == payload.record_length:
                self._require(crc, payload, chunk)
                return
            with self._lock:
                if self._state[chunk.index] == _VERIFIED:
                    return
                # Pieces with gaps never add up, and there may be very many.
                pieces, _ = self._partly.setdefault(
                    chunk.index, (None if payload.strides else CrcPieces(payload.record_length), chunk)
                )
                whole = None if pieces is None else pieces.add(start - payload.record_start, length, crc)
            if whole is not None:
                self._require(whole, payload, chunk)

        return tell

    def finish(self, threads: int = 1) -> None:
        """Reads what is partly read; raises `DamagedCheckpoint` like the reading itself."""
        left = [chunk for _, chunk in self._partly.values()]
        if len(left) < 2 or threads < 2:
            for chunk in left:
                self._read_whole(chunk)
            return
        with ThreadPoolExecutor(threads) as pool:
            try:
                list(pool.map(self._read_whole, left))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _read_whole(self, chunk: StoredChunk) -> None:
        payload = self.resolve(chunk)
        try:
            if payload.crc32 is None:
                with self._lock:
                    self._partly.pop(chunk.index, None)
                return
            crc, block = 0, bytearray(min(_BLOCK, payload.record_length))
            for at in range(0, payload.record_length, _BLOCK):
                view = memoryview(block)[: min(_BLOCK, payload.record_length - at)]
                payload.read_into(payload.record_start + at, view)
                crc = crc32(view, crc)
            self._require(crc, payload, chunk)
        finally:
            payload.close()

    def _require(self, crc: int, payload: Payload, chunk: StoredChunk) -> None:
        if crc != payload.crc32:
            message = (
                f"{chunk.fqn}: bytes in {chunk.path} have CRC-32 {crc:08x}, {payload.crc32:08x} is stored"
            )
            found = finding("crc-mismatch", "bytes", message, fqn=chunk.fqn, file=chunk.path)
            raise DamagedCheckpoint(message, findings=(found,))
        with self._lock:
            self._state[chunk.index] = _VERIFIED
            self._partly.pop(chunk.index, None)
