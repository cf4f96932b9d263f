"""The inbox and the outbox: durable queues of rows, each processed by one worker at a time.

- The inbox stores events. (source, event id) is unique, so an event is accepted once, however often it is
  sent. An event only says that something may have happened; the flow inspects the URI itself.
- The outbox stores messages to endpoints. A message is inserted in the transaction that makes it true and
  sent afterwards. (endpoint, key) is unique. Delivery is at least once, with the same id on every attempt.

A sender without ids announces a place. Such an event is repeated only while nothing has looked at the place:
once it has a run, or has ended, the same bytes are a new event, whose run finds new files or its work done.
An id that is used again for another place, run or step is refused: a failed row of its own says so.

A row is *waiting*, then *taken* while its lease runs, then *done* or *failed*. If a worker dies, the lease
expires and the row can be taken by another one. The number of attempts identifies the taken row, so a worker
that comes back late cannot end a row that another worker has taken since.

A failed row can be retried. Its tries then count from zero, and it has another key, so a run of it is not
mistaken for the failed one. Ended rows are deleted after `KEEP`; until then a repeated id is recognised.

Every function runs inside a transaction of `Catalog.queueing`; `Outbox.put` also in `Catalog.writing`.
PostgreSQL skips rows that others have locked; SQLite has one writer at a time.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sqlalchemy import delete, func, select, update

from ckptcore.catalog import models
from ckptcore.catalog.normalize import clean, clean_json, storable
from ckptcore.catalog.row_values import parsed, read_row, row_findings, sound
from ckptcore.errors import UsageError
from ckptcore.utils.text import short_repr

if TYPE_CHECKING:
    from sqlalchemy import Connection

LEASE = timedelta(minutes=5)  # how long a worker may take without a result
KEEP = timedelta(days=90)  # how long ended rows are kept
# How long an event may wait because of an error: then it is trouble, and not a moment's.
PATIENCE = timedelta(minutes=1)
RUN_WAITS = "its run waits: "  # begins the reason of an event whose run tries again by itself
MOST_REASONS = 5
MOST_QUOTED = 300  # characters of a value in an error
_ANNOUNCED = ("uri", "run", "step")  # what an event is about


class Stage(StrEnum):
    """The state of a row in a queue."""

    WAITING = "waiting"
    TAKEN = "taken"
    DONE = "done"
    FAILED = "failed"


class _Tried:
    """The count of tries that both kinds of rows share."""

    __slots__ = ()
    attempts: int
    attempts_before: int

    @property
    def tries(self) -> int:
        """How often the row was taken since it arrived or was last retried by a user."""
        return self.attempts - self.attempts_before


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event as it arrived. The fields are those of `InboxEvent`.

    has_id: whether the sender gave it the id; otherwise that is a digest of its bytes.
    """

    source: str
    event_id: str
    type: str = ""
    uri: str = ""
    run: str = ""
    step: int | None = None
    body: str = ""
    has_id: bool = True


@dataclass(frozen=True, slots=True)
class Postponed:
    """Events that wait because of one error.

    reason: the error. events: how many wait. since: when the first of them arrived. due: when one of them is
    tried again. trouble: what is odd in their rows.
    """

    reason: str
    events: int
    since: datetime
    due: datetime
    trouble: str = ""

    def __str__(self) -> str:
        number = "1 event waits" if self.events == 1 else f"{self.events} events wait"
        return f"{number} since {self.since:%Y-%m-%d %H:%M} UTC, next try {self.due:%H:%M:%S}: {self.reason}"


@dataclass(frozen=True, slots=True)
class InboxEvent(_Tried):
    """One event of the inbox.

    source, event_id: unique together. type: the sender's name for the event. uri, run: "" if the sender named
    none; step: None. body: as received. state: a `Stage`. attempts: how often the row was taken. flow_run_id:
    the flow run that processes it. attempts_before: attempts before the last retry by a user.
    trouble: what is odd in the row.
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
    trouble: str = ""

    @property
    def key(self) -> str:
        """The idempotency key of this event; a retry by a user changes it."""
        return f"{self.id}:{self.attempts_before}" if self.attempts_before else self.id


@dataclass(frozen=True, slots=True)
class Message(_Tried):
    """One message of the outbox.

    endpoint: the name of the receiver. key: unique for the endpoint. type: what happened. body: plain values.
    state: a `Stage`. attempts: how often the row was taken. attempts_before: attempts before the last retry
    by a user. trouble: what is odd in the row.
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
    trouble: str = ""


