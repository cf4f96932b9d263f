"""List everything at a place, of any kind, with what changes when each entry changes.

For deletions and for comparing identities: no link is followed unless requested, nothing is skipped, and
an entry that cannot be examined is an error. Objects of a remote store are files with a version.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from enum import StrEnum
from typing import Any

from ckptcore.errors import SourceChanged, SourceUnreadable, UsageError
from ckptcore.store import local_path
from ckptcore.store.listing import MAX_FILES, everything_at
from ckptcore.store.place import mounts
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.merged_url import is_merged

MAX_DEPTH = 128  # of folders in folders; no checkpoint is deeper
_UNKNOWN = "unknown"  # the version in a survey of an object whose store reports none


class NameKind(StrEnum):
    """The kind of thing that a name in a folder refers to."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    FIFO = "FIFO"
    SOCKET = "socket"
    DEVICE = "device"


_KINDS = {
    stat.S_IFREG: NameKind.FILE,
    stat.S_IFDIR: NameKind.FOLDER,
    stat.S_IFLNK: NameKind.LINK,
    stat.S_IFIFO: NameKind.FIFO,
    stat.S_IFSOCK: NameKind.SOCKET,
}


@dataclass(frozen=True, slots=True)
class Thing:
    """One name. Attributes that the store does not have are None.

    Attributes:
        kind: Kind of the thing.
        nbytes: Size.
        version: The target of a link; the version of an object's content; else "".
        mtime: ns since 1970.
        ctime: ns since 1970.
        device: With ``inode``, the identity of the file on this machine.
        inode: With ``device``, the identity of the file on this machine.
        links: How many names the file has.
    """

    kind: NameKind
    nbytes: int
    version: str = ""
    mtime: int | None = None
    ctime: int | None = None
    device: int | None = None
    inode: int | None = None
    links: int | None = None

    def as_list(self) -> list[Any]:
        """Return the JSON form."""
        return list(astuple(self))

    @classmethod
    def of_list(cls, form: list[Any]) -> Thing:
        """Return the thing of `as_list`'s form; raises `ValueError`, `TypeError`."""
        return cls(NameKind(form[0]), *form[1:])


def contents(url: str, *, follow: bool = False) -> dict[str, Thing]:
    """Return everything at a place by its relative name, sorted; names of folders end with a slash.

    For a place that is one file, return that file under the empty name.

    Args:
        url: The place.
        follow: List a link to a file as that file, as readers see it.

    Raises:
        SourceUnreadable: A name cannot be examined.
        StorageTrouble: The store failed.
        UsageError: A deletion would be unsafe: another file system, a mount, an object without a version.
    """
    if is_merged(url):
        raise UsageError(f"cannot list {url} as one place", hint="name each of its folders alone")
    path = local_path(url)
    if path is None:
        return _remote_things(url)
    found: dict[str, Thing] = {}
    for name, thing in _local_things(os.path.abspath(path), follow):
        found[name] = thing
        if len(found) > MAX_FILES:
            raise UsageError(f"cannot list {url}: it holds more than {MAX_FILES} names")
    return dict(sorted(found.items()))


def thing_of(seen: os.stat_result, target: str = "") -> Thing:
    """Return the thing of an ``lstat`` result; ``target`` is a link's target."""
    kind = _KINDS.get(stat.S_IFMT(seen.st_mode), NameKind.DEVICE)
    if kind is NameKind.FOLDER:  # its times and size change with its entries, which are listed separately
        return Thing(kind, 0, device=seen.st_dev, inode=seen.st_ino)
    return Thing(
        kind,
        seen.st_size,
        target,
        seen.st_mtime_ns,
        seen.st_ctime_ns,
        seen.st_dev,
        seen.st_ino,
        seen.st_nlink,
    )


def same(one: Thing, other: Thing, *, status: bool = True) -> bool:
    """Report whether a name still refers to the same thing with the same content.

    Args:
        one: The thing at one time.
        other: The thing at another time.
        status: Count a change of status alone (ctime) as a difference.
    """
    alike = (one.kind, one.nbytes, one.version, one.mtime, one.inode) == (
        other.kind,
        other.nbytes,
        other.version,
        other.mtime,
        other.inode,
    )
    return alike and (not status or one.ctime == other.ctime)


def difference(before: Mapping[str, Thing], now: Mapping[str, Thing], *, status: bool = True) -> str | None:
    """Return the first name that was added, removed or written in between, or None."""
    for name in sorted(before.keys() | now.keys()):
        was, seen = before.get(name), now.get(name)
        if was is None or seen is None or not same(was, seen, status=status):
            return name
    return None


def require_no_mount(path: str) -> None:
    """Raise `UsageError` when something is mounted at a path or below it.

    A bind mount of the same file system has the same device number: its files would pass for this folder's.
    """
    above = os.path.realpath(path)
    for _, _, point in mounts():
        if point == above or point.startswith(above.rstrip("/") + "/"):
            raise UsageError(
                f"cannot delete {path}: another folder is mounted at {point}", hint="unmount it first"
            )


def _remote_things(url: str) -> dict[str, Thing]:
    found = everything_at(url)
    for name, seen in found.items():
        if seen.stamp == _UNKNOWN:
            raise UsageError(f"cannot prove that {url}/{name} is unchanged: the store reports no version")
    # The version may be a digest: when an object is rewritten with equal bytes, only the time changes.
    return {
        name: Thing(NameKind.FILE, seen.nbytes, seen.stamp, None if seen.at is None else round(seen.at * 1e9))
        for name, seen in found.items()
    }


def _local_things(root: str, follow: bool) -> Iterator[tuple[str, Thing]]:
    try:
        top = os.stat(root) if follow else os.lstat(root)
    except OSError as error:
        raise SourceUnreadable(f"cannot look at {root}: {error.strerror}") from error
    if not stat.S_ISDIR(top.st_mode):
        yield "", _thing(root, top)
        return
    todo = [("", 0)]
    while todo:
        folder, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise UsageError(f"cannot list {root}/{folder}: more than {MAX_DEPTH} nested folders")
        for name in _folder_names(f"{root}/{folder}"):
            path, thing = f"{root}/{folder}{name}", None
            try:
                seen = os.lstat(path)
                if follow and stat.S_ISLNK(seen.st_mode):
                    thing = _followed(path)
                thing = thing or _thing(path, seen)
            except FileNotFoundError as error:
                raise SourceChanged(f"{path} was removed while {root} was listed") from error
            except OSError as error:
                raise SourceUnreadable(f"cannot look at {path}: {error.strerror}") from error
            if thing.device != top.st_dev and not follow:
                raise UsageError(f"cannot delete {root}: {path} is on another file system")
            if thing.kind is NameKind.FOLDER:
                todo.append((f"{folder}{name}/", depth + 1))
                yield f"{folder}{name}/", thing
            else:
                yield f"{folder}{name}", thing


def _folder_names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise SourceUnreadable(f"cannot list {folder}: {error.strerror}") from error


def _thing(path: str, seen: os.stat_result) -> Thing:
    return thing_of(seen, os.readlink(path) if stat.S_ISLNK(seen.st_mode) else "")


def _followed(path: str) -> Thing | None:
    """Return the target of a link to a file. Readers do not list folders behind links, so those give None."""
    try:
        seen = os.stat(path)
    except OSError:
        return None  # a dangling link: it is listed as a link
    return None if stat.S_ISDIR(seen.st_mode) else thing_of(seen)
