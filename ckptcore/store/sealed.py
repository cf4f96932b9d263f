"""Work safely in a folder where other users may create entries.

The folder's parents are resolved once, when it is opened; links there are legitimate. From the folder down
every name is opened below its folder's descriptor. A link, a FIFO, a device or another user's file is refused
(`StagingForeign`), neither used nor emptied. Checks are per file, never per byte range.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ckptcore.errors import CkptError, SourceUnreadable, StagingForeign
from ckptcore.store import Joint, inner_path
from ckptcore.store.folder_tree import FOLDER, closing_fd, enter, look, remove_tree, walk
from ckptcore.store.local import LocalStore, close_all
from ckptcore.store.local_writer import unreadable, unwritable
from ckptcore.store.owners import Owners, untrusted_entry
from ckptcore.utils import host

_log = logging.getLogger("ckptcore")
Names = Mapping[str, os.stat_result]  # entries of a folder, by name; links not followed


class SealedFolder:
    """A trusted user's folder, by descriptor, once it is opened. Safe to use from several threads.

    Attributes:
        path: The path it was opened by.
        name: Its last part.
        parent: The folder it is in.
        owners: The users whose entries in it are trusted.
    """

    def __init__(
        self, path: Path, *, mode: int | None = None, foreign: Callable[[Path, Names], None] | None = None
    ) -> None:
        """Prepare a folder; nothing is opened yet.

        Args:
            path: Its path.
            mode: The mode to create it with; the umask still applies.
            foreign: Called with a path and the entries of its folder; raises when they are not ckptcore's.
        """
        self.path, self.name, self.parent = path, path.name, path.parent
        self.owners = Owners.of_process()
        self._mode = self.owners.folder_mode if mode is None else mode
        self._foreign = foreign
        self._lock = threading.Lock()
        self._open_fds: dict[str, int] = {}
        weakref.finalize(self, close_all, self._open_fds)

    def open(self, *, make: bool = False) -> int | None:
        """Return its descriptor, kept open until `close` or for this object's life; None if it is missing.

        Args:
            make: Create it and its parents.

        Raises:
            StagingForeign: It is not a trusted user's, or not ckptcore's.
            OSError: It cannot be opened.
        """
        with self._lock:
            # Once: a name may refer to another folder later, but the
            # descriptor keeps the one that was checked.
            if "folder" not in self._open_fds:
                try:
                    self._open(make=make)
                except FileNotFoundError:  # it was removed at this moment
                    if make:
                        raise
            return self._open_fds.get("folder")

    def close(self) -> None:
        """Close it; the next `open` may find another folder of the same name."""
        with self._lock:
            close_all(self._open_fds)

    def in_place(self) -> bool:
        """Report whether the name still refers to the open folder: a run that ends renames its folder."""
        with self._lock:
            fd = self._open_fds.get("folder")
            if fd is None:
                return False
            # The folder is looked up in its open parent, not by its path.
            now = look(self._open_fds["parent"], self.name)
            return now is not None and os.path.samestat(now, os.fstat(fd))

    def parent_fd(self) -> int:
        """Return the descriptor of the open folder's parent; do not list or close it."""
        return self._open_fds["parent"]

    def parent_in_place(self) -> bool:
        """Report whether the parent's path still leads to the open parent."""
        try:
            return os.path.samestat(os.stat(self.parent), os.fstat(self._open_fds["parent"]))
        except OSError:
            return False

    @contextlib.contextmanager
    def beside(self) -> Iterator[tuple[int, list[str]]]:
        """Yield a descriptor of the parent and the names in it; (-1, []) when it cannot be listed."""
        parent = self._open_fds.get("parent")
        try:
            # By the open parent where there is one; through a link in its path only before that.
            fd = os.open(self.parent if parent is None else ".", FOLDER & ~os.O_NOFOLLOW, dir_fd=parent)
        except OSError:  # nothing of ckptcore's can be found there
            yield -1, []
            return
        with closing_fd(fd):
            yield fd, os.listdir(fd)

    def remove(self, gone: str) -> None:
        """Remove the open folder with everything in it; its name is free at once.

        Args:
            gone: A free name beside it, for the renamed folder. What cannot be removed stays there.

        Raises:
            OSError: It cannot be renamed.
        """
        fd = self.open()
        if fd is None or not self.in_place():
            return  # another run has removed it
        parent = self.parent_fd()
        with contextlib.suppress(FileNotFoundError):
            host.rename(self.name, gone, src_dir_fd=parent, dst_dir_fd=parent)
        moved = look(parent, gone)
        # Exactly the folder that was open, else a stranger's folder of that name would be removed.
        if moved is not None and os.path.samestat(moved, os.fstat(fd)):
            path = self.path.with_name(gone)
            try:
                if self._foreign is not None:  # entries that arrived before the rename may be another user's
                    self._foreign(path, names_in(fd))
                remove_tree(parent, gone, str(path), self.owners)
            except (OSError, StagingForeign) as error:  # the next run retries
                _log.warning("%s is kept: %s", path, error)
        self.close()

    @contextlib.contextmanager
    def below(self, folders: tuple[str, ...], *, make: bool = False) -> Iterator[int | None]:
        """Yield a descriptor of a folder in it, by the names on the way; None when there is none."""
        fd = self.open(make=make)
        # A descriptor of its own: the walk closes each folder that it leaves.
        folder_fd = os.dup(fd) if fd is not None else None
        path = str(self.path)
        try:
            for name in folders:
                if folder_fd is None:
                    break
                path = f"{path}/{name}"
                inner = enter(folder_fd, name, path, self.owners, make=make)
                os.close(folder_fd)
                folder_fd = inner
            yield folder_fd
        finally:
            if folder_fd is not None:
                os.close(folder_fd)

    def strangers_may_write(self) -> bool:
        """Report whether users outside `owners` can write to the open folder."""
        fd = self.open()
        return fd is not None and self.owners.strangers_may_write(os.fstat(fd).st_mode)

    def anybody_may_write(self) -> bool:
        """Report whether everybody on the machine can write to the open folder."""
        fd = self.open()
        return fd is not None and bool(os.fstat(fd).st_mode & stat.S_IWOTH)

    def shut_out(self) -> bool:
        """Remove everybody else's right to write; return whether that worked.

        It does not where a file system keeps no modes, or another of the owners created the folder.
        """
        fd = self.open()
        assert fd is not None  # the caller has opened it
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        with contextlib.suppress(PermissionError):
            # Rights are removed, none is added; set-id and sticky bits stay.
            os.fchmod(fd, mode & (self.owners.folder_mode | 0o7000))
        return not self.strangers_may_write()

    def _open(self, *, make: bool) -> None:
        try:
            # O_PATH: a parent need not be readable, only passable.
            parent = os.open(self.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if not make:
                return
            self.parent.mkdir(parents=True, exist_ok=True)
            parent = os.open(self.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except NotADirectoryError:
            if not make:
                return
            raise
        fd = None
        try:
            fd = self._open_in(parent, make=make)
        finally:
            if fd is None:
                os.close(parent)
        if fd is not None:
            self._open_fds |= {"parent": parent, "folder": fd}

    def _open_in(self, parent: int, *, make: bool) -> int | None:
        is_new = False
        status = look(parent, self.name)
        if status is None:
            if not make:
                return None
            # Another run may create it at this moment: what is there then is checked like any other.
            with contextlib.suppress(FileExistsError):
                host.mkdir(self.name, self._mode, dir_fd=parent)
                is_new = True
            status = os.stat(self.name, dir_fd=parent, follow_symlinks=False)
        try:
            self.owners.require_folder(status, str(self.path))
        except CkptError:
            if is_new:  # a server maps this user to another: remove the new folder, which is empty
                with contextlib.suppress(OSError):
                    host.rmdir(self.name, dir_fd=parent)
            raise
        fd = os.open(self.name, FOLDER, dir_fd=parent)
        try:
            # By the descriptor: the name may have been exchanged since the look.
            self.owners.require_folder(os.fstat(fd), str(self.path))
            if self._foreign is not None:
                self._foreign(self.path, names_in(fd))
        except BaseException as error:
            now, status = look(parent, self.name), os.fstat(fd)
            os.close(fd)
            if isinstance(error, StagingForeign) and (now is None or not os.path.samestat(now, status)):
                # It was being removed under another name, so its entries prove nothing.
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error
            raise
        return fd


class SealedStore(LocalStore):
    """A sealed folder, or a folder in one, as a store."""

    def __init__(self, home: SealedFolder, *inside: str) -> None:
        super().__init__(home.path.joinpath(*inside))
        self._home, self._inside = home, inside

    def list(self) -> dict[str, int]:
        """List the files: relative path -> size in bytes."""
        return {path: status.st_size for path, status in self.entries() if not path.endswith("/")}

    def entries(self) -> Sequence[tuple[str, os.stat_result]]:
        """Return (path, status) of every file and folder, sorted; names of folders end with a slash.

        Raises:
            StagingForeign: An entry is not a trusted user's.
            SourceUnreadable: There is no folder.
        """
        try:
            with self._home.below(self._inside) as fd:
                if fd is None:
                    raise SourceUnreadable(f"{self.url} does not exist", hint="check the path")
                return sorted(walk(fd, "", self.url, self._home.owners), key=lambda entry: entry[0])
        except OSError as error:
            raise unreadable(self.url, error) from error

    def is_there(self) -> bool:
        """Report whether the folder exists; raises `StagingForeign` for anything else under its name."""
        try:
            with self._home.below(self._inside) as fd:
                return fd is not None
        except OSError as error:
            raise unreadable(self.url, error) from error

    def size(self, path: str) -> int | None:
        """Return the size in bytes of a trusted user's file, or None."""
        status = self._look(path)
        return None if status is None or stat.S_ISDIR(status.st_mode) else status.st_size

    def stamp(self, path: str) -> str | None:
        """Return the size, times and inode as a text, or None when there is no such entry."""
        status = self._look(path)
        if status is None:
            return None
        times = f"modified {status.st_mtime_ns}, changed {status.st_ctime_ns}"
        return f"{status.st_size} bytes, {times}, inode {status.st_ino}"

    def joint(self, path: str, nbytes: int, *, alone: bool = False) -> Joint | None:
        """Open a file that several processes write ranges of, if it has no other hard links."""
        with self._at(path) as (fd, name):
            status = look(fd, name) if fd is not None else None
        if status is not None:  # it is written in place: another hard link would expose another user's file
            self._home.owners.require_only_name(status, f"{self.url}/{path}")
        return super().joint(path, nbytes, alone=alone)

    def put(self, path: str, data: bytes) -> None:
        """Write a small file, unless it holds the same already."""
        if self.size(path) != len(data) or self.read(path, 0, len(data)) != data:
            super().put(path, data)

    def remove(self, path: str) -> None:
        """Remove a trusted user's file; a missing file is no error."""
        # A descriptor that is kept open would refer to the removed file.
        self._forget(path)
        try:
            with self._at(path) as (fd, name):
                status = look(fd, name) if fd is not None else None
                if fd is None or status is None:
                    return
                self._home.owners.require_file(status, f"{self.url}/{path}")
                with contextlib.suppress(FileNotFoundError):
                    host.unlink(name, dir_fd=fd)
        except OSError as error:
            raise unwritable(f"{self.url}/{path}", error) from error

    def remove_all(self) -> None:
        """Remove the folder with everything in it."""
        self.close()
        *above, name = self._inside
        try:
            with self._home.below(tuple(above)) as fd:
                if fd is not None and look(fd, name) is not None:
                    remove_tree(fd, name, self.url, self._home.owners)
        except OSError as error:
            raise unwritable(self.url, error) from error

    def _look(self, path: str) -> os.stat_result | None:
        """Return the status of a trusted user's file, or of a folder; None when nothing is there."""
        try:
            with self._at(path) as (fd, name):
                status = look(fd, name) if fd is not None else None
        except OSError as error:
            raise unreadable(f"{self.url}/{path}", error) from error
        if status is not None and not stat.S_ISDIR(status.st_mode):
            self._home.owners.require_file(status, f"{self.url}/{path}")
        return status

    def _open_inside(self, path: str) -> int:
        path_text = f"{self.url}/{path}"
        try:
            with self._at(path) as (fd, name):
                status = look(fd, name) if fd is not None else None
                if fd is None or status is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                self._home.owners.require_file(status, path_text)
                # Neither through a link nor waiting for a FIFO that took the name since the look.
                opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
        except OSError as error:
            raise unreadable(path_text, error) from error
        try:
            # By the descriptor: the name may have been exchanged since the look.
            self._home.owners.require_only_name(os.fstat(opened), path_text)
        except BaseException:
            os.close(opened)
            raise
        return opened

    def _folder_of(self, path: str) -> int:
        *above, _ = inner_path(path, origin=self.url).split("/")
        with self._home.below((*self._inside, *above), make=True) as fd:
            assert fd is not None  # it was made
            return os.dup(fd)

    @contextlib.contextmanager
    def _at(self, path: str) -> Iterator[tuple[int | None, str]]:
        *above, name = inner_path(path, origin=self.url).split("/")
        with self._home.below((*self._inside, *above)) as fd:
            yield fd, name


def names_in(fd: int) -> Names:
    """Return the names in a folder, with the status of each."""
    statuses = ((name, look(fd, name)) for name in os.listdir(fd))
    return {name: status for name, status in statuses if status is not None}


def refuse_odd(path: Path, odd: Sequence[str]) -> None:
    """Raise `StagingForeign` if a folder has names that ckptcore does not create."""
    if odd:
        names = ", ".join(odd[:5])
        raise untrusted_entry(str(path), f"it holds files that ckptcore does not create (got {names!r})")
