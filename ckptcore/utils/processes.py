"""Identify a process of this machine, so that another process can prove later that it has ended.

What is recorded beside a lease or a claim: the pid, when the process was started, the namespaces in which
both are counted, and the machine's boot id with a mark. A pid alone may be another process by then, here or
elsewhere.

Virtual machines that were cloned from one snapshot have the same boot id, pids and start times. So a process
makes a new mark for each lease or claim, and writes it to a file in memory that this machine's other
processes can read. A clone has the file as it was at the snapshot: a mark that was made elsewhere since then
is not in it, and proves nothing. What is in doubt may be alive.
"""

from __future__ import annotations

import os
import stat
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress

Identity = tuple[str, str, str, str]
"""The pid, start time in ticks, namespaces, and boot id with a mark behind a colon; "" if unknown."""

_FOLDERS = ("/dev/shm", "/tmp")  # both are in the snapshot of a machine, as its processes are
_MOST_BYTES = 1 << 22  # of marks that are read of one process
_KEPT_S = 900.0  # after the last mark of a process that has ended; leases and claims end earlier
_PREFIX = ".ckptcore-process-"


def this_process() -> Identity:
    """Return the identity of this process, with a new mark; without one where it can be written nowhere."""
    pid, started, namespaces, boot = _here()
    mark = f"{uuid.uuid4().hex}{time.time_ns():x}"  # with the clock: clones may draw the same number
    known = bool(started) and _MARKS.add(pid, started, mark)
    return pid, started, namespaces, f"{boot}:{mark}" if boot and known else ""


def is_this(process: Sequence[str]) -> bool:
    """Return whether a process is this one, and no clone of it; see `has_ended`."""
    here = _here()
    boot, _, mark = process[3].partition(":") if len(process) == len(here) else ("", "", "")
    return (*process[:3], boot) == here and bool(mark) and mark in _marks(*here[:2])


def has_ended(process: Sequence[str]) -> bool:
    """Return whether a process is known to have ended.

    False for one of another machine, namespace or boot, and for one that cannot be looked at.

    Args:
        process: What `this_process` returned there.
    """
    here = _here()
    if len(process) != len(here) or not all((*process, *here)):
        return False
    pid, started, namespaces = process[:3]
    boot, _, mark = process[3].partition(":")
    if (namespaces, boot) != here[2:] or not mark or mark not in _marks(pid, started):
        return False
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


def _here() -> Identity:
    pid = str(os.getpid())
    # Another namespace's /proc (`unshare --pid` alone leaves it) has another process at this number.
    started = _started(pid) if _read_link("/proc/self") == pid else ""
    return pid, started or "", _namespaces(), _read("/proc/sys/kernel/random/boot_id")


class _Marks:
    """The marks of this process, in a file of its own; a forked process has another one."""

    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        self._lock, self._path = threading.Lock(), ""

    def add(self, pid: str, started: str, mark: str) -> bool:
        """Write a mark; return whether others can read it."""
        with self._lock:
            if self._path:
                return _appended(self._path, mark, 0)
            for path in _paths(pid, started):
                if _appended(path, mark, os.O_CREAT | os.O_EXCL):  # one that is there is not ours
                    self._path = path
                    _prune(os.path.dirname(path))
                    return True
        return False


def _appended(path: str, mark: str, create: int) -> bool:
    with suppress(OSError):  # without a mark nothing is proven
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | create, 0o644)
        try:
            return os.write(fd, f"{mark}\n".encode()) == len(mark) + 1
        finally:
            os.close(fd)
    return False


def _prune(folder: str) -> None:
    """Remove the marks of processes that have ended long ago, of this user where the folder is sticky."""
    with suppress(OSError):  # a listing that fails leaves them
        for name in os.listdir(folder):
            pid, _, started = name.removeprefix(_PREFIX).partition("-")
            if not name.startswith(_PREFIX) or not pid.isdigit() or _started(pid) == started:
                continue
            path = f"{folder}/{name}"
            with suppress(OSError):  # another user's, or gone
                if time.time() - os.lstat(path).st_mtime > _KEPT_S:
                    os.unlink(path)


def _marks(pid: str, started: str) -> frozenset[str]:
    """Return the marks that a process of this machine has made."""
    if not (pid.isdigit() and started.isdigit()):
        return frozenset()
    for path in _paths(pid, started):
        with suppress(OSError, UnicodeDecodeError):  # not there, or nobody's marks: nothing is proven
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    return frozenset(file.read(_MOST_BYTES).decode("ascii").splitlines())
    return frozenset()


def _paths(pid: str, started: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{_PREFIX}{pid}-{started}" for folder in _FOLDERS)


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


_MARKS = _Marks()
