"""Measure how much memory this process can still use, and say how it is allocated and returned.

A module of its own, for the accounts of the kernel, the container and the C library.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of the GNU C library
_PAD, _MAPPED = 16 << 20, 32 << 20  # the largest that the library takes for the latter


def available_memory() -> int | None:
    """Return the bytes that machine and container leave for this process; None where neither reports them."""
    known = [n for n in (_machine(), _container()) if n is not None]
    return min(known) if known else None


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


def keep_freed(nbytes: int) -> None:
    """Keep up to so many freed bytes in this process, for the next arrays.

    Usually the C library returns an array's memory at once, and the kernel clears the pages of the next one
    anew: that is a fifth of the time in which millions of chunks are read. Other C libraries ignore this.
    """
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return
    mallopt(_M_MMAP_THRESHOLD, _MAPPED)
    mallopt(_M_TOP_PAD, _PAD)
    mallopt(_M_TRIM_THRESHOLD, nbytes)
