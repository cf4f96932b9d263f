"""Local store: how do bytes of local files move fast, exactly, and never out of the folder?

Reads are `pread` into the caller's buffers: no memory map, so peak memory is what the caller chose.
Writers preallocate, write at offsets from any thread, fsync, and appear under their name by rename.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import resource
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from ckptcore.errors import (
    CkptError,
    DestinationUnwritable,
    DiskFull,
    SourceUnreadable,
    StorageTrouble,
    UnsafeContent,
)
from ckptcore.store import Buffer, Store, Writer

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SERIAL = itertools.count()
_TMPFS_MAGIC = 0x01021994
# One write makes page cache folios as large as itself; megabytes in one piece must be found by
# compaction when memory is full of cache, which was measured to cost three times the copy.
_WRITE, _MAX_WRITE = 256 << 10, 1 << 30
_SYNC_EVERY = 64 << 20  # bytes after which writeback is started, so that fsync finds little to do


class LocalStore:
    """A folder on this machine."""

    def __init__(self, root: Path) -> None:
        self.local: Path | None = root
        self.url = str(root)
        self._root = root
        self._real = os.path.realpath(root)
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}
        # Half of what the process may have: a checkpoint of 1024 ranks has 1024 files.
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_open = 8192 if soft == resource.RLIM_INFINITY else min(soft // 2, 8192)

    def list(self) -> dict[str, int]:
        found: dict[str, int] = {}
        try:
            if not self._root.is_dir():
                if self._root.exists():
                    raise SourceUnreadable(f"{self.url} is a file, not a folder")
                raise SourceUnreadable(f"{self.url} does not exist", hint="check the path")
            for folder, _, names in os.walk(self._root, onerror=_reraise):
                for name in names:
                    path = os.path.join(folder, name)
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile, or dangling
                        found[os.path.relpath(path, self._root)] = os.stat(path).st_size
        except OSError as error:
            raise _unreadable(self.url, error) from error
        return dict(sorted(found.items()))

    def size(self, path: str) -> int | None:
        try:
            seen = os.stat(self._root / path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _unreadable(f"{self.url}/{path}", error) from error
        return seen.st_size if stat.S_ISREG(seen.st_mode) else None

    def stamp(self, path: str) -> str | None:
        try:
            seen = os.stat(self._root / path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _unreadable(f"{self.url}/{path}", error) from error
        return f"{seen.st_size} bytes, modified {seen.st_mtime_ns}, inode {seen.st_ino}"

    def read(self, path: str, start: int, length: int) -> bytes:
        fd, kept = self._descriptor(path)
        try:
            data = os.pread(fd, length, start)
            while 0 < len(data) < length:
                more = os.pread(fd, length - len(data), start + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise _unreadable(f"{self.url}/{path}", error) from error
        finally:
            if not kept:
                os.close(fd)
        if len(data) != length:
            raise _short(self.url, path, start, length, len(data))
        return data

    def read_into(self, path: str, start: int, into: Buffer) -> None:
        done, length = 0, len(into)
        fd, kept = self._descriptor(path)
        try:
            while done < length:
                got = os.preadv(fd, [into[done:]], start + done)
                if not got:
                    raise _short(self.url, path, start, length, done)
                done += got
        except OSError as error:
            raise _unreadable(f"{self.url}/{path}", error) from error
        finally:
            if not kept:
                os.close(fd)

    def writer(self, path: str, nbytes: int) -> Writer:
        return LocalWriter(self._root / path, nbytes, lambda: self._forget(path))

    def put(self, path: str, data: bytes) -> None:
        writer = self.writer(path, len(data))
        try:
            writer.write(0, data)
        except CkptError:
            writer.abort()
            raise
        writer.commit()

    def remove(self, path: str) -> None:
        self._forget(path)
        try:
            (self._root / path).unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(f"{self.url}/{path}", error) from error

    def remove_all(self) -> None:
        self.close()
        try:
            if self._root.is_dir():
                shutil.rmtree(self._root)
        except OSError as error:
            raise _unwritable(self.url, error) from error

    def copy_to(self, path: str, target: Store, name: str) -> None:
        size = self.size(path) or 0
        writer = target.writer(name, size)
        try:
            for at in range(0, size, _SYNC_EVERY):
                writer.write(at, self.read(path, at, min(_SYNC_EVERY, size - at)))
        except CkptError:
            writer.abort()
            raise
        writer.commit()

    def free_bytes(self) -> int | None:
        at = self._root.absolute()
        while not at.exists():
            at = at.parent
        seen = os.statvfs(at)
        return seen.f_bavail * seen.f_frsize

    def close(self) -> None:
        with self._lock:
            for fd in self._open.values():
                os.close(fd)
            self._open.clear()

    def _forget(self, path: str) -> None:
        """Closes what is open under a name that stands for another file from now on."""
        with self._lock:
            fd = self._open.pop(path, None)
        if fd is not None:
            os.close(fd)

    def _descriptor(self, path: str) -> tuple[int, bool]:
        """(descriptor, whether it is kept open) of a file; one that is not kept must be closed."""
        fd = self._open.get(path)
        if fd is not None:
            return fd, True
        fd = self._open_inside(path)
        with self._lock:
            kept = path not in self._open and len(self._open) < self._max_open
            if kept:
                self._open[path] = fd
        return fd, kept

    def _open_inside(self, path: str) -> int:
        full = os.path.join(self._root, path)
        if not self._is_inside(os.path.realpath(full)):
            raise UnsafeContent(f"{full} is a link that leaves the checkpoint's folder")
        try:
            # O_NONBLOCK: a FIFO in place of a file must not hang the reader.
            fd = os.open(full, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _unreadable(full, error) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise SourceUnreadable(f"{full} is not a regular file")
        return fd

    def _is_inside(self, real: str) -> bool:
        if real.startswith(self._real + os.sep) or self._real == os.sep:
            return True
        # The Hugging Face cache keeps snapshots as links into a sibling folder of blobs.
        snapshots = os.path.dirname(self._real)
        blobs = os.path.join(os.path.dirname(snapshots), "blobs") + os.sep
        return os.path.basename(snapshots) == "snapshots" and real.startswith(blobs)


class LocalWriter:
    """A file being written under a temporary name beside its final one."""

    sequential = False

    def __init__(self, path: Path, nbytes: int, replaced: Callable[[], None]) -> None:
        self._path, self._nbytes, self._replaced = path, nbytes, replaced
        # Unique per writer: two runs of one plan may meet, and both end with the same bytes.
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}-{next(_SERIAL)}.part")
        self._unsynced = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # 0o666: the file's mode follows the umask, as a plain open() would.
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._fd = os.open(self._temporary, flags, 0o666)
        except OSError as error:
            raise _unwritable(str(path), error, nbytes) from error
        try:
            self._in_memory = _is_tmpfs(self._fd)
            self._piece = _MAX_WRITE if self._in_memory else _WRITE
            self._preallocate()
        except OSError as error:
            self.abort()
            raise _unwritable(str(path), error, nbytes) from error

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
            raise _unwritable(str(self._path), error, self._nbytes) from error
        self._start_writeback(at, len(view))

    def copy(self, source: Store, path: str, start: int, length: int, at: int) -> bool:
        if not isinstance(source, LocalStore):
            return False
        done = 0
        fd, kept = source._descriptor(path)  # the two halves of one store
        try:
            while done < length:
                try:
                    got = os.copy_file_range(fd, self._fd, length - done, start + done, at + done)
                except OSError as error:
                    if error.errno in _FULL:
                        raise _unwritable(str(self._path), error, self._nbytes) from error
                    if done == 0:  # another file system, or one without the call
                        return False
                    raise _unreadable(f"{source.url}/{path}", error) from error
                if not got:
                    if done == 0:
                        return False
                    raise _short(source.url, path, start, length, done)
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
            raise _unwritable(str(self._path), error, self._nbytes) from error

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


def _reraise(error: OSError) -> None:
    raise error


def _short(url: str, path: str, start: int, length: int, got: int) -> SourceUnreadable:
    return SourceUnreadable(
        f"{url}/{path} ends early: {length} bytes wanted at {start}, {got} there",
        hint="the file is truncated; copy it again",
        file=path,
    )


def _unreadable(what: str, error: OSError) -> CkptError:
    if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR):
        return StorageTrouble(f"cannot read {what}: {error.strerror}")
    return SourceUnreadable(f"cannot read {what}: {error.strerror or error}")


def _unwritable(what: str, error: OSError, nbytes: int | None = None) -> CkptError:
    if error.errno in _FULL:
        need = "" if nbytes is None else f" ({nbytes} bytes)"
        return DiskFull(f"no room to write {what}{need}: {error.strerror}", path=what)
    if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
        return StorageTrouble(f"cannot write {what}: {error.strerror}")
    return DestinationUnwritable(f"cannot write {what}: {error.strerror or error}")
