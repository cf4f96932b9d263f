"""Claims: leases that let one process make an output while others wait for it.

A claim is one row for each (content of a source, destination, options). Its owner works while the lease runs,
and renews the lease. If a worker dies, its lease expires and another worker may take the claim; one on the
same machine, which can prove that its process has ended, need not wait. A finished claim stays done. The
number of attempts identifies the taken row, so a worker that comes back late cannot end a claim that another
one has taken.

Every function runs inside the given transaction. Functions that change something need a writer's transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, select, update

from ckptcore.catalog.models import Claim
from ckptcore.catalog.normalize import clean, normal_uri, same_places, storable
from ckptcore.utils import processes

if TYPE_CHECKING:
    from sqlalchemy import Connection

LEASE = timedelta(minutes=5)  # how long a worker may go without renewing
TAKEN, DONE, FAILED = "taken", "done", "failed"
_TAKEN_OVER = "another worker took it over, under another scheme of the destination"
_SIGN = " | "  # between an owner and its process, in one column


@dataclass(frozen=True, slots=True)
class Key:
    """The key of a claim: the source's content, the destination, and all options that affect the output."""

    source_digest: str
    destination: str
    options_digest: str


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """One claim.

    process: that of the owner, see `ckptcore.utils.processes`; () if unknown. mine: whether this call took it
    for the caller.
    """

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
    process: tuple[str, ...] = ()
    mine: bool = False

    def is_in_use(self, now: datetime) -> bool:
        """Return whether its owner may still be at work."""
        return self.state == TAKEN and self.due_at > now and not processes.has_ended(self.process)


def take(
    conn: Connection,
    now: datetime,
    key: Key,
    source: str,
    owner: str,
    *,
    lease: timedelta = LEASE,
    retry: bool = False,
) -> ClaimRow:
    """Take a claim for `owner`, or return it as it is: done, or taken by another process.

    Args:
        conn: a writer's transaction.
        now: the time to record.
        key: what is made, of what, and where.
        source: the URI of the source.
        owner: the caller. An owner can take its own claim twice.
        lease: how long the claim is reserved without a renewal.
        retry: take the claim even if it is done.

    Returns:
        The claim. `mine` tells whether the caller owns it now.
    """
    claim_columns = {
        "source_digest": key.source_digest,
        "destination_uri": normal_uri(key.destination),
        "options_digest": key.options_digest,
        "source_uri": normal_uri(source),
        "state": TAKEN,
        # With the process, so that another one on this machine can see at once that it has ended.
        "owner": _SIGN.join((storable(owner), " ".join(processes.this_process()))),
        "attempts": 1,
        "taken_at": now,
        "due_at": now + lease,
    }
    elsewhere = (*_is(key), Claim.destination_uri != claim_columns["destination_uri"])
    for row in conn.execute(select(Claim.__table__).where(*elsewhere)):  # another scheme of the same place
        claim = _claim_row(row)
        if _is_settled(claim, now, owner, retry=retry):
            return claim
    # Two workers may claim at once: the unique key decides which of them inserts the row.
    insert: Any = import_module(f"sqlalchemy.dialects.{conn.dialect.name}").insert
    columns = [Claim.source_digest, Claim.destination_uri, Claim.options_digest]
    inserted = conn.execute(
        insert(Claim).values(claim_columns).on_conflict_do_nothing(index_elements=columns).returning(Claim.id)
    ).first()
    mine = (*_is(key), Claim.destination_uri == claim_columns["destination_uri"])
    # Read under a lock: on PostgreSQL another worker may change it between both statements.
    row = conn.execute(select(Claim.__table__).where(*mine).with_for_update()).one()
    claim = _claim_row(row, mine=inserted is not None)
    if not claim.mine and _is_settled(claim, now, owner, retry=retry):
        return claim
    lost = {"state": FAILED, "ended_at": now, "error_code": "interrupted", "error_message": _TAKEN_OVER}
    conn.execute(
        update(Claim)
        .where(*elsewhere, Claim.state == TAKEN)  # its worker, if it comes back, owns nothing any more
        .values(lost | {"attempts": Claim.attempts + 1})
    )
    if claim.mine:
        return claim
    # A row that ended, or whose owner is gone: the next attempt has a
    # number of its own, by which `_owned` knows it.
    claim_columns |= {
        "attempts": row.attempts + 1,
        "ended_at": None,
        "error_code": None,
        "error_message": None,
    }
    conn.execute(update(Claim).where(Claim.id == row.id).values(claim_columns))
    return _claim_row(conn.execute(select(Claim.__table__).where(Claim.id == row.id)).one(), mine=True)


