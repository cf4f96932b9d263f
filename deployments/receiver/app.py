"""App: the receiver's HTTP face.

    POST    /hooks/SOURCE    an event; 202 as soon as it is in the inbox
    OPTIONS /hooks/SOURCE    the handshake of CloudEvents senders
    GET     /healthz         the process runs
    GET     /readyz          the inbox can be written and events are being started

In the order of a request: is the source known, the type right, the body small enough, the proof good; then it
is parsed, its place compared with the allowed roots, and the event kept. Only then is it answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from ckptcore.catalog.queues import Stage
from ckptcore.errors import CkptError
from ckptcore.utils.text import shown
from deployments.receiver.batch_writer import Keeper
from deployments.receiver.event import read_event
from deployments.receiver.http_errors import REFUSALS, RequestRefused
from deployments.receiver.inbox import Kept, Mailbox
from deployments.receiver.run_request import order_of
from deployments.receiver.settings import Sender
from deployments.receiver.verify import verify

BODY_SECONDS = 10.0  # for a body to arrive
RETRY_AFTER = {"retry-after": "5"}

_log = logging.getLogger("deployments.receiver")


class Background(Protocol):
    """What works beside the requests: it starts runs and sends notifications."""

    def start(self) -> None:
        """Begin."""

    def wake(self) -> None:
        """There is something new in the inbox."""

    def stop(self) -> None:
        """End, in bounded time."""

    def trouble(self) -> str:
        """Why events are not being started, or ""."""


def make_app(
    senders: Mapping[str, Sender],
    box: Mailbox,
    background: Background | None = None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The application. clock: seconds since 1970."""
    keeper = Keeper(box, clock)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        if background is not None:
            background.start()
        yield
        if background is not None:
            await asyncio.to_thread(background.stop)
        keeper.close()

    # No pages of documentation: they load scripts from elsewhere.
    app = FastAPI(title="ckptcore webhook receiver", docs_url=None, redoc_url=None, lifespan=life)

    @app.post("/hooks/{source}", status_code=202, responses=RESPONSES, openapi_extra=BODY)
    async def receive(source: str, request: Request) -> Response:
        """Take an event. A repeat is answered with the id of the first, and starts nothing."""
        try:
            sender = _sender(senders, source)
            headers = _headers(request)
            _require_type(sender, headers)
            body = await _body(request, headers, sender.max_body)
            verify(sender.dialect, sender.header, sender.secrets, headers, body, clock())
            event = read_event(sender.dialect, sender.name, headers, body, sender.accepts)
            if not event.wanted:
                _log.info("%s: %s is not an announcement, left", source, event.type)
                return JSONResponse({"status": "ignored", "type": event.type}, 202)
            order = order_of(sender, event.uri, event.run, event.step)
            kept = await keeper.keep(event, order.uri, body)
        except RequestRefused as refused:
            _log.warning("%s: %d %s %s", shown(source), refused.status, refused.name, refused.why)
            return JSONResponse(
                refused.told, refused.status, headers=RETRY_AFTER if refused.status == 503 else None
            )
        if kept.new and background is not None:
            background.wake()
        _log.info("%s: %s %s of %s", source, "accepted" if kept.new else "repeated", kept.id, order.uri)
        return JSONResponse(_accepted(kept), 202)

    @app.options("/hooks/{source}", responses={404: RESPONSES[404]})
    async def handshake(source: str, request: Request) -> Response:
        """Agree to be sent CloudEvents (cloudevents/spec, http-webhook.md, 4: abuse protection)."""
        if source not in senders or senders[source].dialect.envelope != "cloudevents":
            return JSONResponse(RequestRefused("unknown-source").told, 404)
        origin = request.headers.get("webhook-request-origin", "")
        allowed = {"webhook-allowed-origin": origin, "webhook-allowed-rate": "*"} if origin else {}
        return Response(status_code=200, headers={"allow": "POST, OPTIONS"} | allowed)

    @app.get("/healthz")
    async def healthy() -> dict[str, str]:
        """The process runs and answers."""
        return {"status": "ok"}

    @app.get("/readyz", responses={503: {"description": "not ready", "model": dict[str, str]}})
    async def ready() -> Response:
        """Whether an event would be taken, and whether taken ones are being started."""
        state = {"inbox": "ok", "starting": "ok"}
        try:
            await keeper.check()
        except (CkptError, TimeoutError) as error:
            state["inbox"] = getattr(error, "message", "no answer")
        state["starting"] = (background.trouble() if background is not None else "") or "ok"
        # Events are taken while Prefect is away: that is what the inbox is for.
        return JSONResponse(state, 200 if state["inbox"] == "ok" else 503)

    return app


def _accepted(kept: Kept) -> dict[str, str]:
    if kept.new:
        return {"status": "accepted", "id": kept.id}
    told = {"status": "duplicate", "id": kept.id, "state": kept.state}
    if kept.state == Stage.FAILED:  # nothing starts it again by itself
        told["hint"] = f"it has failed; `ckptcore catalog inbox retry {kept.id}` puts it back"
    return told


def _sender(senders: Mapping[str, Sender], source: str) -> Sender:
    if source not in senders:
        raise RequestRefused("unknown-source")
    return senders[source]


def _require_type(sender: Sender, headers: Mapping[str, str]) -> None:
    media = headers.get("content-type", "").split(";")[0].strip().lower()
    if media not in sender.dialect.media:
        raise RequestRefused("unsupported-type", f"{', '.join(sorted(sender.dialect.media))} is")


def _headers(request: Request) -> dict[str, str]:
    """By lower-case name; raises `RequestRefused` when one that counts is given twice."""
    found: dict[str, str] = {}
    for name, value in request.headers.items():
        counts = name in ONCE or name.startswith(("webhook-", "x-", "ce-"))
        if name in found and counts and name not in ADDED_BY_PROXIES:
            # A proxy and we could each look at another one.
            raise RequestRefused("malformed", f"{name} is given twice")
        found.setdefault(name, value)
    return found


async def _body(request: Request, headers: Mapping[str, str], most: int) -> bytes:
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most:
        raise RequestRefused("too-large", f"{most} bytes are")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise RequestRefused("too-large", f"{most} bytes are")
                parts.append(part)
    except TimeoutError as error:
        raise RequestRefused("too-slow") from error
    except ClientDisconnect as error:
        raise RequestRefused("malformed", "the sender went away") from error
    return b"".join(parts)


ONCE = frozenset({"authorization", "content-type", "content-length", "idempotency-key"})
ADDED_BY_PROXIES = frozenset({"x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-request-id"})
_TEXT: dict[str, Any] = {"type": "string"}


def _answer(description: str, required: list[str], **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _refusal(status: int) -> dict[str, Any]:
    names = [f"{name}: {words}" for name, (s, words) in REFUSALS.items() if s == status]
    return _answer("; ".join(names), ["error", "message"], error=_TEXT, message=_TEXT)


_STATUS = {"enum": ["accepted", "duplicate", "ignored"]}
RESPONSES: dict[int | str, dict[str, Any]] = {
    202: _answer(
        "accepted, repeated or left",
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
