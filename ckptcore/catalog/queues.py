"""Queues: who works on which row, so that none is lost, and none is worked on twice at a time?

A row is *waiting*, then *taken* for as long as its lease runs, then *done* or *failed*. A worker that dies
says nothing: when the lease is over the row can be taken again. A taken row is known by its number of
attempts, so that a worker which comes back late cannot settle what somebody else has taken since.

A failed row can be put back: its tries are counted from there, and what is made for it gets another key, so
that it is no repeat of what had failed. What has ended is forgotten after `KEEP`; until then an id that comes
again is recognised.

Every function works inside a transaction of `Catalog.queueing`. On PostgreSQL rows that others hold are
skipped; on SQLite there is one writer at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, func, select, update

from ckptcore.catalog.models import Inbox, Outbox
from ckptcore.catalog.normalize import clean
from ckptcore.errors import UsageError

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Row

Queue = type[Inbox] | type[Outbox]
LEASE = timedelta(minutes=5)  # how long a worker may be silent
KEEP = timedelta(days=90)  # how long what has ended is remembered


class Stage(StrEnum):
    """Where a row of a queue stands."""

    WAITING = "waiting"
    TAKEN = "taken"
    DONE = "done"
    FAILED = "failed"


def put(
    conn: Connection, queue: Queue, key: tuple[str, str], row: Mapping[str, Any]
) -> tuple[Row[Any], bool]:
    """The row of this key, and whether it is new: of several that put one at once, one does.

    key: the two columns that are unique together. row: the columns of a new one.
    """
    insert: Any = import_module(f"sqlalchemy.dialects.{conn.dialect.name}").insert
    columns = [getattr(queue, name) for name in key]
    made = conn.execute(
        insert(queue).values(**row).on_conflict_do_nothing(index_elements=columns).returning(queue.id)
    ).first()
    same = [column == row[name] for name, column in zip(key, columns, strict=True)]
    return conn.execute(select(queue.__table__).where(*same)).one(), made is not None


def take(
    conn: Connection,
    queue: Queue,
    now: datetime,
    *meant: ColumnElement[bool],
    limit: int = 1,
    lease: timedelta = LEASE,
) -> list[Row[Any]]:
    """Up to `limit` rows whose time has come, the longest due first; they are the caller's for `lease`.

    meant: what else must hold of a row. Those that it leaves out are not touched, nor counted as tried.
    """
    due = conn.execute(
        select(queue.id)
        .where(queue.state.in_((Stage.WAITING.value, Stage.TAKEN.value)), queue.due_at <= now, *meant)
        .order_by(queue.due_at, queue.id)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).scalars()
    mine = queue.id.in_(list(due))
    conn.execute(
        update(queue)
        .where(mine)
        .values(state=Stage.TAKEN.value, due_at=now + lease, attempts=queue.attempts + 1)
    )
    return list(conn.execute(select(queue.__table__).where(mine).order_by(queue.id)))


def settle(
    conn: Connection,
    queue: Queue,
    row: int,
    attempt: int,
    stage: Stage,
    *,
    ended_at: datetime | None,
    due_at: datetime | None = None,
    error: str | None = None,
    **columns: Any,
) -> bool:
    """How a taken row stands now; False, and nothing changed, when it was taken again since.

    attempt: the row's number of attempts when it was taken. due_at: when it is to be taken again.
    """
    values = {"state": stage.value, "ended_at": ended_at, **columns}
    values["error_message"] = None if error is None else clean(error)
    if due_at is not None:
        values["due_at"] = due_at
    taken = (queue.id == row, queue.attempts == attempt, queue.state == Stage.TAKEN.value)
    return conn.execute(update(queue).where(*taken).values(values)).rowcount == 1


def listed(conn: Connection, queue: Queue, state: str | None, limit: int) -> list[Row[Any]]:
    """Rows of a stage, or all that are not done, the newest first. Raises `UsageError`."""
    if state is not None and state not in list(Stage):
        raise UsageError(f"{state!r} is no stage of a row", hint=", ".join(Stage))
    wanted = queue.state != Stage.DONE.value if state is None else queue.state == state
    return list(conn.execute(select(queue.__table__).where(wanted).order_by(queue.id.desc()).limit(limit)))


def again(conn: Connection, queue: Queue, now: datetime, ref: str | None, **columns: Any) -> tuple[str, ...]:
    """Puts failed rows back to the waiting ones; their ids.

    ref: the id of one, or its beginning; None means all. columns: what else they are given.
    Raises `UsageError` when no failed row, or more than one, is meant.
    """
    failed = queue.state == Stage.FAILED.value
    meant = failed if ref is None else failed & queue.uuid.startswith(ref, autoescape=True)
    found = conn.execute(select(queue.id, queue.uuid).where(meant).order_by(queue.id)).all()
    if ref is not None and (len(found) != 1 or not ref):
        told = (
            f"is no failed row of the {queue.__tablename__}"
            if not found
            else "is the beginning of several ids"
        )
        raise UsageError(
            f"{ref!r} {told}", hint=f"`ckptcore catalog {queue.__tablename__} list --state failed` shows them"
        )
    values = {"state": Stage.WAITING.value, "due_at": now, "ended_at": None, **columns}
    for row in found:
        conn.execute(
            update(queue).where(queue.id == row.id, failed).values(attempts_before=queue.attempts, **values)
        )
    return tuple(row.uuid for row in found)


def forget(conn: Connection, now: datetime, keep: timedelta = KEEP) -> int:
    """Deletes the rows of both queues that ended longer ago than `keep`; how many."""
    ended = (Stage.DONE.value, Stage.FAILED.value)
    return sum(
        conn.execute(delete(queue).where(queue.state.in_(ended), queue.ended_at < now - keep)).rowcount
        for queue in (Inbox, Outbox)
    )


def depth(conn: Connection, queue: Queue) -> dict[str, int]:
    """How many rows are waiting, taken, done and failed."""
    counted = select(queue.state, func.count()).group_by(queue.state)
    found = {row[0]: row[1] for row in conn.execute(counted)}
    return {stage.value: found.get(stage.value, 0) for stage in Stage}
