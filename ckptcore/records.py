"""Records: which stored records were read as a whole, and do they hold what their checksum says?

A record may be read in pieces, for several tensors, by several threads. What the pieces do not make
up (a part that nobody asked for, a transpose that is read with gaps) is read once more at the end:
whether damage is seen must not depend on how something was read.
"""

from __future__ import annotations

import threading
import zlib
from dataclasses import dataclass

from ckptcore.crc import Pieces
from ckptcore.errors import DamagedCheckpoint, finding
from ckptcore.gather import Seen
from ckptcore.manifest import Item, View
from ckptcore.resolve import Payload, resolve
from ckptcore.store import Store

_BLOCK = 4 << 20
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

    def resolve(self, store: Store) -> Payload:
        """The chunk's bytes, found."""
        return resolve(store, self.path, self.item, self.dtype, self.shape, self.view, self.fqn)


class Records:
    """The checksums of the items of one checkpoint; safe for threads.

    Memory: a byte an item, and what is known of records that are partly read.
    """

    def __init__(self, store: Store, items: int, verify: bool = True) -> None:
        self._store, self._verify = store, verify
        self._state = bytearray(items)
        self._partly: dict[int, tuple[Pieces | None, Place]] = {}
        self._lock = threading.Lock()

    @property
    def unverified(self) -> int:
        """Items that were read and could not be proven, for want of a checksum."""
        return self._state.count(_UNPROVEN)

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

    def finish(self) -> None:
        """Reads what is partly read; raises `DamagedCheckpoint` like the reading itself."""
        block = bytearray(_BLOCK)
        while self._partly:
            index = next(iter(self._partly))
            _, place = self._partly[index]
            payload = place.resolve(self._store)
            try:
                crc = 0
                for at in range(0, payload.record_length, _BLOCK):
                    view = memoryview(block)[: min(_BLOCK, payload.record_length - at)]
                    payload.read_into(payload.record_start + at, view)
                    crc = zlib.crc32(view, crc)
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
