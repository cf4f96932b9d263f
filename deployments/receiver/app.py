"""The receiver's HTTP API.

    POST    /hooks/SOURCE    an event; 202 as soon as it is in the inbox
    OPTIONS /hooks/SOURCE    the handshake of CloudEvents senders
    GET     /healthz         the process runs
    GET     /readyz          the inbox accepts events, and events are being started
            /catalog         the catalog page, if it is configured

A request is checked in this order: source, content type, size of the body, signature or token. Then it is
parsed, its URI is checked against the allowed roots, and the event is stored. Only then is it answered.

Waiting events are written to the inbox in batches; each gets its reply once it is durable. A transaction
costs the same for one event and for fifty. One batch is written at a time, and new events wait for the next,
so the database gets no more requests than it can answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from ckptcore.catalog.queues import Stage
from ckptcore.errors import CkptError, InternalError
from ckptcore.page.http_errors import REFUSALS, RequestRefused
from ckptcore.utils.isolation import attempt
from ckptcore.utils.text import short_repr
from deployments.receiver.dispatch import StepThread
from deployments.receiver.event import Event, media_of, read_event
from deployments.receiver.inbox import EventQueues, StoredEvent
from deployments.receiver.settings import Sender, flow_run_for
from deployments.receiver.verify import verify

SECONDS = 5.0  # for the inbox to store an event; senders wait 10 to 30 s
MAX_WAITING = 512  # events; others are refused at once, and their senders retry
MAX_TOGETHER = 64  # events in a batch
FRESH = 1.0  # seconds that the result of a check is reused
TOGETHER = 0.005  # seconds that an event waits for others
BODY_SECONDS = 10.0  # for a body to arrive
RETRY_AFTER = {"retry-after": "5"}

_log = logging.getLogger("deployments.receiver")


@dataclass
class Receiver:
    """The handlers of the routes, and what they share; `make_app` has its attributes."""

    senders: Mapping[str, Sender]
    writer: EventWriter
    background: StepThread | None
    clock: Callable[[], float]
    count: Callable[[str, str], None]

    @asynccontextmanager
    async def life(self, _: FastAPI) -> AsyncIterator[None]:
        """Run the background work as long as the application."""
        if self.background is not None:
            self.background.start()
        yield
        if self.background is not None:
            await asyncio.to_thread(self.background.stop)
        self.writer.close()

    async def receive(self, source: str, request: Request) -> Response:
        """Accept an event. A repeated event returns the id of the first and starts nothing."""
        try:
            sender = _sender(self.senders, source)
            headers = _headers(request)
            _require_type(sender, headers)
            body = await _body(request, headers, sender.max_body)
            verify(sender.dialect, sender.header, sender.secrets, headers, body, self.clock())
            event = read_event(sender.dialect, sender.name, headers, body, sender.accepts)
            if not event.announces:
                _log.info("%s: %s is not an announcement, ignored", source, event.type)
                self.count(source, "ignored")
                return JSONResponse({"status": "ignored", "type": event.type}, 202)
            flow_run = flow_run_for(sender, event.uri, event.run, event.step)
            stored_event = await self.writer.keep(event, flow_run.uri, body)
        except RequestRefused as refused:
            _log.warning("%s: %d %s %s", short_repr(source), refused.status, refused.name, refused.why)
            self.count(source if source in self.senders else "", refused.name)
            return JSONResponse(
                refused.reply, refused.status, headers=RETRY_AFTER if refused.status == 503 else None
            )
        if stored_event.new and self.background is not None:
            self.background.wake()
        log_fields = {"sender": source, "event": stored_event.id, "source": flow_run.uri}
        result = "accepted" if stored_event.new else "repeated"
        _log.info(
            "%s: %s %s of %s", source, result, stored_event.id, flow_run.uri, extra={"ckptcore": log_fields}
        )
        reply: dict[str, Any] = {**_accepted(stored_event)}
        self.count(source, reply["status"])
        if event.left_out:
            reply["left_out"] = list(event.left_out)
        return JSONResponse(reply, 202)

    async def handshake(self, source: str, request: Request) -> Response:
        """Accept CloudEvents from the origin (cloudevents/spec, http-webhook.md, 4: abuse protection)."""
        if source not in self.senders or self.senders[source].dialect.envelope != "cloudevents":
            return JSONResponse(RequestRefused("unknown-source").reply, 404)
        origin = request.headers.get("webhook-request-origin", "")
        allowed = {"webhook-allowed-origin": origin, "webhook-allowed-rate": "*"}
        return Response(
            status_code=200,
            headers={"allow": "POST, OPTIONS"} | (allowed if _ORIGIN.fullmatch(origin) else {}),
        )

    async def healthy(self) -> dict[str, str]:
        """Return 200: the process runs."""
        return {"status": "ok"}

    async def ready(self) -> Response:
        """Return whether events are accepted, and whether accepted ones are being started."""
        state = {"inbox": "ok", "starting": "ok"}
        try:
            await self.writer.check()
        except (CkptError, TimeoutError) as error:
            state["inbox"] = getattr(error, "message", "no answer")
        state["starting"] = (self.background.trouble() if self.background is not None else "") or "ok"
        # The inbox accepts events while Prefect is away.
        return JSONResponse(state, 200 if state["inbox"] == "ok" else 503)


def make_app(
    senders: Mapping[str, Sender],
    box: EventQueues,
    background: StepThread | None = None,
    clock: Callable[[], float] | None = None,
    page: tuple[str, FastAPI] | None = None,
    count: Callable[[str, str], None] | None = None,
) -> FastAPI:
    """Return the application.

    Args:
        senders: the configured sources, by name.
        box: the inbox and the outbox.
        background: the background work, started and stopped with the application.
        clock: returns seconds since 1970. None: this machine's for signatures, the catalog's for events.
        page: the catalog page, and the path below which it is.
        count: called with each request's source, or "" for an unknown one, and its result.
    """
    writer = EventWriter(box, clock)
    receiver = Receiver(
        senders, writer, background, clock or time.time, count or (lambda source, result: None)
    )
    # No documentation pages: they load scripts from other servers.
    app = FastAPI(title="ckptcore webhook receiver", docs_url=None, redoc_url=None, lifespan=receiver.life)
    accepts: dict[str, Any] = {"status_code": 202, "responses": RESPONSES, "openapi_extra": BODY}
    app.post("/hooks/{source}", **accepts)(receiver.receive)
    app.options("/hooks/{source}", responses={404: RESPONSES[404]})(receiver.handshake)
    app.get("/healthz")(receiver.healthy)
    not_ready: dict[str, Any] = {"description": "not ready", "model": dict[str, str]}
    app.get("/readyz", responses={503: not_ready})(receiver.ready)
    if page is not None:
        app.mount(*page)
    return app


def _accepted(stored_event: StoredEvent) -> dict[str, str]:
    if stored_event.new:
        return {"status": "accepted", "id": stored_event.id}
    reply = {"status": "duplicate", "id": stored_event.id, "state": stored_event.state}
    if stored_event.state == Stage.FAILED:  # it is not retried automatically
        reply["hint"] = f"the event failed; retry it with `ckptcore catalog inbox retry {stored_event.id}`"
    return reply


def _sender(senders: Mapping[str, Sender], source: str) -> Sender:
    if source not in senders:
        raise RequestRefused("unknown-source")
    return senders[source]


def _require_type(sender: Sender, headers: Mapping[str, str]) -> None:
    if media_of(headers) not in sender.dialect.media:
        raise RequestRefused("unsupported-type", f"use {' or '.join(sorted(sender.dialect.media))}")


def _headers(request: Request) -> dict[str, str]:
    """Return the headers by lower-case name. Raises `RequestRefused` if a relevant one is repeated."""
    value_by_name: dict[str, str] = {}
    for name, value in request.headers.items():
        counts = name in ONCE or name.startswith(("webhook-", "x-", "ce-"))
        if name in value_by_name and counts and name not in ADDED_BY_PROXIES:
            # A proxy and this process could each use another one.
            raise RequestRefused("malformed", f"the header {name} is repeated")
        value_by_name.setdefault(name, value)
    return value_by_name


async def _body(request: Request, headers: Mapping[str, str], most: int) -> bytes:
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most:
        raise RequestRefused("too-large", f"the maximum is {most} bytes")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise RequestRefused("too-large", f"the maximum is {most} bytes")
                parts.append(part)
    except TimeoutError as error:
        raise RequestRefused("too-slow") from error
    except ClientDisconnect as error:
        raise RequestRefused("malformed", "the sender closed the connection") from error
    return b"".join(parts)


ONCE = frozenset({"authorization", "content-type", "content-length", "idempotency-key"})
ADDED_BY_PROXIES = frozenset({"x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-request-id"})
_ORIGIN = re.compile(r"[!-~]{1,255}")  # it is repeated in the answer
_TEXT: dict[str, Any] = {"type": "string"}


def _answer(description: str, required: list[str], **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _refusal(status: int) -> dict[str, Any]:
    names = [f"{name}: {text}" for name, (s, text) in REFUSALS.items() if s == status]
    return _answer("; ".join(names), ["error", "message"], error=_TEXT, message=_TEXT)


_STATUS = {"enum": ["accepted", "duplicate", "ignored"]}
RESPONSES: dict[int | str, dict[str, Any]] = {
    202: _answer(
        "accepted, repeated or ignored",
        ["status"],
        status=_STATUS,
        id=_TEXT,
        state={"enum": list(Stage)},
        hint=_TEXT,
    ),
    **{status: _refusal(status) for status in sorted({status for status, _ in REFUSALS.values()})},
}
_EVENT = {"schema": {"type": "object"}}
BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": _EVENT, "application/cloudevents+json": _EVENT},
    }
}


@dataclass(frozen=True, slots=True)
class PendingEvent:
    """An event to store. uri: the allowed, normalized one. body: as received. stored_event: gets its row."""

    event: Event
    uri: str
    body: str
    stored_event: asyncio.Future[StoredEvent]


class EventWriter:
    """Stores events in batches, for one event loop.

    clock: returns seconds since 1970; None means the catalog's clock.
    """

    def __init__(self, box: EventQueues, clock: Callable[[], float] | None = None) -> None:
        self._box, self._clock = box, clock
        self._thread = ThreadPoolExecutor(1, "inbox")
        self._waiting: list[PendingEvent] = []
        self._writer: asyncio.Task[None] | None = None
        self._check: asyncio.Future[None] | None = None
        self._checked = 0.0  # end of the last check, by the event loop's clock

    async def keep(self, event: Event, uri: str, body: bytes) -> StoredEvent:
        """Store an event and return its row. Raises `RequestRefused` if the inbox does not accept it."""
        if len(self._waiting) >= MAX_WAITING:
            raise RequestRefused("unavailable", "too many events are waiting for the inbox")
        future: asyncio.Future[StoredEvent] = asyncio.get_running_loop().create_future()
        self._waiting.append(PendingEvent(event, uri, body.decode(), future))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        try:
            return await asyncio.wait_for(future, SECONDS)
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

    def _note_checked(self, end_time: float) -> None:
        self._checked = end_time

    def close(self) -> None:
        """Finish the current batch and close the connections."""
        self._thread.shutdown()
        self._box.close()

    async def _write(self) -> None:
        while self._waiting:
            await asyncio.sleep(TOGETHER)
            # Skip events whose senders were asked to retry.
            batch = [entry for entry in self._waiting[:MAX_TOGETHER] if not entry.stored_event.done()]
            del self._waiting[:MAX_TOGETHER]
            if not batch:
                continue
            loop = asyncio.get_running_loop()
            for entry, stored in zip(
                batch, await loop.run_in_executor(self._thread, self._put, batch), strict=True
            ):
                if entry.stored_event.done():
                    continue
                if isinstance(stored, CkptError):
                    entry.stored_event.set_exception(RequestRefused("unavailable", stored.message))
                elif stored.refused:
                    entry.stored_event.set_exception(RequestRefused("id-reused", stored.refused))
                else:
                    entry.stored_event.set_result(stored)

    def _put(self, batch: Sequence[PendingEvent]) -> Sequence[StoredEvent | CkptError]:
        """Store events together, or each alone if one of them cannot be stored; return the row of each."""
        # Receivers share the rows, and go by one clock: their hosts' may be minutes apart.
        now = None if self._clock is None else datetime.fromtimestamp(self._clock(), UTC)
        events = [(entry.event, entry.uri, entry.body) for entry in batch]
        rows = attempt(self._box.put, events, now)
        if not isinstance(rows, CkptError):
            return rows
        if rows.transient or len(batch) == 1:  # whatever the error, the senders are asked to retry
            trace = rows.__cause__ if isinstance(rows, InternalError) else None
            _log.error("the inbox cannot be written: %s", rows.message, exc_info=trace)
            return [rows] * len(batch)
        return [row for entry in batch for row in self._put([entry])]
