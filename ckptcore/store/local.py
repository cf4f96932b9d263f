"""Read and write local files fast and exactly, never outside the folder.

Reads are `pread` into the caller's buffers: without a memory map, the caller's buffers are the peak memory.
`ckptcore.store.local_writer` has the writers.

A link that leaves a checkpoint's folder is refused: whoever made the checkpoint would choose which file of
this machine its reader copies into an output. Two kinds of folders are read through links nevertheless. A
snapshot in the Hugging Face cache has links into the blobs of its own repository. And a folder that has
nothing but links, each to a file of the same name in one other folder, is that other folder by another name:
no file of it tells the reader what to take from there.
"""

from __future__ import annotations

import os
import resource
import shutil
import stat
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

from ckptcore.errors import CkptError, SourceUnreadable, UnsafeContent
from ckptcore.store import Buffer, FileWriter, Joint, ReadObserver, Store
from ckptcore.store.file_status import FileStatus, NameKind, of_stat
from ckptcore.store.local_listing import Walk, everything_in, opened_parent
from ckptcore.store.local_writer import JointWriter, LocalWriter, short, unreadable, unwritable
from ckptcore.store.owners import Owners
from ckptcore.utils import host

_BLOCK = 64 << 20  # bytes of a copy between stores
_MOST_LINKS = 1 << 20


