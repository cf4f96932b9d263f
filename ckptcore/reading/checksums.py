"""Records: which stored records were read as a whole, and do they hold what their checksum says?

A record may be read in pieces, for several tensors, by several threads. What the pieces do not make
up (a part that nobody asked for, a transpose that is read with gaps) is read once more at the end:
whether damage is seen must not depend on how something was read.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckptcore.core.manifest import Item, View
from ckptcore.errors import DamagedCheckpoint, finding
from ckptcore.reading.gather import Seen
from ckptcore.reading.payload import Payload, resolve
from ckptcore.store import Store
from ckptcore.utils.crc32 import Pieces, crc32

_BLOCK = 1 << 20
_UNTOUCHED, _UNPROVEN, _VERIFIED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk lies, and as what: the arguments of `resolve`."""

    index: int  # of the item
    path: str
    item: Item
    dtype: str
    shape: tuple[int, ...]
    view: View | None
    fqn: str

    def resolve(self, store: Store, scratch: str | None = None) -> Payload:
        """The chunk's bytes, found."""
        return resolve(store, self.path, self.item, self.dtype, self.shape, self.view, self.fqn, scratch)


class Records:
    """The checksums of the items of one checkpoint; safe for threads.

    Memory: a byte an item, and what is known of records that are partly read.
    """

    def __init__(self, store: Store, items: int, verify: bool = True, scratch: str | None = None) -> None:
        self._store, self._verify, self._scratch = store, verify, scratch
        self._state = bytearray(items)
        self._partly: dict[int, tuple[Pieces | None, Place]] = {}
        self._lock = threading.Lock()

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

    def expect(self, place: Place) -> None:
        """Asks for an item to be proven by `finish`, unless reading proves it before."""
        with self._lock:
            if self._state[place.index] != _VERIFIED:
                self._partly.setdefault(place.index, (None, place))

    def seen(self, payload: Payload, place: Place) -> Seen | None:
        """What is told of every range that is read of a payload; None when it proves nothing."""
        with self._lock:
            if self._state[place.index] == _VERIFIED:
                return None
            self._state[place.index] = _UNPROVEN
        if not self._verify or payload.crc32 is None:
            return None

        def tell(start: int, length: int, crc: int) -> None:
            if length == payload.record_length:
                self._require(crc, payload, place)
                return
            with self._lock:
                if self._state[place.index] == _VERIFIED:
                    return
                # Pieces with gaps never add up, and there may be very many.
                pieces, _ = self._partly.setdefault(
                    place.index, (None if payload.strides else Pieces(payload.record_length), place)
                )
                whole = None if pieces is None else pieces.add(start - payload.record_start, length, crc)
            if whole is not None:
                self._require(whole, payload, place)

        return tell

    def finish(self, threads: int = 1) -> None:
        """Reads what is partly read; raises `DamagedCheckpoint` like the reading itself."""
        left = [place for _, place in self._partly.values()]
        if len(left) < 2 or threads < 2:
            for place in left:
                self._read_whole(place)
            return
        with ThreadPoolExecutor(threads) as pool:
            try:
                list(pool.map(self._read_whole, left))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _read_whole(self, place: Place) -> None:
        payload = place.resolve(self._store, self._scratch)
        try:
            if payload.crc32 is None:
                with self._lock:
                    self._partly.pop(place.index, None)
                return
            crc, block = 0, bytearray(min(_BLOCK, payload.record_length))
            for at in range(0, payload.record_length, _BLOCK):
                view = memoryview(block)[: min(_BLOCK, payload.record_length - at)]
                payload.read_into(payload.record_start + at, view)
                crc = crc32(view, crc)
            self._require(crc, payload, place)
        finally:
            payload.close()

    def _require(self, crc: int, payload: Payload, place: Place) -> None:
        if crc != payload.crc32:
            message = (
                f"{place.fqn}: bytes in {place.path} have CRC-32 {crc:08x}, {payload.crc32:08x} is stored"
            )
            found = finding("crc-mismatch", "bytes", message, fqn=place.fqn, file=place.path)
            raise DamagedCheckpoint(message, findings=(found,))
        with self._lock:
            self._state[place.index] = _VERIFIED
            self._partly.pop(place.index, None)
