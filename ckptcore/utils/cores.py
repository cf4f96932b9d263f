"""Count the processor cores that this process may use: by its affinity, and by the container's quota."""

from __future__ import annotations

import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return how many cores this process may keep busy, at least one.

    A container with a quota of half the time of a machine of 64 cores sees all of them, and has 32.
    """
    cores = len(os.sched_getaffinity(0))
    quota = _quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _quota() -> float | None:
    """Return the cores' worth of time that the control groups of this process leave it; None for all."""
    quotas = [quota for group in _groups() if (quota := _of(group)) is not None]
    return min(quotas, default=None)


def _groups() -> list[Path]:
    """Return the folders of this process's control groups for processor time, and of those around them."""
    found = [_GROUPS, _GROUPS / "cpu"]
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)  # cgroups(7)
        if not controllers:
            root = _GROUPS
        elif "cpu" in controllers.split(","):
            root = _GROUPS / controllers
        else:
            continue
        inner = root / path.lstrip("/")
        found += [group for group in (inner, *inner.parents) if root in (group, *group.parents)]
    return found


def _of(group: Path) -> float | None:
    """Return the quota of one group, in cores: ``cpu.max`` of version 2, two files of version 1."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()[:2]
        except (OSError, ValueError):  # no such group, or one of the other version
            continue
        if quota.isdigit() and period.isdigit() and int(period):  # else "max", or -1
            return int(quota) / int(period)
    return None
