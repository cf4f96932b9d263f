"""Folders by descriptor: how is a tree walked and removed in which somebody may have put a link?

Every name is opened below the descriptor of its folder, and no link is followed. A path is looked up anew
at each use; a descriptor stays what it was opened for, whoever renames what.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from ckptcore.store.owners import Owners, strange

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 10
_NOREPLACE, _EXCHANGE = 1, 2  # flags of renameat2


@dataclass(frozen=True, slots=True)
class Spot:
    """A name in a folder that is held open: who swaps one of its parents leads nobody elsewhere.

    at: the folder's descriptor, -1 for a folder that is not there. path: what to call it.
    """

    at: int
    name: str
    path: str

    def look(self) -> os.stat_result | None:
        """What bears the name, links unfollowed; None when nothing does."""
        return look(self.at, self.name) if self.at >= 0 else None

    def beside(self, name: str) -> Spot:
        """Another name in the same folder."""
        return Spot(self.at, name, os.path.join(os.path.dirname(self.path), name))


def rename_new(old: Spot, new: Spot) -> None:
    """Moves a name, never over another: `os.rename` would replace a file, or an empty folder.

    Raises `OSError`; `FileExistsError` where something is there.
    """
    failed = _renameat2(old, new, _NOREPLACE)
    if failed == 0:
        return
    if failed not in (errno.ENOSYS, errno.EINVAL):
        raise OSError(failed, os.strerror(failed))
    if new.look() is not None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    os.rename(old.name, new.name, src_dir_fd=old.at, dst_dir_fd=new.at)


def exchange(a: Spot, b: Spot) -> bool:
    """Swaps two names in one step; False, and nothing is done, where the file system cannot."""
    return _renameat2(a, b, _EXCHANGE) == 0


def _renameat2(a: Spot, b: Spot, flag: int) -> int:
    """The error number of the call, or 0."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # another system, or an old libc
        return errno.ENOSYS
    if call(a.at, os.fsencode(a.name), b.at, os.fsencode(b.name), flag) == 0:
        return 0
    return ctypes.get_errno()


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Closes a descriptor behind the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def look(at: int, name: str) -> os.stat_result | None:
    """What a name in a folder stands for, links unfollowed; None when there is nothing."""
    try:
        return os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return None


def enter(at: int, name: str, what: str, owners: Owners, *, make: bool = False) -> int | None:
    """A descriptor of a folder of ours in another; None when there is none.

    make: make it then, with the mode that the umask leaves. Raises `StagingForeign`, `OSError`.
    """
    seen = look(at, name)
    if seen is None:
        if not make:
            return None
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o777, dir_fd=at)
        seen = os.stat(name, dir_fd=at, follow_symlinks=False)
    owners.require_folder(seen, what)
    try:
        fd = os.open(name, FOLDER, dir_fd=at)
    except FileNotFoundError:
        return None
    try:
        owners.require_folder(os.fstat(fd), what)
    except BaseException:
        os.close(fd)
        raise
    return fd


def walk(fd: int, prefix: str, what: str, owners: Owners) -> Iterator[tuple[str, os.stat_result]]:
    """(path, what it is) of every file and folder below one, folders with a slash behind their names.

    Raises `StagingForeign` for what is another user's, no file and no folder, or mounted there.
    """
    for name in sorted(os.listdir(fd)):
        shown = f"{what}/{name}"
        seen = look(fd, name)
        if seen is None:  # removed meanwhile
            continue
        if not stat.S_ISDIR(seen.st_mode):
            owners.require_file(seen, shown)
            yield prefix + name, seen
            continue
        below = enter(fd, name, shown, owners)
        if below is None:
            continue
        with closing_fd(below):
            _require_one_mount(fd, below, shown)
            yield f"{prefix}{name}/", seen
            yield from walk(below, f"{prefix}{name}/", shown, owners)


def remove_tree(at: int, name: str, what: str, owners: Owners) -> None:
    """Removes a folder with all that is in it; a link in it is removed, and never followed.

    owners: whose files may go. What somebody else removes meanwhile is fine.
    Raises `OSError` for the first that cannot be removed, when everything else is gone, and
    `StagingForeign` for what is not theirs, or mounted there: that is left.
    """
    try:
        fd = os.open(name, FOLDER, dir_fd=at)
    except FileNotFoundError:
        return
    with closing_fd(fd):
        owners.require_folder(os.fstat(fd), what)
        _require_one_mount(at, fd, what)
        # Again while it fills: a process that waits for a lock in it may make that lock once more.
        for _ in range(_TRIES):
            failed = _remove_owned(fd, what, owners)
            try:
                os.rmdir(name, dir_fd=at)
            except FileNotFoundError:
                return
            except OSError as error:
                if failed is not None or error.errno != errno.ENOTEMPTY:
                    raise failed or error from None
            else:
                return
    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))


def _remove_owned(fd: int, what: str, owners: Owners) -> OSError | None:
    failed: OSError | None = None
    for name in os.listdir(fd):
        seen = look(fd, name)
        if seen is None:
            continue
        try:
            if stat.S_ISDIR(seen.st_mode):
                remove_tree(fd, name, f"{what}/{name}", owners)
            else:
                owners.require(seen, f"{what}/{name}")
                os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            continue
        except OSError as error:
            failed = failed or error
    return failed


def _require_one_mount(above: int, below: int, what: str) -> None:
    """A mount shows another folder: what is removed in it is removed there. Device numbers do not tell."""
    if _mount(above) != _mount(below):
        raise strange(what, "another folder is mounted there")


def _mount(fd: int) -> bytes:
    # Bytes: whoever may not read Python's own files cannot load a codec.
    try:
        with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
            return next((line for line in file if line.startswith(b"mnt_id:")), b"")
    except OSError:  # no /proc: the device number tells what it can
        return str(os.fstat(fd).st_dev).encode()
