"""Walk and remove folder trees by descriptor, so that a planted link leads nowhere else.

Every name is opened below the descriptor of its folder, and no link is followed. A path is looked up anew
at each use; a descriptor keeps referring to what was opened, even after renames.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from ckptcore.store.owners import Owners, untrusted_entry
from ckptcore.utils import host

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 10
_NOREPLACE, _EXCHANGE = 1, 2  # flags of renameat2


@dataclass(frozen=True, slots=True)
class DirEntryAt:
    """A name in an open folder: swapping one of its parents does not redirect it.

    Attributes:
        folder_fd: The folder's descriptor, -1 for a missing folder.
        name: A name in it.
        path: The path for messages.
    """

    folder_fd: int
    name: str
    path: str

    def look(self) -> os.stat_result | None:
        """Return the status of the name, without following links; None when nothing has it."""
        return look(self.folder_fd, self.name) if self.folder_fd >= 0 else None

    def beside(self, name: str) -> DirEntryAt:
        """Return another name in the same folder."""
        return DirEntryAt(self.folder_fd, name, os.path.join(os.path.dirname(self.path), name))


def rename_new(old: DirEntryAt, new: DirEntryAt) -> None:
    """Move a name, never over another: `os.rename` would replace a file, or an empty folder.

    Raises:
        FileExistsError: The new name exists.
        OSError: The move failed.
    """
    if _renamed(old, new):
        return
    # Not in one step: this is for file systems that cannot refuse, and the window is as short as it gets.
    if new.look() is not None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    host.rename(old.name, new.name, src_dir_fd=old.folder_fd, dst_dir_fd=new.folder_fd)


def rename_file_new(old: DirEntryAt, new: DirEntryAt) -> None:
    """Move a file, never over another, also where the file system's rename cannot refuse to.

    There, an empty file takes the name first: nobody else can create it then. A process that is killed in
    between leaves that empty file.

    Raises:
        FileExistsError: The new name exists, or another process took it from the empty file.
        OSError: The move failed.
    """
    if _renamed(old, new):
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing_fd(os.open(new.name, flags, 0o600, dir_fd=new.folder_fd)) as fd:
        # Between creating it and looking, another process may have replaced the empty file.
        placeholder, status = os.fstat(fd), new.look()
        if status is None or not os.path.samestat(placeholder, status) or status.st_size:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        try:
            host.rename(old.name, new.name, src_dir_fd=old.folder_fd, dst_dir_fd=new.folder_fd)
        except OSError:
            status = new.look()
            # Only the empty file of this process is removed, and only if nobody wrote to it.
            if status is not None and os.path.samestat(placeholder, status) and not status.st_size:
                host.unlink(new.name, dir_fd=new.folder_fd)
            raise


def _renamed(old: DirEntryAt, new: DirEntryAt) -> bool:
    """Move a name, never over another; return False where the file system's rename cannot refuse to."""
    failed = _renameat2(old, new, _NOREPLACE)
    # ENOSYS: an old kernel; EINVAL: a file system without the flag.
    if failed not in (0, errno.ENOSYS, errno.EINVAL):
        raise OSError(failed, os.strerror(failed))
    return failed == 0


def exchange(a: DirEntryAt, b: DirEntryAt) -> bool:
    """Swap two names in one step; return False, and change nothing, where the file system cannot."""
    # Any error means that nothing was changed; the caller has a way in two steps.
    return _renameat2(a, b, _EXCHANGE) == 0


