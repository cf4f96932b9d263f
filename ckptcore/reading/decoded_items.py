"""Decode compressed items, and keep those that several chunks view, within a budget of memory.

A small item is decoded in memory while its `DecodedRoom` has room, and else into a slot of one temporary
file that its items share. A large one has a file of its own. So no item is decoded twice for want of memory.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import BinaryIO

from ckptcore.core.manifest import Item
from ckptcore.encodings.codecs import decode_into, decode_to_file, decode_to_place
from ckptcore.errors import BudgetTooSmall, CkptError, DiskFull, MalformedCheckpoint
from ckptcore.store import Buffer, Readable

_IN_MEMORY = 8 << 20
_SMALL = 256 << 10  # bytes: less is copied out of its pages
DECODED = 32 << 20  # bytes of decoded items where the caller has no budget for them
# Limits of the decoded items that are kept: a number of items and bytes of disk, whichever is reached first.
_LEAST, _MOST_KEPT, _KEPT_BYTES = 2, 32, 4 << 30


class DecodedRoom:
    """Memory for decoded items, and a file for those that it has no room for. Safe for threads.

    Args:
        nbytes: Bytes of memory; `resize` changes them.
        scratch: Folder for the file, None for the default.
    """

    def __init__(self, nbytes: int = DECODED, scratch: str | None = None) -> None:
        self._lock = threading.RLock()  # an item that the garbage collector finds gives back in any thread
        self._nbytes, self._taken = nbytes, 0
        self._scratch = scratch
        self._file: BinaryIO | None = None
        self._free, self._slots = list[int](), 0

    @property
    def taken(self) -> int:
        """Count the bytes of memory in use."""
        return self._taken

    def resize(self, nbytes: int) -> None:
        """Set the bytes of memory for the items that follow."""
        with self._lock:
            self._nbytes = nbytes

    def take(self, nbytes: int) -> bool:
        """Take memory; return False where so much is not free."""
        with self._lock:
            if self._taken + nbytes > self._nbytes:
                return False
            self._taken += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Give memory back."""
        with self._lock:
            self._taken -= nbytes

    def slot(self) -> tuple[int, int]:
        """Return (file, first byte) of a slot for an item of at most `_IN_MEMORY` bytes."""
        with self._lock:
            # Unlinked from the beginning: nothing is left after a crash.
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._scratch)  # noqa: SIM115  open until `__del__`
            # A slot of an earlier item before a new one: the file does not grow with their number.
            if self._free:
                return self._file.fileno(), self._free.pop()
            self._slots += 1
            return self._file.fileno(), (self._slots - 1) * _IN_MEMORY

    def give_back_slot(self, start: int) -> None:
        """Let another item have a slot."""
        with self._lock:
            self._free.append(start)

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()


