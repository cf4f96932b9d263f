"""Holds: reasons, with an optional end, why a checkpoint must not be deleted.

Every function runs inside the given transaction. Functions that change something need a writer's transaction.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from sqlalchemy import ColumnElement, insert, or_, select, update

from ckptcore.catalog.models import Checkpoint, Hold
from ckptcore.catalog.normalize import clean
from ckptcore.catalog.query import require_kept, resolve_checkpoint
from ckptcore.catalog.row_values import read_row
from ckptcore.errors import UsageError

if TYPE_CHECKING:
    from sqlalchemy import Connection


@dataclass(frozen=True, slots=True)
class HoldRow:
    """One hold.

    until: when it expires, or None. released_at: when it was released, or None. trouble: what is odd in the
    row.
    """

    id: str
    checkpoint: str
    uri: str
    reason: str
    owner: str
    placed_at: datetime
    until: datetime | None
    released_at: datetime | None
    trouble: str = ""


def place(
    conn: Connection, now: datetime, ref: str, reason: str, *, owner: str = "", until: datetime | None = None
) -> str:
    """Place a hold on the checkpoint that `ref` names, and return the hold's id. Raises `UsageError`."""
    if not reason.strip():
        raise UsageError("a hold needs a reason", hint="say who needs the checkpoint, and what for")
    if until is not None and until <= now:
        raise UsageError(
            f"the end of a hold must be in the future (got {until.isoformat()})", hint="name a later time"
        )
    new = str(uuid.uuid4())
    conn.execute(
        insert(Hold).values(
            uuid=new,
            checkpoint_id=require_kept(conn, ref),
            reason=clean(reason),
            owner=clean(owner),
            placed_at=now,
            until=until,
        )
    )
    return new


def release(conn: Connection, now: datetime, ref: str) -> str:
    """Release the hold of an id, or of a unique beginning of one, and return its id.

    A second call changes nothing. Raises `UsageError` for an unknown id.
    """
    # An empty beginning would match every hold.
    ids = conn.execute(select(Hold.uuid).where(Hold.uuid.startswith(ref, autoescape=True))).scalars().all()
    if len(ids) != 1 or not ref:
        reason = f"{ref!r} is the beginning of several holds" if ids else f"there is no hold {ref}"
        raise UsageError(reason, hint="`ckptcore catalog hold list` lists all holds")
    (hold,) = ids
    # The first time counts: a second call does not move it.
    conn.execute(update(Hold).where(Hold.uuid == hold, Hold.released_at.is_(None)).values(released_at=now))
    return hold


def active(conn: Connection, now: datetime, ref: str | None = None) -> tuple[HoldRow, ...]:
    """Return the holds in force, oldest first: all, or those on the checkpoint that `ref` names."""
    query = select(Hold, Checkpoint.uuid.label("checkpoint"), Checkpoint.uri).join(Checkpoint)
    if ref is not None:
        query = query.where(Hold.checkpoint_id == resolve_checkpoint(conn, ref))
    rows = conn.execute(query.where(*in_force(now)).order_by(Hold.id))
    return tuple(read_row(HoldRow, row, id=row.uuid) for row in rows)


def in_force(now: datetime) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions on `Hold` under which a hold is in force at `now`."""
    return Hold.released_at.is_(None), or_(Hold.until.is_(None), Hold.until > now)
