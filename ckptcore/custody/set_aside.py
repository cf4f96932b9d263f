"""Set a checkpoint aside, so that it can be restored, and purge exactly the files that were approved.

What goes is first moved into a new folder beside it, or stays where it is on an object store:

    .NAME.retiring-1a2b3c4d.ckptcore/
        record.json     what it is, why it goes, until when it can be restored, and every file of it
        NAME            the checkpoint, on this machine

The record decides what is here: a killed run leaves the folder, and the next one reads it. All steps on this
machine use descriptors of folders that were opened one below the other, so that no link redirects them. The
record is locked while a process works on it.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import os
import re
import stat
import uuid
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol

from blake3 import blake3

from ckptcore.catalog.retirements import GivenUp
from ckptcore.core.columnar_file import canonical_json
from ckptcore.errors import Busy, CkptError, SourceChanged, SourceUnreadable, UsageError
from ckptcore.fingerprints.holdings import Holding, pack, unpack
from ckptcore.store import join_url, local_path, open_store, split_url
from ckptcore.store.below import FOLDER, open_folder
from ckptcore.store.file_status import FileStatus, difference, of_stat, same_content
from ckptcore.store.folder_tree import DirEntryAt, rename_new
from ckptcore.store.listing import contents, names_at
from ckptcore.utils import host
from ckptcore.utils.foreign_text import InvalidText, load_json_object, parse_time, parsing

_NAME = re.compile(r"\.(?P<name>.+)\.retiring-[0-9a-f]{8}\.ckptcore")
RECORD, _DRAFT = "record.json", ".record.json.part"
RETIRED, REPLACED = "retired", "replaced"
_MOST_BYTES = 1 << 30  # of a record


@dataclass(frozen=True)
class SetAsideRecord:
    """What is set aside.

    Attributes:
        why: RETIRED, or REPLACED by a conversion.
        checkpoint: Its id in the catalog; "" if it has none.
        uri: Its path or URL.
        child: For a retired one, the id of the checkpoint that replaces it.
        proof: For a retired one, what that holds: see `ckptcore.catalog.retirements`.
        expects: What the child must hold when it is read; () if its digests prove it.
        given_up: What goes without proof, as a user said.
        at: When it was set aside.
        due_at: When it may be purged.
        things: Its files by name, in the order of removal; the names of folders end with a slash.
    """

    why: str
    checkpoint: str
    uri: str
    child: str
    proof: str
    expects: Collection[Holding]
    given_up: tuple[GivenUp, ...]
    at: datetime
    due_at: datetime
    things: Mapping[str, FileStatus]

    def dump(self) -> bytes:
        """Return the JSON form."""
        form = {name: getattr(self, name) for name in ("why", "checkpoint", "uri", "child", "proof")}
        form |= {"at": self.at.isoformat(), "due_at": self.due_at.isoformat()}
        form["expects"] = base64.b64encode(pack(self.expects)).decode()
        form["given_up"] = [content.as_dict() for content in self.given_up]
        form["things"] = [[name, thing.as_list()] for name, thing in self.things.items()]
        return canonical_json({"version": 2, **form})

    @property
    def digest(self) -> str:
        """Return the BLAKE3 of the JSON form."""
        return blake3(self.dump()).hexdigest()

    @classmethod
    def load(cls, data: bytes) -> SetAsideRecord:
        """Read the form of `dump`; raise `InvalidText` for other data."""
        with parsing("a record"):
            form = load_json_object(data)
            if form["version"] != 2:
                raise InvalidText(f"cannot read version {form['version']}")
            return cls(
                str(form["why"]),
                str(form["checkpoint"]),
                str(form["uri"]),
                str(form["child"]),
                str(form["proof"]),
                unpack(base64.b64decode(form["expects"], validate=True)),
                tuple(GivenUp(g["name"], g["kind"], g["bytes"]) for g in form["given_up"]),
                parse_time(form["at"]),
                parse_time(form["due_at"]),
                {str(name): FileStatus.of_list(thing) for name, thing in form["things"]},
            )


class SetAside(Protocol):
    """A checkpoint that is set aside, or about to be, from `begin` or `open_set_aside` to `close`.

    Attributes:
        record: What it is.
        home: Path or URL of the folder with the record.
    """

    record: SetAsideRecord
    home: str

    @property
    def place(self) -> str:
        """Where its files are now."""

    @property
    def holds(self) -> bool:
        """Whether anything of it is set aside."""

    def look(self) -> dict[str, FileStatus]:
        """Return everything of it, as `ckptcore.store.listing.contents` does."""

    def move_in(self) -> None:
        """Set it aside. Raises `UsageError`."""

    def restore(self, uri: str = "") -> None:
        """Move it back to its place, or to another one; raise `UsageError` if something else is there."""

    def hide(self) -> None:
        """Take it out of sight where that is possible only after its row is marked."""

    def require_approved(self) -> None:
        """Raise `SourceChanged` unless its files are, name by name, those of the record."""

    def remove(self) -> tuple[tuple[str, ...], str]:
        """Remove the files of the record that are unchanged, and the record if nothing is left.

        Returns:
            The names that stay, and the system's message if a file could not be removed.
        """

    def close(self) -> None:
        """Leave the rest to other processes."""


def begin(record: SetAsideRecord, parent_fd: int = -1) -> SetAside:
    """Write a record beside a checkpoint; nothing is moved yet.

    Args:
        record: What is about to be set aside.
        parent_fd: On this machine, the open folder that contains it; it is closed with the result.
    """
    if local_path(record.uri) is not None:
        return LocalSetAside.begin(record, parent_fd)
    return RemoteSetAside.begin(record)


def homes_in(folder: str) -> tuple[str, ...]:
    """Return the folders with records in a folder: of what is set aside, and of what killed runs left.

    Raises:
        CkptError: The folder cannot be listed.
    """
    path = local_path(folder)
    if path is None:
        return tuple(join_url(folder, name) for name in names_at(folder) if _NAME.fullmatch(name))
    try:
        names = sorted(os.listdir(path))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise SourceUnreadable(f"cannot list {folder}: {error.strerror}") from error
    return tuple(join_url(folder, name) for name in names if _NAME.fullmatch(name))


def folder_of(home: str) -> str:
    """Return the inode of the folder around a record's folder; "" on an object store, or if there is none.

    Where a disk is away there is another folder of that name, or none.
    """
    path = local_path(home)
    try:
        return "" if path is None else str(os.stat(os.path.dirname(path)).st_ino)
    except OSError:
        return ""


def place_of(home: str) -> str | None:
    """Return the place of a checkpoint whose record is in this folder; None for any other folder."""
    parent, name = split_url(home)
    matched = _NAME.fullmatch(name)
    return None if matched is None else join_url(parent, matched["name"])


def open_set_aside(home: str, parent_fd: int = -1) -> SetAside | None:
    """Open a folder of `homes_in`.

    Args:
        home: Its path or URL.
        parent_fd: On this machine, the open folder that contains it; it is closed with the result, or here.

    Returns:
        What is set aside; None for a folder without a record, which is removed.

    Raises:
        Busy: Another process works on it.
        UsageError: It is no such folder, or it belongs to another user.
    """
    if local_path(home) is not None:
        return LocalSetAside.opened(home, parent_fd)
    return RemoteSetAside.opened(home)


class LocalSetAside:
    """See `SetAside`; on this machine, the checkpoint is moved into the folder of the record."""

    def __init__(
        self, record: SetAsideRecord, home: str, parent_fd: int, folder_fd: int, lock_fd: int
    ) -> None:
        self.record, self.home = record, home
        self._parent_fd, self._folder_fd, self._lock_fd = parent_fd, folder_fd, lock_fd
        self._name = os.path.basename(record.uri)
        # Of one that is one file: moving it changed its status, as its record says, or a publication did it.
        self._arrived: FileStatus | None = None

    @classmethod
    def begin(cls, record: SetAsideRecord, parent_fd: int) -> LocalSetAside:
        """See `begin`."""
        parent, name = os.path.split(record.uri)
        home = f".{name}.retiring-{uuid.uuid4().hex[:8]}.ckptcore"
        folder_fd = lock_fd = -1
        try:
            host.mkdir(home, 0o700, dir_fd=parent_fd)
            folder_fd = os.open(home, FOLDER, dir_fd=parent_fd)
            lock_fd = _written(record, folder_fd)
            host.fsync(parent_fd)
        except OSError as error:
            _forget(home, folder_fd, parent_fd)
            _close(lock_fd, folder_fd, parent_fd)
            raise UsageError(f"cannot set {record.uri} aside: {error.strerror}") from error
        return cls(record, f"{parent.rstrip('/')}/{home}", parent_fd, folder_fd, lock_fd)

    @classmethod
    def opened(cls, path: str, parent_fd: int) -> LocalSetAside | None:
        """See `open_set_aside`."""
        home, folder_fd, lock_fd = os.path.basename(path), -1, -1
        try:
            folder_fd = os.open(home, FOLDER, dir_fd=parent_fd)
            lock_fd = os.open(
                RECORD, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd
            )
            host.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls(_own_record(path, folder_fd, lock_fd), path, parent_fd, folder_fd, lock_fd)
        except BlockingIOError as error:
            _close(lock_fd, folder_fd, parent_fd)
            raise Busy(f"another process works on {path}") from error
        except FileNotFoundError:  # killed before it was written, or after all was removed
            _forget(home, folder_fd, parent_fd)
            rest = _exists(home, parent_fd)
            _close(lock_fd, folder_fd, parent_fd)
            if rest:
                raise UsageError(f"cannot use {path}: it has no record") from None
            return None
        except (OSError, ValueError) as error:
            _close(lock_fd, folder_fd, parent_fd)
            raise UsageError(f"cannot use {path}: {_reason(error)}") from error

    @property
    def place(self) -> str:
        """See `SetAside`."""
        return f"{self.home}/{self._name}"

    @property
    def holds(self) -> bool:
        """See `SetAside`."""
        return _exists(self._name, self._folder_fd)

    def look(self) -> dict[str, FileStatus]:
        """See `SetAside`."""
        return contents(self.place)

    def hide(self) -> None:
        """Do nothing: it was moved."""

    @property
    def inside(self) -> DirEntryAt:
        """The name of the checkpoint in the folder, for a publication that moves it there itself."""
        return DirEntryAt(self._folder_fd, self._name, self.place)

    def move_in(self) -> None:
        """Move it here in one step, through the open folder, not by its path.

        Of one that is one file, the record gets the status that this gave it: a program that has it open
        still can write to it, and reset its time, but not its status.
        """
        try:
            host.rename(self._name, self._name, src_dir_fd=self._parent_fd, dst_dir_fd=self._folder_fd)
            if "" in self.record.things:
                self._arrived, before = self.look()[""], self._lock_fd
                require_files(self.record.uri, self.record.things, {"": self._arrived}, status=False)
                self.record = replace(self.record, things={"": self._arrived})
                self._lock_fd = _written(self.record, self._folder_fd)
                # Only now: the new record is locked, and no other process comes between them.
                _close(before)
            # A rename survives a power cut only when both of its folders are flushed.
            host.fsync(self._folder_fd)
            host.fsync(self._parent_fd)
        except OSError as error:
            raise UsageError(f"cannot set {self.record.uri} aside: {error.strerror}") from error

    def restore(self, uri: str = "") -> None:
        """See `SetAside`; another place must be in the same folder."""
        name = os.path.basename(uri) if uri else self._name
        if self.holds:
            try:
                rename_new(self.inside, DirEntryAt(self._parent_fd, name, uri or self.record.uri))
                host.fsync(self._parent_fd)
            except OSError as error:
                taken = _exists(name, self._parent_fd)
                why = "something else is there now" if taken else error.strerror
                raise UsageError(
                    f"cannot restore {uri or self.record.uri}: {why}; it is complete in {self.place}",
                    hint="name another place in the same folder: ckptcore catalog restore ... --to NAME",
                ) from error
        _forget(os.path.basename(self.home), self._folder_fd, self._parent_fd)

    def require_approved(self) -> None:
        """See `SetAside`."""
        now, approved = self.look(), self.record.things
        if "" in approved and self._arrived is None and self.record.why == REPLACED:
            name = difference(approved, now, status=False)
            self._arrived = now.get("")
        else:
            name = difference({"": self._arrived} if self._arrived else approved, now)
        if name is not None:
            raise _changed(self.record.uri, name)

    def remove(self) -> tuple[tuple[str, ...], str]:
        """See `SetAside`."""
        left: list[str] = []
        try:
            if "" in self.record.things:
                _unlink(self._name, self._folder_fd, "", {"": self._arrived or self.record.things[""]}, left)
            else:
                below = open_folder(self._name, self._folder_fd, self.place)
                try:
                    _remove_approved(below, "", self.record.things, left)
                    if not left:
                        _remove_folder(self._name, self._folder_fd, below, "", left)
                finally:
                    os.close(below)
        except (OSError, UsageError) as error:
            return tuple(left), _reason(error)
        if not left:
            _forget(os.path.basename(self.home), self._folder_fd, self._parent_fd)
        return tuple(left), ""

    def close(self) -> None:
        """See `SetAside`."""
        _close(self._lock_fd, self._folder_fd, self._parent_fd)
        self._lock_fd = self._folder_fd = self._parent_fd = -1


class RemoteSetAside:
    """See `SetAside`; objects cannot be moved, and stay at their place until they are purged.

    In a bucket that keeps versions they are hidden by delete markers; the purge deletes the versions.
    """

    def __init__(self, record: SetAsideRecord, home: str) -> None:
        self.record, self.home = record, home
        # A late import: most checkpoints are no objects.
        from ckptcore.store.objects.versions import bucket_with_versions

        self._versions = bucket_with_versions(record.uri)

    @classmethod
    def begin(cls, record: SetAsideRecord) -> RemoteSetAside:
        """See `begin`."""
        parent, name = split_url(record.uri)
        home = join_url(parent, f".{name}.retiring-{uuid.uuid4().hex[:8]}.ckptcore")
        with closing(open_store(home)) as store:
            store.put(RECORD, record.dump())
        return cls(record, home)

    @classmethod
    def opened(cls, home: str) -> RemoteSetAside | None:
        """See `open_set_aside`."""
        with closing(open_store(home)) as store:
            size = store.size(RECORD)
            if size is None:
                return None
            if size > _MOST_BYTES:
                raise UsageError(f"cannot use {home}: its record has {size} bytes")
            try:
                record = SetAsideRecord.load(store.read(RECORD, 0, size))
            except ValueError as error:
                raise UsageError(f"cannot use {home}: {error}") from error
        if record.uri.rstrip("/") != place_of(home):
            raise UsageError(f"cannot use {home}: its record is of {record.uri}")
        return cls(record, home)

    @property
    def place(self) -> str:
        """See `SetAside`."""
        return self.record.uri

    @property
    def holds(self) -> bool:
        """Whether an object of the record is there, as it was."""
        objects = self.look()
        return any(
            name in objects and same_content(thing, objects[name])
            for name, thing in self.record.things.items()
        )

    def look(self) -> dict[str, FileStatus]:
        """Return its objects, also those that are hidden."""
        try:
            visible = contents(self.record.uri)
        except SourceUnreadable:  # there is no object of that name, nor below it
            visible = {}
        hidden = {} if self._versions is None else self._versions.hidden()
        return {name: version.status for name, version in hidden.items()} | visible

    def move_in(self) -> None:
        """Do nothing: the objects stay."""

    def hide(self) -> None:
        """Hide its objects behind delete markers, in a bucket that keeps versions."""
        if self._versions is not None:
            self._remove_unchanged()

    def restore(self, uri: str = "") -> None:
        """See `SetAside`; the objects are at their place, or behind delete markers."""
        if uri:
            raise UsageError(f"cannot restore {self.record.uri} to another place: its objects were not moved")
        if self._versions is not None:
            self._versions.show()
        self._forget()

    def require_approved(self) -> None:
        """See `SetAside`."""
        require_files(self.record.uri, self.record.things, self.look())

    def remove(self) -> tuple[tuple[str, ...], str]:
        """Remove the objects one by one, each checked right before: one that was written since is kept."""
        try:
            self._remove_unchanged()
            if self._versions is not None:
                self._versions.remove(self.record.things)
            left = tuple(self.look())
        except CkptError as error:
            return (), error.message
        self._forget()
        return left, ""

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _remove_unchanged(self) -> None:
        single = "" in self.record.things
        folder, itself = split_url(self.record.uri) if single else (self.record.uri, "")
        with closing(open_store(folder)) as store:
            stamps = {name: store.stamp(name or itself) for name in self.record.things}
            objects = self.look()  # an object that is unchanged now was unchanged when its stamp was read
            for name, thing in self.record.things.items():
                unchanged = (
                    name in objects and same_content(thing, objects[name]) and stamps[name] is not None
                )
                if unchanged and store.stamp(name or itself) == stamps[name]:
                    store.remove(name or itself)

    def _forget(self) -> None:
        with closing(open_store(self.home)) as store:
            store.remove(RECORD)


def partly_gone(set_aside: SetAside) -> bool:
    """Return whether a file of the record is gone: its removal had begun."""
    remaining = set_aside.look() if set_aside.holds else {}
    return not set_aside.record.things.keys() <= remaining.keys()


def _own_record(path: str, folder_fd: int, lock_fd: int) -> SetAsideRecord:
    """Read a record; raise `OSError`, and `ValueError` for another user's, or one of another place."""
    folder_stat, record_stat = os.fstat(folder_fd), os.fstat(lock_fd)
    owners = {folder_stat.st_uid, record_stat.st_uid}
    if owners != {os.geteuid()} or not stat.S_ISREG(record_stat.st_mode):
        raise ValueError("it is another user's")
    # Bounded before it is read: the record of another program could be of any size.
    if record_stat.st_size > _MOST_BYTES:
        raise ValueError(f"its record has {record_stat.st_size} bytes")
    record = SetAsideRecord.load(os.pread(lock_fd, record_stat.st_size, 0))
    if record.uri != place_of(path):
        raise ValueError(f"its record is of {record.uri}")
    return record


