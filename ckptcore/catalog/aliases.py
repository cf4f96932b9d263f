"""Aliases: movable names for checkpoints, changed by compare-and-swap, and behind a gate.

A caller can pass the checkpoint that it expects under the name. If another one is there, nothing changes.
What a name refers to is served: `promote` refuses what is damaged, a trainer's own save, unproven, or made
from a step with an open alarm (`history.py`), unless it is forced, and leaves a row in the audit, from which
`history` is read.

Every function runs inside the given transaction. Functions that change something need a writer's transaction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, insert, select, update

from ckptcore.catalog import audit
from ckptcore.catalog.audit import AuditRow
from ckptcore.catalog.database import clock
from ckptcore.catalog.history import Alarm, alarms_behind
from ckptcore.catalog.models import Alias, AuditRecord, Checkpoint
from ckptcore.catalog.normalize import storable
from ckptcore.catalog.query import PREFIX, loadable, part_of, require_kept, resolve_checkpoint
from ckptcore.catalog.row_values import read_row
from ckptcore.catalog.types import Kind, State
from ckptcore.errors import FINDINGS, Conflict, UsageError
from ckptcore.utils.near_names import did_you_mean
from ckptcore.utils.text import count

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
    name: str,
    ref: str,
    expect: str | None = None,
    *,
    force: bool = False,
    accept: Collection[str] = (),
    author: audit.Author = audit.COMMAND,
) -> AliasRow:
    """Point an alias at a checkpoint that is fit to be served, and record who did it.

    Args:
        conn: a writer's transaction; its time is recorded.
        name: the alias.
        ref: id, unique prefix, URI or alias of the new checkpoint.
        expect: what the alias must refer to now; see `set_alias`.
        force: set it whatever the catalog knows about the checkpoint; the audit says what it knew.
        accept: codes of alarms that are accepted; the audit names them.
        author: who does it.

    Returns:
        The alias after the change.

    Raises:
        Conflict: the checkpoint is damaged, not there, a trainer's own save, not loadable, not proven, or
            made from a step with an alarm, or the alias refers to another one than `expect`.
        UsageError: `name` cannot be an alias, or `ref` names no checkpoint.
    """
    checkpoint_id = conn.execute(
        select(Checkpoint.uuid).where(Checkpoint.id == require_kept(conn, ref))
    ).scalar_one()
    objection = objections(conn, {checkpoint_id: ref}, accept).get(checkpoint_id)
    if objection is not None and not force:
        raise Conflict(
            f"cannot set alias {name}: {objection.reason}",
            hint=f"{objection.step}; --force sets the alias all the same",
            name=name,
        )
    named, now = perhaps(conn, name), clock(conn)
    row = set_alias(conn, now, name, ref, expect)
    forced: dict[str, Any] = {} if objection is None else {"forced": objection.reason}
    if accept:
        forced["accepted"] = sorted(accept)
    detail = {"alias": name, "before": None if named is None else named.checkpoint, **forced}
    audit.note(conn, now, "alias.set", row.checkpoint, detail, author)
    return row


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a checkpoint should not be served, and the next step."""

    reason: str
    step: str


def accepted_codes(codes: Collection[str]) -> Collection[str]:
    """Return codes of alarms that a user accepts. Raises `UsageError` for one that no finding has."""
    unknown = [code for code in codes if code not in FINDINGS]
    if unknown:
        raise UsageError(
            f"--accept must be the code of a finding (got {unknown[0]!r})",
            hint="the refusal names the codes of the alarms",
        )
    return codes


def objections(
    conn: Connection, refs: Mapping[str, str], accept: Collection[str] = ()
) -> dict[str, Objection]:
    """Return what speaks against serving checkpoints, by public id; nothing for those that are fit.

    Args:
        conn: a transaction.
        refs: public id -> how the next step calls the checkpoint.
        accept: codes of alarms that do not count.
    """
    columns = (Checkpoint.id, Checkpoint.uuid, Checkpoint.uri, Checkpoint.state, Checkpoint.kind)
    query = select(*columns, Checkpoint.verified_at).where(Checkpoint.uuid.in_(list(refs)))
    # For all checkpoints at once: pages ask for many.
    rows = conn.execute(query).all()
    opens = loadable(conn, [row.id for row in rows])
    alarms = alarms_behind(conn, [row.id for row in rows])
    by_public_id = {
        row.uuid: _objection(row, opens.get(row.id), refs[row.uuid])
        or _alarmed(row.uri, [alarm for alarm in alarms.get(row.id, ()) if alarm.code not in accept])
        for row in rows
    }
    return {id: objection for id, objection in by_public_id.items() if objection is not None}


def _objection(row: Any, opens: str | None, ref: str) -> Objection | None:
    # In the order of weight: what is broken comes before what was never proven.
    if row.state != State.PRESENT:
        return Objection(f"{row.uri} is {row.state}", f"`ckptcore catalog show {ref}` shows its findings")
    if row.kind == Kind.SOURCE:
        return Objection(f"{row.uri} is a source, as its trainer wrote it", "name what was made from it")
    if opens == "no":
        step = f"`ckptcore catalog show {ref}` says what it lacks, or failed"
        return Objection(f"no engine opens {row.uri}", step)
    if opens == "unproven":
        return Objection(
            f"nothing has proved the export {row.uri}", f"prove it: ckptcore verify-export {ref}"
        )
    if row.verified_at is None:
        return Objection(
            f"nothing has verified {row.uri}", f"verify it: ckptcore validate {ref} --level bytes"
        )
    return None