def _renameat2(a: DirEntryAt, b: DirEntryAt, flag: int) -> int:
    """Return the error number of the call, or 0."""
    return host.renameat2(a.folder_fd, a.name, b.folder_fd, b.name, flag)


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Close a descriptor after the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def look(folder_fd: int | None, name: str) -> os.stat_result | None:
    """Return the status of a name in a folder, or of a path, links not followed; None when nothing has it."""
    try:
        return os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def enter(parent_fd: int, name: str, path: str, owners: Owners, *, make: bool = False) -> int | None:
    """Open a trusted folder in another; return None when there is none.

    Args:
        parent_fd: Descriptor of the parent.
        name: Name of the folder.
        path: Its path, for messages.
        owners: The trusted users.
        make: Create a missing folder, with the mode that the umask leaves.

    Raises:
        StagingForeign: It is not a folder, or not a trusted user's.
        OSError: It cannot be opened.
    """
    status = look(parent_fd, name)
    if status is None:
        if not make:
            return None
        with contextlib.suppress(FileExistsError):
            host.mkdir(name, 0o777, dir_fd=parent_fd)
        status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    owners.require_folder(status, path)
    try:
        fd = os.open(name, FOLDER, dir_fd=parent_fd)
    except FileNotFoundError:
        return None
    try:
        # By the descriptor: the name may have been exchanged since the look.
        owners.require_folder(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def walk(fd: int, prefix: str, folder_path: str, owners: Owners) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path, status) of every file and folder below one; names of folders end with a slash.

    Raises:
        StagingForeign: An entry is another user's, neither file nor folder, or a mount point.
    """
    for name in sorted(os.listdir(fd)):
        path = f"{folder_path}/{name}"
        status = look(fd, name)
        if status is None:  # removed meanwhile
            continue
        if not stat.S_ISDIR(status.st_mode):
            owners.require_file(status, path)
            yield prefix + name, status
            continue
        below = enter(fd, name, path, owners)
        if below is None:
            continue
        with closing_fd(below):
            _require_one_mount(fd, below, path)
            yield f"{prefix}{name}/", status
            yield from walk(below, f"{prefix}{name}/", path, owners)


def remove_tree(parent_fd: int, name: str, path: str, owners: Owners) -> None:
    """Remove a folder with everything in it; a link in it is removed, never followed.

    Another process may remove entries meanwhile.

    Args:
        parent_fd: Descriptor of the parent.
        name: Name of the folder.
        path: Its path, for messages.
        owners: The users whose files may be removed.

    Raises:
        OSError: An entry cannot be removed; everything else is.
        StagingForeign: An entry is another user's, or a mount point; it is left.
    """
    try:
        fd = os.open(name, FOLDER, dir_fd=parent_fd)
    except FileNotFoundError:
        return
    with closing_fd(fd):
        owners.require_folder(os.fstat(fd), path)
        _require_one_mount(parent_fd, fd, path)
        # Retry while it fills: a process that waits for a lock file in it may create it once more.
        # The number of tries bounds a process that keeps creating files.
        for _ in range(_TRIES):
            failed = _remove_owned(fd, path, owners)
            try:
                host.rmdir(name, dir_fd=parent_fd)
            except FileNotFoundError:
                return
            except OSError as error:
                if failed is not None or error.errno != errno.ENOTEMPTY:
                    raise failed or error from None
            else:
                return
    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))


def _remove_owned(fd: int, folder_path: str, owners: Owners) -> OSError | None:
    failed: OSError | None = None
    for name in os.listdir(fd):
        status = look(fd, name)
        if status is None:
            continue
        try:
            if stat.S_ISDIR(status.st_mode):
                remove_tree(fd, name, f"{folder_path}/{name}", owners)
            else:
                owners.require(status, f"{folder_path}/{name}")
                host.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            continue
        except OSError as error:
            # The first error is reported, and everything else is removed nevertheless.
            failed = failed or error
    return failed


def _require_one_mount(above: int, below: int, path: str) -> None:
    """Raise unless both folders are on one mount: a bind mount has the same device number."""
    if _mount(above) != _mount(below):
        raise untrusted_entry(path, "another folder is mounted there")


def _mount(fd: int) -> bytes:
    # Bytes: a process that may not read Python's own files cannot load a codec.
    try:
        with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
            return next((line for line in file if line.startswith(b"mnt_id:")), b"")
    except OSError:  # no /proc: the device number is a weaker check
        return str(os.fstat(fd).st_dev).encode()
