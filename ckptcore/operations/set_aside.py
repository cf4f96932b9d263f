"""Set a source aside so that it can be restored, and remove exactly its approved files.

A source that is deleted is first moved into a new folder beside it:

    .NAME.retiring-1a2b3c4d.ckptcore/
        record.json     the checkpoint's id, and every approved name in it, with its identity
        NAME            the source

A killed run leaves that folder; a later run removes only the names in its record. All steps use descriptors
of folders that were opened one below the other, so that no link redirects them. The record is locked while
its process is alive.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import uuid
from collections.abc import Mapping

from ckptcore.core.columnar_file import canonical_json
from ckptcore.errors import Busy, SourceChanged, UsageError
from ckptcore.store.below import FOLDER, open_above, open_below, open_folder
from ckptcore.store.contents import Thing, contents, difference, same, thing_of
from ckptcore.store.folder_tree import Spot, rename_new
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.foreign_text import InvalidText, load_json_object, parsing

_NAME = re.compile(r"\.(?P<name>.+)\.retiring-[0-9a-f]{8}\.ckptcore")
_OLDER = re.compile(r"\.(?P<name>.+)\.retired-[0-9a-f]{8}\.ckptcore")  # the source itself, and no record
RECORD = "record.json"
_BEGINS = b'{"checkpoint":'  # of every record, also of a truncated one
MOST_BYTES = 1 << 30  # bytes of a record


@dataclass(frozen=True)
class RemovalRecord:
    """What may be removed.

    Attributes:
        checkpoint: The source's id in the catalog.
        child: The child's id in the catalog.
        uri: The source's path or URL.
        fingerprint: Of the child; None if only its digests prove it.
        things: The source's files by name; the names of folders end with a slash.
    """

    checkpoint: str
    child: str
    uri: str
    fingerprint: str | None
    things: Mapping[str, Thing]

    def dump(self) -> bytes:
        """Return the JSON form."""
        form = {"checkpoint": self.checkpoint, "child": self.child, "uri": self.uri}
        things = {name: thing.as_list() for name, thing in self.things.items()}
        return canonical_json({"version": 1, **form, "fingerprint": self.fingerprint, "things": things})

    @classmethod
    def load(cls, data: bytes) -> RemovalRecord:
        """Read the form of `dump`; raise `InvalidText` for other data."""
        with parsing("a record"):
            form = load_json_object(data)
            if form["version"] != 1:
                raise InvalidText(f"cannot read version {form['version']}")
            things = {str(name): Thing.of_list(each) for name, each in form["things"].items()}
            wanted = form["fingerprint"]
            wanted = None if wanted is None else str(wanted)
            return cls(str(form["checkpoint"]), str(form["child"]), str(form["uri"]), wanted, things)


class Aside:
    """One source while it is set aside, from `begin` or `leftover` to `close`.

    home: the folder that it is moved into. path: its own place.
    """

    def __init__(self, above: int, parent: str, name: str, home: str, at: int, lock: int) -> None:
        self.path, self.home = f"{parent.rstrip('/')}/{name}", f"{parent.rstrip('/')}/{home}"
        self._above, self._at, self._lock, self._name, self._home = above, at, lock, name, home
        self.record = RemovalRecord("", "", "", None, {})
        self._arrived: Thing | None = None  # a source that is one file: moving it changed its status

    @classmethod
    def begin(cls, root: str, record: RemovalRecord) -> Aside:
        """Create a folder beside a source, with the record of what may be removed; nothing is moved yet."""
        parent, name = os.path.split(record.uri)
        above = open_above(root, record.uri)
        home = new_home(name)
        at = lock = -1
        try:
            os.mkdir(home, 0o700, dir_fd=above)
            at = os.open(home, FOLDER, dir_fd=above)
            lock = os.open(RECORD, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=at)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with os.fdopen(os.dup(lock), "wb") as file:
                file.write(record.dump())
                file.flush()
                os.fsync(file.fileno())
            os.fsync(at)
        except OSError as error:
            _forget(home, at, above)
            _close(lock, at, above)
            raise UsageError(f"cannot move {record.uri} away: {error.strerror}") from error
        found = cls(above, parent, name, home, at, lock)
        found.record = record
        return found

    @classmethod
    def leftover(cls, root: str, parent: str, home: str) -> Aside | None:
        """Open a folder that a killed process left.

        Args:
            root: The watched root.
            parent: The folder below it that contains ``home``.
            home: One of `leftovers`.

        Returns:
            The source set aside; None for an empty folder, which is removed.

        Raises:
            Busy: Its process is alive.
            UsageError: It is not such a folder, or it belongs to another user.
        """
        matched = _NAME.fullmatch(home)
        assert matched is not None
        above = open_below(root, parent, parent)
        at = lock = -1
        try:
            at = os.open(home, FOLDER, dir_fd=above)
            lock = os.open(RECORD, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = cls(above, parent, matched["name"], home, at, lock)
            found.record = found._read_record()
        except BlockingIOError as error:
            _close(lock, at, above)
            raise Busy(f"another process is deleting {parent}/{home}") from error
        except (OSError, ValueError) as error:
            empty = _removed_empty(home, above)
            _close(lock, at, above)
            if empty:
                return None
            raise UsageError(f"cannot resume it: {_reason(error)}") from error
        else:
            return found

    def _read_record(self) -> RemovalRecord:
        """Read the record of a leftover; raise `OSError`, and `ValueError` for one that is not our own."""
        seen = os.fstat(self._at), os.fstat(self._lock)
        if {each.st_uid for each in seen} != {os.geteuid()} or not stat.S_ISREG(seen[1].st_mode):
            raise ValueError("it is another user's")
        if seen[1].st_size > MOST_BYTES:
            raise ValueError(f"its record has {seen[1].st_size} bytes")
        data = os.pread(self._lock, seen[1].st_size, 0)
        if not self.holds and data[: len(_BEGINS)] == _BEGINS[: len(data)]:
            return self.record  # killed before it moved the source, or after it removed the last name
        record = RemovalRecord.load(data)
        if record.uri != self.path:
            raise ValueError(f"its record is of {record.uri}")
        return record

    @property
    def holds(self) -> bool:
        """Whether the source, or the rest of it, is here."""
        return _exists(self._name, self._at)

    def take(self) -> None:
        """Move the source here in one step, through the opened folder, not by its path."""
        try:
            os.rename(self._name, self._name, src_dir_fd=self._above, dst_dir_fd=self._at)
        except OSError as error:
            raise UsageError(f"cannot move {self.path} away: {error.strerror}") from error

    def restore(self) -> None:
        """Move the source back to its place; raise `UsageError` if something else is there now."""
        if not self.holds:
            self._leave()
            return
        try:
            rename_new(Spot(self._at, self._name, self.home), Spot(self._above, self._name, self.path))
        except OSError as error:
            why = "something else is there now" if _exists(self._name, self._above) else error.strerror
            raise UsageError(
                f"cannot move {self.path} back: {why}; it is in {self.home}",
                hint=f"move {self.home}/{self._name} to where you want it",
            ) from error
        self._leave()

    def look(self) -> dict[str, Thing]:
        """Return all files here, as `ckptcore.store.contents.contents` does."""
        return contents(f"{self.home}/{self._name}")

    def require_approved(self) -> None:
        """Raise `SourceChanged` unless the files here are, name by name, the approved ones."""
        now, approved = self.look(), self.record.things
        if "" in approved and self._arrived is None:
            found = difference(approved, now, status=False)
            self._arrived = now.get("")
        else:
            found = difference({"": self._arrived} if self._arrived else approved, now)
        if found is not None:
            raise SourceChanged(
                f"{self.path}{'/' if found else ''}{found} was written, moved or touched while this ran",
                hint="run again when no process writes there",
            )

    def remove(self) -> tuple[tuple[str, ...], str]:
        """Remove the approved files that are unchanged.

        Returns:
            The names that stay, and the system's message if it could not remove an approved file: then the
            rest stays here for the next run.
        """
        left: list[str] = []
        try:
            if "" in self.record.things:
                _unlink(self._name, self._at, "", {"": self._arrived or self.record.things[""]}, left)
            else:
                below = open_folder(self._name, self._at, self.path)
                try:
                    _remove_approved(below, "", self.record.things, left)
                    if not left:
                        _remove_folder(self._name, self._at, below, "", left)
                finally:
                    os.close(below)
        except (OSError, UsageError) as error:
            return tuple(left), _reason(error)
        if not left:
            self._leave()
        return tuple(left), ""

    def close(self) -> None:
        """Unlock the rest for other processes."""
        _close(self._lock, self._at, self._above)
        self._lock = self._at = self._above = -1

    def _leave(self) -> None:
        _forget(self._home, self._at, self._above)


def new_home(name: str) -> str:
    """Return a new name for the folder beside a source with the record of its deletion."""
    return f".{name}.retiring-{uuid.uuid4().hex[:8]}.ckptcore"


def source_of(home: str) -> str | None:
    """Return the name of the source of a folder of `new_home`; None for any other name."""
    matched = _NAME.fullmatch(home)
    return None if matched is None else matched["name"]


def leftovers(root: str, parent: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (the folders of `Aside` in a folder below a watched root, the folders of older versions).

    Raises `UsageError` if the folder does not exist, or only through a link.
    """
    at = open_below(root, parent, parent)
    try:
        names = sorted(os.listdir(at))
    except OSError as error:
        raise UsageError(f"cannot list {parent}: {error.strerror}") from error
    finally:
        os.close(at)
    return tuple(n for n in names if _NAME.fullmatch(n)), tuple(n for n in names if _OLDER.fullmatch(n))


