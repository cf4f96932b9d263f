"""Write local files so that they appear completely or not at all, and map their errors to ckptcore's.

Writers preallocate, write at offsets from any thread, and fsync; a rename publishes the file. Large files go
past the page cache where the file system and the caller's memory allow it.
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

from ckptcore.errors import Busy, CkptError, DestinationUnwritable, DiskFull, SourceUnreadable, StorageTrouble
from ckptcore.store import BLOCK, Buffer, FileWriter, Store
from ckptcore.utils import host

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SERIAL = itertools.count()
_TMPFS, _EXT, _XFS = 0x01021994, 0xEF53, 0x58465342  # as statfs(2) lists them
# One write makes page cache folios as large as itself. When memory is full of cache, the kernel must compact
# it to find megabytes in one piece, which was measured to cost three times the copy.
_WRITE, _MAX_WRITE = 256 << 10, 1 << 30
# Larger files go past the page cache, in whole blocks. A write into the cache takes a fresh page for every
# block, and pushes out what others keep there: measured at 0.5 to 1.4 CPU seconds a GiB, against 0.1.
_PAST_CACHE, _LEAST_PAST = 64 << 20, 256 << 10
_SYNC_EVERY = 64 << 20  # bytes between starts of writeback, so that fsync finds little to do


class LocalWriter(FileWriter):
    """A file being written under a temporary name beside its final one."""

    sequential = False
    _flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

    def __init__(self, folder: int, path: Path, nbytes: int, replaced: Callable[[], None]) -> None:
        """Open a file under a temporary name.

        Args:
            folder: Descriptor of the file's folder; the writer closes it.
            path: Final path; its last name is the file's, the rest is for messages.
            nbytes: Size to reserve.
            replaced: Called when the name refers to the new file.
        """
        self._folder, self._path, self._nbytes, self._replaced = folder, path, nbytes, replaced
        self._name, self._fd, self._past = self._first_name(path.name), -1, -1
        self._unsynced, self._left = 0, False
        try:
            # 0o666: the file's mode follows the umask, as a plain open() would.
            self._fd = os.open(self._name, self._flags, 0o666, dir_fd=folder)
            self._left = True
            kind = _file_system(self._fd)
            self._in_memory = kind == _TMPFS
            self._piece = _MAX_WRITE if self._in_memory else _WRITE
            self._preallocate()
            if kind in (_EXT, _XFS) and nbytes >= _PAST_CACHE:
                self._past = self._open_past_cache()
        except OSError as error:
            self.abort()
            raise unwritable(str(path), error, nbytes) from error

    def _open_past_cache(self) -> int:
        """Return a descriptor for writes past the cache, or -1 where that is not possible."""
        flags = os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self._name, flags, dir_fd=self._folder)
        except OSError as error:
            # EINVAL is a file system without it; ENOENT a joint file that another process has just published.
            if error.errno not in (errno.EINVAL, errno.ENOENT):
                raise
            return -1
        if os.path.samestat(os.fstat(fd), os.fstat(self._fd)):
            return fd
        os.close(fd)  # another process has just published the file that this name had
        return -1

    def _first_name(self, name: str) -> str:
        # Unique per writer: two runs of one plan may meet, and both end with the same bytes. In containers
        # every process has the same number, and a killed one may have left a file.
        return f".{name}.{os.getpid()}-{next(_SERIAL)}-{os.urandom(4).hex()}.part"

    def _preallocate(self) -> None:
        if self._in_memory:
            # fallocate on tmpfs would clear every page now, and the write would touch it once more.
            space = os.fstatvfs(self._fd)
            if space.f_blocks and self._nbytes > space.f_bavail * space.f_frsize:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(self._fd, self._nbytes)
        elif self._nbytes:
            try:
                os.posix_fallocate(self._fd, 0, self._nbytes)
            except OSError as error:
                # Then only the size is set, and a full disk shows while writing.
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                os.ftruncate(self._fd, self._nbytes)

    def write(self, offset: int, data: Buffer | bytes) -> None:
        """Write ``data`` at byte ``offset``, from any thread."""
        view = memoryview(data).cast("B")
        try:
            # Whole blocks past the cache; the two ends, which are shorter than a block, through it.
            begin, end = self._write_past_cache(offset, view) if self._past >= 0 else (0, 0)
            for first, last in ((0, begin), (end, len(view))):
                position = first
                while position < last:
                    position += os.pwrite(
                        self._fd, view[position : min(position + self._piece, last)], offset + position
                    )
                self._start_writeback(last - first)
        except OSError as error:
            raise unwritable(str(self._path), error, self._nbytes) from error

    def _write_past_cache(self, offset: int, view: Buffer) -> tuple[int, int]:
        """Write the whole blocks of ``view``, and return where they begin and end in it.

        The device takes them from where they are, so blocks of memory and of the file must begin at the same
        bytes. What is in the cache of them is dropped by the kernel; no two threads write one block.
        """
        # A buffer that cannot be written to has no address for ctypes, and small pieces are no use.
        if view.readonly or len(view) < _LEAST_PAST:
            return 0, 0
        begin, end = -offset % BLOCK, len(view) - (offset + len(view)) % BLOCK
        # Memory and file must be at the same place within a block, which is
        # so only for buffers that were made for it.
        if (ctypes.addressof(ctypes.c_char.from_buffer(view)) - offset) % BLOCK:
            return 0, 0
        position = begin
        while position < end:
            try:
                position += os.pwrite(self._past, view[position:end], offset + position)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                break  # other blocks than ours: the rest through the cache
        return begin, position

    def copy(self, source: Store, path: str, start: int, length: int, offset: int) -> bool:
        """Copy a byte range of a local store with ``copy_file_range``; return False when it cannot."""
        descriptor = getattr(source, "descriptor", None)
        if descriptor is None:  # not a local store
            return False
        count = 0
        fd, stays_open = descriptor(path)
        try:
            while count < length:
                try:
                    got = os.copy_file_range(fd, self._fd, length - count, start + count, offset + count)
                except OSError as error:
                    if error.errno in _FULL:
                        raise unwritable(str(self._path), error, self._nbytes) from error
                    # The first call decides: later ones fail for other reasons.
                    if count == 0:  # another file system, or one without the call
                        return False
                    raise unreadable(f"{source.url}/{path}", error) from error
                # 0 bytes at the beginning: some file systems say so instead of an
                # error; later it is the end of the file.
                if not got:
                    if count == 0:
                        return False
                    raise short(source.url, path, start, length, count)
                count += got
        finally:
            if not stays_open:
                os.close(fd)
        self._start_writeback(length)
        return True

    def commit(self) -> None:
        """Sync the file and rename it to its final name."""
        try:
            # Before the rename: after a power failure no name refers to bytes that were never written.
            self._sync()
            os.close(self._taken())
            self._rename(self._path.name)
        except OSError as error:
            self.abort()
            raise unwritable(str(self._path), error, self._nbytes) from error
        self._close()

    def abort(self) -> None:
        """Remove the temporary file."""
        if self._left:
            self._left = False
            with contextlib.suppress(OSError):  # the next run sweeps leftovers
                host.unlink(self._name, dir_fd=self._folder)
        self._close()

    def _sync(self) -> None:
        if not self._in_memory:
            host.fsync(self._fd)

    def _rename(self, name: str) -> None:
        """Rename the file, durably."""
        host.replace(self._name, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._left = False
        # The store may have the file that had this name before open.
        self._replaced()
        # A rename is durable when its folder is.
        host.fsync(self._folder)

    def _taken(self) -> int:
        """Return the file's descriptor; the caller closes it."""
        fd, self._fd = self._fd, -1
        return fd

    def _close(self) -> None:
        """Close the open descriptors, once."""
        # Each is replaced before it is closed: a second call closes nothing that has the same number by then.
        (folder, self._folder), (past, self._past) = (self._folder, -1), (self._past, -1)
        for fd in (self._taken(), past, folder):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _start_writeback(self, length: int) -> None:
        if self._in_memory or _SYNC_FILE_RANGE is None:
            return
        self._unsynced += length
        if self._unsynced >= _SYNC_EVERY:
            self._unsynced = 0
            _SYNC_FILE_RANGE(self._fd, ctypes.c_int64(0), ctypes.c_int64(0), 2)