def _alarmed(uri: str, alarms: Sequence[Alarm]) -> Objection | None:
    """Return the objection of open alarms about a checkpoint, or about what it was made from."""
    if not alarms:
        return None
    codes = list(dict.fromkeys(alarm.code for alarm in alarms))
    first = alarms[0]
    step = "" if first.step is None else f" at step {first.step}"
    return Objection(
        f"{uri} has {count(len(alarms), 'open alarm')} ({', '.join(codes)}), first{step}: {first.message}",
        f"`ckptcore catalog history {first.run or 'RUN'}` lists them; "
        f"{' '.join(f'--accept {code}' for code in codes)} accepts these",
    )


def history(conn: Connection, name: str) -> tuple[AuditRow, ...]:
    """Return the changes of an alias, newest first."""
    changes = (
        select(AuditRecord)
        .where(
            AuditRecord.action.in_(("alias.set", "alias.remove")),
            # Found by text in the database, compared exactly in Python: a name may be part of another value.
            AuditRecord.detail.contains(f'"alias":{json.dumps(name)}', autoescape=True),
        )
        .order_by(AuditRecord.id.desc())
    )
    return tuple(row for row in map(audit.row_of, conn.execute(changes)) if row.detail.get("alias") == name)


def previous(conn: Connection, name: str) -> str:
    """Return the id of the checkpoint that an alias referred to before its last change.

    Raises:
        UsageError: there is no such alias, or it referred to no other one.
    """
    before = perhaps_previous(conn, get(conn, name))
    if before is None:
        raise UsageError(
            f"{name} referred to no other checkpoint before",
            hint=f"`ckptcore catalog alias history {name}` lists its changes",
        )
    return before


def perhaps_previous(conn: Connection, row: AliasRow) -> str | None:
    """Return the id of the checkpoint that an alias referred to before its last change, or None."""
    changes = (change for change in history(conn, row.name) if change.action == "alias.set")
    before = next((change.detail.get("before") for change in changes), None)
    return before if isinstance(before, str) and before != row.checkpoint else None


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
    checkpoint_row = require_kept(conn, ref)
    of_name = Alias.name == name
    row = conn.execute(select(Alias.checkpoint_id, Alias.version).where(of_name).with_for_update()).first()
    if expect is not None:
        # Compared with what is there now, not with a version: callers know checkpoints.
        expected = None if expect == NOTHING else resolve_checkpoint(conn, expect)
        if (row.checkpoint_id if row else None) != expected:
            there = conn.execute(_alias_rows().where(of_name)).first()
            target = "it does not exist" if there is None else f"it points to {there.uuid} ({there.uri})"
            raise Conflict(
                f"cannot set alias {name}: {target} (expected {expect or 'no checkpoint'})",
                hint=f"`ckptcore catalog alias list` shows where {name} points now",
                name=name,
            )
    if row is None:
        alias_columns = {"name": name, "checkpoint_id": checkpoint_row, "version": 1, "updated_at": now}
        conn.execute(insert(Alias).values(alias_columns))
    else:
        # SQLite has no FOR UPDATE: the version tells whether another process moved the alias.
        same = (of_name, Alias.version == row.version)
        alias_columns = {"checkpoint_id": checkpoint_row, "version": row.version + 1, "updated_at": now}
        if conn.execute(update(Alias).where(*same).values(alias_columns)).rowcount != 1:
            raise Conflict(f"cannot set alias {name}: another process moved it at the same time", name=name)
    return get(conn, name)


def remove(conn: Connection, name: str) -> AliasRow:
    """Remove an alias, and return it. Raises `UsageError` if it does not exist."""
    row = get(conn, name)
    conn.execute(delete(Alias).where(Alias.name == name))
    return row


def get(conn: Connection, name: str) -> AliasRow:
    """Return an alias. Raises `UsageError` if it does not exist."""
    row = perhaps(conn, name)
    if row is None:
        names = conn.execute(select(Alias.name)).scalars()
        otherwise = "`ckptcore catalog alias list` lists all aliases"
        raise UsageError(f"there is no alias {name}", hint=did_you_mean(name, names, otherwise))
    return row


def perhaps(conn: Connection, name: str) -> AliasRow | None:
    """Return an alias, or None."""
    row = conn.execute(_alias_rows().where(Alias.name == storable(name))).first()
    return None if row is None else _alias_row(row)


def every(
    conn: Connection, *, part: str = "", after: str | None = None, limit: int | None = None
) -> tuple[AliasRow, ...]:
    """Return all aliases, sorted by name.

    Args:
        conn: a transaction.
        part: only those with this text in their names.
        after: only those behind this name.
        limit: the most aliases.
    """
    query = _alias_rows().limit(limit)
    if part:
        query = query.where(part_of(conn, Alias.name, storable(part)))
    if after:
        query = query.where(Alias.name > storable(after))
    return tuple(map(_alias_row, conn.execute(query)))


def of_checkpoint(conn: Connection, ref: str) -> tuple[AliasRow, ...]:
    """Return the aliases of the checkpoint that `ref` names, sorted by name."""
    of_row = Alias.checkpoint_id == resolve_checkpoint(conn, ref)
    return tuple(map(_alias_row, conn.execute(_alias_rows().where(of_row))))


def _alias_rows() -> Select[Any]:
    """Return the query whose rows `_alias_row` reads."""
    return select(Alias, Checkpoint.uuid, Checkpoint.uri).join(Checkpoint).order_by(Alias.name)


def _alias_row(row: Any) -> AliasRow:
    return read_row(AliasRow, row, checkpoint=row.uuid)


def _require_name(name: str) -> None:
    # What looks like an id would hide the checkpoint with that id.
    if not _NAME.fullmatch(name) or PREFIX.fullmatch(name.lower()):
        raise UsageError(
            f"{name!r} cannot be an alias",
            hint="use letters, digits and . _ @ / + -, with a letter or digit first, and unlike an id",
        )