class DecodedItem:
    """A decoded item: in memory when small, else in an unlinked file.

    Args:
        store: The checkpoint's folder.
        path: The file.
        item: The item.
        limit: The most bytes that it may have.
        scratch: Folder for a file, None for the default.
        room: The memory for it; None where one item at a time is decoded.

    Raises:
        MalformedCheckpoint: It cannot be decoded, or is larger.
        DiskFull: There is no room for its file.
    """

    def __init__(
        self,
        store: Readable,
        path: str,
        item: Item,
        limit: int,
        scratch: str | None,
        room: DecodedRoom | None,
    ) -> None:
        self._lock = threading.Lock()
        self._data: Buffer | None = None
        self._file: BinaryIO | None = None
        self._room, self._taken = room, 0
        self._slot: int | None = None
        self._begin = self._number = 0
        try:
            self.length = self._decode(store, path, item, limit, scratch)
        except OSError as error:
            self.close()
            raise _no_place(error, path, scratch) from error
        except BaseException:
            self.close()
            raise

    def __call__(self, start: int, into: Buffer) -> None:
        """Fill ``into`` from byte ``start``."""
        if start < 0 or start + len(into) > self.length:
            raise MalformedCheckpoint(f"decoded item ends at {self.length}")
        if self._data is not None:
            into[:] = self._data[start : start + len(into)]
            return
        filled = 0
        while filled < len(into):
            count = os.preadv(self._number, [into[filled:]], self._begin + start + filled)
            if not count:
                raise MalformedCheckpoint(f"decoded item ends at {start + filled}")
            filled += count
        if self._number < 0:  # its slot may have another item by now
            raise ValueError("a decoded item was closed while it was read")

    def close(self) -> None:
        """Give back its memory or its place on the disk."""
        with self._lock:
            self._data = None
            self._number = -1  # what reads it now fails, and reads no other item
            if self._file is not None:
                self._file.close()
            room, taken, slot = self._room, self._taken, self._slot
            self._taken, self._slot = 0, None
        if room is not None:
            room.give_back(taken)
            if slot is not None:
                room.give_back_slot(slot)

    def __del__(self) -> None:
        self.close()

    def _decode(self, store: Readable, path: str, item: Item, limit: int, scratch: str | None) -> int:
        """Decode the item to where there is room; return its bytes."""
        codec, start, stored = item.codec, item.start, item.length
        if limit > _IN_MEMORY or stored > _IN_MEMORY:
            self._file, length = decode_to_file(codec, store, path, start, stored, limit, scratch)
            self._number = self._file.fileno()
            return length
        room = self._room
        if room is not None and not room.take(limit + stored):
            self._number, self._begin = room.slot()
            self._slot = self._begin
            return decode_to_place(codec, store, path, start, stored, limit, (self._number, self._begin))
        self._taken = limit + stored
        plain, length = decode_into(codec, store, path, start, stored, limit)
        self._data = plain[:length] if length > _SMALL else memoryview(bytes(plain[:length]))
        if room is not None:
            room.give_back(self._taken - length)
        self._taken = length
        return length


class DecodedItems:
    """The latest decoded items that chunks view. Safe for threads.

    A map cuts an item into many tensors, such as a layer's experts; without this, each would decode the
    complete item. An item that is dropped closes when its last reader is done.

    Args:
        scratch: Folder for items that memory has no room for, None for the default.

    Attributes:
        room: The memory of these and of all other decoded items of a checkpoint.
    """

    def __init__(self, scratch: str | None = None) -> None:
        self.room = DecodedRoom(scratch=scratch)
        self._lock = threading.Lock()
        self._decoding: dict[int, threading.Lock] = {}
        self._kept: OrderedDict[int, DecodedItem] = OrderedDict()

    def of(self, index: int, decode: Callable[[], DecodedItem]) -> DecodedItem:
        """Return the item of this number; the first caller decodes it."""
        with self._lock:
            # A lock for each item: other items are decoded at the same time, this one once.
            decoding = self._decoding.setdefault(index, threading.Lock())
        with decoding:
            with self._lock:
                cached = self._kept.get(index)
                if cached is not None:
                    self._kept.move_to_end(index)
                    return cached
            decoded = decode()
            with self._lock:
                self._kept[index] = decoded
                while len(self._kept) > _LEAST and (
                    len(self._kept) > _MOST_KEPT or sum(d.length for d in self._kept.values()) > _KEPT_BYTES
                ):
                    self._kept.popitem(last=False)
            return decoded


def _no_place(error: OSError, path: str, scratch: str | None) -> CkptError:
    """Return the error for an item that can be decoded neither to memory nor to a file."""
    if error.errno == errno.ENOMEM:
        return BudgetTooSmall(f"cannot allocate memory to decode an item of {path}")
    from ckptcore.store.local_writer import unwritable  # a late import: nothing else here writes

    folder = scratch or tempfile.gettempdir()
    disk_error = unwritable(f"{folder}/(decoded items of {path})", error)
    place = "" if scratch else ", or name another folder with TMPDIR"
    if isinstance(disk_error, DiskFull):
        disk_error.hint = (
            f"free space in {folder}{place}, or raise --memory: a quarter of it takes decoded items"
        )
    return disk_error
