"""Inbox and outbox: what was accepted and is not done, and what others have to be told.

Rows of the catalog. One is written before the sender is answered, and each step of its way is one
transaction: whatever is stopped, killed or unplugged, the next process goes on from the rows. A row that
was taken is back when its lease is over.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ckptcore.catalog import open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.queues import InboxEvent, Message, NewEvent, inbox, outbox
from deployments.receiver.event import Event

LEASE = timedelta(minutes=2)  # a process that took rows and died holds them no longer

__all__ = ["InboxEvent", "Kept", "Mailbox", "Message", "News"]


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """A message to put into the outbox. target: a name of the configuration. key: no second one has it
    there."""

    target: str
    key: str
    type: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kept:
    """The row of an event. new: not sent before. state: waiting, taken, done or failed."""

    id: str
    new: bool
    state: str


class Mailbox:
    """Inbox and outbox of one catalog; see `ckptcore.catalog.open_catalog` for the URL and the errors.

    Every method is one transaction, and raises `CatalogError` when the database is away.
    """

    def __init__(self, url: str | None = None, turn: threading.Lock | None = None) -> None:
        # turn: shared by the boxes of a process. SQLite lets writers poll for their turn, and they oversleep.
        self._catalog = open_catalog(url)
        self._turn = turn or threading.Lock()
        self._open = ExitStack()
        self._open.enter_context(self._catalog.kept_open())

    def put(self, events: Sequence[tuple[Event, str, str]], now: datetime) -> list[Kept]:
        """Keep events, given with URI and body; the row of each.

        The URI is as it was allowed, which need not be how the event spells it; the body is as it came.
        """
        found = []
        with self._transaction() as conn:
            for event, uri, body in events:
                came = NewEvent(event.source, event.event_id, event.type, uri, event.run, event.step, body)
                row, new = inbox.accept(conn, now, came)
                found.append(Kept(row.id, new, row.state))
        return found

    def take(self, now: datetime, limit: int, sources: Collection[str]) -> Sequence[InboxEvent]:
        """Events of these sources to start or to look at; nobody else gets them while the lease runs."""
        with self._transaction() as conn:
            return inbox.take(conn, now, limit=limit, lease=LEASE, only=sources)

    def later(self, row: InboxEvent, at: datetime, why: str) -> None:
        """The start failed; try again at a time."""
        with self._transaction() as conn:
            inbox.later(conn, row, at, why)

    def running(self, row: InboxEvent, flow_run_id: str, look_at: datetime) -> None:
        """A run works on the event; look at it at a time."""
        with self._transaction() as conn:
            inbox.later(conn, row, look_at, None, flow_run_id=flow_run_id)

    def end(self, row: InboxEvent, now: datetime, failure: str | None, news: Sequence[News]) -> bool:
        """The event is done, or has failed; with it, in the same transaction, what others are told.

        False, and nothing is told, when somebody else has taken the row since.
        """
        with self._transaction() as conn:
            good = failure is None
            mine = inbox.done(conn, now, row) if good else inbox.failed(conn, now, row, failure or "")
            for one in news if mine else ():
                outbox.put(conn, now, one.target, one.key, type=one.type, body=one.body)
            return mine

    def messages(self, now: datetime, limit: int, targets: Collection[str]) -> Sequence[Message]:
        """Messages to these targets, to send; nobody else gets them while the lease runs."""
        with self._transaction() as conn:
            return outbox.take(conn, now, limit=limit, lease=LEASE, only=targets)

    def sent(self, message: Message, now: datetime) -> None:
        """The message has arrived."""
        with self._transaction() as conn:
            outbox.done(conn, now, message)

    def unsent(self, message: Message, now: datetime, why: str, again: datetime | None) -> None:
        """It has not; try again at a time, or not by itself."""
        with self._transaction() as conn:
            if again is None:
                outbox.failed(conn, now, message, why)
            else:
                outbox.later(conn, message, again, why)

    def watched(self) -> list[str]:
        """The roots that are swept for new checkpoints."""
        with self._catalog.reading() as conn:
            return [root.uri for root in roots.every(conn, enabled=True)]

    def check(self) -> None:
        """Raise `CatalogError` when the database does not answer or the tables are not there."""
        with self._transaction() as conn:
            inbox.depth(conn)

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        with self._turn, self._catalog.queueing() as conn:
            yield conn

    def close(self) -> None:
        """Give the connections back."""
        self._open.close()
        self._catalog.close()
