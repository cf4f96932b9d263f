"""Reach what is outside this process: the clocks, and the file operations of a commit.

The order of commits, leases, claims and set-aside folders rests on these calls. They are called by the
module's name, as in ``host.rename(...)``, so that a simulation can put its own in their place, one function
at a time. Other processes are reached in the same way through `ckptcore.utils.processes`, and objects of a
store through the client of `ckptcore.store.objects.shared_clients`.

Arguments are those of the functions of the same name in `os`, `time` and `fcntl`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import time


def now() -> float:
    """Return the time of this machine, seconds since 1970."""
    return time.time()


def now_ns() -> int:
    """Return the time of this machine, ns since 1970."""
    return time.time_ns()


def monotonic() -> float:
    """Return seconds on a clock that is never set."""
    return time.monotonic()


def uptime() -> float:
    """Return seconds since the machine started, also those that it slept."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def sleep(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)


def rename(old: str, new: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
    """Move a name; replace a file, or an empty folder."""
    os.rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)


def replace(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
    """Move a file; replace one of the new name."""
    os.replace(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)


def link(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
    """Give a file, or a link itself, a second name; replace nothing."""
    os.link(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=False)


def unlink(name: str | os.PathLike[str], *, dir_fd: int | None = None) -> None:
    """Remove a file's name."""
    os.unlink(name, dir_fd=dir_fd)


def mkdir(name: str, mode: int, *, dir_fd: int) -> None:
    """Make a folder."""
    os.mkdir(name, mode, dir_fd=dir_fd)


def rmdir(name: str | os.PathLike[str], *, dir_fd: int | None = None) -> None:
    """Remove an empty folder."""
    os.rmdir(name, dir_fd=dir_fd)


def fsync(fd: int) -> None:
    """Make a file's bytes, or a folder's names, durable."""
    os.fsync(fd)


def flock(fd: int, operation: int) -> None:
    """Lock an open file against other processes of this machine."""
    fcntl.flock(fd, operation)


def renameat2(old_fd: int, old: str, new_fd: int, new: str, flags: int) -> int:
    """Move or exchange names below folders; return the error number, or 0."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # another system, or an old libc
        return errno.ENOSYS
    return 0 if call(old_fd, os.fsencode(old), new_fd, os.fsencode(new), flags) == 0 else ctypes.get_errno()