Row = TypeVar("Row", InboxEvent, Message)


class Queue(Generic[Row]):
    """One queue of the catalog.

    Args:
        table: its model.
        row: the class of the returned rows.
        key: the two columns that are unique together. The first is the source or the endpoint.
        on_retry: column values that a retry by a user sets, beside those of the state.
    """

    def __init__(
        self,
        table: type[models.Inbox] | type[models.Outbox],
        row: type[Row],
        key: tuple[str, str],
        on_retry: Mapping[str, Any] | None = None,
    ) -> None:
        self._table, self._key = table, key
        self._row: type[Row] = row
        self._on_retry = on_retry or {}

    def take(
        self,
        conn: Connection,
        now: datetime,
        *,
        limit: int = 1,
        lease: timedelta = LEASE,
        only: Collection[str] | None = None,
    ) -> list[Row]:
        """Take due rows, longest due first. They are the caller's while the lease runs.

        Args:
            conn: a transaction of `Catalog.queueing`.
            now: the current time.
            limit: the most rows to take; odd ones, which nobody can process, are failed.
            lease: how long the rows are reserved.
            only: the sources or endpoints to take from; None means all. Other rows are not touched, nor
                counted as tried.
        """
        table = self._table
        chosen = () if only is None else (getattr(table, self._key[0]).in_(only),)
        # Taken rows whose lease ran out are due as well: their worker has ended.
        due = conn.execute(
            select(table.id)
            .where(table.state.in_((Stage.WAITING.value, Stage.TAKEN.value)), table.due_at <= now, *chosen)
            .order_by(table.due_at, table.id)
            .limit(limit)
            # Rows that another worker has locked are its own: nobody waits for them.
            .with_for_update(skip_locked=True)
        ).scalars()
        mine = table.id.in_(list(due))
        # Counted before anything is done: a row that kills its worker must not be tried for ever.
        conn.execute(
            update(table)
            .where(mine)
            .values(state=Stage.TAKEN.value, due_at=now + lease, attempts=table.attempts + 1)
        )
        taken = list(map(self._read, conn.execute(select(table.__table__).where(mine).order_by(table.id))))
        for row in taken:
            for odd in row_findings(row):  # nobody could process it: it is not due again and again
                failed = {"state": Stage.FAILED.value, "ended_at": now, "error_message": clean(odd.message)}
                conn.execute(update(table).where(table.id == row.row).values(failed))
        return [row for row in taken if not row.trouble]

    def done(self, conn: Connection, now: datetime, row: Row, **columns: Any) -> bool:
        """End a finished row. Return False if its lease expired and another worker has taken it."""
        return self._settle(conn, row, Stage.DONE, ended_at=now, **columns)

    def later(self, conn: Connection, row: Row, due_at: datetime, why: str | None, **columns: Any) -> bool:
        """Schedule a row for another attempt at `due_at`, with an error `why` if any. Returns as `done`."""
        return self._settle(conn, row, Stage.WAITING, due_at=due_at, error=why, **columns)

    def failed(self, conn: Connection, now: datetime, row: Row, why: str) -> bool:
        """End a row that is not to be tried automatically; `retry` reopens it. Returns as `done`."""
        return self._settle(conn, row, Stage.FAILED, ended_at=now, error=why)

    def retry(self, conn: Connection, now: datetime, ref: str | None) -> tuple[str, ...]:
        """Reopen failed rows and return their ids.

        Args:
            conn: a transaction of `Catalog.queueing`.
            now: the time from which the rows are due.
            ref: the id of a row or its beginning; None means all failed rows.

        Raises:
            UsageError: no failed row, or more than one, has the id.
        """
        table = self._table
        failed = table.state == Stage.FAILED.value
        chosen = failed if ref is None else failed & table.uuid.startswith(ref, autoescape=True)
        rows = conn.execute(select(table.id, table.uuid).where(chosen).order_by(table.id)).all()
        # An empty text would be the beginning of every id.
        if ref is not None and (len(rows) != 1 or not ref):
            name = table.__tablename__
            why = "is a prefix of several ids" if rows else f"is not a failed row of the {name}"
            raise UsageError(
                f"{ref!r} {why}", hint=f"`ckptcore catalog {name} list --state failed` lists them"
            )
        reset_columns = {"state": Stage.WAITING.value, "due_at": now, "ended_at": None, **self._on_retry}
        for row in rows:
            conn.execute(
                # Failed still: another process may have reopened the row at this moment.
                update(table)
                .where(table.id == row.id, failed)
                # Tries count from here, and the key of the row changes with it.
                .values(attempts_before=table.attempts, **reset_columns)
            )
        return tuple(row.uuid for row in rows)

    def listed(self, conn: Connection, state: str | None = None, limit: int = 50) -> tuple[Row, ...]:
        """Return rows of a stage, or all that are not done, newest first. Raises `UsageError`."""
        if state is not None and state not in list(Stage):
            raise UsageError(f"unknown state {state!r}", hint=f"use one of {', '.join(Stage)}")
        table = self._table
        in_stage = table.state != Stage.DONE.value if state is None else table.state == state
        newest = select(table.__table__).where(in_stage).order_by(table.id.desc()).limit(limit)
        return tuple(map(self._read, conn.execute(newest)))

    def depth(self, conn: Connection) -> dict[str, int]:
        """Return the number of rows in each stage."""
        counted = select(self._table.state, func.count()).group_by(self._table.state)
        counts = {row[0]: row[1] for row in conn.execute(counted)}
        return {stage.value: counts.get(stage.value, 0) for stage in Stage}

    def forget(self, conn: Connection, before: datetime) -> int:
        """Delete the rows that ended before a time and return how many."""
        table, ended = self._table, (Stage.DONE.value, Stage.FAILED.value)
        return conn.execute(delete(table).where(table.state.in_(ended), table.ended_at < before)).rowcount

    def _insert(self, conn: Connection, due_at: datetime, values: Mapping[str, Any]) -> tuple[Row, bool]:
        """Insert a row, or read the one with the same key; also return whether it is new."""
        table = self._table
        # A sender may repeat an event while it is being stored: the unique key decides which one is new.
        insert: Any = import_module(f"sqlalchemy.dialects.{conn.dialect.name}").insert
        columns = [getattr(table, name) for name in self._key]
        row = {
            "uuid": str(uuid.uuid4()),
            "state": Stage.WAITING.value,
            "attempts": 0,
            "due_at": due_at,
            **values,
        }
        inserted = conn.execute(
            insert(table).values(**row).on_conflict_do_nothing(index_elements=columns).returning(table.id)
        ).first()
        # Read after the insert: either the new row, or the one that was faster.
        same = [column == row[name] for name, column in zip(self._key, columns, strict=True)]
        return self._read(conn.execute(select(table.__table__).where(*same)).one()), inserted is not None

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
        """End a taken row. Return False, with nothing changed, if it has been taken since."""
        table = self._table
        message = None if error is None else clean(error)
        values = {"state": stage.value, "ended_at": ended_at, "error_message": message, **columns}
        # Attempts identify who took the row: its number is in the row that the worker has.
        taken = (table.id == row.row, table.attempts == row.attempts, table.state == Stage.TAKEN.value)
        return conn.execute(update(table).where(*taken).values(values)).rowcount == 1

    def _read(self, row: Any) -> Row:
        read: Row = read_row(self._row, row, id=row.uuid, row=row.id)
        return read


