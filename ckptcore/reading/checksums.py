"""Verify the checksums of stored records, including records that are read in parts.

Several threads may read a record in pieces, for several tensors. Some pieces do not add up to the record: a
part was not requested, or a transpose was read with gaps. Such a record is read once more at the end. Whether
damage is detected must not depend on how the record was read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ckptcore.errors import AlteredInTransit, DamagedCheckpoint, finding
from ckptcore.reading.decoded_items import DecodedItems
from ckptcore.reading.payload import Payload, RangeVerifier, StoredChunk, resolve
from ckptcore.store import Readable
from ckptcore.utils.crc32 import CrcPieces, crc32

_BLOCK = 1 << 20
_Open = tuple[CrcPieces | None, StoredChunk]  # what was read of a record; None if it never adds up
_UNTOUCHED, _UNPROVEN, _VERIFIED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class RecordProgress:
    """What one process has read of a checkpoint's records.

    Attributes:
        state: A byte for each item.
        partly: The records that are read in part, by number.
    """

    state: bytes
    partly: dict[int, _Open]


class Records:
    """The stored records of one checkpoint, and which of them are verified. Safe for threads.

    Memory: one byte per item, and the pieces of partly read records.

    Args:
        store: The checkpoint's folder.
        items: How many items its manifest has.
        verify: Whether to check checksums.
        scratch: Folder for decoded items, None for the default.
    """

    def __init__(self, store: Readable, items: int, verify: bool = True, scratch: str | None = None) -> None:
        self._store, self._verify, self._scratch = store, verify, scratch
        self._state = bytearray(items)
        self._partly: dict[int, _Open] = {}
        self._lock = threading.Lock()
        self._decoded = DecodedItems(scratch)
        self._awaiting: set[int] = set()

    @property
    def unverified(self) -> int:
        """Count the items that were read without a checksum to verify them."""
        return self._state.count(_UNPROVEN)

    def verified(self, index: int) -> bool:
        """Report whether an item's checksum was verified."""
        return self._state[index] == _VERIFIED

    def pending(self, index: int) -> bool:
        """Report whether something is still to be read before an item is verified, or cannot be."""
        return index in self._partly or (index in self._awaiting and self._state[index] == _UNPROVEN)

    def await_proof(self, numbers: Iterable[int]) -> None:
        """Call these items pending until the store that they were read from has proven its files."""
        self._awaiting.update(numbers)

    def confirm_awaited(self, proven: Iterable[int]) -> None:
        """Call items verified whose files the store has proven, and no other item pending any more."""
        with self._lock:
            for index in self._awaiting.intersection(proven):
                if self._state[index] == _UNPROVEN:
                    self._state[index] = _VERIFIED
            self._awaiting.clear()

    def limit_decoded(self, nbytes: int) -> None:
        """Set the memory for decoded items; what it has no room for is on the disk."""
        self._decoded.room.resize(nbytes)

    def resolve(self, chunk: StoredChunk) -> Payload:
        """Find a chunk's payload; see `ckptcore.reading.payload.resolve`."""
        return resolve(chunk, self._store, self._scratch, self._decoded)

    def expect(self, chunk: StoredChunk) -> None:
        """Request that `finish` verifies an item, unless a read does so before."""
        with self._lock:
            if self._state[chunk.index] != _VERIFIED:
                self._partly.setdefault(chunk.index, (None, chunk))

    def verifier(self, payload: Payload, chunk: StoredChunk) -> RangeVerifier | None:
        """Return a callback for every range read of a payload; None if there is nothing to verify."""
        with self._lock:
            if self._state[chunk.index] == _VERIFIED:
                return None
            self._state[chunk.index] = _UNPROVEN
        if not self._verify or payload.crc32 is None:
            return None

        def report(start: int, length: int, crc: int) -> None:
            if length == payload.record_length:
                self._require(crc, payload, chunk)
                return
            with self._lock:
                if self._state[chunk.index] == _VERIFIED:
                    return
                # Pieces with gaps never add up, and there can be very many.
                pieces, _ = self._partly.setdefault(
                    chunk.index, (None if payload.strides else CrcPieces(payload.record_length), chunk)
                )
                total = None if pieces is None else pieces.add(start - payload.record_start, length, crc)
            if total is not None and total != payload.crc32 and payload.forget is not None:
                # Its pieces are used already: they came altered, or the store has them like that.
                self._retry_record(payload, chunk, total)
                raise AlteredInTransit(
                    f"{chunk.fqn}: bytes of {chunk.path} came altered; read again, they match their CRC-32"
                )
            if total is not None:
                self._require(total, payload, chunk)

        return report

    def prove(self, numbers: Iterable[int]) -> None:
        """Call items verified whose complete records were read and match their checksums."""
        with self._lock:
            for index in numbers:
                self._state[index] = _VERIFIED
                self._partly.pop(index, None)

    def progress(self) -> RecordProgress:
        """Return what this process has read and verified, for `join` in another one."""
        with self._lock:
            return RecordProgress(bytes(self._state), dict(self._partly))

    def join(self, reports: Sequence[RecordProgress]) -> None:
        """Add what other processes have read: what is verified in one needs no other, and pieces add up."""
        with self._lock:
            for report in reports:
                states = np.frombuffer(report.state, np.uint8)
                # A view of `_state`, so the maximum is written there: a higher number is the better proof.
                merged_state = np.frombuffer(self._state, np.uint8)
                np.maximum(merged_state, states, out=merged_state)
                for index, (pieces, chunk) in report.partly.items():
                    mine, _ = self._partly.setdefault(index, (pieces, chunk))
                    if mine is None or pieces is None:
                        self._partly[index] = (mine or pieces, chunk)
                    elif mine is not pieces:
                        mine.join(pieces)
            for index in [index for index in self._partly if self._state[index] == _VERIFIED]:
                del self._partly[index]

    @property
    def partly(self) -> tuple[int, ...]:
        """Return the numbers of the records that are read in part, and not verified."""
        with self._lock:
            return tuple(self._partly)

    def finish(self, threads: int = 1, numbers: Iterable[int] | None = None) -> None:
        """Read the partly read records; raises `DamagedCheckpoint` like the reads before.

        Args:
            threads: How many read.
            numbers: Only these; None for all.
        """
        left = [self._partly[number] for number in (self.partly if numbers is None else numbers)]
        if len(left) < 2 or threads < 2:
            for open_record in left:
                self._read_record(open_record)
            return
        with ThreadPoolExecutor(threads) as pool:
            try:
                list(pool.map(self._read_record, left))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _read_record(self, open_record: _Open) -> None:
        pieces, chunk = open_record
        payload = self.resolve(chunk)
        try:
            if payload.crc32 is None:
                with self._lock:
                    self._partly.pop(chunk.index, None)
                return
            # Pieces of several processes may add up only here.
            total = None if pieces is None else pieces.total()
            crc = _crc_of(payload) if total is None else total
            if crc != payload.crc32 and payload.forget is not None:
                self._retry_record(payload, chunk, crc)
            else:
                self._require(crc, payload, chunk)
        finally:
            payload.close()

    def _retry_record(self, payload: Payload, chunk: StoredChunk, before: int) -> None:
        """Ask the store for a record once more, which had the CRC-32 ``before``.

        Raises:
            DamagedCheckpoint: It came as before: the store has it like that.
            AlteredInTransit: It came otherwise, and still does not match.
        """
        assert payload.forget is not None  # the caller has checked
        assert payload.path is not None
        payload.forget(payload.path, payload.record_start, payload.record_length)
        crc = _crc_of(payload)
        if crc not in (before, payload.crc32):
            raise AlteredInTransit(
                f"{chunk.fqn}: bytes of {chunk.path} came with CRC-32 {before:08x}, and again with {crc:08x} "
                f"(must be {payload.crc32:08x})"
            )
        self._require(crc, payload, chunk)

    def _require(self, crc: int, payload: Payload, chunk: StoredChunk) -> None:
        if crc != payload.crc32:
            message = (
                f"{chunk.fqn}: bytes in {chunk.path} must have CRC-32 {payload.crc32:08x} (got {crc:08x})"
            )
            mismatch = finding("crc-mismatch", "bytes", message, fqn=chunk.fqn, file=chunk.path)
            raise DamagedCheckpoint(message, findings=(mismatch,))
        with self._lock:
            self._state[chunk.index] = _VERIFIED
            self._partly.pop(chunk.index, None)


def _crc_of(payload: Payload) -> int:
    crc, block = 0, bytearray(min(_BLOCK, payload.record_length))
    for offset in range(0, payload.record_length, _BLOCK):
        view = memoryview(block)[: min(_BLOCK, payload.record_length - offset)]
        payload.read_into(payload.record_start + offset, view)
        crc = crc32(view, crc)
    return crc
