"""Outbox: which messages are to be told to whom, and who has heard them?

A message is put in the transaction that makes it true, and sent after it: neither is told what did not
happen, nor is forgotten what did. One (endpoint, key) is one message. Sending is at least once: the id stays
the same over all attempts, so that the other side can tell. Every function works inside a transaction of
`Catalog.queueing`, `put` in `Catalog.writing` as well.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from ckptcore.catalog import queues
from ckptcore.catalog.models import Outbox
from ckptcore.catalog.normalize import clean_json, storable
from ckptcore.catalog.queues import LEASE, Stage

if TYPE_CHECKING:
    from sqlalchemy import Connection


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    endpoint: the name of who is to hear it. key: what makes it one of its kind there. type: what happened.
    body: plain values. state: waiting, taken, done or failed. attempts: how often it was taken;
    attempts_before: before somebody put it back, last.
    """

    id: str
    endpoint: str
    key: str
    type: str
    body: dict[str, Any]
    state: str
    attempts: int
    due_at: datetime
    created_at: datetime
    ended_at: datetime | None
    error_message: str | None
    attempts_before: int
    row: int

    @property
    def tries(self) -> int:
        """How often it was taken since it was put, or put back."""
        return self.attempts - self.attempts_before


def put(
    conn: Connection, now: datetime, endpoint: str, key: str, *, type: str, body: Mapping[str, Any]
) -> tuple[Message, bool]:
    """The message's row, and whether it is new: put again, the first one stands as it is."""
    found, new = queues.put(
        conn,
        Outbox,
        ("endpoint", "key"),
        {
            "uuid": str(uuid.uuid4()),
            "endpoint": storable(endpoint),
            "key": storable(key),
            "type": storable(type),
            "body": clean_json(body),
            "state": Stage.WAITING.value,
            "attempts": 0,
            "due_at": now,
            "created_at": now,
        },
    )
    return _message(found), new


def take(
    conn: Connection,
    now: datetime,
    *,
    limit: int = 1,
    lease: timedelta = LEASE,
    endpoints: Collection[str] | None = None,
) -> list[Message]:
    """Messages whose time has come, the longest due first; they are the caller's for `lease`.

    endpoints: only messages to these; None means all.
    """
    meant = () if endpoints is None else (Outbox.endpoint.in_(endpoints),)
    return [_message(row) for row in queues.take(conn, Outbox, now, *meant, limit=limit, lease=lease)]


def sent(conn: Connection, now: datetime, message: Message) -> bool:
    """The endpoint has it; False when the lease was over and somebody else sends it now."""
    return queues.settle(conn, Outbox, message.row, message.attempts, Stage.DONE, ended_at=now)


def later(conn: Connection, message: Message, due_at: datetime, why: str) -> bool:
    """It is to be sent again at `due_at`; False as in `sent`."""
    return queues.settle(
        conn, Outbox, message.row, message.attempts, Stage.WAITING, ended_at=None, due_at=due_at, error=why
    )


def failed(conn: Connection, now: datetime, message: Message, why: str) -> bool:
    """Nobody is to try again by himself (`again` puts it back); False as in `sent`."""
    return queues.settle(conn, Outbox, message.row, message.attempts, Stage.FAILED, ended_at=now, error=why)


def again(conn: Connection, now: datetime, ref: str | None) -> tuple[str, ...]:
    """Puts failed messages back to the waiting ones; see `queues.again`."""
    return queues.again(conn, Outbox, now, ref)


def listed(conn: Connection, state: str | None = None, limit: int = 50) -> tuple[Message, ...]:
    """Messages, the newest first; see `queues.listed`."""
    return tuple(_message(row) for row in queues.listed(conn, Outbox, state, limit))


def depth(conn: Connection) -> dict[str, int]:
    """How many messages are waiting, taken, done and failed."""
    return queues.depth(conn, Outbox)


def _message(row: Any) -> Message:
    return Message(
        id=row.uuid,
        endpoint=row.endpoint,
        key=row.key,
        type=row.type,
        body=json.loads(row.body),
        state=row.state,
        attempts=row.attempts,
        due_at=row.due_at,
        created_at=row.created_at,
        ended_at=row.ended_at,
        error_message=row.error_message,
        attempts_before=row.attempts_before,
        row=row.id,
    )
