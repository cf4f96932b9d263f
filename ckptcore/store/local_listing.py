"""List what is at a place of this machine by descriptor, so that a planted link leads nowhere else."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ckptcore.errors import CkptError, SourceChanged, SourceUnreadable, UsageError
from ckptcore.store.file_status import FileStatus, NameKind, of_stat
from ckptcore.store.folder_tree import DirEntryAt, closing_fd
from ckptcore.store.local_writer import unreadable
from ckptcore.store.place import mounts
from ckptcore.utils import host

MAX_DEPTH = 128  # of folders in folders; no checkpoint is deeper
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Walk:
    """How a place is listed.

    Attributes:
        follow: A link to a file is that file, and mounts are entered, as readers do. Otherwise a link is a
            link, and a mount is one name.
        lenient: Pass over what was removed meanwhile.
    """

    follow: bool = False
    lenient: bool = False


def everything_in(dir_entry: DirEntryAt, walk: Walk) -> Iterator[tuple[str, FileStatus]]:
    """Yield (relative name, status) of everything at a name in an open folder; "" is the name itself.

    Raises:
        SourceUnreadable: A name cannot be examined.
        SourceChanged: A name was removed meanwhile, and the walk is not lenient.
        StorageTrouble: The file system failed.
        UsageError: Folders are nested too deeply.
    """
    try:
        # Only the top is followed here; each entry decides about its own link.
        top = _behind_links(dir_entry) if walk.follow else look_at(dir_entry)
    except OSError as error:
        raise unreadable(dir_entry.path, error) from error
    if top is None:
        return
    yield "", top
    if top.kind is NameKind.FOLDER:
        # Mount points are asked for once, not for every name.
        points = () if walk.follow else {point for _, _, point in mounts()}
        real = (
            ""
            if walk.follow
            else os.path.normpath(os.path.join(_path_of(dir_entry.folder_fd), dir_entry.name))
        )
        yield from _entries(dir_entry, top, "", real.rstrip("/"), points, 0, walk)


def _behind_links(dir_entry: DirEntryAt) -> FileStatus | None:
    """Return the status of a name, links followed; None where there is nothing."""
    looked_at = host.now_ns()
    try:
        return of_stat(os.stat(dir_entry.name, dir_fd=dir_entry.folder_fd), looked_at=looked_at)
    except FileNotFoundError:
        return None


def look(path: str) -> FileStatus | None:
    """Return the status of a name on this machine, links not followed; None where nothing has the name."""
    with opened_parent(path) as dir_entry:
        return None if dir_entry is None else look_at(dir_entry)


def look_at(dir_entry: DirEntryAt) -> FileStatus | None:
    """Return the status of a name in an open folder, links not followed; None where nothing has the name."""
    looked_at, result = host.now_ns(), dir_entry.look()
    if result is None:
        return None
    folder_path = _path_of(dir_entry.folder_fd)
    mounted = not stat.S_ISLNK(result.st_mode) and (
        result.st_dev != os.fstat(dir_entry.folder_fd).st_dev
        or os.path.normpath(os.path.join(folder_path, dir_entry.name)) in {point for _, _, point in mounts()}
    )
    return status_at(dir_entry, result, looked_at=looked_at, mounted=mounted)


def status_at(
    dir_entry: DirEntryAt, result: os.stat_result, *, looked_at: int | None = None, mounted: bool = False
) -> FileStatus:
    """Return the status of an ``lstat`` result; the arguments are those of `of_stat`."""
    target = os.readlink(dir_entry.name, dir_fd=dir_entry.folder_fd) if stat.S_ISLNK(result.st_mode) else ""
    return of_stat(result, target, looked_at=looked_at, mounted=mounted)


@contextlib.contextmanager
def opened_parent(path: str) -> Iterator[DirEntryAt | None]:
    """Yield a name in its open folder; None where there is no such folder.

    Raises:
        SourceUnreadable: The folder cannot be opened.
    """
    parent, name = os.path.split(path)
    try:
        # O_PATH: the folder may be one that can be passed, but not listed.
        folder = os.open(parent or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    except OSError as error:
        raise SourceUnreadable(f"cannot look at {path}: {error.strerror}") from error
    with closing_fd(folder):
        yield DirEntryAt(folder, name or ".", path)


def _entries(
    folder: DirEntryAt,
    status: FileStatus,
    prefix: str,
    real: str,
    points: Collection[str],
    depth: int,
    walk: Walk,
) -> Iterator[tuple[str, FileStatus]]:
    """Yield (name, status) of everything in a folder, given its own status and its path without links."""
    if depth > MAX_DEPTH:
        raise UsageError(f"cannot list {folder.path}: more than {MAX_DEPTH} nested folders")
    try:
        # A link at the top is the user's own; below it none is followed.
        flags = _FOLDER if walk.follow and not depth else _FOLDER | os.O_NOFOLLOW
        below = os.open(folder.name, flags, dir_fd=folder.folder_fd)
    except FileNotFoundError as error:
        if walk.lenient and depth:
            return
        raise SourceChanged(f"{folder.path} was removed while it was listed") from error
    except OSError as error:
        raise _unlistable(folder.path, error) from error
    with closing_fd(below):
        try:
            folder_status, names = os.fstat(below), os.listdir(below)
        except OSError as error:
            raise _unlistable(folder.path, error) from error
        # The descriptor must be of the folder that was looked at: it may have been exchanged in between.
        if (folder_status.st_dev, folder_status.st_ino) != status.identity:
            raise SourceUnreadable(f"cannot list {folder.path}: it was replaced meanwhile")
        for name in names:
            dir_entry = DirEntryAt(below, name, f"{folder.path}/{name}")
            path = f"{real}/{name}"
            entry = _entry(dir_entry, folder_status.st_dev, path in points, walk)
            if entry is None:
                continue
            yield prefix + name, entry
            if entry.kind is NameKind.FOLDER:
                yield from _entries(dir_entry, entry, f"{prefix}{name}/", path, points, depth + 1, walk)


def _entry(dir_entry: DirEntryAt, device: int, mounted: bool, walk: Walk) -> FileStatus | None:
    """Return the status of a name in a folder; None if it was removed meanwhile, and that is passed over."""
    looked_at = host.now_ns()
    try:
        result = os.stat(dir_entry.name, dir_fd=dir_entry.folder_fd, follow_symlinks=False)
        if not walk.follow:
            return status_at(
                dir_entry, result, looked_at=looked_at, mounted=mounted or result.st_dev != device
            )
        if stat.S_ISLNK(result.st_mode):
            # A link to nothing is still a name that a deletion would remove.
            return _followed(dir_entry, looked_at) or status_at(dir_entry, result, looked_at=looked_at)
        return of_stat(result, looked_at=looked_at)
    except FileNotFoundError as error:
        if walk.lenient:
            return None
        raise SourceChanged(f"{dir_entry.path} was removed while its folder was listed") from error
    except OSError as error:
        raise unreadable(dir_entry.path, error) from error


def _followed(dir_entry: DirEntryAt, looked_at: int) -> FileStatus | None:
    """Return the target of a link to a file. Readers do not list folders behind links, so those give None."""
    try:
        result = os.stat(dir_entry.name, dir_fd=dir_entry.folder_fd)
    except OSError:
        return None  # a dangling link: it is listed as a link
    return None if stat.S_ISDIR(result.st_mode) else of_stat(result, looked_at=looked_at)


def _unlistable(path: str, error: OSError) -> CkptError:
    return SourceUnreadable(f"cannot list {path}: {error.strerror}")


def _path_of(folder_fd: int) -> str:
    """Return the current path of an open folder, without links; "" where the system does not report it."""
    try:
        return os.readlink(f"/proc/self/fd/{folder_fd}")
    except OSError:
        return ""
