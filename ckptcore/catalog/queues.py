"""The inbox and the outbox: queues of rows, none of which is lost, or worked on twice at a time.

- The inbox holds events. One is accepted once, however often it is sent: (source, event id) is unique. It
  says that something may have happened; what it names is looked at before anything is believed.
- The outbox holds messages to others. One is put in the transaction that makes it true, and sent after it;
  one (endpoint, key) is one message. Sending is at least once: the id stays the same over all attempts.

A row is *waiting*, then *taken* for as long as its lease runs, then *done* or *failed*. A worker that dies
says nothing: when the lease is over the row can be taken again. A taken row is known by its number of
attempts, so that a worker which comes back late cannot settle what somebody else has taken since.

A failed row can be put back: its tries are counted from there, and what is made for it gets another key, so
that it is no repeat of what had failed. What has ended is forgotten after `KEEP`; until then an id that comes
again is recognised.

Every function works inside a transaction of `Catalog.queueing`, `Outbox.put` in `Catalog.writing` as well. On
PostgreSQL rows that others hold are skipped; on SQLite there is one writer at a time.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sqlalchemy import delete, func, select, update

from ckptcore.catalog import models
from ckptcore.catalog.normalize import clean, clean_json, storable
from ckptcore.errors import UsageError

if TYPE_CHECKING:
    from sqlalchemy import Connection

LEASE = timedelta(minutes=5)  # how long a worker may be silent
KEEP = timedelta(days=90)  # how long what has ended is remembered
_COLUMNS = {"id": "uuid", "row": "id"}  # field -> column, where they differ


class Stage(StrEnum):
    """Where a row of a queue stands."""

    WAITING = "waiting"
    TAKEN = "taken"
    DONE = "done"
    FAILED = "failed"


class _Tried:
    """What both kinds of rows can say of their attempts."""

    __slots__ = ()
    attempts: int
    attempts_before: int

    @property
    def tries(self) -> int:
        """How often the row was taken since it came, or was put back."""
        return self.attempts - self.attempts_before


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event as it arrived; the fields are those of `InboxEvent`."""

    source: str
    event_id: str
    type: str = ""
    uri: str = ""
    run: str = ""
    step: int | None = None
    body: str = ""


@dataclass(frozen=True, slots=True)
class InboxEvent(_Tried):
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
    def key(self) -> str:
        """What identifies this event, and this event after somebody put it back."""
        return f"{self.id}:{self.attempts_before}" if self.attempts_before else self.id


@dataclass(frozen=True, slots=True)
class Message(_Tried):
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


Row = TypeVar("Row", InboxEvent, Message)


