"""Aliases: which checkpoint does a name stand for, and who may move it?

A name moves by compare-and-swap: whoever says what he expects there either finds it, or changes nothing.
Every function works inside the transaction that it is given, a writer's where it changes something.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from sqlalchemy import delete, insert, select, update

from ckptcore.catalog.models import Alias, Checkpoint
from ckptcore.catalog.query import PREFIX, require_kept, resolve_checkpoint
from ckptcore.errors import Conflict, UsageError

if TYPE_CHECKING:
    from sqlalchemy import Connection

NOTHING = ""  # what is expected of a name that must be new
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/+-]{0,199}")


@dataclass(frozen=True, slots=True)
class AliasRow:
    """One name. checkpoint: the id of what it stands for. version: how often it was set."""

    name: str
    checkpoint: str
    uri: str
    version: int
    updated_at: datetime


def set_alias(conn: Connection, now: datetime, name: str, ref: str, expect: str | None = None) -> AliasRow:
    """The name stands for what `ref` names from now on.

    expect: id, prefix, URI or alias of what it must stand for now; `NOTHING` for a new name; None for
        whatever it is.

    Raises `Conflict` when it stands for something else, and then changes nothing.
    """
    _require_name(name)
    wanted = require_kept(conn, ref)
    here = Alias.name == name
    row = conn.execute(select(Alias.checkpoint_id, Alias.version).where(here).with_for_update()).first()
    if expect is not None:
        expected = None if expect == NOTHING else resolve_checkpoint(conn, expect)
        if (row.checkpoint_id if row else None) != expected:
            raise Conflict(
                f"{name} {_standing(conn, name)}, not for {expect or 'nothing'}; it was not changed",
                hint=f"`ckptcore catalog alias list` shows where {name} stands now",
                name=name,
            )
    if row is None:
        values = {"name": name, "checkpoint_id": wanted, "version": 1, "updated_at": now}
        conn.execute(insert(Alias).values(values))
    else:
        same = (here, Alias.version == row.version)
        values = {"checkpoint_id": wanted, "version": row.version + 1, "updated_at": now}
        if conn.execute(update(Alias).where(*same).values(values)).rowcount != 1:
            raise Conflict(f"{name} was moved by somebody else meanwhile", name=name)
    return get(conn, name)


def remove(conn: Connection, name: str) -> None:
    """The name stands for nothing any more. Raises `UsageError` where it is not there."""
    get(conn, name)
    conn.execute(delete(Alias).where(Alias.name == name))


def get(conn: Connection, name: str) -> AliasRow:
    """What the name stands for. Raises `UsageError`."""
    found = _alias_rows(conn, name)
    if not found:
        raise UsageError(f"there is no alias {name}", hint="`ckptcore catalog alias list` shows them")
    return found[0]


def every(conn: Connection) -> tuple[AliasRow, ...]:
    """All aliases, by name."""
    return tuple(_alias_rows(conn, None))


def _alias_rows(conn: Connection, name: str | None) -> list[AliasRow]:
    wanted = select(Alias, Checkpoint.uuid, Checkpoint.uri).join(Checkpoint).order_by(Alias.name)
    if name is not None:
        wanted = wanted.where(Alias.name == name)
    return [AliasRow(r.name, r.uuid, r.uri, r.version, r.updated_at) for r in conn.execute(wanted)]


def _standing(conn: Connection, name: str) -> str:
    found = _alias_rows(conn, name)
    return f"stands for {found[0].checkpoint} ({found[0].uri})" if found else "is not there"


def _require_name(name: str) -> None:
    if not _NAME.fullmatch(name) or PREFIX.fullmatch(name.lower()):
        raise UsageError(
            f"{name!r} cannot be an alias",
            hint="letters, digits and . _ @ / + -, beginning with a letter or digit, unlike an id",
        )
