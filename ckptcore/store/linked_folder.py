"""Find the folder that another one is made of, by links to each of its files.

A link that leaves a checkpoint's folder is refused: whoever made the checkpoint would choose which file of
this machine its reader copies into an output. Two kinds of folders are read through links nevertheless. A
snapshot in the Hugging Face cache has links into the blobs of its own repository. And a folder that has
nothing but links, each to a file of the same name in one other folder, is that other folder by another name:
no file of it tells the reader what to take from there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from ckptcore.store.owners import Owners

_MAX_FILES = 1 << 20


def is_inside(real: str, folder: str) -> bool:
    """Report whether a real path is in a folder, or in the blobs of the hub's cache that it is a snapshot of.

    Args:
        real: The real path of a file.
        folder: The real path of the folder.
    """
    if folder == os.sep or real.startswith(folder + os.sep):
        return True
    # The checkpoint may be a folder inside of a snapshot.
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
        for count, (path, entry) in enumerate(_files(folder, "")):
            if count >= _MAX_FILES or not entry.is_symlink():
                return None
            target = os.path.normpath(os.path.join(os.path.dirname(entry.path), os.readlink(entry.path)))
            above = target.removesuffix(os.sep + path)
            if not above or above == target:  # in the root of the file system, or under another name
                return None
            above = os.path.realpath(above)
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


def _files(folder: str, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield (relative path, entry) of everything below a folder but its folders, which are not links."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, f"{prefix}{entry.name}{os.sep}")
            else:
                yield prefix + entry.name, entry