class Queue(Generic[Row]):
    """One queue of the catalog.

    Args:
        table: Its model.
        row: What a row is given as.
        key: The two columns that are unique together; the first says whom a row is from, or for.
        put_back: What a row is given besides when it is put back.
    """

    def __init__(
        self,
        table: type[models.Inbox] | type[models.Outbox],
        row: type[Row],
        key: tuple[str, str],
        put_back: Mapping[str, Any] | None = None,
    ) -> None:
        self._table, self._key = table, key
        self._row: type[Row] = row
        self._put_back = put_back or {}

    def take(
        self,
        conn: Connection,
        now: datetime,
        *,
        limit: int = 1,
        lease: timedelta = LEASE,
        only: Collection[str] | None = None,
    ) -> list[Row]:
        """Take rows whose time has come, the longest due first; they are the caller's for a lease.

        Args:
            conn: A transaction of `Catalog.queueing`.
            now: When.
            limit: How many at most.
            lease: For how long.
            only: Only rows of these sources, or for these endpoints; None means all. Others are not touched,
                nor counted as tried.
        """
        table = self._table
        chosen = () if only is None else (getattr(table, self._key[0]).in_(only),)
        due = conn.execute(
            select(table.id)
            .where(table.state.in_((Stage.WAITING.value, Stage.TAKEN.value)), table.due_at <= now, *chosen)
            .order_by(table.due_at, table.id)
            .limit(limit)
            .with_for_update(skip_locked=True)
        ).scalars()
        mine = table.id.in_(list(due))
        conn.execute(
            update(table)
            .where(mine)
            .values(state=Stage.TAKEN.value, due_at=now + lease, attempts=table.attempts + 1)
        )
        return [
            self._read(row) for row in conn.execute(select(table.__table__).where(mine).order_by(table.id))
        ]

    def done(self, conn: Connection, now: datetime, row: Row, **columns: Any) -> bool:
        """End a row that needs no more work; False when its lease was over and somebody else has it."""
        return self._settle(conn, row, Stage.DONE, ended_at=now, **columns)

    def later(self, conn: Connection, row: Row, due_at: datetime, why: str | None, **columns: Any) -> bool:
        """Have a row taken again at ``due_at``; False as in `done`. why: what went wrong, or None."""
        return self._settle(conn, row, Stage.WAITING, due_at=due_at, error=why, **columns)

    def failed(self, conn: Connection, now: datetime, row: Row, why: str) -> bool:
        """End a row that nobody is to try again by himself (`again` puts it back); False as in `done`."""
        return self._settle(conn, row, Stage.FAILED, ended_at=now, error=why)

    def again(self, conn: Connection, now: datetime, ref: str | None) -> tuple[str, ...]:
        """Put failed rows back to the waiting ones; their ids.

        ref: the id of one, or its beginning; None means all. Raises `UsageError` when no failed row, or more
        than one, has it.
        """
        table = self._table
        failed = table.state == Stage.FAILED.value
        chosen = failed if ref is None else failed & table.uuid.startswith(ref, autoescape=True)
        found = conn.execute(select(table.id, table.uuid).where(chosen).order_by(table.id)).all()
        if ref is not None and (len(found) != 1 or not ref):
            name = table.__tablename__
            why = "is the beginning of several ids" if found else f"is no failed row of the {name}"
            raise UsageError(
                f"{ref!r} {why}", hint=f"`ckptcore catalog {name} list --state failed` shows them"
            )
        values = {"state": Stage.WAITING.value, "due_at": now, "ended_at": None, **self._put_back}
        for row in found:
            conn.execute(
                update(table)
                .where(table.id == row.id, failed)
                .values(attempts_before=table.attempts, **values)
            )
        return tuple(row.uuid for row in found)

    def listed(self, conn: Connection, state: str | None = None, limit: int = 50) -> tuple[Row, ...]:
        """Rows of a stage, or all that are not done, the newest first. Raises `UsageError`."""
        if state is not None and state not in list(Stage):
            raise UsageError(f"{state!r} is no stage of a row", hint=", ".join(Stage))
        table = self._table
        wanted = table.state != Stage.DONE.value if state is None else table.state == state
        newest = select(table.__table__).where(wanted).order_by(table.id.desc()).limit(limit)
        return tuple(self._read(row) for row in conn.execute(newest))

    def depth(self, conn: Connection) -> dict[str, int]:
        """How many rows are waiting, taken, done and failed."""
        counted = select(self._table.state, func.count()).group_by(self._table.state)
        found = {row[0]: row[1] for row in conn.execute(counted)}
        return {stage.value: found.get(stage.value, 0) for stage in Stage}

    def forget(self, conn: Connection, before: datetime) -> int:
        """Delete the rows that ended before a time; how many."""
        table, ended = self._table, (Stage.DONE.value, Stage.FAILED.value)
        return conn.execute(delete(table).where(table.state.in_(ended), table.ended_at < before)).rowcount

    def _insert(self, conn: Connection, due_at: datetime, values: Mapping[str, Any]) -> tuple[Row, bool]:
        """The row of a key, and whether it is new: of several that put one at once, one does."""
        table = self._table
        insert: Any = import_module(f"sqlalchemy.dialects.{conn.dialect.name}").insert
        columns = [getattr(table, name) for name in self._key]
        row = {
            "uuid": str(uuid.uuid4()),
            "state": Stage.WAITING.value,
            "attempts": 0,
            "due_at": due_at,
            **values,
        }
        made = conn.execute(
            insert(table).values(**row).on_conflict_do_nothing(index_elements=columns).returning(table.id)
        ).first()
        same = [column == row[name] for name, column in zip(self._key, columns, strict=True)]
        return self._read(conn.execute(select(table.__table__).where(*same)).one()), made is not None

    def _settle(
        self,
        conn: Connection,
        row: Row,
        stage: Stage,
        *,
        ended_at: datetime | None = None,
        error: str | None = None,
        **columns: Any,
    ) -> bool:
        """How a taken row ends; False, and nothing changed, when it was taken again since."""
        table = self._table
        message = None if error is None else clean(error)
        values = {"state": stage.value, "ended_at": ended_at, "error_message": message, **columns}
        taken = (table.id == row.row, table.attempts == row.attempts, table.state == Stage.TAKEN.value)
        return conn.execute(update(table).where(*taken).values(values)).rowcount == 1

    def _read(self, row: Any) -> Row:
        read: Row = self._row(**self._values(row))
        return read

    def _values(self, row: Any) -> dict[str, Any]:
        """The fields of a row of the table."""
        return {f.name: getattr(row, _COLUMNS.get(f.name, f.name)) for f in fields(self._row)}


class _Inbox(Queue[InboxEvent]):
    def accept(self, conn: Connection, now: datetime, event: NewEvent) -> tuple[InboxEvent, bool]:
        """The event's row, and whether it is new: sent again, the first one stays as it is."""
        values = {
            "source": storable(event.source),
            "event_id": storable(event.event_id),
            "type": storable(event.type),
            "uri": clean(event.uri),
            "run": storable(event.run),
            "step": event.step,
            "body": clean(event.body),
            "received_at": now,
        }
        return self._insert(conn, now, values)

    def get(self, conn: Connection, event_id: str) -> InboxEvent:
        """The event with this id of ours. Raises `UsageError`."""
        row = conn.execute(select(self._table.__table__).where(self._table.uuid == event_id)).first()
        if row is None:
            raise UsageError(f"the inbox has no event {event_id}", hint="take the id that the 202 answered")
        return self._read(row)


class _Outbox(Queue[Message]):
    def put(
        self, conn: Connection, now: datetime, endpoint: str, key: str, *, type: str, body: Mapping[str, Any]
    ) -> tuple[Message, bool]:
        """The message's row, and whether it is new: put again, the first one stays as it is."""
        values = {
            "endpoint": storable(endpoint),
            "key": storable(key),
            "type": storable(type),
            "body": clean_json(body),
            "created_at": now,
        }
        return self._insert(conn, now, values)

    def _values(self, row: Any) -> dict[str, Any]:
        return super()._values(row) | {"body": json.loads(row.body)}


# A run of an event that is put back is another run.
inbox = _Inbox(models.Inbox, InboxEvent, ("source", "event_id"), put_back={"flow_run_id": None})
outbox = _Outbox(models.Outbox, Message, ("endpoint", "key"))


def forget(conn: Connection, now: datetime, keep: timedelta = KEEP) -> int:
    """Delete the rows of both queues that ended longer ago than ``keep``; how many."""
    return inbox.forget(conn, now - keep) + outbox.forget(conn, now - keep)
