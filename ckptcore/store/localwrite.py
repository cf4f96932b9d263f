"""Local writers: how does a file appear on this machine, whole or not at all?

They preallocate, write at offsets from any thread, and fsync; a file appears under its name by rename.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
from collections.abc import Callable
from pathlib import Path

from ckptcore.errors import Busy
from ckptcore.store import Buffer, Store
from ckptcore.store._localerrors import FULL, short, unreadable, unwritable

_SERIAL = itertools.count()
_TMPFS_MAGIC = 0x01021994
# One write makes page cache folios as large as itself; megabytes in one piece must be found by
# compaction when memory is full of cache, which was measured to cost three times the copy.
_WRITE, _MAX_WRITE = 256 << 10, 1 << 30
_SYNC_EVERY = 64 << 20  # bytes after which writeback is started, so that fsync finds little to do


class LocalWriter:
    """A file being written under a temporary name beside its final one."""

    sequential = False
    _flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC

    def __init__(self, path: Path, nbytes: int, replaced: Callable[[], None]) -> None:
        self._path, self._nbytes, self._replaced = path, nbytes, replaced
        self._temporary = self._name(path)
        self._unsynced = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # 0o666: the file's mode follows the umask, as a plain open() would.
            self._fd = os.open(self._temporary, self._flags, 0o666)
        except OSError as error:
            raise unwritable(str(path), error, nbytes) from error
        try:
            self._in_memory = _is_tmpfs(self._fd)
            self._piece = _MAX_WRITE if self._in_memory else _WRITE
            self._preallocate()
        except OSError as error:
            self.abort()
            raise unwritable(str(path), error, nbytes) from error

    def _name(self, path: Path) -> Path:
        # Unique per writer: two runs of one plan may meet, and both end with the same bytes.
        return path.with_name(f".{path.name}.{os.getpid()}-{next(_SERIAL)}.part")

    def _preallocate(self) -> None:
        if self._in_memory:
            # tmpfs would clear every page now and take it again at the write.
            seen = os.fstatvfs(self._fd)
            if seen.f_blocks and self._nbytes > seen.f_bavail * seen.f_frsize:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(self._fd, self._nbytes)
        elif self._nbytes:
            try:
                os.posix_fallocate(self._fd, 0, self._nbytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                os.ftruncate(self._fd, self._nbytes)

    def write(self, at: int, data: Buffer | bytes) -> None:
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self._fd, view[done : done + self._piece], at + done)
        except OSError as error:
            raise unwritable(str(self._path), error, self._nbytes) from error
        self._start_writeback(at, len(view))

    def copy(self, source: Store, path: str, start: int, length: int, at: int) -> bool:
        descriptor = getattr(source, "descriptor", None)
        if descriptor is None:  # not a local store
            return False
        done = 0
        fd, kept = descriptor(path)
        try:
            while done < length:
                try:
                    got = os.copy_file_range(fd, self._fd, length - done, start + done, at + done)
                except OSError as error:
                    if error.errno in FULL:
                        raise unwritable(str(self._path), error, self._nbytes) from error
                    if done == 0:  # another file system, or one without the call
                        return False
                    raise unreadable(f"{source.url}/{path}", error) from error
                if not got:
                    if done == 0:
                        return False
                    raise short(source.url, path, start, length, done)
                done += got
        finally:
            if not kept:
                os.close(fd)
        self._start_writeback(at, length)
        return True

    def commit(self) -> None:
        try:
            if not self._in_memory:
                os.fsync(self._fd)
            os.close(self._fd)
            os.replace(self._temporary, self._path)
            self._replaced()
            sync_folder(self._path.parent)
        except OSError as error:
            raise unwritable(str(self._path), error, self._nbytes) from error

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._temporary.unlink(missing_ok=True)

    def _start_writeback(self, at: int, length: int) -> None:
        if self._in_memory or _SYNC_FILE_RANGE is None:
            return
        self._unsynced += length
        if self._unsynced >= _SYNC_EVERY:
            self._unsynced = 0
            _SYNC_FILE_RANGE(self._fd, ctypes.c_int64(0), ctypes.c_int64(0), 2)


class JointWriter(LocalWriter):
    """A file that several processes write ranges of, under its name. What is there already stays.

    alone: while nobody else has it open; a writer that was given up for lost may still be at work.
    """

    _flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC

    def __init__(
        self, root: Path, path: str, nbytes: int, replaced: Callable[[], None], *, alone: bool = False
    ) -> None:
        self._root = root
        super().__init__(root / path, nbytes, replaced)
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.abort()
            raise Busy(f"another process is writing {root / path}") from error
        if not self._path.exists() or not os.path.samestat(os.fstat(self._fd), os.stat(self._path)):
            self.abort()
            raise Busy(f"{root / path} was joined a moment ago")

    def name(self, path: str) -> None:
        try:
            if not self._in_memory:
                os.fsync(self._fd)
            os.replace(self._path, self._root / path)
            os.close(self._fd)  # only now: until it has its name, nobody else may write to it
            self._replaced()
            sync_folder(self._path.parent)
        except OSError as error:
            raise unwritable(str(self._root / path), error, self._nbytes) from error

    def _name(self, path: Path) -> Path:
        return path

    def _preallocate(self) -> None:
        if os.fstat(self._fd).st_size != self._nbytes:
            super()._preallocate()

    def commit(self) -> None:
        """Makes durable what was written; the name stays."""
        try:
            if not self._in_memory:
                os.fsync(self._fd)
            os.close(self._fd)
            self._replaced()
            sync_folder(self._path.parent)
        except OSError as error:
            raise unwritable(str(self._path), error, self._nbytes) from error

    def abort(self) -> None:
        """Closes it; what other processes wrote stays."""
        with contextlib.suppress(OSError):
            os.close(self._fd)


def sync_folder(path: Path) -> None:
    """Makes names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _libc_call(name: str) -> Callable[..., int] | None:
    try:
        call: Callable[..., int] = getattr(ctypes.CDLL(None, use_errno=True), name)
        return call  # noqa: TRY300  the pair reads better together
    except (AttributeError, OSError):  # not Linux: writeback then starts at fsync
        return None


# SYNC_FILE_RANGE_WRITE (2) starts writeback of dirty pages without waiting for it.
_SYNC_FILE_RANGE = _libc_call("sync_file_range")


def _is_tmpfs(fd: int) -> bool:
    buffer = ctypes.create_string_buffer(256)
    call = _libc_call("fstatfs")
    if call is None or call(fd, buffer) != 0:
        return False
    return int.from_bytes(buffer.raw[:8], "little") == _TMPFS_MAGIC
