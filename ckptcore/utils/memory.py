"""Measure how much memory this process can still use.

A module of its own, for the accounts of the kernel and the container.
"""

from __future__ import annotations

from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


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