class JointWriter(LocalWriter):
    """A file that several processes write ranges of, under its name. Existing bytes are kept.

    ``alone`` requires that no other process has it open: a writer presumed dead may still be at work.
    """

    _flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

    def __init__(
        self, folder: int, path: Path, nbytes: int, replaced: Callable[[], None], *, alone: bool = False
    ) -> None:
        super().__init__(folder, path, nbytes, replaced)
        try:
            # Shared among those who write ranges; alone for the one who joins them.
            host.flock(self._fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.abort()
            raise Busy(f"another process is writing {path}") from error
        # The lock is of the file, not of the name: who waited may have
        # it on a file that was published meanwhile.
        if not self._is_named():
            self.abort()
            raise Busy(f"another process has just published {path}")

    def name(self, path: str) -> None:
        """Rename it; ``path`` is in the same folder."""
        try:
            # Synced while the name is still the joint's: a crash leaves a joint that can be finished.
            self._sync()
            self._rename(path.rpartition("/")[2])
        except OSError as error:
            self._close()
            raise unwritable(str(self._path.with_name(path)), error, self._nbytes) from error
        self._close()  # only now: until the rename, nobody else may write to it

    def commit(self) -> None:
        """Make the written bytes durable; the name stays."""
        try:
            self._sync()
            os.close(self._taken())
            self._replaced()
            host.fsync(self._folder)
        except OSError as error:
            self._close()
            raise unwritable(str(self._path), error, self._nbytes) from error
        self._close()

    def abort(self) -> None:
        """Close it; bytes from other processes are kept."""
        self._close()

    def _first_name(self, name: str) -> str:
        return name

    def _preallocate(self) -> None:
        # Another process may have set its size already, and its bytes are in it.
        if os.fstat(self._fd).st_size != self._nbytes:
            super()._preallocate()

    def _is_named(self) -> bool:
        try:
            now = os.stat(self._path.name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._fd), now)


