"""Claims: who makes one thing of one content, and has it been made?

A claim is a row of its own for every (content of a source, destination, options). Whoever takes it works
while its lease runs, and renews the lease; a worker that dies says nothing, and when the lease is over
another may take the claim. What is done stays done. A taken row is known by its number of attempts, so that
a worker which comes back late settles nothing.

Every function works inside the transaction that it is given, a writer's where it changes something.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sqlalchemy import select, update

from ckptcore.catalog.models import Claim
from ckptcore.catalog.normalize import clean, normal_uri, storable

if TYPE_CHECKING:
    from sqlalchemy import Connection

LEASE = timedelta(minutes=5)  # how long a worker may be silent
TAKEN, DONE, FAILED = "taken", "done", "failed"


@dataclass(frozen=True, slots=True)
class Key:
    """What is made of what. source_digest: of the content. options_digest: of all that decides the output."""

    source_digest: str
    destination: str
    options_digest: str


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """One claim as it stands. mine: whether it was taken just now, by whoever asked."""

    id: int
    key: Key
    source: str
    state: str
    owner: str
    attempts: int
    taken_at: datetime
    due_at: datetime
    ended_at: datetime | None
    error_code: str | None
    error: str | None
    mine: bool = False


def take(
    conn: Connection,
    now: datetime,
    key: Key,
    source: str,
    owner: str,
    *,
    lease: timedelta = LEASE,
    again: bool = False,
) -> ClaimRow:
    """The claim: the caller's from now on (`mine`), or how it stands: done, or in other hands.

    owner: who asks; the same owner takes his own claim again at once. again: take what is done, too.
    """
    values = {
        "source_digest": key.source_digest,
        "destination_uri": normal_uri(key.destination),
        "options_digest": key.options_digest,
        "source_uri": normal_uri(source),
        "state": TAKEN,
        "owner": storable(owner),
        "attempts": 1,
        "taken_at": now,
        "due_at": now + lease,
    }
    insert: Any = import_module(f"sqlalchemy.dialects.{conn.dialect.name}").insert
    columns = [Claim.source_digest, Claim.destination_uri, Claim.options_digest]
    made = conn.execute(
        insert(Claim).values(values).on_conflict_do_nothing(index_elements=columns).returning(Claim.id)
    ).first()
    row = conn.execute(select(Claim.__table__).where(*_is(key)).with_for_update()).one()
    if made is not None:
        return _claim_row(row, mine=True)
    busy = row.state == TAKEN and row.due_at > now and row.owner != storable(owner)
    if busy or (row.state == DONE and not again):
        return _claim_row(row)
    values |= {"attempts": row.attempts + 1, "ended_at": None, "error_code": None, "error_message": None}
    conn.execute(update(Claim).where(Claim.id == row.id).values(values))
    return _claim_row(conn.execute(select(Claim.__table__).where(Claim.id == row.id)).one(), mine=True)


def renew(conn: Connection, now: datetime, claim: ClaimRow, *, lease: timedelta = LEASE) -> bool:
    """The lease runs anew; False when the claim is the caller's no more."""
    return conn.execute(update(Claim).where(*_held(claim)).values(due_at=now + lease)).rowcount == 1


def done(conn: Connection, now: datetime, claim: ClaimRow) -> bool:
    """What was claimed is made; False when the claim is the caller's no more."""
    return conn.execute(update(Claim).where(*_held(claim)).values(state=DONE, ended_at=now)).rowcount == 1


def failed(conn: Connection, now: datetime, claim: ClaimRow, code: str, message: str) -> bool:
    """It could not be made, and may be tried again; False when the claim is the caller's no more."""
    values = {"state": FAILED, "ended_at": now, "error_code": code, "error_message": clean(message)}
    return conn.execute(update(Claim).where(*_held(claim)).values(values)).rowcount == 1


def standing(conn: Connection, key: Key) -> ClaimRow | None:
    """How a claim stands, or None when nobody ever took it."""
    row = conn.execute(select(Claim.__table__).where(*_is(key))).first()
    return None if row is None else _claim_row(row)


def of_destination(conn: Connection, destination: str) -> tuple[ClaimRow, ...]:
    """Every claim on a destination, the newest first."""
    wanted = select(Claim.__table__).where(Claim.destination_uri == normal_uri(destination))
    return tuple(_claim_row(row) for row in conn.execute(wanted.order_by(Claim.id.desc())))


def _is(key: Key) -> tuple[Any, ...]:
    return (
        Claim.source_digest == key.source_digest,
        Claim.destination_uri == normal_uri(key.destination),
        Claim.options_digest == key.options_digest,
    )


def _held(claim: ClaimRow) -> tuple[Any, ...]:
    return Claim.id == claim.id, Claim.attempts == claim.attempts, Claim.state == TAKEN


def _claim_row(row: Any, mine: bool = False) -> ClaimRow:
    key = Key(row.source_digest, row.destination_uri, row.options_digest)
    return ClaimRow(
        row.id,
        key,
        row.source_uri,
        row.state,
        row.owner,
        row.attempts,
        row.taken_at,
        row.due_at,
        row.ended_at,
        row.error_code,
        row.error_message,
        mine,
    )
