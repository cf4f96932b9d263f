"""Nest stores: a subfolder to read from, and a store that records which files are read.

Formats nest, and their readers need not know.
"""

from __future__ import annotations

from pathlib import Path

from ckptcore.store import Buffer, Readable


class SubStore:
    """A read-only store below ``prefix`` (with its slash) of another, with its connections and caches."""

    def __init__(self, store: Readable, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self.url = f"{store.url.rstrip('/')}/{prefix.rstrip('/')}"
        self.local: Path | None = store.local / prefix if store.local is not None else None

    def list(self) -> dict[str, int]:
        """Return every file below: relative path -> size in bytes."""
        found = self._store.list()
        return {p.removeprefix(self._prefix): n for p, n in found.items() if p.startswith(self._prefix)}

    def size(self, path: str) -> int | None:
        """Return the size in bytes, or None when there is no such file."""
        return self._store.size(self._prefix + path)

    def stamp(self, path: str) -> str | None:
        """Return a text that changes when the file is rewritten."""
        return self._store.stamp(self._prefix + path)

    def ctime(self, path: str) -> int | None:
        """Return when its status last changed, ns, or None."""
        return self._store.ctime(self._prefix + path)

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return exactly ``length`` bytes; raises like the outer store."""
        return self._store.read(self._prefix + path, start, length)

    def read_into(self, path: str, start: int, into: Buffer) -> None:
        """Fill ``into`` exactly; raises like the outer store."""
        self._store.read_into(self._prefix + path, start, into)

    def close(self) -> None:
        """Do nothing: whoever opened the outer store closes it."""


class Noting(SubStore):
    """A store that adds the names of the files it reads bytes of to ``names``."""

    def __init__(self, store: Readable, names: set[str]) -> None:
        super().__init__(store, "")
        self.url, self.local, self._names = store.url, store.local, names

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return exactly ``length`` bytes, and record the name."""
        self._names.add(path)
        return super().read(path, start, length)

    def read_into(self, path: str, start: int, into: Buffer) -> None:
        """Fill ``into`` exactly, and record the name."""
        self._names.add(path)
        super().read_into(path, start, into)