def renew(conn: Connection, now: datetime, claim: ClaimRow, *, lease: timedelta = LEASE) -> bool:
    """Renew the lease. Return False if the caller no longer owns the claim."""
    # By id and attempts: a worker that was stopped too long finds that the row is another's.
    return conn.execute(update(Claim).where(*_owned(claim)).values(due_at=now + lease)).rowcount == 1


def done(conn: Connection, now: datetime, claim: ClaimRow) -> bool:
    """Mark a claim as done. Return False if the caller no longer owns it."""
    return conn.execute(update(Claim).where(*_owned(claim)).values(state=DONE, ended_at=now)).rowcount == 1


def end(conn: Connection, now: datetime, claim: ClaimRow, failure: tuple[str, str] | None) -> bool:
    """End a claim as done, or as failed with a code and a message. Return False if another worker took it."""
    if failure is None:
        return done(conn, now, claim)
    return failed(conn, now, claim, *failure)


def failed(conn: Connection, now: datetime, claim: ClaimRow, code: str, message: str) -> bool:
    """Mark a claim as failed, free for a retry. Return False if the caller no longer owns it."""
    values = {"state": FAILED, "ended_at": now, "error_code": code, "error_message": clean(message)}
    return conn.execute(update(Claim).where(*_owned(claim)).values(values)).rowcount == 1


def drop(conn: Connection, claim: ClaimRow) -> bool:
    """Remove a claim that records nothing. Return False if the caller no longer owns it."""
    return conn.execute(delete(Claim).where(*_owned(claim))).rowcount == 1


def follow(conn: Connection, source: str, before: str, after: str) -> None:
    """Let the claims that are done be those of a source whose files changed, and not what was made of it.

    Args:
        conn: a writer's transaction.
        source: the URI of the source.
        before: the digest of its content until now.
        after: that of its content from now on.
    """
    done_of_it = (
        # Claims that are taken keep their content: their worker is reading what was there.
        Claim.source_digest == before,
        Claim.source_uri.in_(same_places(source)),
        Claim.state == DONE,
    )
    conn.execute(update(Claim).where(*done_of_it).values(source_digest=after))


def current(conn: Connection, key: Key) -> ClaimRow | None:
    """Return a claim, or None if it was never taken."""
    # Several rows may be of one place; the last one that was taken is what is happening.
    row = conn.execute(select(Claim.__table__).where(*_is(key)).order_by(Claim.taken_at.desc())).first()
    return None if row is None else _claim_row(row)


def of_destination(conn: Connection, destination: str) -> tuple[ClaimRow, ...]:
    """Return every claim on a destination, newest first."""
    query = select(Claim.__table__).where(Claim.destination_uri.in_(same_places(destination)))
    return tuple(_claim_row(row) for row in conn.execute(query.order_by(Claim.id.desc())))


def read_owner(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the owner and the process in the column `owner`; () if there is none."""
    owner, _, process = text.rpartition(_SIGN)
    return (owner, tuple(process.split(" "))) if owner else (text, ())


def _is(key: Key) -> tuple[Any, ...]:
    return (
        Claim.source_digest == key.source_digest,
        Claim.destination_uri.in_(same_places(key.destination)),
        Claim.options_digest == key.options_digest,
    )


def _is_settled(claim: ClaimRow, now: datetime, owner: str, *, retry: bool) -> bool:
    """Return whether a claim is not to be taken: another worker has it, or it is done."""
    busy = claim.owner != storable(owner) and claim.is_in_use(now)
    return busy or (claim.state == DONE and not retry)


def _owned(claim: ClaimRow) -> tuple[Any, ...]:
    return Claim.id == claim.id, Claim.attempts == claim.attempts, Claim.state == TAKEN


def _claim_row(row: Any, mine: bool = False) -> ClaimRow:
    key = Key(row.source_digest, row.destination_uri, row.options_digest)
    owner, process = read_owner(row.owner)
    return ClaimRow(
        row.id,
        key,
        row.source_uri,
        row.state,
        owner,
        row.attempts,
        row.taken_at,
        row.due_at,
        row.ended_at,
        row.error_code,
        row.error_message,
        process,
        mine,
    )