class _Inbox(Queue[InboxEvent]):
    def accept(self, conn: Connection, now: datetime, event: NewEvent) -> tuple[InboxEvent, bool]:
        """Insert an event and return its row and whether it is new. A repeated event changes nothing.

        A row with another id than the event's is that of a refusal, whose error says why.
        """
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
        row, new = self._insert(conn, now, values)
        if new:
            return row, new
        # With an id of the sender: repeated for the same place it is
        # the same event, for another one a mistake.
        if event.has_id:
            is_same = all(getattr(row, name) == values[name] for name in _ANNOUNCED)
            return (row, new) if is_same else self._refuse(conn, now, row, values)
        # Nothing has looked at the place yet, so the waiting event covers this one as well.
        if row.state not in (Stage.DONE, Stage.FAILED) and row.flow_run_id is None:
            return row, new
        # The id becomes free. Of two receivers, the second changes nothing here, and repeats the first one's.
        started = (models.Inbox.id == row.row, models.Inbox.event_id == row.event_id)
        conn.execute(update(models.Inbox).where(*started).values(event_id=f"{row.event_id}:{row.id}"))
        return self._insert(conn, now, values)

    def _refuse(
        self, conn: Connection, now: datetime, row: InboxEvent, values: Mapping[str, Any]
    ) -> tuple[InboxEvent, bool]:
        """Insert a failed row for an event with the id of another one, and return it."""
        before, after = (
            ", ".join(f"{name} {short_repr(of(name), MOST_QUOTED)}" for name in _ANNOUNCED)
            for of in (partial(getattr, row), values.__getitem__)
        )
        id = values["event_id"]
        why = f"the id {short_repr(id)} belongs to another event ({before}); not started: {after}"
        # A digest of both, so that the same refusal is one row, however often it is repeated.
        digest = hashlib.sha256(f"{id}\n{after}".encode()).hexdigest()
        failed = {"event_id": f"refused:{digest}", "state": Stage.FAILED.value, "ended_at": now}
        refused, _ = self._insert(conn, now, {**values, **failed, "error_message": clean(why)})
        return replace(refused, error_message=clean(why)), False

    def postponed(
        self, conn: Connection, now: datetime, only: Collection[str] | None = None
    ) -> tuple[Postponed, ...]:
        """Return why events wait that arrived `PATIENCE` ago or before, most events first.

        only: the sources of the events; None means all.
        """
        table = models.Inbox
        chosen = () if only is None else (table.source.in_(only),)
        waiting = (
            table.state.in_((Stage.WAITING.value, Stage.TAKEN.value)),
            table.error_message.is_not(None),
            table.error_message.not_like(
                f"{RUN_WAITS}%"
            ),  # a run that waits for its checkpoint is no trouble
            table.received_at <= now - PATIENCE,
        )
        # Grouped by reason: a thousand events that wait for one server are one line.
        number = func.count()
        reasons = conn.execute(
            select(table.error_message, number, func.min(table.received_at), func.min(table.due_at))
            .where(*waiting, *chosen)
            .group_by(table.error_message)
            .order_by(number.desc(), table.error_message)
            .limit(MOST_REASONS)
        )
        names = [f.name for f in fields(Postponed) if f.name != "trouble"]
        return tuple(sound(Postponed, **dict(zip(names, row, strict=True))) for row in reasons)

    def get(self, conn: Connection, event_id: str) -> InboxEvent:
        """Return the event with this row id (not the sender's). Raises `UsageError`."""
        row = conn.execute(select(self._table.__table__).where(self._table.uuid == event_id)).first()
        if row is None:
            raise UsageError(
                f"the inbox has no event {event_id}", hint="use the id in the receiver's 202 reply"
            )
        return self._read(row)


class _Outbox(Queue[Message]):
    def put(
        self, conn: Connection, now: datetime, endpoint: str, key: str, *, type: str, body: Mapping[str, Any]
    ) -> tuple[Message, bool]:
        """Insert a message and return its row and whether it is new. A repeated message changes nothing."""
        values = {
            "endpoint": storable(endpoint),
            "key": storable(key),
            "type": storable(type),
            "body": clean_json(body),
            "created_at": now,
        }
        return self._insert(conn, now, values)

    def _read(self, row: Any) -> Message:
        return read_row(Message, row, id=row.uuid, row=row.id, body=parsed(row.body))


# A retried event gets a new flow run.
inbox = _Inbox(
    models.Inbox, InboxEvent, ("source", "event_id"), on_retry={"flow_run_id": None, "error_message": None}
)
outbox = _Outbox(models.Outbox, Message, ("endpoint", "key"))


def forget(conn: Connection, now: datetime, keep: timedelta = KEEP) -> int:
    """Delete the rows of both queues that ended longer ago than `keep`, and return how many."""
    return inbox.forget(conn, now - keep) + outbox.forget(conn, now - keep)
