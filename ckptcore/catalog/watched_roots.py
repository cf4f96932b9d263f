"""Watched roots: folders that are swept for new checkpoints, with the options of their conversion.

Every function runs inside the given transaction. Functions that change something need a writer's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, insert, select, update

from ckptcore.catalog.models import WatchedRoot
from ckptcore.catalog.normalize import clean, clean_json, normal_uri, storable
from ckptcore.catalog.row_values import parsed, read_row
from ckptcore.errors import UsageError
from ckptcore.utils.merged_url import is_merged
from ckptcore.utils.near_names import did_you_mean

if TYPE_CHECKING:
    from sqlalchemy import Connection

_ALSO, _RETENTION = "also", "retention"


@dataclass(frozen=True, slots=True)
class RootRow:
    """One watched root.

    include: globs on paths relative to `uri`; empty means everything. target: the options of the conversion.
    also: those of further conversions of every checkpoint. retention: what `retire` keeps, as
    `ckptcore.operations.retention.root_retention` reads it; both are stored in the column of the target.
    swept_at, swept_note: the time and the summary of the last sweep. trouble: what is odd in the row; such a
    root is not swept.
    """

    name: str
    uri: str
    include: tuple[str, ...]
    target: dict[str, Any]
    enabled: bool
    created_at: datetime
    swept_at: datetime | None
    swept_note: str | None
    also: tuple[dict[str, Any], ...] = ()
    retention: dict[str, Any] = field(default_factory=dict)
    trouble: str = ""


def add(
    conn: Connection,
    now: datetime,
    name: str,
    uri: str,
    *,
    include: Sequence[str] = (),
    targets: Sequence[Mapping[str, Any]] = ({},),
    retention: Mapping[str, Any] | None = None,
) -> RootRow:
    """Add a watched root. Raises `UsageError` if the name is empty or taken, or nothing can watch the URI."""
    if not name.strip():
        raise UsageError("a watched root needs a name", hint="for example the name of the training run")
    if is_merged(uri):
        raise UsageError(
            f"cannot watch {uri}: it is one checkpoint in several folders",
            hint="watch each folder by itself, or convert the checkpoint with `ckptcore consolidate`",
        )
    if storable(uri) != uri:
        raise UsageError(f"cannot watch {uri!r}: its name is not UTF-8", hint="rename the folder")
    if _root_rows(conn, name):
        raise UsageError(
            f"the watched root {name} exists already",
            hint=f"change it: ckptcore catalog root set {name}; or use another name",
        )
    conn.execute(
        insert(WatchedRoot).values(
            name=storable(name),
            uri=normal_uri(uri),
            include=clean_json(list(include)),
            target=clean_json(_stored(targets, retention or {})),
            enabled=True,
            created_at=now,
        )
    )
    return get(conn, storable(name))


def change(
    conn: Connection,
    name: str,
    *,
    include: Sequence[str] | None = None,
    targets: Sequence[Mapping[str, Any]] | None = None,
    retention: Mapping[str, Any] | None = None,
) -> RootRow:
    """Replace settings of a root; None leaves one as it is. Raises `UsageError` if there is no such root."""
    row = get(conn, name)
    stored = _stored(
        (row.target, *row.also) if targets is None else targets,
        row.retention if retention is None else retention,
    )
    values = {
        "target": clean_json(stored),
        "include": clean_json(list(row.include if include is None else include)),
    }
    conn.execute(update(WatchedRoot).where(WatchedRoot.name == storable(name)).values(values))
    return get(conn, name)


def remove(conn: Connection, name: str) -> RootRow:
    """Remove a watched root, and return it. Raises `UsageError` if it does not exist."""
    row = get(conn, name)
    conn.execute(delete(WatchedRoot).where(WatchedRoot.name == storable(name)))
    return row


def enable(conn: Connection, name: str, enabled: bool) -> RootRow:
    """Enable or pause a watched root. Raises `UsageError` if it does not exist."""
    get(conn, name)
    conn.execute(update(WatchedRoot).where(WatchedRoot.name == storable(name)).values(enabled=enabled))
    return get(conn, name)


def swept(conn: Connection, now: datetime, name: str, note: str = "") -> None:
    """Record that a root was swept. Raises `UsageError` if it does not exist."""
    get(conn, name)
    values = {"swept_at": now, "swept_note": clean(note)}
    conn.execute(update(WatchedRoot).where(WatchedRoot.name == storable(name)).values(values))


def get(conn: Connection, name: str) -> RootRow:
    """Return the watched root with this name. Raises `UsageError` if it does not exist."""
    rows = _root_rows(conn, name)
    if not rows:
        names = conn.execute(select(WatchedRoot.name)).scalars()
        otherwise = "`ckptcore catalog root list` lists all watched roots"
        raise UsageError(f"there is no watched root {name}", hint=did_you_mean(name, names, otherwise))
    return rows[0]


def every(conn: Connection, *, enabled: bool | None = None) -> tuple[RootRow, ...]:
    """Return all watched roots, sorted by name; only the enabled or the paused ones if asked for."""
    return tuple(root for root in _root_rows(conn, None) if enabled is None or root.enabled is enabled)


def enabled_uris(conn: Connection) -> tuple[str, ...]:
    """Return the URIs of the enabled roots, sorted by name; their settings, right or wrong, do not matter."""
    query = select(WatchedRoot.uri).where(WatchedRoot.enabled).order_by(WatchedRoot.name)
    return tuple(conn.execute(query).scalars())


def _stored(targets: Sequence[Mapping[str, Any]], retention: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON form of a root's settings: that of its first target, and the others in it."""
    form, *also = map(dict, targets)
    if also:
        form[_ALSO] = also
    if retention:
        form[_RETENTION] = dict(retention)
    return form


def _root_rows(conn: Connection, name: str | None) -> list[RootRow]:
    query = select(WatchedRoot.__table__).order_by(WatchedRoot.name)
    if name is not None:
        query = query.where(WatchedRoot.name == storable(name))
    return [_root_row(row) for row in conn.execute(query)]


def _root_row(row: Any) -> RootRow:
    target = parsed(row.target)
    beside = {}
    if isinstance(target, dict):
        beside = {"also": target.pop(_ALSO, []), "retention": target.pop(_RETENTION, {})}
    root = read_row(RootRow, row, include=parsed(row.include), target=target, **beside)
    return replace(root, include=tuple(root.include), also=tuple(root.also))
