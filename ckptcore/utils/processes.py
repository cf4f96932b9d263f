"""Identify a process of this machine, so that another process can prove later that it has ended.

What is recorded beside a lease or a claim: the pid, when the process was started, the namespaces in which
both are counted, and the machine's boot id. A pid alone may be another process by then, here or elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

Identity = tuple[str, str, str, str]
"""The pid, start time in ticks, namespaces and boot id; "" for what is unknown."""


def this_process() -> Identity:
    """Return the identity of this process."""
    pid = str(os.getpid())
    # Another namespace's /proc (`unshare --pid` alone leaves it) has another process at this number.
    started = _started(pid) if _read_link("/proc/self") == pid else ""
    return pid, started or "", _namespaces(), _read("/proc/sys/kernel/random/boot_id")


def has_ended(process: Sequence[str]) -> bool:
    """Return whether a process is known to have ended.

    False for one of another machine, namespace or boot, and for one that cannot be looked at.

    Args:
        process: What `this_process` returned there.
    """
    here = this_process()
    if len(process) != len(here) or not all((*process, *here)) or tuple(process[2:]) != here[2:]:
        return False
    pid, started = process[:2]
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's: /proc may hide it
        pass
    except (OSError, ValueError, OverflowError):  # no pid
        return False
    found = _started(pid)
    return found is not None and found != started


def _namespaces() -> str:
    """Return the namespaces of this process; "" where they are unknown."""
    found = (_read_link(f"/proc/self/ns/{kind}") for kind in ("pid", "time"))
    return ",".join(filter(None, found))  # kernels before 5.6 have none of time


def _started(pid: str) -> str | None:
    """Return when a process was started, in ticks; "" if it has ended, None if it cannot be seen."""
    # Its name, between parentheses, may be anything.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return "" if fields[0] in "ZX" else fields[19]  # a zombie has ended; its parent has not asked yet


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
