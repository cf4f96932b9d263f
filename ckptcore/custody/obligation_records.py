"""Record the obligations that count on a copy beside it, for runs without the catalog that began them.

    .NAME.obligations.ckptcore/ID.json      one obligation each

A lost, restored or unused catalog (``--no-catalog``) does not forget what must not go: whoever replaces the
place reads the records, and `ckptcore catalog rebuild` records the obligations again. No process changes the
record of another. Readers and sweeps skip the folder, as they do staging folders.
"""

from __future__ import annotations

import base64
import errno
import os
import re
from collections.abc import Collection, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from ckptcore.catalog import obligations
from ckptcore.catalog.obligations import ObligationRow
from ckptcore.core.columnar_file import canonical_json
from ckptcore.errors import CatalogError, CkptError, SourceUnreadable, UsageError
from ckptcore.fingerprints.holdings import Holding, pack, pack_specs, unpack
from ckptcore.store import fetch_each, join_url, local_path, open_store, split_url
from ckptcore.store.folder_tree import FOLDER, closing_fd
from ckptcore.store.listing import names_at
from ckptcore.store.place import identify
from ckptcore.utils import host
from ckptcore.utils.foreign_text import InvalidText, load_json_object, parse_time, parsing

_RECORD = re.compile(r"[^./][^/]*\.json")
_NAME = re.compile(r"\.(?P<name>.+)\.obligations\.ckptcore")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Obligation:
    """An obligation with its contents.

    packed: the contents as they are stored.
    """

    row: ObligationRow
    contents: Collection[Holding]
    packed: bytes = field(repr=False, compare=False)

    @classmethod
    def of(cls, row: ObligationRow, contents: Collection[Holding]) -> Obligation:
        """Return an obligation whose contents are not stored yet."""
        return cls(row, contents, pack(contents))


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


def recorded_obligation(conn: Any, row: ObligationRow, beside: Obligation | None = None) -> Obligation:
    """Return an obligation of the catalog with its contents; raise `CatalogError` if they are damaged.

    beside: the same in a record, whose contents are not unpacked once more where they are equal.
    """
    packed = obligations.contents_of(conn, row.id)
    try:
        equal = beside is not None and beside.packed == packed
        return Obligation(row, beside.contents if beside and equal else unpack(packed), packed)
    except InvalidText as error:
        raise CatalogError(
            f"the contents of obligation {row.id} on {row.place} cannot be read: {error}",
            hint=f"`ckptcore catalog rebuild --made {row.place}` reads the record beside the copy; `ckptcore "
            f"catalog obligation release {row.id} --accept-loss '*'` gives up what it protects",
        ) from error


def read_obligations(place: str) -> tuple[Obligation, ...]:
    """Return the obligations in the records beside a place; none where there is no record.

    Raises:
        SourceUnreadable: One cannot be read: what it protects is not known.
    """
    if identify(place).is_bucket:  # beside which there is nothing: no destination is an entire bucket
        return ()
    home, recorded, name = home_of(place), [], ""
    try:
        names = _names(home)
        if not names:
            return ()
        with closing(open_store(home)) as store:
            records = dict(zip(names, fetch_each(store, names), strict=True))
        for name in names:
            if (record := records[name]) is not None:  # else its obligation ended meanwhile
                recorded.append(loaded(record))
    except (InvalidText, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SourceUnreadable(
            f"cannot read {join_url(home, name)}, which says what must not be replaced: {why}",
            hint="restore it from a backup, or move it away if nothing beside it is needed",
        ) from error
    return tuple(recorded)


def _names(home: str) -> list[str]:
    path = local_path(home)
    try:
        if path is not None:
            return sorted(filter(_RECORD.fullmatch, os.listdir(path)))
        with closing(open_store(home)) as store:
            return sorted(filter(_RECORD.fullmatch, store.list()))
    except OSError as error:  # a name of more than 255 bytes has no record, either
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise
    except SourceUnreadable as error:
        if not error.values.get("absent"):
            raise
    return []


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


def add_obligations(place: str, new_obligations: Iterable[Obligation]) -> None:
    """Write the records of obligations beside a place; those of the same ids are replaced.

    Raises:
        UsageError: One cannot be written.
    """
    home = home_of(place)
    for obligation in new_obligations:
        data = canonical_json({"version": 2, **_dumped(obligation)})
        try:
            if local_path(home) is not None:
                _put_local(home, f"{obligation.row.id}.json", data)
                continue
            with closing(open_store(home)) as store:
                store.put(f"{obligation.row.id}.json", data)
        except OSError as error:
            raise UsageError(f"cannot write {home}/{obligation.row.id}.json: {error.strerror}") from error


def drop_obligations(place: str, ids: Iterable[str]) -> None:
    """Remove the records of obligations beside a place, as far as it can be reached."""
    home = home_of(place)
    path = local_path(home)
    try:
        for public in ids:
            if path is not None:
                with suppress(FileNotFoundError):
                    host.unlink(os.path.join(path, f"{public}.json"))
                continue
            with closing(open_store(home)) as store:
                store.remove(f"{public}.json")
        if path is not None:
            host.rmdir(path)
    except (CkptError, OSError):
        # Others are left, or the copy's disk is away: a record too many refuses, and loses nothing.
        return


def _put_local(home: str, record: str, data: bytes) -> None:
    parent, name = os.path.split(os.path.abspath(home))
    # Written elsewhere and renamed: a reader finds a complete record or none.
    draft = f".{record}.{os.getpid()}.part"
    with closing_fd(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as above:
        with suppress(FileExistsError):
            host.mkdir(name, 0o755, dir_fd=above)
        with closing_fd(os.open(name, FOLDER, dir_fd=above)) as folder:  # follows no link
            if os.fstat(folder).st_uid != os.geteuid():
                raise UsageError(f"cannot write {home}/{record}: the folder is another user's")
            with suppress(FileNotFoundError):  # a killed run's
                host.unlink(draft, dir_fd=folder)
            with os.fdopen(os.open(draft, _NEW, 0o644, dir_fd=folder), "wb") as file:
                file.write(data)
                file.flush()
                host.fsync(file.fileno())
            host.rename(draft, record, src_dir_fd=folder, dst_dir_fd=folder)
            host.fsync(folder)
        host.fsync(above)


def _dumped(obligation: Obligation) -> dict[str, str]:
    row = obligation.row
    return {
        "id": row.id,
        "checkpoint": row.checkpoint or "",
        "source": row.source,
        "place": row.place,
        "created_at": row.created_at.isoformat(),
        "contents": base64.b64encode(obligation.packed).decode(),
    }


def loaded(data: bytes) -> Obligation:
    """Read a record; raise `InvalidText` for other data."""
    with parsing("a record"):
        form = load_json_object(data)
        if form["version"] != 2:
            raise InvalidText(f"cannot read version {form['version']}")
        packed = base64.b64decode(form["contents"], validate=True)
        contents = unpack(packed)
        row = ObligationRow(
            str(form["id"]),
            str(form["checkpoint"]) or None,
            str(form["source"]),
            str(form["place"]),
            pack_specs(contents),
            parse_time(form["created_at"]),
        )
        return Obligation(row, contents, packed)
