"""Measure how much memory this process can still use, and say how it is allocated and returned.

A module of its own, for the accounts of the kernel, the container and the C library.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

_GROUP = Path("/sys/fs/cgroup")
# malloc.h of the GNU C library
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
_WORTH = 64 << 20
_PAD, _ALL = 16 << 20, (1 << 31) - 1
# Afterwards: the library's own number of maps, the largest threshold that it takes, and what is kept.
_MAPS, _MAPPED, _FREED = 65536, 32 << 20, 64 << 20


def available_memory() -> int | None:
    """Return the bytes that machine and container leave for this process; None where neither reports them."""
    limits = [n for n in (_machine(), _container()) if n is not None]
    return min(limits) if limits else None


def _machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(fields[0][1]) << 10 if fields else None


def _container() -> int | None:
    """Return the bytes left in control group version 2; files in the page cache count as free."""
    try:
        limit = (_GROUP / "memory.max").read_text().strip()
        used = int((_GROUP / "memory.current").read_text())
        parts = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdigit():
        return None
    return max(0, int(limit) - used + int(parts.get("inactive_file", 0)))


def untouched(nbytes: int, *, huge_from: int | None = None) -> memoryview:
    """Allocate memory whose pages appear, as zeros, when they are first written.

    A bytearray of 16 MiB is cleared page by page, for 10 ms and more in which no other thread can run. This
    memory goes back to the kernel when it is not used any more.

    Args:
        nbytes: Its size.
        huge_from: Where huge pages begin, if the kernel has any; None for small ones alone.

    Raises:
        OSError: There is no memory left.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_from is not None and nbytes > huge_from and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE, huge_from, nbytes - huge_from)
    return memoryview(memory)[:nbytes]


@contextmanager
def reusing_memory() -> Iterator[None]:
    """Return to the kernel at the end what `reuse_memory` keeps inside; within another one, at its end."""
    with _reuse.lock:
        _reuse.depth += 1
    try:
        yield
    finally:
        with _reuse.lock:
            _reuse.depth -= 1
            if _reuse.on and not _reuse.depth:
                _reuse.on = False
                _give_back()


def reuse_memory(nbytes: int) -> None:
    """Keep freed memory in this process for the next arrays, until the outermost `reusing_memory` ends.

    Usually the C library returns a large array's memory at once, and the kernel clears the pages of the next
    one anew: that is a fifth of the time in which millions of chunks are read and planned. Other C libraries
    ignore this.

    Args:
        nbytes: Bytes of what will be read or made. For a few it is not worth it.
    """
    # Setting it, and returning the memory at the end, costs more than it saves.
    if nbytes < _WORTH:
        return
    with _reuse.lock:
        # Without an open `reusing_memory` nothing would ever return it to the kernel.
        if _reuse.on or not _reuse.depth:
            return
        _reuse.on = True
        for parameter, value in ((_M_MMAP_MAX, 0), (_M_TOP_PAD, _PAD), (_M_TRIM_THRESHOLD, _ALL)):
            _call("mallopt", parameter, value)


def _give_back() -> None:
    for parameter, value in ((_M_MMAP_MAX, _MAPS), (_M_MMAP_THRESHOLD, _MAPPED), (_M_TRIM_THRESHOLD, _FREED)):
        _call("mallopt", parameter, value)
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    import ctypes

    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):  # another C library
        return
    function(*arguments)


class _Reuse:
    """Whether freed memory is kept, and how many `reusing_memory` are open in all threads."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.depth, self.on = 0, False


_reuse = _Reuse()
