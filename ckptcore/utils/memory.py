"""How much memory this process could still take.

A file of its own: it knows the accounts of kernel and container, which nothing else here asks.
"""

from __future__ import annotations

from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Bytes that are free for this process, by the machine and by its container; None where nothing tells."""
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
    """What control group version 2 leaves; files in the page cache can be given back."""
    try:
        limit = (_GROUP / "memory.max").read_text().strip()
        used = int((_GROUP / "memory.current").read_text())
        parts = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdigit():
        return None
    return max(0, int(limit) - used + int(parts.get("inactive_file", 0)))
