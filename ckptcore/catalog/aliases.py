"""Aliases: movable names for checkpoints, changed by compare-and-swap, and behind a gate.

A caller can pass the checkpoint that it expects under the name. If another one is there, nothing changes.
What a name refers to is served: `promote` refuses what is damaged, a trainer's own save, or unproven, unless
it is forced, and leaves a row in the audit, from which `history` is read.

Every function runs inside the given transaction. Functions that change something need a writer's transaction.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, insert, select, update

from ckptcore.catalog import audit
from ckptcore.catalog.audit import AuditRow
from ckptcore.catalog.models import Alias, AuditRecord, Checkpoint
from ckptcore.catalog.query import PREFIX, loadable, require_kept, resolve_checkpoint
from ckptcore.catalog.row_values import sound
from ckptcore.catalog.types import Kind, State
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


def promote(
    conn: Connection,
    now: datetime,
    name: str,
    ref: str,
    expect: str | None = None,
    *,
    force: bool = False,
    actor: str | None = None,
    via: str = audit.CLI,
) -> AliasRow:
    """Point an alias at a checkpoint that is fit to be served, and record who did it.

    Args:
        conn: a writer's transaction.
        now: the time to record.
        name: the alias.
        ref: id, unique prefix, URI or alias of the new checkpoint.
        expect: what the alias must refer to now; see `set_alias`.
        force: set it whatever the catalog knows about the checkpoint; the audit says what it knew.
        actor: who does it; None means the user of this process.
        via: the way, as the audit names it.

    Returns:
        The alias after the change.

    Raises:
        Conflict: the checkpoint is damaged, not there, a trainer's own save, not loadable or not proven, or
            the alias refers to another one than `expect`.
        UsageError: `name` cannot be an alias, or `ref` names no checkpoint.
    """
    unfit = _unfit(conn, require_kept(conn, ref), ref)
    if unfit is not None and not force:
        reason, step = unfit
        raise Conflict(
            f"cannot set alias {name}: {reason}",
            hint=f"{step}; --force sets the alias all the same",
            name=name,
        )
    before = next((row.checkpoint for row in every(conn) if row.name == name), None)
    row = set_alias(conn, now, name, ref, expect)
    forced = {} if unfit is None else {"forced": unfit[0]}
    detail = {"alias": name, "before": before, **forced}
    audit.note(conn, now, "alias.set", row.checkpoint, detail, actor=actor, via=via)
    return row


def _unfit(conn: Connection, checkpoint: int, ref: str) -> tuple[str, str] | None:
    """Return why a checkpoint should not be served, and the next step; None if nothing speaks against it."""
    columns = (Checkpoint.uri, Checkpoint.state, Checkpoint.kind, Checkpoint.verified_at)
    row = conn.execute(select(*columns).where(Checkpoint.id == checkpoint)).one()
    opens = loadable(conn, (checkpoint,)).get(checkpoint)
    if row.state != State.PRESENT:
        return f"{row.uri} is {row.state}", f"`ckptcore catalog show {ref}` shows its findings"
    if row.kind == Kind.SOURCE:
        return f"{row.uri} is a source, as its trainer wrote it", "name what was made from it"
    if opens == "no":
        return f"no engine opens {row.uri}", f"`ckptcore catalog show {ref}` says what it lacks, or failed"
    if opens == "unproven":
        return f"nothing has proved the export {row.uri}", f"prove it: ckptcore verify-export {ref}"
    if row.verified_at is None:
        return f"nothing has verified {row.uri}", f"verify it: ckptcore validate {ref} --level bytes"
    return None


def history(conn: Connection, name: str) -> tuple[AuditRow, ...]:
    """Return the changes of an alias, newest first."""
    changes = (
        select(AuditRecord)
        .where(AuditRecord.action.in_(("alias.set", "alias.remove")))
        .order_by(AuditRecord.id.desc())
    )
    return tuple(row for row in map(audit.row_of, conn.execute(changes)) if row.detail.get("alias") == name)


def previous(conn: Connection, name: str) -> str:
    """Return the id of the checkpoint that an alias referred to before its last change.

    Raises:
        UsageError: there is no such alias, or it referred to no other one.
    """
    current = get(conn, name)
    before = next(
        (row.detail.get("before") for row in history(conn, name) if row.action == "alias.set"), None
    )
    if not isinstance(before, str) or before == current.checkpoint:
        raise UsageError(
            f"{name} referred to no other checkpoint before",
            hint=f"`ckptcore catalog alias history {name}` lists its changes",
        )
    return before


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
