"""Mount the files of an export as a folder (FUSE), computed from the checkpoint when they are read.

Read-only. ``python -m ckptcore.page.mounted_folder`` is what `ckptcore mount` becomes; its request is in the
environment. libfuse is called through mfusepy (https://github.com/mxmlnkn/mfusepy).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptcore.conversion.virtual_folder import VirtualFolder
from ckptcore.errors import CkptError, MissingDependency, UsageError
from ckptcore.page.virtual_program import open_reported, run
from ckptcore.planning.request import Request, Settings
from ckptcore.store import local_path
from ckptcore.utils import terminal
from ckptcore.utils.extras import needed

REQUEST = "CKPTCORE_MOUNTED"
_BLOCK = 4096
_CACHED_S = 3600  # the kernel keeps names, sizes and bytes: none changes while it is mounted
_OPTIONS: Mapping[str, Any] = {
    **dict.fromkeys(("ro", "nodev", "nosuid", "noexec", "kernel_cache"), True),
    **dict.fromkeys(("entry_timeout", "attr_timeout"), _CACHED_S),
}
_ENDED = 8  # what libfuse's main function returns after a signal, too (lib/helper.c)


class MountedFolder:
    """The callbacks of one mounted folder; several threads call them. Errors are those of `OSError`.

    Args:
        folder: The files.
        line: What is printed once the files can be read.
        place: Status of the folder that they are mounted at: their owner and times.
    """

    use_ns = True  # times in nanoseconds

    def __init__(self, folder: VirtualFolder, line: str, place: os.stat_result) -> None:
        self._folder, self._line = folder, line
        self._working_directory = os.open(".", os.O_RDONLY)
        self.is_mounted = False
        owner = {"st_uid": place.st_uid, "st_gid": place.st_gid}
        times = dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), place.st_mtime_ns)
        self._attributes: dict[str, dict[str, int]] = {}
        self._names: dict[str, list[str]] = {"/": []}
        for path, file in folder.files.items():
            blocks = -(-file.nbytes // _BLOCK) * (_BLOCK // 512)
            sized = {"st_size": file.nbytes, "st_blocks": blocks, "st_blksize": _BLOCK}
            mode = {"st_mode": stat.S_IFREG | 0o444, "st_nlink": 1}
            self._attributes[f"/{path}"] = {**mode, **sized, **owner, **times}
            self._add(f"/{path}")
        for path in self._names:
            mode = {"st_mode": stat.S_IFDIR | 0o555, "st_nlink": 2}
            self._attributes[path] = {**mode, **owner, **times}

    def _add(self, path: str) -> None:
        """Add a file, and the folders above it."""
        above, _, name = path.rpartition("/")
        above = above or "/"
        is_new = above not in self._names
        self._names.setdefault(above, []).append(name)
        if is_new:
            self._add(above)

    def init(self, _path: str) -> None:
        """Say that the files can be read: the kernel asks for this first."""
        os.fchdir(self._working_directory)  # libfuse has changed to "/", and the source may be relative
        self.is_mounted = True
        terminal.line(self._line)

    def getattr(self, path: str, _handle: int | None = None) -> Mapping[str, int]:
        """Return the attributes of a file or folder."""
        try:
            return self._attributes[path]
        except KeyError:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT)) from None

    def readdir(self, path: str, _handle: int) -> list[str]:
        """Return the names in a folder."""
        return [".", "..", *self._names[path]]

    def open(self, _path: str, flags: int) -> int:
        """Open a file for reading. The kernel has looked for it before."""
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return 0

    def read(self, path: str, nbytes: int, start: int, _handle: int) -> bytes:
        """Return bytes of a file. An error of the source is EIO, and a line on stderr."""
        try:
            return self._folder.read(path[1:], start, nbytes)
        except CkptError as error:
            terminal.line(f"{error.code}: {error.message}", err=True)
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from error

    def statfs(self, _path: str) -> Mapping[str, int]:
        """Return the size of all files; no byte is free."""
        nbytes = sum(file.nbytes for file in self._folder.files.values())
        count = len(self._attributes)
        return {"f_bsize": _BLOCK, "f_frsize": _BLOCK, "f_blocks": -(-nbytes // _BLOCK), "f_files": count}


def require_mountable(directory: str, source: str) -> Path:
    """Return the folder to mount at.

    Raises:
        UsageError: It is no empty folder of this machine, or is in the source.
    """
    path, source_path = local_path(directory), local_path(source)
    if path is None:
        raise UsageError(f"cannot mount at {directory}", hint="name an empty folder of this machine")
    try:
        entries = next(iter(path.iterdir()), None)
    except OSError as error:
        hint = {
            errno.ENOENT: f"make it first: mkdir {path}",
            errno.ENOTCONN: f"what mounted it was killed: fusermount3 -u {path}",
        }.get(error.errno or 0, "name an empty folder")
        raise UsageError(f"cannot mount at {path}: {error.strerror}", hint=hint) from error
    if entries is not None:
        raise UsageError(f"cannot mount at {path}: it is not empty", hint="name an empty folder")
    if source_path is not None and path.resolve().is_relative_to(source_path.resolve()):
        raise UsageError(f"cannot mount at {path}: it is in the source", hint="name a folder elsewhere")
    return path


def mount(request: Request, settings: Settings) -> None:
    """Mount an export until SIGTERM, SIGINT, or until it is unmounted.

    Args:
        request: The export. Its destination is the folder to mount at.
        settings: Memory and threads.

    Raises:
        CkptError: What `open_virtual` raises, or the folder cannot be mounted.
    """
    path = require_mountable(request.destination, request.source)
    fuse = _fuse()
    with open_reported(request, settings) as folder:
        nbytes = sum(file.nbytes for file in folder.files.values())
        line = f"mounted {len(folder.files)} files, {nbytes} bytes, at {path}"
        callbacks = MountedFolder(folder, line, path.stat())
        try:
            # An absolute path: libfuse would take a name that begins with "-" for its options.
            fuse.FUSE(callbacks, str(path.absolute()), foreground=True, fsname="ckptcore", **_OPTIONS)
        except RuntimeError as error:
            if not (callbacks.is_mounted and error.args == (_ENDED,)):
                raise UsageError(
                    f"cannot mount at {path}",
                    hint="read what libfuse printed; a container needs /dev/fuse and CAP_SYS_ADMIN for it",
                ) from error


def _fuse() -> Any:
    """Return the module mfusepy, whose import loads libfuse."""
    with needed("mount", "mount a folder"):
        try:
            import mfusepy
        except OSError as error:
            raise MissingDependency(
                f"cannot mount a folder: {error}", hint="install libfuse: apt-get install fuse3"
            ) from error
    return mfusepy


if __name__ == "__main__":
    run(REQUEST, lambda request, settings, _: mount(request, settings))
