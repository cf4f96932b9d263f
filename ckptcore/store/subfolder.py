"""Nest stores: a subfolder to read from, and a store that records what a reader takes from which files.

Formats nest, and their readers need not know. So do encodings: a torch zip is a file, an item of a file, or
what a codec decodes. A `FileRange` is one of these, with positions of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ckptcore.store import Buffer, Readable, ReadObserver

Ints = npt.NDArray[np.int64]


class Account(Protocol):
    """What a reader takes from its files (`ckptcore.core.byte_ledger.ByteLedger`)."""

    def add_read(self, path: str) -> None:
        """Record that the reader has read bytes of a file."""

    def explain(self, path: str, spans: Ints) -> None:
        """Record ranges whose bytes an encoding has read or checked.

        Args:
            path: The file.
            spans: int64 [n, 2]: the first byte of each range, and the byte behind its last.
        """

    def add_unused(self, path: str, start: int, end: int, description: str, padding: bool = False) -> None:
        """Record what the bytes ``[start, end)`` are, which belong to no tensor, object or structure.

        padding: They are structure if all of them are zero, which nobody has read yet.
        """

    def carry(self, path: str, group: str, values: Mapping[str, Any], odd: Collection[str] = ()) -> None:
        """Record values that the format's reader does not take: they become an object called ``group``.

        Args:
            path: The file.
            group: Name of the object.
            values: Key -> decoded value (`ckptcore.core.object_tree`).
            odd: Those of the keys that the reader knows, and with values of another type.
        """


class RenamedFiles(ABC):
    """Files of another store under other names, to read from."""

    def __init__(self, store: Readable) -> None:
        self._store = store

    @abstractmethod
    def _stored_name(self, path: str) -> str:
        """Return the name of a file in the other store."""

    def size(self, path: str) -> int | None:
        """Return the size in bytes, or None when there is no such file."""
        return self._store.size(self._stored_name(path))

    def stamp(self, path: str) -> str | None:
        """Return a text that changes when the file is rewritten."""
        return self._store.stamp(self._stored_name(path))

    def ctime(self, path: str) -> int | None:
        """Return when its status last changed, ns, or None."""
        return self._store.ctime(self._stored_name(path))

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return exactly ``length`` bytes; raises like the other store."""
        return self._store.read(self._stored_name(path), start, length)

    def read_into(self, path: str, start: int, into: Buffer) -> None:
        """Fill ``into`` exactly; raises like the other store."""
        self._store.read_into(self._stored_name(path), start, into)


class SubStore(RenamedFiles):
    """A read-only store below ``prefix`` (with its slash) of another, with its connections and caches."""

    def __init__(self, store: Readable, prefix: str) -> None:
        super().__init__(store)
        self._prefix = prefix
        self.url = f"{store.url.rstrip('/')}/{prefix.rstrip('/')}"
        self.local: Path | None = store.local / prefix if store.local is not None else None
        self.observer: ReadObserver | None = None  # that of the outer store receives the reads

    def list(self) -> dict[str, int]:
        """Return every file below: relative path -> size in bytes."""
        sizes = self._store.list()
        # Filtered from one listing: a subfolder costs no request of its own.
        return {p.removeprefix(self._prefix): n for p, n in sizes.items() if p.startswith(self._prefix)}

    def _stored_name(self, path: str) -> str:
        return self._prefix + path

    def account(self, path: str) -> tuple[Account, str] | None:
        """Return the account of this reading, and the name of a file in it, or None without one."""
        return account_of(self._store, self._prefix + path)

    def unrecorded(self) -> Readable:
        """Return the same folder without an account, for a look at files that are no part of what is read."""
        return SubStore(unrecorded(self._store), self._prefix)

    def close(self) -> None:
        """Do nothing: whoever opened the outer store closes it."""


class RecordingStore(SubStore):
    """A store that records in an account what a reader takes from which files."""

    def __init__(self, store: Readable, account: Account) -> None:
        super().__init__(store, "")
        self.url, self.local, self._account = store.url, store.local, account

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return exactly ``length`` bytes, and record the name."""
        self._account.add_read(path)
        return super().read(path, start, length)

    def read_into(self, path: str, start: int, into: Buffer) -> None:
        """Fill ``into`` exactly, and record the name."""
        self._account.add_read(path)
        super().read_into(path, start, into)

    def account(self, path: str) -> tuple[Account, str] | None:
        """Return its own account."""
        return self._account, path

    def unrecorded(self) -> Readable:
        """Return the store itself."""
        return unrecorded(self._store)


def account_of(store: Readable, path: str) -> tuple[Account, str] | None:
    """Return the account of the current reading, and the name of a file in it, or None without one."""
    return store.account(path) if isinstance(store, SubStore) else None


def unrecorded(store: Readable) -> Readable:
    """Return a store whose reads are in no account: `SubStore.unrecorded`, or the store itself."""
    return store.unrecorded() if isinstance(store, SubStore) else store


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of a file, or what a codec makes of it.

    Attributes:
        store: The folder.
        path: The file.
        start: First byte in the file.
        length: Bytes of the range; where a codec decoded it, of the result.
        content: These bytes, where they were read before.
        stored: Bytes in the file of what a codec decoded to ``content``; 0 without a codec.
    """

    store: Readable
    path: str
    start: int
    length: int
    content: bytes | None = None
    stored: int = 0

    def __call__(self, start: int, length: int) -> bytes:
        """Return exactly these bytes of the range."""
        if self.content is not None:
            return self.content[start : start + length]
        return self.store.read(self.path, self.start + start, length)

    def explain(self, spans: Ints) -> None:
        """Record ranges of it in the account of the reading, as `Account.explain`."""
        # Bytes that a codec made have no place in the file.
        placed = None if self.stored else account_of(self.store, self.path)
        if placed is not None:  # a decoded item is one range of its file
            account, path = placed
            account.explain(path, spans + self.start)

    def add_unused(self, start: int, end: int, description: str, padding: bool = False) -> None:
        """Record bytes of it in the account of the reading, as `Account.add_unused`."""
        placed = account_of(self.store, self.path)
        if placed is None:
            return
        account, path = placed
        # Bytes that were decoded before are looked at now, not when the file is checked.
        if padding and self.content is not None:
            if not any(memoryview(self.content)[start:end]):
                return
            padding = False
        # The file has the encoded item as one range: which part of it
        # is left over cannot be said in its bytes.
        if self.stored:
            description = f"bytes [{start}, {end}) of {description}, as its codec decodes them"
            account.add_unused(path, self.start, self.start + self.stored, description)
        else:
            account.add_unused(path, self.start + start, self.start + end, description, padding)

    def carry(self, group: str, values: Mapping[str, Any], odd: Collection[str] = ()) -> None:
        """Record values of it in the account of the reading, as `Account.carry`."""
        placed = account_of(self.store, self.path)
        if placed is not None and values:
            account, path = placed
            account.carry(path, group, values, odd)


def explain(store: Readable, path: str, start: int, end: int) -> None:
    """Record that the bytes ``[start, end)`` of a file were read, and that what they say was taken."""
    FileRange(store, path, start, end - start).explain(np.array([[0, end - start]], np.int64))
