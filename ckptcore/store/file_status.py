"""Hold what one look at a name shows: what it is, its size, and what changes when it is written.

A file of this machine has its times and its inode; an object of a store has a version of its content, as a
rule its ETag, and a time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from operator import attrgetter
from typing import Any

from ckptcore.utils.foreign_text import InvalidText, parse_time

NO_VERSION = "unknown"  # of an object whose store reports none
YOUNG = -1  # a ctime that is too recent to be proof: a later write may still get the same one
# Times advance by a tick of the kernel, 10 ms at most; on FAT and older file systems by up to 2 s.
_FINE_NS, _COARSE_NS, _ROUND_NS = 20_000_000, 2_100_000_000, 10_000_000
_SECOND_NS = 10**9
# Keys of the version and of the time of a file in what fsspec's file systems report.
_VERSIONS = ("ETag", "etag", "md5Hash", "blob_id")
_TIMES = ("LastModified", "mtime", "updated", "last_modified", "created")


class NameKind(StrEnum):
    """The kind of thing that a name in a folder refers to."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    FIFO = "FIFO"
    SOCKET = "socket"
    DEVICE = "device"
    MOUNT = "mount point"


_CONTENT = attrgetter("kind", "nbytes", "version", "mtime", "inode")
_KINDS = {
    stat.S_IFREG: NameKind.FILE,
    stat.S_IFDIR: NameKind.FOLDER,
    stat.S_IFLNK: NameKind.LINK,
    stat.S_IFIFO: NameKind.FIFO,
    stat.S_IFSOCK: NameKind.SOCKET,
}


@dataclass(frozen=True, slots=True)
class FileStatus:
    """One name at one moment. Attributes that its store does not have are None.

    Attributes:
        kind: What it is.
        nbytes: Size, bytes.
        version: The target of a link; the version of an object's content, or `NO_VERSION`; else "".
        mtime: When its content last changed, ns since 1970.
        ctime: When its status last changed, by a write, a chmod or a link, ns since 1970.
        device: With ``inode``, the identity of the file on this machine.
        inode: With ``device``, the identity of the file on this machine.
        links: How many names the file has.
        looked_at: Just before this was asked, ns since 1970.
    """

    kind: NameKind
    nbytes: int = 0
    version: str = ""
    mtime: int | None = None
    ctime: int | None = None
    device: int | None = None
    inode: int | None = None
    links: int | None = None
    looked_at: int | None = field(default=None, compare=False)

    @property
    def identity(self) -> tuple[int, int] | None:
        """(device, inode) on this machine."""
        return None if self.device is None or self.inode is None else (self.device, self.inode)

    @property
    def stamp(self) -> str:
        """A text that changes when the file is rewritten. It has no ctime, which chmod changes, too."""
        if self.inode is not None:
            return f"{self.nbytes} bytes, modified {self.mtime}, inode {self.inode}"
        has_time = self.version == NO_VERSION and self.mtime is not None
        return f"{self.nbytes} bytes, version {self.mtime if has_time else self.version}"

    @property
    def settled_ctime(self) -> int | None:
        """The ctime, or `YOUNG` while a later write could get the same one; None without a ctime.

        The ctime may come from another machine's clock.
        """
        if self.ctime is None or self.looked_at is None:
            return self.ctime
        # A time that is a multiple of 10 ms may come from a file system with
        # coarse times, so its grain is the coarse one.
        grain = _COARSE_NS if self.ctime % _ROUND_NS == 0 else _FINE_NS
        # In both directions: a file server's clock may be ahead of this one.
        return YOUNG if -grain <= self.looked_at - self.ctime < grain else self.ctime

    @property
    def changed_at(self) -> float | None:
        """When it last changed, seconds since 1970; None where the store does not report it."""
        # A copied file keeps its old mtime; the ctime shows when it arrived.
        times = [time for time in (self.mtime, self.ctime) if time is not None]
        return max(times) / 1e9 if times else None

    def as_list(self) -> list[Any]:
        """Return the JSON form."""
        # Not when it was looked at: equal files must have equal forms.
        return [getattr(self, name) for name in self.__slots__ if name != "looked_at"]

    @classmethod
    def of_list(cls, form: list[Any]) -> FileStatus:
        """Return the status of `as_list`'s form; raises `ValueError`, `TypeError`."""
        kind, nbytes, version, mtime, ctime, device, inode, links = form
        return cls(NameKind(kind), nbytes, version, mtime, ctime, device, inode, links)