def sync_folder(path: Path | str, parent_fd: int | None = None) -> None:
    """Make names in a folder durable; ``parent_fd`` is the descriptor that a relative path starts from."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent_fd)
    try:
        host.fsync(fd)
    finally:
        os.close(fd)


def _libc_call(name: str) -> Callable[..., int] | None:
    try:
        call: Callable[..., int] = getattr(ctypes.CDLL(None, use_errno=True), name)
        return call  # noqa: TRY300  the pair is easier to read together
    except (AttributeError, OSError):  # not Linux: then writeback starts at fsync
        return None


# SYNC_FILE_RANGE_WRITE (2) starts writeback of dirty pages without waiting for it.
_SYNC_FILE_RANGE = _libc_call("sync_file_range")


def _file_system(fd: int) -> int:
    """Return the magic number of a file's file system; 0 where statfs(2) has none."""
    buffer = ctypes.create_string_buffer(256)
    call = _libc_call("fstatfs")
    if call is None or call(fd, buffer) != 0:
        return 0
    # f_type is the first field of statfs, as long as a word.
    return int.from_bytes(buffer.raw[:8], "little")


def short(url: str, path: str, start: int, length: int, got: int) -> SourceUnreadable:
    """Return the error for a file that is shorter than the requested range."""
    return SourceUnreadable(
        f"{url}/{path} ends early: {length} bytes needed at offset {start} (got {got})",
        hint="the file is truncated; copy it again",
        file=path,
    )


def unreadable(path: str, error: OSError) -> CkptError:
    """Return the error for a failed read."""
    # These say that a disk or a server fails at the moment, not that the file is wrong.
    if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR):
        return StorageTrouble(f"cannot read {path}: {error.strerror}")
    return SourceUnreadable(f"cannot read {path}: {error.strerror or error}")


def unwritable(path: str, error: OSError, nbytes: int | None = None) -> CkptError:
    """Return the error for a failed write of a file of ``nbytes``."""
    if error.errno in _FULL:
        return _full(path, error, "" if nbytes is None else f" ({nbytes} bytes)")
    if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
        return StorageTrouble(f"cannot write {path}: {error.strerror}")
    return DestinationUnwritable(f"cannot write {path}: {error.strerror or error}")


def _full(path: str, error: OSError, need: str) -> DiskFull:
    """Return the error for a file that has no room, and what it lacks: bytes, files, a quota or a size."""
    message, advice = f"no room to write {path}{need}: {error.strerror}", "finished files are kept"
    if error.errno == errno.EDQUOT:
        hint = (
            f"free space of this user's quota there, or have it raised, and run the command again: {advice}"
        )
        return DiskFull(message, hint=hint, path=path, lacks="quota")
    if error.errno == errno.EFBIG:
        hint = (
            "raise `ulimit -f`, choose another file system, or write smaller files (export: --max-file-size)"
        )
        return DiskFull(message, hint=hint, path=path, lacks="size")
    # Without inodes there are free bytes, and the advice must be another one.
    free, files = free_room(Path(path).parent)
    if files == 0:
        message += "; its file system has no inode left for another file"
        hint = f"remove files there, however small, and run the command again: {advice}"
        return DiskFull(message, hint=hint, path=path, lacks="inodes")
    if free is None:
        return DiskFull(message, path=path)
    return DiskFull(message, path=path, free=free)


def free_room(folder: Path) -> tuple[int | None, int | None]:
    """Return the (bytes, inodes) that are free where ``folder`` is, or should be; None where unknown."""
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            space = os.statvfs(place)
            return space.f_bavail * space.f_frsize, space.f_favail if space.f_files else None
    return None, None
