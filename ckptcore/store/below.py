"""Open a folder below a root so that no link on the way leads elsewhere.

Each call looks a path up again, and another process may exchange any part of it meanwhile. An open descriptor
keeps naming the same folder, so names in it are used relative to the descriptor.
"""

from __future__ import annotations

import errno
import os
import stat

from ckptcore.errors import UsageError
from ckptcore.store.file_status import of_stat

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_above(root: str, uri: str) -> int:
    """Open the parent folder of a place below a watched root; the caller closes the descriptor.

    Raises:
        UsageError: The place is not below the root by its path, or a link is on the way.
    """
    parent, name = uri.rpartition("/")[::2]
    parent_fd = open_below(root, parent or "/", uri)
    try:
        status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    except OSError as error:
        os.close(parent_fd)
        raise UsageError(f"cannot delete {uri}: {error.strerror}") from error
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)) or name in ("", ".", ".."):
        os.close(parent_fd)
        raise UsageError(
            f"cannot delete {uri}: must be a file or a folder (got a {of_stat(status).kind.value})"
        )
    return parent_fd


def open_below(root: str, folder: str, uri: str) -> int:
    """Open a folder that is a watched root or below it; ``uri`` is the place to delete, for messages."""
    if os.path.realpath(root) != root:
        raise UsageError(
            f"cannot delete {uri}: the watched root {root} is reached through a link",
            hint=f"watch {os.path.realpath(root)} instead",
        )
    base = root.rstrip("/") + "/"
    parts = f"{folder}/".removeprefix(base).rstrip("/").split("/") if folder != root else []
    if not f"{folder}/".startswith(base) or any(part in ("", ".", "..") for part in parts):
        raise UsageError(f"cannot delete {uri}: it is not below the watched root {root}")
    try:
        fd, path = os.open(root, FOLDER), root
    except OSError as error:
        raise UsageError(f"cannot delete {uri}: {root}: {error.strerror}") from error
    try:
        for part in parts:
            path = f"{path.rstrip('/')}/{part}"
            below = open_folder(part, fd, path)
            os.close(fd)
            fd = below
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_folder(name: str, parent_fd: int, path: str) -> int:
    """Open a folder in another, unless it is a link; ``path`` is for the message. Raises `UsageError`."""
    try:
        return os.open(name, FOLDER, dir_fd=parent_fd)
    except OSError as error:
        why = "not a folder, or a link" if error.errno in (errno.ELOOP, errno.ENOTDIR) else error.strerror
        raise UsageError(f"cannot delete below {path}: {why}") from error
