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
import re
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
_KEPT_S = 900.0  # after a process was first seen to have ended; its leases and claims have ended by then
_STRANGE_S = 7 * 86400.0  # since the last mark of a process of another namespace, which cannot be seen
_MODE, _SEEN_ENDED = 0o644, 0o444  # of a file of marks
_PREFIX = ".ckptcore-process-"


def this_process() -> Identity:
    """Return the identity of this process, with a new mark; without one where it can be written nowhere."""
    pid, started, namespaces, boot = _this_identity()
    mark = f"{uuid.uuid4().hex}{time.time_ns():x}"  # with the clock: clones may draw the same number
    is_recorded = bool(started) and _MARKS.add(pid, started, mark)
    return pid, started, namespaces, f"{boot}:{mark}" if boot and is_recorded else ""


def forget(process: Identity) -> None:
    """Drop the mark of this process that `this_process` made: nothing records it any more."""
    _MARKS.drop(process[3].partition(":")[2])


def is_this(process: Sequence[str]) -> bool:
    """Return whether a process is this one, and no clone of it; see `has_ended`."""
    current = _this_identity()
    boot, _, mark = process[3].partition(":") if len(process) == len(current) else ("", "", "")
    return (*process[:3], boot) == current and bool(mark) and mark in _marks(*current[:2])


def has_ended(process: Sequence[str]) -> bool:
    """Return whether a process is known to have ended.

    False for one of another machine, namespace or boot, and for one that cannot be looked at.

    Args:
        process: What `this_process` returned there.
    """
    current = _this_identity()
    if len(process) != len(current) or not all((*process, *current)):
        return False
    pid, started, namespaces = process[:3]
    boot, _, mark = process[3].partition(":")
    # A clone of the machine has equal pids and start times: only a mark tells the processes apart.
    if (namespaces, boot) != current[2:] or not mark or mark not in _marks(pid, started):
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's: /proc may hide it
        pass
    except (OSError, ValueError, OverflowError):  # no pid
        return False
    start_now = _started(pid)
    return start_now is not None and start_now != started


def is_running(process: Sequence[str]) -> bool:
    """Return whether a process is seen to run on this machine; False for one that cannot be seen.

    A clone of this machine looks the same, and counts as this one.

    Args:
        process: What `this_process` returned there.
    """
    current = _this_identity()
    if len(process) != len(current) or not all((*process, *current)):
        return False
    same = (process[2], process[3].partition(":")[0]) == current[2:]
    return same and process[0].isdigit() and _started(process[0]) == process[1]


def _this_identity() -> Identity:
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
        self._lock, self._path, self._open = threading.Lock(), "", set[str]()

    def add(self, pid: str, started: str, mark: str) -> bool:
        """Write a mark; return whether it can be read."""
        with self._lock:
            if self._path and _appended(self._path, mark, 0):
                self._open.add(mark)
                return True
            for path in _paths(pid, started):
                # One that is there was not made by this program, or by one that this process has replaced.
                if _appended(path, mark, os.O_CREAT | os.O_EXCL):
                    self._path = path
                    self._open.add(mark)
                    _prune(os.path.dirname(path))
                    return True
        return False

    def drop(self, mark: str) -> None:
        """Remove the file with the last of its marks: most processes leave none."""
        with self._lock:
            self._open.discard(mark)
            if self._path and not self._open:
                with suppress(OSError):  # it is removed when others look, as those of killed processes are
                    os.unlink(self._path)
                self._path = ""


def _appended(path: str, mark: str, create: int) -> bool:
    with suppress(OSError):  # without a mark nothing is proven
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | create, _MODE)
        try:
            if create:
                os.fchmod(fd, _MODE)  # whatever the umask: other users' processes look, too
            line = f"\n{mark}\n".encode()  # a line of its own, also behind one that was cut
            return os.write(fd, line) == len(line)
        finally:
            os.close(fd)
    return False


def _prune(folder: str) -> None:
    """Remove this user's marks of processes that were seen to have ended some time ago."""
    now, prefix = time.time(), f"{_PREFIX}{_numbers_of_namespaces()}-"
    with suppress(OSError):  # a listing that fails leaves them
        for name in os.listdir(folder):
            if name.startswith(_PREFIX):
                pid, _, started = name.removeprefix(prefix).rpartition("-")
                is_visible = name.startswith(prefix) and pid.isdigit()
                if not is_visible or _started(pid) != started:
                    with suppress(OSError):  # another user's, or gone
                        _prune_one(f"{folder}/{name}", now, ended=is_visible)


def _prune_one(path: str, now: float, *, ended: bool) -> None:
    """Remove one file of marks when it is time, and note when its process was first seen to have ended."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return
        # The mode is the note: whoever looks next sees it, and the time of that change.
        if ended and stat.S_IMODE(status.st_mode) != _SEEN_ENDED:
            os.fchmod(fd, _SEEN_ENDED)
            os.utime(fd)
        elif now - status.st_mtime > (_KEPT_S if ended else _STRANGE_S):
            os.unlink(path)
    finally:
        os.close(fd)


def _marks(pid: str, started: str) -> frozenset[str]:
    """Return the marks that a process of this machine has made."""
    marks = set[str]()
    if pid.isdigit() and started.isdigit():
        for path in _paths(pid, started):
            with suppress(OSError, UnicodeDecodeError):  # not there, or nobody's marks: nothing is proven
                marks.update(_read_regular(path).decode("ascii").split())
    return frozenset(marks)


def _read_regular(path: str) -> bytes:
    """Read a file, and nothing that another user may have put there: a link, a folder or a pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return b""
        with open(fd, "rb", closefd=False) as file:
            return file.read(_MOST_BYTES)
    finally:
        os.close(fd)


def _paths(pid: str, started: str) -> tuple[str, ...]:
    # Containers may share these folders, and count processes for themselves.
    name = f"{_PREFIX}{_numbers_of_namespaces()}-{pid}-{started}"
    return tuple(f"{folder}/{name}" for folder in _FOLDERS)


def _numbers_of_namespaces() -> str:
    return "-".join(re.findall("[0-9]+", _namespaces()))


def _namespaces() -> str:
    """Return the namespaces of this process; "" where they are unknown."""
    links = (_read_link(f"/proc/self/ns/{kind}") for kind in ("pid", "time"))
    return ",".join(filter(None, links))  # kernels before 5.6 have none of time


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
