"""Aliases: movable names for checkpoints, changed by compare-and-swap.

A caller can pass the checkpoint that it expects under the name. If another one is there, nothing changes.
Every function runs inside the given transaction. Functions that change something need a writer's transaction.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, insert, select, update

from ckptcore.catalog.models import Alias, Checkpoint
from ckptcore.catalog.query import PREFIX, require_kept, resolve_checkpoint
from ckptcore.catalog.row_values import sound
from ckptcore.errors import Conflict, UsageError
from ckptcore.utils.dataclass import dataclass

if TYPE_CHECKING:
    from sqlalchemy import Connection, Select

NOTHING = ""  # the expected value of a name that must be new
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/+-]{0,199}")


@dataclass(frozen=True, slots=True)
class AliasRow:
    """One alias.

    checkpoint: the public id of its checkpoint. version: how often the alias was set. trouble: what is odd in
    the row.
    """

    name: str
    checkpoint: str
    uri: str
    version: int
    updated_at: datetime
    trouble: str = ""


def set_alias(conn: Connection, now: datetime, name: str, ref: str, expect: str | None = None) -> AliasRow:
    """Point the alias `name` at the checkpoint that `ref` names.

    Args:
        conn: a writer's transaction.
        now: the time to record.
        name: the alias.
        ref: id, unique prefix, URI or alias of the new checkpoint.
        expect: id, prefix, URI or alias of the checkpoint that `name` must point to now. `NOTHING` requires a
            new name; None accepts any.

    Returns:
        The alias after the change.

    Raises:
        Conflict: the alias points to another checkpoint than `expect`. Nothing was changed.
        UsageError: `name` cannot be an alias, or `ref` names no checkpoint.
    """
    _require_name(name)
    wanted = require_kept(conn, ref)
    here = Alias.name == name
    row = conn.execute(select(Alias.checkpoint_id, Alias.version).where(here).with_for_update()).first()
    if expect is not None:
        expected = None if expect == NOTHING else resolve_checkpoint(conn, expect)
        if (row.checkpoint_id if row else None) != expected:
            raise Conflict(
                f"cannot set alias {name}: {_target_text(conn, name)} (expected {expect or 'no checkpoint'})",
                hint=f"`ckptcore catalog alias list` shows where {name} points now",
                name=name,
            )
    if row is None:
        values = {"name": name, "checkpoint_id": wanted, "version": 1, "updated_at": now}
        conn.execute(insert(Alias).values(values))
    else:
        same = (here, Alias.version == row.version)
        values = {"checkpoint_id": wanted, "version": row.version + 1, "updated_at": now}
        if conn.execute(update(Alias).where(*same).values(values)).rowcount != 1:
            raise Conflict(f"cannot set alias {name}: another process moved it at the same time", name=name)
    return get(conn, name)


def remove(conn: Connection, name: str) -> None:
    """Remove an alias. Raises `UsageError` if it does not exist."""
    get(conn, name)
    conn.execute(delete(Alias).where(Alias.name == name))


def get(conn: Connection, name: str) -> AliasRow:
    """Return an alias. Raises `UsageError` if it does not exist."""
    row = conn.execute(_alias_rows().where(Alias.name == name)).first()
    if row is None:
        raise UsageError(f"there is no alias {name}", hint="`ckptcore catalog alias list` lists all aliases")
    return _alias_row(row)


def every(conn: Connection) -> tuple[AliasRow, ...]:
    """Return all aliases, sorted by name."""
    return tuple(map(_alias_row, conn.execute(_alias_rows())))


def of_checkpoint(conn: Connection, ref: str) -> tuple[AliasRow, ...]:
    """Return the aliases of the checkpoint that `ref` names, sorted by name."""
    here = Alias.checkpoint_id == resolve_checkpoint(conn, ref)
    return tuple(map(_alias_row, conn.execute(_alias_rows().where(here))))


def _alias_rows() -> Select[Any]:
    """Return the query whose rows `_alias_row` reads."""
    return select(Alias, Checkpoint.uuid, Checkpoint.uri).join(Checkpoint).order_by(Alias.name)


def _alias_row(row: Any) -> AliasRow:
    return sound(
        AliasRow,
        name=row.name,
        checkpoint=row.uuid,
        uri=row.uri,
        version=row.version,
        updated_at=row.updated_at,
    )


def _target_text(conn: Connection, name: str) -> str:
    row = conn.execute(_alias_rows().where(Alias.name == name)).first()
    return "it does not exist" if row is None else f"it points to {row.uuid} ({row.uri})"


def _require_name(name: str) -> None:
    if not _NAME.fullmatch(name) or PREFIX.fullmatch(name.lower()):
        raise UsageError(
            f"{name!r} cannot be an alias",
            hint="use letters, digits and . _ @ / + -, with a letter or digit first, and unlike an id",
        )
