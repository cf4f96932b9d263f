"""The receiver's view of the inbox (accepted events) and the outbox (messages to send).

Both are rows of the catalog. An event is stored before its sender gets a reply, and each later step is one
transaction. Whatever is stopped, killed or unplugged, the next process continues from the rows. A taken row
becomes free when its lease expires.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ckptcore.catalog import open_catalog, promotions
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.audit import AuditRow
from ckptcore.catalog.database import clock
from ckptcore.catalog.queues import RUN_WAITS, InboxEvent, Message, NewEvent, Postponed, inbox, outbox
from ckptcore.catalog.run_outputs import output_at, outputs_of_run
from ckptcore.utils.isolation import for_each
from deployments.receiver.event import Event

LEASE = timedelta(minutes=2)  # rows of a process that died are free after this time

__all__ = ["EventQueues", "InboxEvent", "Message", "StoredEvent"]


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """The row of an event.

    new: False for a repeated event. state: waiting, taken, done or failed. refused: why the event is not
    accepted; "" if it is.
    """

    id: str
    new: bool
    state: str
    refused: str = ""


class EventQueues:
    """The inbox and the outbox of one catalog.

    See `ckptcore.catalog.open_catalog` for the URL and the errors. Every method is one transaction,
    `announce` one for each message. It raises `CatalogError` if the database does not answer.
    """

    def __init__(self, url: str | None = None, turn: threading.Lock | None = None) -> None:
        # turn: shared by the mailboxes of a process. SQLite's writers poll for their turn and wait too long.
        self._catalog = open_catalog(url)
        self._turn = turn or threading.Lock()
        self._open = ExitStack()
        self._open.enter_context(self._catalog.kept_open())

    def now(self) -> datetime:
        """Return the time by which events and messages are due: the catalog's."""
        return self._catalog.now()

    def put(self, events: Sequence[tuple[Event, str, str]], now: datetime | None = None) -> list[StoredEvent]:
        """Store events and return the row of each.

        Args:
            events: (event, URI, body) each. The URI is the allowed, normalized one; the body is as received.
            now: the time to record; the catalog's if None.
        """
        stored = []
        with self._transaction() as conn:
            now = now or clock(conn)
            for event, uri, body in events:
                announced = (event.type, uri, event.run, event.step, body, event.has_id)
                row, new = inbox.accept(conn, now, NewEvent(event.source, event.event_id, *announced))
                refused = row.error_message or "" if row.event_id != event.event_id else ""
                stored.append(StoredEvent(row.id, new, row.state, refused))
        return stored

    def take(self, now: datetime, limit: int, sources: Collection[str]) -> Sequence[InboxEvent]:
        """Take events of these sources. Nobody else gets them while the lease runs."""
        with self._transaction() as conn:
            return inbox.take(conn, now, limit=limit, lease=LEASE, only=sources)

    def later(self, row: InboxEvent, retry_at: datetime, why: str) -> None:
        """Schedule another try to start an event."""
        with self._transaction() as conn:
            inbox.later(conn, row, retry_at, why)

    def running(self, row: InboxEvent, flow_run_id: str, look_at: datetime, waits_for: str = "") -> None:
        """Record the run of an event, and what it waits for, and schedule the next look at it."""
        why = f"{RUN_WAITS}{waits_for}" if waits_for else None
        with self._transaction() as conn:
            inbox.later(conn, row, look_at, why, flow_run_id=flow_run_id)

    def end(
        self, row: InboxEvent, now: datetime, failure: str | None, body: Mapping[str, Any], to: Sequence[str]
    ) -> bool:
        """End an event, and put a message about it into the outbox in the same transaction.

        Args:
            row: the event.
            now: the time to record.
            failure: why it failed, or None.
            body: of the message, with its type.
            to: names of targets in the configuration.

        Returns:
            False, with no messages stored, if another process has taken the row since.
        """
        with self._transaction() as conn:
            good = failure is None
            mine = inbox.done(conn, now, row) if good else inbox.failed(conn, now, row, failure or "")
            key = f"{row.key}:{'succeeded' if good else 'failed'}"  # unique for the target
            for target in to if mine else ():
                outbox.put(conn, now, target, key, type=body["type"], body=body)
            return mine

    def messages(self, now: datetime, limit: int, targets: Collection[str]) -> Sequence[Message]:
        """Take messages to these targets. Nobody else gets them while the lease runs."""
        with self._transaction() as conn:
            return outbox.take(conn, now, limit=limit, lease=LEASE, only=targets)

    def sent(self, message: Message, now: datetime) -> None:
        """Record that a message was delivered."""
        with self._transaction() as conn:
            outbox.done(conn, now, message)

    def unsent(self, message: Message, now: datetime, why: str, retry_at: datetime | None) -> None:
        """Record a failed delivery, and schedule a retry unless `retry_at` is None."""
        with self._transaction() as conn:
            if retry_at is None:
                outbox.failed(conn, now, message, why)
            else:
                outbox.later(conn, message, retry_at, why)

    def outputs(self, flow_run_id: str | None, destination: str, source: str) -> list[dict[str, Any]]:
        """Return what a run made, or what was made at the destination from the source before it."""
        with self._catalog.reading() as conn:
            return outputs_of_run(conn, flow_run_id) or (
                output_at(conn, destination, source) if destination else []
            )

    def announce(self, now: datetime, endpoints: Mapping[str, Collection[str]]) -> int:
        """Put messages about alias changes into the outbox, and return how many are new.

        Args:
            now: the time to record.
            endpoints: name -> the types of messages that it gets.
        """
        with self._catalog.reading() as conn:
            alias_changes = [
                (name, change)
                for name, types in endpoints.items()
                for change in promotions.unannounced(conn, now, name, types)
            ]
        count = 0

        def put(alias_change: tuple[str, AuditRow]) -> None:
            nonlocal count
            with self._transaction() as conn:
                count += promotions.announce(conn, now, *alias_change)

        for_each(put, alias_changes)
        return count

    def watched(self) -> list[str]:
        """Return the URIs of the enabled watched roots."""
        with self._catalog.reading() as conn:
            return list(roots.enabled_uris(conn))

    def postponed(self, now: datetime, sources: Collection[str]) -> tuple[Postponed, ...]:
        """Return why events of these sources have been waiting for a while."""
        with self._catalog.reading() as conn:
            return inbox.postponed(conn, now, sources)

    def check(self) -> None:
        """Raise `CatalogError` if the database does not answer or lacks the tables."""
        with self._transaction() as conn:
            inbox.depth(conn)

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        with self._turn, self._catalog.queueing() as conn:
            yield conn

    def close(self) -> None:
        """Close the connections."""
        self._open.close()
        self._catalog.close()
