"""Keep what was read of objects in small pieces: headers, pickles, indexes.

Pieces are kept by bucket, key and ETag, so they are right however long they are kept: another version of an
object has another ETag. All stores of a process share them, and several steps of a command read them once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

PAGE = 64 << 10  # the least that is asked for
LARGEST = 32 << 20  # more is read directly, and not kept
_KEPT = 64 << 20

Version = tuple[str, str, str]  # bucket, key, ETag


class SmallReads:
    """Pieces of objects. Safe for threads.

    Args:
        memory: The most bytes of all pieces; those that were not used for the longest time go first.
    """

    def __init__(self, memory: int = _KEPT) -> None:
        self._memory, self._used = memory, 0
        self._lock = threading.Lock()
        self._pieces: OrderedDict[tuple[Version, int], bytes] = OrderedDict()
        self._starts: dict[Version, list[int]] = {}

    def find(self, version: Version, start: int, length: int) -> bytes | None:
        """Return bytes that one kept piece has, or None."""
        with self._lock:
            for first in self._starts.get(version, ()):
                piece = self._pieces[version, first]
                if first <= start and start + length <= first + len(piece):
                    self._pieces.move_to_end((version, first))
                    return piece[start - first : start - first + length]
        return None

    def keep(self, version: Version, start: int, data: bytes) -> None:
        """Keep a piece."""
        with self._lock:
            old = self._pieces.get((version, start))
            if len(data) > self._memory or (old is not None and len(old) >= len(data)):
                return
            self._remove(version, start)
            self._pieces[version, start] = data
            self._starts.setdefault(version, []).append(start)
            self._used += len(data)
            while self._used > self._memory:
                (oldest, first), _ = next(iter(self._pieces.items()))
                self._remove(oldest, first)

    def forget(self, version: Version, start: int, length: int) -> None:
        """Drop the pieces with any byte of a range."""
        with self._lock:
            for first in list(self._starts.get(version, ())):
                if first < start + length and start < first + len(self._pieces[version, first]):
                    self._remove(version, first)

    def clear(self) -> None:
        """Drop all pieces."""
        with self._lock:
            self._pieces.clear()
            self._starts.clear()
            self._used = 0

    def pieces(self, version: Version) -> list[tuple[int, bytes]]:
        """Return what is kept of an object: (first byte, bytes)."""
        with self._lock:
            return [(first, self._pieces[version, first]) for first in self._starts.get(version, ())]

    def _remove(self, version: Version, start: int) -> None:
        gone = self._pieces.pop((version, start), None)
        if gone is None:
            return
        self._used -= len(gone)
        starts = self._starts[version]
        starts.remove(start)
        if not starts:
            del self._starts[version]


SHARED = SmallReads()


def page_around(start: int, length: int, size: int | None) -> tuple[int, int]:
    """Return the (first byte, bytes) to ask for around a small read, within an object of ``size`` bytes.

    >>> page_around(0, 8, 1 << 20), page_around(100_000, 8, 110_000)
    ((0, 65536), (65536, 44464))
    """
    if size is None:
        return start, length
    first = start // PAGE * PAGE
    last = min(size, -(-(start + length) // PAGE) * PAGE)
    return first, last - first
