"""Record what is at a place, so that a later look can detect any change.

Links are not followed, and nothing is opened. `ckptcore.store.listing` lists what readers see; an inventory
lists everything that replacing the place would delete.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptcore.errors import SourceUnreadable, StorageTrouble, UsageError
from ckptcore.store import YOUNG, is_s3, local_path
from ckptcore.store.folder_tree import FOLDER as OPEN_FOLDER
from ckptcore.store.folder_tree import Spot, closing_fd
from ckptcore.store.local import settled_ctime
from ckptcore.store.place import mounts
from ckptcore.utils.dataclass import dataclass

if TYPE_CHECKING:
    from ckptcore.store.objects import ObjectSeen

FILE, LINK, FOLDER, SPECIAL, MOUNT = "file", "link", "folder", "special", "mount"
NO_ETAG = "unknown"  # stamp of an object whose store has no ETags
MAX_DEPTH = 128  # of folders in folders; no checkpoint is deeper
_WAITS_S = (0.03, 2.2)  # until file times advance: on most file systems, and on older ones
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
    """One name.

    Attributes:
        kind: FILE, LINK, FOLDER, SPECIAL or MOUNT.
        nbytes: Size of a file.
        stamp: Changes when it is written or replaced; the kind of a special file; "" for a folder.
        inode: (device, inode) on this machine.
        ctime: When the status of a file or link changed, ns since 1970. It is not part of the identity, but
            a rewrite in place can restore the mtime and not the ctime. None where there is no such time.
    """

    kind: str
    nbytes: int
    stamp: str
    inode: tuple[int, int] | None = None
    ctime: int | None = None


Inventory = Mapping[str, Entry]  # relative path -> entry, sorted; "" is the place itself


def take(url: str) -> dict[str, Entry]:
    """Return everything at a place; empty where nothing is. An object store's folder has no own entry.

    Raises:
        SourceUnreadable: A name cannot be examined.
        StorageTrouble: The store failed.
        UsageError: Folders are nested too deeply, or the URL cannot be opened.
    """
    path = local_path(url)
    if path is None:
        return dict(sorted(_remote(url)))
    parent, name = os.path.split(os.fspath(path))
    try:
        at = os.open(parent or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise SourceUnreadable(f"cannot look at {url}: {error.strerror}") from error
    with closing_fd(at):
        return take_at(Spot(at, name or ".", os.fspath(path)))


def take_settled(url: str) -> dict[str, Entry]:
    """Call `take`, and wait a little if needed, until every ctime is old enough to reveal a later write."""
    found: dict[str, Entry] = {}
    for wait_s in (*_WAITS_S, 0.0):
        now, found = time.time_ns(), take(url)
        if all(e.ctime is None or settled_ctime(e.ctime, now) != YOUNG for e in found.values()):
            break
        time.sleep(wait_s)
    return found


def take_at(spot: Spot) -> dict[str, Entry]:
    """Return the inventory of a name in an open folder; no link is followed on the way down."""
    return dict(sorted(_local_entries(spot)))


def look(path: str) -> Entry | None:
    """Return the entry of a name on this machine, without its content; None where nothing has the name."""
    parent, name = os.path.split(path)
    try:
        at = os.open(parent or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with closing_fd(at):
        return look_at(Spot(at, name or ".", path))


def look_at(spot: Spot) -> Entry | None:
    """Return the entry of a name in an open folder; None where nothing has the name."""
    seen = spot.look()
    if seen is None:
        return None
    here = _path_of(spot.at)
    mounted = not stat.S_ISLNK(seen.st_mode) and (
        seen.st_dev != os.fstat(spot.at).st_dev
        or os.path.normpath(os.path.join(here, spot.name)) in {point for _, _, point in mounts()}
    )
    return entry_at(spot, seen, mounted=mounted)


def differs(before: Inventory, now: Inventory) -> str | None:
    """Return the first name that was added, removed, written or touched in between, or None."""
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            return name
    return None


def same(was: Entry | None, now: Entry | None, *, status: bool = True) -> bool:
    """Report whether a name still refers to the same thing with the same content.

    Args:
        was: The entry at one time.
        now: The entry at another time.
        status: Count a change of status alone (ctime) as a difference.
    """
    if was is None or now is None or status:
        return was == now
    return replace(was, ctime=now.ctime) == now


def entry_at(spot: Spot, seen: os.stat_result, *, mounted: bool = False) -> Entry:
    """Return the entry of a status result."""
    inode = (seen.st_dev, seen.st_ino)
    if mounted:
        return Entry(MOUNT, 0, "a mount point", inode)
    if stat.S_ISDIR(seen.st_mode):  # its times change with its entries, which are recorded separately
        return Entry(FOLDER, 0, "", inode)
    if stat.S_ISREG(seen.st_mode):
        return Entry(FILE, seen.st_size, str(seen.st_mtime_ns), inode, seen.st_ctime_ns)
    if stat.S_ISLNK(seen.st_mode):
        return Entry(LINK, 0, os.readlink(spot.name, dir_fd=spot.at), inode, seen.st_ctime_ns)
    return Entry(SPECIAL, 0, _SPECIAL.get(stat.S_IFMT(seen.st_mode), "a special file"), inode)


def _local_entries(spot: Spot) -> Iterator[tuple[str, Entry]]:
    try:
        top = look_at(spot)
    except OSError as error:
        raise SourceUnreadable(f"cannot look at {spot.path}: {error.strerror}") from error
    if top is None:
        return
    yield "", top
    if top.kind != FOLDER:
        return
    points = {point for _, _, point in mounts()}
    real = os.path.normpath(os.path.join(_path_of(spot.at), spot.name))
    yield from _entries_below(spot, top, "", real, points, 0)


def _entries_below(
    folder: Spot, entry: Entry, prefix: str, real: str, points: Collection[str], depth: int
) -> Iterator[tuple[str, Entry]]:
    """Yield (name, entry) of everything in a folder, given its own entry and its path without links."""
    if depth > MAX_DEPTH:
        raise UsageError(f"cannot list {folder.path}: more than {MAX_DEPTH} nested folders")
    try:
        below = os.open(folder.name, OPEN_FOLDER, dir_fd=folder.at)
    except OSError as error:
        raise SourceUnreadable(f"cannot list {folder.path}: {error.strerror}") from error
    with closing_fd(below):
        try:
            here = os.fstat(below)
            if (here.st_dev, here.st_ino) != entry.inode:
                raise SourceUnreadable(f"cannot list {folder.path}: it was replaced meanwhile")
            for each in os.scandir(below):
                seen = each.stat(follow_symlinks=False)
                spot = Spot(below, each.name, f"{folder.path}/{each.name}")
                mounted = seen.st_dev != here.st_dev or f"{real.rstrip('/')}/{each.name}" in points
                found = entry_at(spot, seen, mounted=mounted)
                yield prefix + each.name, found
                if found.kind == FOLDER:
                    yield from _entries_below(
                        spot,
                        found,
                        f"{prefix}{each.name}/",
                        f"{real.rstrip('/')}/{each.name}",
                        points,
                        depth + 1,
                    )
        except OSError as error:
            raise SourceUnreadable(f"cannot list {folder.path}: {error.strerror}") from error


def _path_of(at: int) -> str:
    """Return the current path of an open folder, without links; "" where the system does not report it."""
    try:
        return os.readlink(f"/proc/self/fd/{at}")
    except OSError:
        return ""


def of_object(seen: ObjectSeen) -> Entry:
    """Return the entry of an object."""
    return Entry(FILE, seen.nbytes, seen.etag or NO_ETAG)


def _s3(url: str) -> Iterator[tuple[str, Entry]]:
    from ckptcore.store.objects.shared_clients import client_of, key_of

    client, key = client_of(url), key_of(url)
    prefix = f"{key}/" if key else ""

    def exact() -> list[ObjectSeen]:
        found = client.head(key) if key else None
        return [] if found is None else [found]

    def below() -> list[ObjectSeen]:
        return list(client.list(prefix))

    # Both at once: neither depends on the other's answer.
    itself, inner = client.each(lambda look: look(), (exact, below))
    for seen in itself:
        yield "", of_object(seen)
    for seen in inner:
        if not seen.key.endswith("/"):  # an empty object that some tools create as a folder marker
            yield seen.key[len(prefix) :], of_object(seen)


def _remote(url: str) -> Iterator[tuple[str, Entry]]:
    if is_s3(url):
        yield from _s3(url)
        return
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
            continue  # an empty object that some tools create as a folder marker
        version = next((info[k] for k in _VERSIONS if info.get(k)), NO_ETAG)
        # The exact name: "out//x" and "out/x" are different objects.
        inner = name[len(root) + 1 :] if name != root else ""
        yield inner, Entry(FILE, int(info["size"] or 0), str(version))