def _written(record: SetAsideRecord, folder_fd: int) -> int:
    """Write a record into its open folder, in the place of an earlier one; return it, locked."""
    lock_fd = os.open(_DRAFT, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder_fd)
    try:
        host.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with os.fdopen(os.dup(lock_fd), "wb") as file:
            file.write(record.dump())
            file.flush()
            host.fsync(file.fileno())
        host.rename(_DRAFT, RECORD, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        host.fsync(folder_fd)
    except BaseException:
        _close(lock_fd)
        raise
    return lock_fd


def require_files(
    uri: str, before: Mapping[str, FileStatus], now: Mapping[str, FileStatus], *, status: bool = True
) -> None:
    """Raise `SourceChanged` unless everything at a place is, name by name, as it was before.

    Args:
        uri: The place.
        before: Everything there at one time.
        now: Everything there at another time.
        status: Count a change of status alone (ctime) as a difference.
    """
    name = difference(before, now, status=status)
    if name is not None:
        raise _changed(uri, name)


def _changed(uri: str, name: str) -> SourceChanged:
    return SourceChanged(
        f"{join_url(uri, name) if name else uri} was written, moved or touched while this ran",
        hint="run again when no process writes there",
    )


def _remove_approved(folder_fd: int, prefix: str, things: Mapping[str, FileStatus], left: list[str]) -> None:
    """Remove approved names below a descriptor, depth first. No link is followed, no mount crossed."""
    for name in os.listdir(folder_fd):
        approved = things.get(f"{prefix}{name}/")
        if approved is None:
            _unlink(name, folder_fd, prefix + name, things, left)
            continue
        try:
            subfolder_fd = open_folder(name, folder_fd, prefix + name)
        except UsageError:  # no folder any more
            left.append(prefix + name)
            continue
        try:
            # By the open descriptor: the name may lead to another folder by now.
            if not same_content(approved, of_stat(os.fstat(subfolder_fd))):
                left.append(f"{prefix}{name}/")
                continue
            before = len(left)
            _remove_approved(subfolder_fd, f"{prefix}{name}/", things, left)
            if len(left) == before:
                _remove_folder(name, folder_fd, subfolder_fd, f"{prefix}{name}/", left)
        finally:
            os.close(subfolder_fd)


def _remove_folder(name: str, parent_fd: int, folder_fd: int, prefix: str, left: list[str]) -> None:
    """Remove a folder, unless files appeared in it meanwhile."""
    try:
        host.rmdir(name, dir_fd=parent_fd)
    except OSError as error:
        came = sorted(os.listdir(folder_fd))
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not came:
            raise
        left += [prefix + name_inside for name_inside in came]


def _unlink(name: str, folder_fd: int, full: str, things: Mapping[str, FileStatus], left: list[str]) -> None:
    file_stat = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    approved = things.get(full)
    target = os.readlink(name, dir_fd=folder_fd) if stat.S_ISLNK(file_stat.st_mode) else ""
    # The status of a file with several names changes when another of its names is removed.
    if approved is None or not same_content(approved, of_stat(file_stat, target), status=approved.links == 1):
        left.append(full)
        return
    host.unlink(name, dir_fd=folder_fd)


def _exists(name: str, folder_fd: int) -> bool:
    try:
        os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _forget(home: str, folder_fd: int, parent_fd: int) -> None:
    """Remove the record and its folder, unless another process has a file there."""
    for name in (_DRAFT, RECORD):
        with contextlib.suppress(OSError):
            if folder_fd >= 0:
                host.unlink(name, dir_fd=folder_fd)
    with contextlib.suppress(OSError):
        host.rmdir(home, dir_fd=parent_fd)


def _close(*descriptors: int) -> None:
    for fd in descriptors:
        if fd >= 0:
            os.close(fd)
