"""Inbox: which events were accepted, and what became of each?

An event is accepted once, however often it is sent: (source, event id) is unique. It says that something
may have happened; what it names is looked at before anything is believed. Every function works inside a
transaction of `Catalog.queueing`.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from ckptcore.catalog import queues
from ckptcore.catalog.models import Inbox
from ckptcore.catalog.normalize import clean, storable
from ckptcore.catalog.queues import LEASE, Stage
from ckptcore.errors import UsageError

if TYPE_CHECKING:
    from sqlalchemy import Connection


@dataclass(frozen=True, slots=True)
class InboxEvent:
    """One event.

    source, event_id: unique together. type: what the sender calls it. uri, run: "" where it named none; step:
    None. body: as it came. state: waiting, taken, done or failed. attempts: how often it was taken.
    flow_run_id: the run that works on it. attempts_before: those of its attempts that were made before
    somebody put it back, last.
    """

    id: str
    source: str
    event_id: str
    type: str
    uri: str
    run: str
    step: int | None
    body: str
    state: str
    attempts: int
    due_at: datetime
    received_at: datetime
    ended_at: datetime | None
    flow_run_id: str | None
    error_message: str | None
    attempts_before: int
    row: int

    @property
    def tries(self) -> int:
        """How often it was taken since it came, or was put back."""
        return self.attempts - self.attempts_before

    @property
    def key(self) -> str:
        """What stands for this event, and for it once more after somebody put it back."""
        return f"{self.id}:{self.attempts_before}" if self.attempts_before else self.id


def accept(
    conn: Connection,
    now: datetime,
    source: str,
    event_id: str,
    *,
    type: str = "",
    uri: str = "",
    run: str = "",
    step: int | None = None,
    body: str = "",
    due_at: datetime | None = None,
) -> tuple[InboxEvent, bool]:
    """The event's row, and whether it is new: sent again, the first one stands as it is.

    due_at: when it may be taken at the earliest; now by default.
    """
    found, new = queues.put(
        conn,
        Inbox,
        ("source", "event_id"),
        {
            "uuid": str(uuid.uuid4()),
            "source": storable(source),
            "event_id": storable(event_id),
            "type": storable(type),
            "uri": clean(uri),
            "run": storable(run),
            "step": step,
            "body": clean(body),
            "state": Stage.WAITING.value,
            "attempts": 0,
            "due_at": due_at or now,
            "received_at": now,
        },
    )
    return _event(found), new


def take(
    conn: Connection,
    now: datetime,
    *,
    limit: int = 1,
    lease: timedelta = LEASE,
    sources: Collection[str] | None = None,
) -> list[InboxEvent]:
    """Events whose time has come, the longest due first; they are the caller's for `lease`.

    sources: only events of these; None means all.
    """
    meant = () if sources is None else (Inbox.source.in_(sources),)
    return [_event(row) for row in queues.take(conn, Inbox, now, *meant, limit=limit, lease=lease)]


def done(conn: Connection, now: datetime, event: InboxEvent, flow_run_id: str | None = None) -> bool:
    """The event needs no more work; False when its lease was over and somebody else has it."""
    kept = event.flow_run_id if flow_run_id is None else flow_run_id
    return queues.settle(conn, Inbox, event.row, event.attempts, Stage.DONE, ended_at=now, flow_run_id=kept)


def later(conn: Connection, event: InboxEvent, due_at: datetime, why: str) -> bool:
    """The event is to be taken again at `due_at`; False as in `done`."""
    return queues.settle(
        conn, Inbox, event.row, event.attempts, Stage.WAITING, ended_at=None, due_at=due_at, error=why
    )


def failed(conn: Connection, now: datetime, event: InboxEvent, why: str) -> bool:
    """Nobody is to try again by himself (`again` puts it back); False as in `done`."""
    return queues.settle(conn, Inbox, event.row, event.attempts, Stage.FAILED, ended_at=now, error=why)


def again(conn: Connection, now: datetime, ref: str | None) -> tuple[str, ...]:
    """Puts failed events back to the waiting ones, for a run of their own; see `queues.again`."""
    return queues.again(conn, Inbox, now, ref, flow_run_id=None)


def listed(conn: Connection, state: str | None = None, limit: int = 50) -> tuple[InboxEvent, ...]:
    """Events, the newest first; see `queues.listed`."""
    return tuple(_event(row) for row in queues.listed(conn, Inbox, state, limit))


def get(conn: Connection, event_id: str) -> InboxEvent:
    """The event with this id of ours. Raises `UsageError`."""
    row = conn.execute(select(Inbox.__table__).where(Inbox.uuid == event_id)).first()
    if row is None:
        raise UsageError(f"the inbox has no event {event_id}", hint="take the id that the 202 answered")
    return _event(row)


def depth(conn: Connection) -> dict[str, int]:
    """How many events are waiting, taken, done and failed."""
    return queues.depth(conn, Inbox)


def _event(row: Any) -> InboxEvent:
    return InboxEvent(
        id=row.uuid,
        source=row.source,
        event_id=row.event_id,
        type=row.type,
        uri=row.uri,
        run=row.run,
        step=row.step,
        body=row.body,
        state=row.state,
        attempts=row.attempts,
        due_at=row.due_at,
        received_at=row.received_at,
        ended_at=row.ended_at,
        flow_run_id=row.flow_run_id,
        error_message=row.error_message,
        attempts_before=row.attempts_before,
        row=row.id,
    )
