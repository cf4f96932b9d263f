"""Digest the files of a source from the reads of other work.

A conversion and a deep check read most bytes of a source: headers first, then tensors, in pieces of any size,
from several threads, and some bytes twice. `FileSums` observes these reads. It counts each byte once, and
joins neighbouring ranges (CRC-64 can be combined). A file of which every byte was read then has a digest, and
nothing was read for it but the small holes that no reader needs: padding, and structure that is known.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

from ckptcore.utils.crc64 import combine64, crc64
from ckptcore.utils.part_digest import crc_digest

_HOLES, _SHARE = 64 << 10, 4096  # what is read of a file for its digest alone: bytes, or a part of it
_Run = tuple[int, int, int]  # (first byte, byte behind the last, CRC-64)
_START = itemgetter(0)


class FileSums:
    """The ranges that were read of each file, each byte once. Safe for threads.

    Args:
        prefix: Of the paths of reads, if they are below another folder than the checkpoint's.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        self._runs: dict[str, list[_Run]] = {}  # disjoint, in order, neighbours joined
        self._altered: set[str] = set()

    def observe(self, path: str, start: int, data: memoryview | bytes) -> None:
        """Add a range that was read; bytes that were read before do not count again."""
        name = path.removeprefix(self._prefix)
        end = start + len(data)
        with self._lock:
            # Checksums are computed outside of the lock, so that threads do not wait for each other.
            gaps = list(_gaps(self._runs.get(name, ()), start, end))
        if not gaps:
            return
        view = memoryview(data)
        fresh = [(a, b, crc64(view[a - start : b - start])) for a, b in gaps]
        with self._lock:
            runs = self._runs.setdefault(name, [])
            for a, b, crc in fresh:
                for c, d in list(_gaps(runs, a, b)):  # others if another thread has read some of it meanwhile
                    _insert(runs, (c, d, crc if (c, d) == (a, b) else crc64(view[c - start : d - start])))

    def add(self, sums: FileSums) -> None:
        """Add what another process has read.

        A range replaces the known ones that it contains. What overlaps with a known one at one end stays a
        hole: the checksum of its other part is not known.
        """
        with self._lock:
            self._altered.update(sums._altered)
            for path, theirs in sums._runs.items():
                runs = self._runs.setdefault(path, [])
                for run in theirs:
                    start, end, _ = run
                    first = max(bisect_right(runs, start, key=_START) - 1, 0)
                    first += first < len(runs) and runs[first][1] <= start
                    # The run before `start` counts only if it reaches beyond it:
                    # neighbours that only touch are no overlap.
                    behind = bisect_left(runs, end, key=_START)
                    if all(start <= a and b <= end for a, b, _ in runs[first:behind]):
                        del runs[first:behind]
                        _insert(runs, run)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is sent to another process: everything but the lock."""
        # A lock cannot be sent, and belongs to the threads of one process.
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what another process sent."""
        vars(self).update(state, _lock=threading.Lock())

    def forget(self, path: str | None) -> None:
        """Give up the digest of a file, or of all: bytes of it came altered, and count already."""
        with self._lock:
            # None: what came altered is not known to be of one file, so no file that was read has a digest.
            self._altered.update(self._runs if path is None else (path.removeprefix(self._prefix),))

    def below(self, prefix: str) -> FileSums:
        """Return what was read below a folder, for the checkpoint there."""
        inner, cut = FileSums(self._prefix + prefix), len(prefix)
        inner._runs = {p[cut:]: runs for p, runs in self._runs.items() if p.startswith(prefix)}
        inner._altered = {p[cut:] for p in self._altered if p.startswith(prefix)}
        return inner

    def holes(self, path: str, nbytes: int) -> list[tuple[int, int]] | None:
        """Return the ranges of a file that were not read; None if they are too long, or it came altered."""
        with self._lock:
            # A file that nobody read has no digest, and its content is not read for one alone.
            if path in self._altered or (path not in self._runs and nbytes):
                return None
            runs = self._runs.get(path, [])
            if nbytes - sum(end - start for start, end, _ in runs) > max(_HOLES, nbytes // _SHARE):
                return None
            return list(_gaps(runs, 0, nbytes))

    def digest(self, path: str, nbytes: int) -> str | None:
        """Return the digest of a file of which every byte was read; None of another one."""
        with self._lock:
            runs = self._runs.get(path, [])
            # Exactly one run of all bytes; neighbours are joined when they
            # are inserted. An empty file has no run.
            if path in self._altered or [run[:2] for run in runs] != ([(0, nbytes)] if nbytes else []):
                return None
            return crc_digest(runs[0][2] if runs else crc64(b""))


def _gaps(runs: Iterable[_Run], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of ``[start, end)`` that are in no run."""
    ordered = runs if isinstance(runs, list) else list(runs)
    # The run that begins at or before `start` may reach beyond it, so the walk begins there.
    index = max(bisect_right(ordered, start, key=_START) - 1, 0)
    while start < end:
        if index == len(ordered) or ordered[index][0] >= end:
            yield start, end
            return
        first, last, _ = ordered[index]
        if first > start:
            yield start, first
        start, index = max(start, last), index + 1


def _insert(runs: list[_Run], run: _Run) -> None:
    """Insert a run that overlaps no other, and join it with its neighbours."""
    start, end, crc = run
    index = bisect_right(runs, start, key=_START)
    # First the neighbour behind: removing it leaves the position of the one before as it is.
    if index < len(runs) and runs[index][0] == end:
        _, last, behind = runs.pop(index)
        end, crc = last, combine64(crc, behind, last - end)
    if index and runs[index - 1][1] == start:
        index -= 1
        first, _, before = runs.pop(index)
        start, crc = first, combine64(before, crc, end - start)
    runs.insert(index, (start, end, crc))
