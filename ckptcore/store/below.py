"""Below: a folder below a root, opened so that no link on the way leads anywhere else.

Paths are looked up again with every call, and any part of them may be exchanged meanwhile. What was opened
stays what it is: names in it are used relative to its descriptor.
"""

from __future__ import annotations

import errno
import os
import stat

from ckptcore.errors import UsageError
from ckptcore.store.contents import thing_of

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_above(root: str, uri: str) -> int:
    """A descriptor of the folder that a place below a watched root lies in; to be closed.

    Raises `UsageError` unless the place really lies there: by its parts, and without a link on the way.
    """
    parent, name = uri.rpartition("/")[::2]
    at = open_below(root, parent or "/", uri)
    try:
        seen = os.stat(name, dir_fd=at, follow_symlinks=False)
    except OSError as error:
        os.close(at)
        raise UsageError(f"cannot delete {uri}: {error.strerror}") from error
    if not (stat.S_ISDIR(seen.st_mode) or stat.S_ISREG(seen.st_mode)) or name in ("", ".", ".."):
        os.close(at)
        raise UsageError(f"cannot delete {uri}: it is a {thing_of(seen).kind.value}, and no checkpoint")
    return at


def open_below(root: str, folder: str, uri: str) -> int:
    """A descriptor of a folder that is, or lies below, a watched root. uri: what for."""
    if os.path.realpath(root) != root:
        raise UsageError(
            f"cannot delete {uri}: the watched root {root} is reached through a link",
            hint=f"watch {os.path.realpath(root)} instead",
        )
    base = root.rstrip("/") + "/"
    parts = f"{folder}/".removeprefix(base).rstrip("/").split("/") if folder != root else []
    if not f"{folder}/".startswith(base) or any(part in ("", ".", "..") for part in parts):
        raise UsageError(f"cannot delete {uri}: it does not lie below the watched root {root}")
    try:
        at, here = os.open(root, FOLDER), root
    except OSError as error:
        raise UsageError(f"cannot delete {uri}: {root}: {error.strerror}") from error
    try:
        for part in parts:
            here = f"{here.rstrip('/')}/{part}"
            below = open_folder(part, at, here)
            os.close(at)
            at = below
    except BaseException:
        os.close(at)
        raise
    return at


def open_folder(name: str, at: int, path: str) -> int:
    """A descriptor of a folder in another, which is no link. path: what to call it. Raises `UsageError`."""
    try:
        return os.open(name, FOLDER, dir_fd=at)
    except OSError as error:
        why = "a link, or no folder" if error.errno in (errno.ELOOP, errno.ENOTDIR) else error.strerror
        raise UsageError(f"cannot delete below {path}: it is {why}") from error