def restore_older(root: str, parent: str, home: str) -> str:
    """Move a source that an older version set aside back to its place; return that place.

    Raises `UsageError` if something else is there.
    """
    matched = _OLDER.fullmatch(home)
    assert matched is not None
    at = open_below(root, parent, parent)
    try:
        rename_new(Spot(at, home, f"{parent}/{home}"), Spot(at, matched["name"], place_of(parent, home)))
    except OSError as error:
        raise UsageError(f"cannot move {parent}/{home} back: {error.strerror}") from error
    finally:
        os.close(at)
    return f"{parent.rstrip('/')}/{matched['name']}"


def place_of(parent: str, home: str) -> str:
    """Return the original place of a source that an older version set aside."""
    matched = _OLDER.fullmatch(home)
    return f"{parent.rstrip('/')}/{matched['name']}" if matched is not None else home


def partly_gone(record: RemovalRecord, here: Mapping[str, Thing]) -> bool:
    """Return whether any recorded file no longer exists."""
    return not record.things.keys() <= here.keys()


def _remove_approved(at: int, prefix: str, things: Mapping[str, Thing], left: list[str]) -> None:
    """Remove approved names below a descriptor, depth first. No link is followed, no mount crossed."""
    for name in os.listdir(at):
        approved = things.get(f"{prefix}{name}/")
        if approved is None:
            _unlink(name, at, prefix + name, things, left)
            continue
        try:
            below = open_folder(name, at, prefix + name)
        except UsageError:  # no folder any more
            left.append(prefix + name)
            continue
        try:
            if not same(approved, thing_of(os.fstat(below))):
                left.append(f"{prefix}{name}/")
                continue
            before = len(left)
            _remove_approved(below, f"{prefix}{name}/", things, left)
            if len(left) == before:
                _remove_folder(name, at, below, f"{prefix}{name}/", left)
        finally:
            os.close(below)


