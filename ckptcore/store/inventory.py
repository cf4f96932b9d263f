"""Inventory: what exactly lies at a place, so that it can be known again?

Links are not followed, nothing is opened. `ckptcore.store.listing` sees what readers see; an inventory sees
everything that would be lost if the place were replaced.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptcore.errors import SourceUnreadable, StorageTrouble, UsageError
from ckptcore.store import local_path
from ckptcore.store.place import mounts

FILE, LINK, FOLDER, SPECIAL, MOUNT = "file", "link", "folder", "special", "mount"
_TIMES = ("LastModified", "mtime", "updated", "last_modified", "created")
_VERSIONS = ("ETag", "etag", "md5Hash", *_TIMES)
_SPECIAL = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One name. kind: FILE, LINK, FOLDER, SPECIAL or MOUNT. nbytes: of a file. stamp: changes when it is
    written or replaced; of a special file what it is, of a folder "". inode: (device, inode) on this machine.
    """

    kind: str
    nbytes: int
    stamp: str
    inode: tuple[int, int] | None = None


Inventory = Mapping[str, Entry]  # relative path -> entry, sorted; "": what bears the place's own name


def take(url: str) -> dict[str, Entry]:
    """Everything at a place; empty where nothing is. An object store's folder has no entry of its own.

    Raises `SourceUnreadable`, `StorageTrouble`, `UsageError`.
    """
    path = local_path(url)
    found = _local(os.fspath(path)) if path is not None else _remote(url)
    return dict(sorted(found))


def look(path: str) -> Entry | None:
    """What bears this name on this machine, its content left aside; None where nothing does."""
    try:
        seen = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    mounted = not stat.S_ISLNK(seen.st_mode) and (
        os.path.ismount(path) or os.path.realpath(path) in {point for _, _, point in mounts()}
    )
    return _entry(path, seen, mounted=mounted)


def differs(before: Inventory, now: Inventory) -> str | None:
    """The first name that came, went or was written in between, or None. Names are relative."""
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            return name
    return None


def _local(root: str) -> Iterator[tuple[str, Entry]]:
    try:
        top = look(root)
    except OSError as error:
        raise SourceUnreadable(f"cannot look at {root}: {error.strerror}") from error
    if top is None or top.inode is None:
        return
    yield "", top
    points, real = {point for _, _, point in mounts()}, os.path.realpath(root)
    todo = [""] if top.kind == FOLDER else []
    while todo:
        folder = todo.pop()
        try:
            entries = list(os.scandir(os.path.join(root, folder)))
            for each in entries:
                name = os.path.join(folder, each.name)
                seen = each.stat(follow_symlinks=False)
                if stat.S_ISDIR(seen.st_mode) and seen.st_dev == top.inode[0]:
                    todo.append(name)
                mounted = seen.st_dev != top.inode[0] or os.path.join(real, name) in points
                yield name, _entry(os.path.join(root, name), seen, mounted=mounted)
        except OSError as error:
            raise SourceUnreadable(f"cannot list {os.path.join(root, folder)}: {error.strerror}") from error


def _entry(path: str, seen: os.stat_result, *, mounted: bool) -> Entry:
    inode = (seen.st_dev, seen.st_ino)
    if mounted:
        return Entry(MOUNT, 0, "a mount point", inode)
    if stat.S_ISDIR(seen.st_mode):
        return Entry(FOLDER, 0, "", inode)
    if stat.S_ISREG(seen.st_mode):
        return Entry(FILE, seen.st_size, str(seen.st_mtime_ns), inode)
    if stat.S_ISLNK(seen.st_mode):
        return Entry(LINK, 0, os.readlink(path), inode)
    return Entry(SPECIAL, 0, _SPECIAL.get(stat.S_IFMT(seen.st_mode), "a special file"), inode)


def _remote(url: str) -> Iterator[tuple[str, Entry]]:
    import fsspec

    try:
        fs, root = fsspec.url_to_fs(url, use_listings_cache=False)
        fs.invalidate_cache()
        found: dict[str, Any] = fs.find(root.rstrip("/"), detail=True)
    except (ValueError, ImportError) as error:
        raise UsageError(f"cannot open {url!r}: {error}") from error
    except FileNotFoundError:
        return
    except PermissionError as error:
        raise SourceUnreadable(f"cannot list {url}: {error}") from error
    except Exception as error:
        raise StorageTrouble(f"cannot list {url}: {error or type(error).__name__}") from error
    root = root.rstrip("/")
    for name, info in found.items():
        if info.get("type", "file") != "file" or name.endswith("/"):
            continue  # the empty object that some tools leave in a folder's name
        version = next((info[k] for k in _VERSIONS if info.get(k)), "unknown")
        # Exactly as it is called: "out//x" is another object than "out/x".
        inner = name[len(root) + 1 :] if name != root else ""
        yield inner, Entry(FILE, int(info["size"] or 0), str(version))
