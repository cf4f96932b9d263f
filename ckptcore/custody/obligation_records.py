"""Record the obligations that count on a copy beside it, for runs without the catalog that began them.

    .NAME.obligations.ckptcore/record.json

A lost, restored or unused catalog (``--no-catalog``) does not forget what must not go: whoever replaces the
place reads the record, and `ckptcore catalog rebuild` records its obligations again. Readers and sweeps skip
the folder, as they do staging folders.
"""

from __future__ import annotations

import base64
import errno
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from datetime import datetime

from ckptcore.catalog.obligations import ObligationRow
from ckptcore.core.columnar_file import canonical_json
from ckptcore.errors import CkptError, SourceUnreadable, UsageError
from ckptcore.fingerprints.holdings import Holding, pack, pack_specs, unpack
from ckptcore.store import join_url, local_path, open_store, split_url
from ckptcore.store.folder_tree import FOLDER, closing_fd
from ckptcore.store.listing import names_at
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.foreign_text import InvalidText, load_json_object, parsing

RECORD, _DRAFT = "record.json", ".record.json.part"
_NAME = re.compile(r"\.(?P<name>.+)\.obligations\.ckptcore")
_MOST_BYTES = 1 << 30
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Duty:
    """An obligation with its contents."""

    row: ObligationRow
    contents: tuple[Holding, ...]


def home_of(place: str) -> str:
    """Return the folder of the record beside a place; for a link, beside what it leads to."""
    path = local_path(place)
    parent, name = split_url(place if path is None else os.path.realpath(path))
    return join_url(parent, f".{name}.obligations.ckptcore")


def place_of(home: str) -> str | None:
    """Return the place that a folder of `home_of` is about; None for any other folder."""
    parent, name = split_url(home)
    matched = _NAME.fullmatch(name)
    return None if matched is None else join_url(parent, matched["name"])


def read_duties(place: str) -> tuple[Duty, ...]:
    """Return the obligations in the record beside a place; none where there is no record.

    Raises:
        SourceUnreadable: There is one, and it cannot be read: what it protects is not known.
    """
    home = home_of(place)
    if _cannot_be(home):
        return ()
    try:
        with closing(open_store(home)) as store:
            size = store.size(RECORD)
            if size is None:
                return ()
            data = store.read(RECORD, 0, min(size, _MOST_BYTES))
        with parsing("a record"):
            form = load_json_object(data)
            return tuple(_loaded(each, form["version"]) for each in form["obligations"])
    except InvalidText as error:
        raise SourceUnreadable(
            f"cannot read {home}/{RECORD}, which says what must not be replaced: {error}",
            hint="restore it from a backup, or move it away if nothing beside it is needed",
        ) from error


def places_with_records(folder: str) -> tuple[str, ...]:
    """Return the places in a folder beside which there is, or was, a record.

    Raises:
        CkptError: The folder cannot be listed.
    """
    path = local_path(folder)
    try:
        names = names_at(folder) if path is None else sorted(os.listdir(path))
    except OSError as error:
        raise SourceUnreadable(f"cannot list {folder}: {error.strerror}") from error
    return tuple(place for name in names if (place := place_of(join_url(folder, name))) is not None)


def write_duties(place: str, duties: Sequence[Duty]) -> None:
    """Write the record beside a place; without obligations, remove it.

    Raises:
        UsageError: It cannot be written.
    """
    home = home_of(place)
    data = canonical_json({"version": 1, "obligations": [_dumped(each) for each in duties]})
    try:
        if local_path(home) is not None:
            _put_local(home, data if duties else None)
            return
        with closing(open_store(home)) as store:
            if duties:
                store.put(RECORD, data)
            else:
                store.remove(RECORD)
    except OSError as error:
        raise UsageError(f"cannot write {home}/{RECORD}: {error.strerror}") from error


def add_duties(place: str, duties: Iterable[Duty]) -> None:
    """Add obligations to the record beside a place; those of the same ids are replaced."""
    known = {each.row.id: each for each in read_duties(place)}
    known |= {each.row.id: each for each in duties}
    write_duties(place, list(known.values()))


def drop_duties(place: str, ids: Iterable[str]) -> None:
    """Remove obligations from the record beside a place, as far as it can be reached."""
    gone = set(ids)
    try:
        known = read_duties(place)
        if any(each.row.id in gone for each in known):
            write_duties(place, [each for each in known if each.row.id not in gone])
    except CkptError:  # the copy may be on a disk that is away: a record too many refuses, and loses nothing
        return


def _cannot_be(home: str) -> bool:
    """Return whether there is no folder of this name on this machine, such as one of more than 255 bytes."""
    path = local_path(home)
    try:
        return path is not None and not os.stat(path)
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


def _put_local(home: str, data: bytes | None) -> None:
    parent, name = os.path.split(os.path.abspath(home))
    with closing_fd(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as above:
        if data is not None:
            with suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=above)
        with closing_fd(os.open(name, FOLDER, dir_fd=above)) as at:  # follows no link
            if os.fstat(at).st_uid != os.geteuid():
                raise UsageError(f"cannot write {home}/{RECORD}: the folder is another user's")
            with suppress(FileNotFoundError):  # a killed run's
                os.unlink(_DRAFT, dir_fd=at)
            if data is None:
                os.unlink(RECORD, dir_fd=at)
                os.rmdir(name, dir_fd=above)
                return
            with os.fdopen(os.open(_DRAFT, _NEW, 0o644, dir_fd=at), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(_DRAFT, RECORD, src_dir_fd=at, dst_dir_fd=at)
            os.fsync(at)
        os.fsync(above)


def _dumped(each: Duty) -> dict[str, str]:
    row = each.row
    return {
        "id": row.id,
        "checkpoint": row.checkpoint or "",
        "source": row.source,
        "place": row.place,
        "created_at": row.created_at.isoformat(),
        "contents": base64.b64encode(pack(each.contents)).decode(),
    }


def _loaded(form: dict[str, str], version: int) -> Duty:
    if version != 1:
        raise InvalidText(f"cannot read version {version}")
    contents = unpack(base64.b64decode(form["contents"], validate=True))
    row = ObligationRow(
        str(form["id"]),
        str(form["checkpoint"]) or None,
        str(form["source"]),
        str(form["place"]),
        pack_specs(contents),
        datetime.fromisoformat(form["created_at"]),
    )
    return Duty(row, contents)