def _remove_folder(name: str, at: int, below: int, prefix: str, left: list[str]) -> None:
    """Remove a folder, unless files appeared in it meanwhile."""
    try:
        os.rmdir(name, dir_fd=at)
    except OSError as error:
        came = sorted(os.listdir(below))
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not came:
            raise
        left += [prefix + each for each in came]


def _unlink(name: str, at: int, full: str, things: Mapping[str, Thing], left: list[str]) -> None:
    seen = os.stat(name, dir_fd=at, follow_symlinks=False)
    approved = things.get(full)
    target = os.readlink(name, dir_fd=at) if stat.S_ISLNK(seen.st_mode) else ""
    # The status of a file with several names changes when another of its names is removed.
    if approved is None or not same(approved, thing_of(seen, target), status=approved.links == 1):
        left.append(full)
        return
    os.unlink(name, dir_fd=at)


def _removed_empty(name: str, at: int) -> bool:
    try:
        os.rmdir(name, dir_fd=at)
    except OSError:
        return False
    return True


def _exists(name: str, at: int) -> bool:
    try:
        os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _forget(home: str, at: int, above: int) -> None:
    """Remove the record and its folder, unless another process has a file there."""
    with contextlib.suppress(OSError):
        if at >= 0:
            os.unlink(RECORD, dir_fd=at)
    with contextlib.suppress(OSError):
        os.rmdir(home, dir_fd=above)


def _close(*descriptors: int) -> None:
    for fd in descriptors:
        if fd >= 0:
            os.close(fd)