def of_stat(
    result: os.stat_result, target: str = "", *, looked_at: int | None = None, mounted: bool = False
) -> FileStatus:
    """Return the status of an ``lstat`` result.

    Args:
        result: What the system reports.
        target: A link's target.
        looked_at: Just before it was asked, ns since 1970.
        mounted: Whether something is mounted at the name.
    """
    kind = NameKind.MOUNT if mounted else _KINDS.get(stat.S_IFMT(result.st_mode), NameKind.DEVICE)
    if kind in (NameKind.FOLDER, NameKind.MOUNT):  # its times change with its entries, which are listed apart
        return FileStatus(kind, device=result.st_dev, inode=result.st_ino)
    return FileStatus(
        kind,
        result.st_size,
        target,
        result.st_mtime_ns,
        result.st_ctime_ns,
        result.st_dev,
        result.st_ino,
        result.st_nlink,
        looked_at,
    )


def of_info(info: Mapping[str, Any]) -> FileStatus:
    """Return the status of a file in an fsspec file system. info: what that reports about it."""
    # The first of these that a file system reports; a digest or an ETag before an id.
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), NO_VERSION)
    time = next((info[key] for key in _TIMES if info.get(key)), None)
    return FileStatus(NameKind.FILE, int(info["size"] or 0), version, _nanoseconds(time))


def same_content(earlier: FileStatus | None, later: FileStatus | None, *, status: bool = True) -> bool:
    """Return whether a name still refers to the same thing with the same content, also after a restart.

    A device has another number after a restart. Where an object's version is a digest, only its time shows
    that it was rewritten with equal bytes.

    Args:
        earlier: The name at one time; None where nothing had it.
        later: The name at another time.
        status: Count a change of status alone (ctime) as a difference.
    """
    if earlier is None or later is None:
        return earlier is later
    # Without the device: after a restart the same disk may have another number.
    alike = _CONTENT(earlier) == _CONTENT(later)
    return alike and (not status or earlier.ctime == later.ctime)


def same_object(earlier: FileStatus | None, later: FileStatus | None) -> bool:
    """Return whether a key still has the same object, or still none.

    Times count only where there is no version: stores report them to the second in one answer, and more
    exactly in another.
    """
    if earlier is None or later is None:
        return earlier is later
    if (earlier.nbytes, earlier.version) != (later.nbytes, later.version):
        return False
    return earlier.version != NO_VERSION or _same_time(earlier.mtime, later.mtime)


def difference(
    before: Mapping[str, FileStatus], now: Mapping[str, FileStatus], *, status: bool = True
) -> str | None:
    """Return the first name that was added, removed or written in between (`same_content`), or None."""
    names = sorted(before.keys() | now.keys())
    return next((n for n in names if not same_content(before.get(n), now.get(n), status=status)), None)


def _same_time(first_ns: int | None, second_ns: int | None) -> bool:
    """Return whether two times are equal as far as both are known; a whole second may be a rounded time."""
    if first_ns is None or second_ns is None or first_ns == second_ns:
        return first_ns == second_ns
    rounded = first_ns % _SECOND_NS == 0 or second_ns % _SECOND_NS == 0
    return rounded and first_ns // _SECOND_NS == second_ns // _SECOND_NS


def _nanoseconds(time: Any) -> int | None:
    if isinstance(time, datetime):
        return round(time.timestamp() * 1e9)
    if isinstance(time, int | float):
        return round(time * 1e9)
    try:
        return round(parse_time(str(time)).timestamp() * 1e9) if time else None
    except InvalidText:
        return None