class LocalStore:
    """A folder on this machine."""

    def __init__(self, root: Path) -> None:
        self.local: Path | None = root
        self.observer: ReadObserver | None = None
        self.url = str(root)
        self._root = root
        # Links in the path of the root itself are the user's.
        self._real = os.path.realpath(root)
        self._linked: str | None = None  # the folder that this one is made of by links; "" without one
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}
        weakref.finalize(self, close_all, self._open)  # a dropped store closes its files
        # Half of the process's limit: a checkpoint of 1024 ranks has 1024 files.
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_open = 8192 if soft == resource.RLIM_INFINITY else min(soft // 2, 8192)

    def stamped(self) -> dict[str, FileStatus]:
        """List the files with the status of each, links followed."""
        try:
            if not self._root.is_dir():
                if self._root.exists():
                    raise SourceUnreadable(f"{self.url} is a file, not a folder")
                raise SourceUnreadable(f"{self.url} does not exist", hint="check the path", absent=True)
        except OSError as error:
            raise unreadable(self.url, error) from error
        with opened_parent(self.url) as dir_entry:
            # Lenient, because files of a running job come and go while they are listed.
            walk = Walk(follow=True, lenient=True)
            entries = everything_in(dir_entry, walk) if dir_entry is not None else ()
            # A link that is left leads to a folder, or nowhere.
            skipped = (NameKind.FOLDER, NameKind.LINK)
            return dict(sorted((name, status) for name, status in entries if status.kind not in skipped))

    def list(self) -> dict[str, int]:
        """List the files: relative path -> size in bytes."""
        return {path: status.nbytes for path, status in self.stamped().items()}

    def size(self, path: str) -> int | None:
        """Return the size in bytes, or None when there is no such file."""
        status = self.look(path)
        return None if status is None else status.nbytes

    def look(self, path: str) -> FileStatus | None:
        """Return the status of one file, or None when there is no such file."""
        status = self._status(path)
        return status if status is not None and status.kind is NameKind.FILE else None

    def stamp(self, path: str) -> str | None:
        """Return the size, mtime and inode as a text, or None when there is no such file."""
        status = self._status(path)
        return None if status is None else status.stamp

    def ctime(self, path: str) -> int | None:
        """Return the ctime in ns, `YOUNG` when it is recent, or None when there is no such file."""
        status = self._status(path)
        return None if status is None else status.settled_ctime

    def _status(self, path: str) -> FileStatus | None:
        looked_at = host.now_ns()  # before `stat`, or a later write may count as an earlier one
        try:
            return of_stat(os.stat(os.path.join(self.url, path)), looked_at=looked_at)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise unreadable(f"{self.url}/{path}", error) from error

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return exactly ``length`` bytes."""
        fd, stays_open = self.descriptor(path)
        try:
            # A short read is continued; only the end of the file, where nothing comes, is an error.
            data = os.pread(fd, length, start)
            # Linux reads at most 2 GiB in one call.
            while 0 < len(data) < length:
                rest = os.pread(fd, length - len(data), start + len(data))
                if not rest:
                    break
                data += rest
        except OSError as error:
            raise unreadable(f"{self.url}/{path}", error) from error
        finally:
            if not stays_open:
                os.close(fd)
        if len(data) != length:
            raise short(self.url, path, start, length, len(data))
        if self.observer is not None:
            self.observer.observe(path, start, data)
        return data

    def read_into(self, path: str, start: int, into: Buffer) -> None:
        """Fill ``into`` exactly."""
        filled, length = 0, len(into)
        fd, stays_open = self.descriptor(path)
        try:
            while filled < length:
                got = os.preadv(fd, [into[filled:]], start + filled)
                if not got:
                    raise short(self.url, path, start, length, filled)
                filled += got
        except OSError as error:
            raise unreadable(f"{self.url}/{path}", error) from error
        finally:
            if not stays_open:
                os.close(fd)
        if self.observer is not None:
            self.observer.observe(path, start, into)

    def writer(self, path: str, nbytes: int) -> FileWriter:
        """Start a file under a temporary name, with its space reserved."""
        full = self._root / path
        return LocalWriter(self._open_folder(path, nbytes), full, nbytes, lambda: self._forget(path))

    def joint(self, path: str, nbytes: int, *, alone: bool = False) -> Joint | None:
        """Open a file that several processes write ranges of."""
        full = self._root / path
        folder = self._open_folder(path, nbytes)
        return JointWriter(folder, full, nbytes, lambda: self._forget(path), alone=alone)

    def put(self, path: str, data: bytes) -> None:
        """Write a small file completely or not at all."""
        writer = self.writer(path, len(data))
        try:
            writer.write(0, data)
        except CkptError:
            writer.abort()
            raise
        writer.commit()

    def remove(self, path: str) -> None:
        """Remove a file; a missing file is no error."""
        self._forget(path)
        try:
            (self._root / path).unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(f"{self.url}/{path}", error) from error

    def remove_all(self) -> None:
        """Remove the folder with everything in it."""
        self.close()
        try:
            if self._root.is_dir():
                shutil.rmtree(self._root)
        except OSError as error:
            raise unwritable(self.url, error) from error

    def copy_to(self, path: str, target: Store, name: str) -> None:
        """Copy a file into another store, in blocks of 64 MiB."""
        size = self.size(path) or 0
        writer = target.writer(name, size)
        try:
            for offset in range(0, size, _BLOCK):
                writer.write(offset, self.read(path, offset, min(_BLOCK, size - offset)))
        except CkptError:
            writer.abort()
            raise
        writer.commit()

    def free_bytes(self) -> int | None:
        """Return the free bytes of the file system, before the folder exists too."""
        folder = self._root.absolute()
        # The folder may not exist yet: the nearest one above is on the same
        # file system, if nothing is mounted later.
        while not folder.exists():
            folder = folder.parent
        space = os.statvfs(folder)
        return space.f_bavail * space.f_frsize

    def close(self) -> None:
        """Close all open files."""
        with self._lock:
            close_all(self._open)

    def _forget(self, path: str) -> None:
        """Close the descriptor of a name that refers to another file from now on."""
        with self._lock:
            fd = self._open.pop(path, None)
        if fd is not None:
            os.close(fd)

    def descriptor(self, path: str) -> tuple[int, bool]:
        """Return (descriptor, whether the store keeps it open); the caller closes one that is not kept."""
        # Without the lock: a dict's `get` is one step, and a descriptor is only added under it.
        fd = self._open.get(path)
        if fd is not None:
            return fd, True
        fd = self._open_inside(path)
        with self._lock:
            # Another thread may have opened it meanwhile: then the caller closes this one.
            stays_open = path not in self._open and len(self._open) < self._max_open
            if stays_open:
                self._open[path] = fd
        return fd, stays_open

    def _open_folder(self, path: str, nbytes: int) -> int:
        """Create and open a file's folder; the writer closes the descriptor."""
        try:
            return self._folder_of(path)
        except OSError as error:
            raise unwritable(str(self._root / path), error, nbytes) from error

    def _folder_of(self, path: str) -> int:
        folder = (self._root / path).parent
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _open_inside(self, path: str) -> int:
        full = os.path.join(self._root, path)
        # The path without links decides, not the link: a link inside of the folder is fine.
        real = os.path.realpath(full)
        if not self._is_inside(real):
            raise UnsafeContent(
                f"{full} is a link that leaves the checkpoint's folder",
                hint=f"if the link is yours, name the folder that it leads to, {os.path.dirname(real)!r}, or "
                "link every file of that folder under its name, and nothing else; "
                f"otherwise {UnsafeContent.default_hint}",
            )
        try:
            # O_NONBLOCK: a FIFO in place of a file must not hang the reader.
            fd = os.open(full, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise unreadable(full, error) from error
        # By the descriptor, which cannot be exchanged any more.
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise SourceUnreadable(f"{full} is not a regular file")
        return fd

    def _is_inside(self, real: str) -> bool:
        if real.startswith(self._real + os.sep):
            return True
        # Asked once, and only for a folder with links that leave it: all its files are looked at for it.
        if self._linked is None:
            self._linked = linked_folder(self._real) or ""
        return is_inside(real, self._real) or (self._linked != "" and is_inside(real, self._linked))


def close_all(descriptors: dict[str, int]) -> None:
    """Close descriptors and remove them from the dict."""
    while descriptors:
        os.close(descriptors.popitem()[1])


def is_inside(real: str, folder: str) -> bool:
    """Report whether a real path is in a folder, or in the blobs of the hub's cache that it is a snapshot of.

    Args:
        real: The real path of a file.
        folder: The real path of the folder.
    """
    if folder == os.sep or real.startswith(folder + os.sep):
        return True
    # The checkpoint may be a folder inside of a snapshot.
    # The hub's cache: snapshots/COMMIT/NAME is a link to blobs/DIGEST of the same repository.
    repository, separator, inside = folder.rpartition(f"{os.sep}snapshots{os.sep}")
    blobs = os.path.join(repository, "blobs") + os.sep
    return bool(separator and inside) and real.startswith(blobs)


def linked_folder(folder: str) -> str | None:
    """Return the real path of the folder to whose files all files of a folder are links; None without one.

    Each link must be of a trusted user, or of the owner of its target: another's link would have this user's
    rights read for him what he may not read himself.
    """
    owners = Owners.of_process()
    linked: str | None = None
    try:
        for count, (path, entry) in enumerate(_entries(folder, "")):
            # Any file that is no link has content of its own, so the
            # folder is not another one by another name.
            if count >= _MOST_LINKS or not entry.is_symlink():
                return None
            target = os.path.normpath(os.path.join(os.path.dirname(entry.path), os.readlink(entry.path)))
            above = target.removesuffix(os.sep + path)
            if not above or above == target:  # in the root of the file system, or under another name
                return None
            above = os.path.realpath(above)
            # All links must lead to one folder, and stay in it.
            if above != (linked or above) or not is_inside(os.path.realpath(target), above):
                return None
            linked = above
            owner = entry.stat(follow_symlinks=False).st_uid
            status = os.stat(entry.path)
            if not stat.S_ISREG(status.st_mode) or (owner not in owners and owner != status.st_uid):
                return None
    except OSError:
        return None  # whatever cannot be examined proves nothing
    return linked


def _entries(folder: str, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield (relative path, entry) of everything below a folder but its folders, which are not links."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(entry.path, f"{prefix}{entry.name}{os.sep}")
            else:
                yield prefix + entry.name, entry
