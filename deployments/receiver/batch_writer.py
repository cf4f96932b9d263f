"""Write waiting events to the inbox in batches; reply to each once it is durable.

A transaction costs the same for one event and for fifty. One batch is written at a time, and new events wait
for the next, so the database gets no more requests than it can answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from ckptcore.errors import CkptError, InternalError
from ckptcore.page.http_errors import RequestRefused
from ckptcore.utils.isolation import attempt
from deployments.receiver.event import Event
from deployments.receiver.inbox import Kept, Mailbox

SECONDS = 5.0  # for the inbox to store an event; senders wait 10 to 30 s
MAX_WAITING = 512  # events; others are refused at once, and their senders retry
MAX_TOGETHER = 64  # events in a batch
FRESH = 1.0  # seconds that the result of a check is reused
TOGETHER = 0.005  # seconds that an event waits for others

_log = logging.getLogger("deployments.receiver")


@dataclass(frozen=True, slots=True)
class PendingEvent:
    """An event to store. uri: the allowed, normalized one. body: as received. kept: gets its row."""

    event: Event
    uri: str
    body: str
    kept: asyncio.Future[Kept]


class Keeper:
    """Stores events in batches, for one event loop. clock: returns seconds since 1970."""

    def __init__(self, box: Mailbox, clock: Callable[[], float]) -> None:
        self._box, self._clock = box, clock
        self._thread = ThreadPoolExecutor(1, "inbox")
        self._waiting: list[PendingEvent] = []
        self._writer: asyncio.Task[None] | None = None
        self._check: asyncio.Future[None] | None = None
        self._checked = 0.0  # end of the last check, by the event loop's clock

    async def keep(self, event: Event, uri: str, body: bytes) -> Kept:
        """Store an event and return its row. Raises `RequestRefused` if the inbox does not accept it."""
        if len(self._waiting) >= MAX_WAITING:
            raise RequestRefused("unavailable", "too many events are waiting for the inbox")
        kept: asyncio.Future[Kept] = asyncio.get_running_loop().create_future()
        self._waiting.append(PendingEvent(event, uri, body.decode(), kept))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        try:
            return await asyncio.wait_for(kept, SECONDS)
        except TimeoutError as error:
            # The write may still succeed. The repeated event is then a duplicate.
            raise RequestRefused("unavailable", f"the inbox did not answer in {SECONDS:.0f} s") from error

    async def check(self) -> None:
        """Raise `CatalogError` or `TimeoutError` if the inbox does not answer.

        One check runs at a time, for all who wait for it. Its result is reused for `FRESH` seconds. Events
        use the same thread.
        """
        loop = asyncio.get_running_loop()
        if self._check is None or (self._check.done() and loop.time() >= self._checked + FRESH):
            self._check = loop.run_in_executor(self._thread, self._box.check)
            self._check.add_done_callback(lambda _: self._note_checked(loop.time()))
        await asyncio.wait_for(asyncio.shield(self._check), SECONDS)

    def _note_checked(self, at: float) -> None:
        self._checked = at

    def close(self) -> None:
        """Finish the current batch and close the connections."""
        self._thread.shutdown()
        self._box.close()

    async def _write(self) -> None:
        while self._waiting:
            await asyncio.sleep(TOGETHER)
            # Skip events whose senders were asked to retry.
            batch = [entry for entry in self._waiting[:MAX_TOGETHER] if not entry.kept.done()]
            del self._waiting[:MAX_TOGETHER]
            if not batch:
                continue
            loop = asyncio.get_running_loop()
            for entry, kept in zip(
                batch, await loop.run_in_executor(self._thread, self._put, batch), strict=True
            ):
                if entry.kept.done():
                    continue
                if isinstance(kept, CkptError):
                    entry.kept.set_exception(RequestRefused("unavailable", kept.message))
                elif kept.refused:
                    entry.kept.set_exception(RequestRefused("id-reused", kept.refused))
                else:
                    entry.kept.set_result(kept)

    def _put(self, batch: Sequence[PendingEvent]) -> Sequence[Kept | CkptError]:
        """Store events together, or each alone if one of them cannot be stored; return the row of each."""
        now = datetime.fromtimestamp(self._clock(), UTC)
        events = [(entry.event, entry.uri, entry.body) for entry in batch]
        rows = attempt(self._box.put, events, now)
        if not isinstance(rows, CkptError):
            return rows
        if rows.transient or len(batch) == 1:  # whatever the error, the senders are asked to retry
            trace = rows.__cause__ if isinstance(rows, InternalError) else None
            _log.error("the inbox cannot be written: %s", rows.message, exc_info=trace)
            return [rows] * len(batch)
        return [row for entry in batch for row in self._put([entry])]
