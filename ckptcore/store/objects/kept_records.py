"""Keep the small objects that the holder of a lease has written or read, so that it asks for them once.

Under the lease of a destination this process alone writes the records of its staging prefix. What it has put
there, which the store has confirmed, and what it has read since it took the lease, is not asked for again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_MEMORY = 8 << 20


class KeptRecords:
    """Bytes of small objects by key. Safe for threads.

    Args:
        memory: The most bytes that are kept; further objects are asked for each time.
    """

    def __init__(self, memory: int = _MEMORY) -> None:
        self._left = memory
        self._lock = threading.Lock()
        self._contents: dict[str, bytes | None] = {}
        self._written: set[str] = set()
        self._emptied: tuple[str, ...] = ()

    def fetch(self, key: str, ask: Callable[[], bytes | None]) -> bytes | None:
        """Return the bytes of an object, or None if there is none; ``ask`` the store if that is unknown."""
        with self._lock:
            if key in self._contents:
                return self._contents[key]
            if key.startswith(self._emptied) and key not in self._written:
                return None
        content = ask()
        with self._lock:
            if key not in self._contents:  # else it was written meanwhile
                self._keep(key, content)
        return content

    def put(self, key: str, data: bytes) -> None:
        """Keep the bytes of an object that the store has now."""
        with self._lock:
            self._drop(key)
            self._written.add(key)
            self._keep(key, data)

    def forget(self, key: str) -> None:
        """Ask the store for an object from now on: it is about to change."""
        with self._lock:
            self._drop(key)
            self._written.add(key)

    def clear(self) -> None:
        """Ask the store for everything from now on."""
        with self._lock:
            for key in list(self._contents):
                self._drop(key)

    def emptied(self, *prefixes: str) -> None:
        """Take note that all objects below these prefixes were removed."""
        with self._lock:
            for key in [key for key in self._contents if key.startswith(prefixes)]:
                self._drop(key)
            self._written = {key for key in self._written if not key.startswith(prefixes)}
            self._emptied = (*self._emptied, *prefixes)

    def _keep(self, key: str, data: bytes | None) -> None:
        nbytes = len(data or b"")
        if nbytes <= self._left:
            self._left -= nbytes
            self._contents[key] = data

    def _drop(self, key: str) -> None:
        self._left += len(self._contents.pop(key, None) or b"")
