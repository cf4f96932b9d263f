"""Run the receiver: settings, database, Prefect client and HTTP server in one process.

Background threads start and follow runs, send notifications, and reload watched roots. Notifications have a
thread of their own, because they wait for other servers. Starts wait only for Prefect and the database.

The messages of the outbox are sent as signed Standard Webhooks, with retries (standard-webhooks/
standard-webhooks, spec/standard-webhooks.md): the same id on every try, a schedule over days, 410 ends the
tries, redirects are not followed.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path

import httpx
from fastapi import FastAPI

import flows  # noqa: F401  # sets Prefect's environment first
from ckptcore.catalog import unset_warning
from ckptcore.errors import CkptError
from ckptcore.page import http_server
from ckptcore.redaction import beginning
from ckptcore.utils import terminal
from ckptcore.utils.isolation import attempt, for_each
from deployments.metrics import ReceiverMetrics, registry_of, serving
from deployments.receiver.app import make_app
from deployments.receiver.dispatch import RootsRefresher, StepThread, announce_aliases, require_progress, work
from deployments.receiver.inbox import EventQueues, Message
from deployments.receiver.prefect_runs import PrefectRuns
from deployments.receiver.senders import DIALECTS
from deployments.receiver.settings import NotifyTarget, ReceiverSettings, Sender, load
from deployments.receiver.verify import key_of, sign

# Seconds between tries, as the specification suggests: about three days in total.
SCHEDULE = (5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400)
TIMEOUT = 20.0  # seconds each to connect, to send and to wait; a lease is longer than all of them
LIMIT = 10  # messages at once
GONE = 410

CONNECTIONS = 1024  # open at a time; each body is at most `max_body`, and takes at most ten seconds
GRACE = 10  # seconds for open requests after a signal

_STANDARD = DIALECTS["standard-webhooks"]
_log = logging.getLogger("deployments.receiver")


def check(config: Path) -> None:
    """Raise `UsageError` or `CatalogError` if the receiver cannot serve with this file."""
    settings, _ = load(config)
    _warn(settings)
    EventQueues(settings.catalog).close()


def serve(config: Path, host: str, port: int, metrics: tuple[str, int] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Prints the address on stdout once it listens.

    metrics: the address and the port of the metrics, or None.
    """
    settings, senders = load(config)
    _warn(settings)
    runs = PrefectRuns()
    # One mailbox each: requests never wait in a connection pool for the loops' transactions.
    turn = threading.Lock()
    box, rows, news = (EventQueues(settings.catalog, turn) for _ in range(3))
    with ExitStack() as opened:
        listener = opened.enter_context(http_server.listening(host, port))
        client = opened.enter_context(httpx.Client())
        watched = RootsRefresher(rows, senders)
        watched.refresh()
        notify = settings.notify
        beside = StepThread({"notify": lambda: send_due(news, notify, client)})
        loop = StepThread({"roots": watched.refresh, **steps_of(rows, runs, senders, notify)}, beside=beside)
        count: Callable[[str, str], None] | None = None
        if metrics is not None:
            registry = registry_of(settings.catalog)
            count = ReceiverMetrics(registry, loop.trouble).count
            number = opened.enter_context(serving(registry, *metrics))
            terminal.line(f"metrics at http://{metrics[0]}:{number}/metrics")
        app = make_app(senders, box, loop, page=_page(settings), count=count)
        # Imported objects stay alive. Without this, each full garbage collection would delay every sender by
        # a tenth of a second.
        gc.collect()
        gc.freeze()
        lines = [f"listening at http://{host}:{listener.getsockname()[1]}"]
        http_server.serve(app, listener, connections=CONNECTIONS, grace=GRACE, lines=lines)
    rows.close()
    news.close()
    runs.close()


def steps_of(
    box: EventQueues,
    runs: PrefectRuns,
    senders: Mapping[str, Sender],
    targets: Mapping[str, NotifyTarget],
    clock: Callable[[], datetime] | None = None,
) -> dict[str, Callable[[], int]]:
    """Return the steps that start events and follow their runs, in their order.

    clock: returns the time; None means the catalog's, which all receivers share.
    """
    clock = clock or box.now
    return {
        "start": lambda: work(box, runs, senders, targets, clock()),
        "aliases": lambda: announce_aliases(box, runs, targets, clock()),
        "waiting": lambda: require_progress(box, senders, clock()),
    }


def _page(settings: ReceiverSettings) -> tuple[str, FastAPI] | None:
    """Return the catalog page and its path, if it is configured."""
    if settings.page is None:
        return None
    from ckptcore.catalog import open_catalog
    from ckptcore.page.app import make_page
    from ckptcore.page.settings import access_of, prefect_address

    catalog, path = open_catalog(settings.catalog), settings.page.path
    prefect_ui = prefect_address(settings.page.prefect_ui)
    return path, make_page(catalog, access_of(settings.page), path, prefect_ui)


def _warn(settings: ReceiverSettings) -> None:
    """Warn if neither the file nor the environment names a catalog."""
    warning = unset_warning() if settings.catalog is None else None
    if warning is not None:
        _log.warning("%s", warning)


def send_due(
    box: EventQueues,
    targets: Mapping[str, NotifyTarget],
    client: httpx.Client,
    env: Mapping[str, str] = os.environ,
    now: datetime | None = None,
) -> int:
    """Send the due messages in parallel, and return how many were tried.

    This takes as long as the slowest reply, which is less than the lease of the messages. Messages to other
    targets than `targets` are left to the receivers that have those.
    """
    now = now or box.now()
    messages = box.messages(now, LIMIT, list(targets))
    if not messages:
        return 0
    answers: dict[str, tuple[str, bool] | CkptError] = {}

    def post(message: Message) -> None:
        answers[message.id] = attempt(_post, message, targets[message.endpoint], client, env, now)

    # Daemon threads: a process that ends does not wait for other servers.
    threads = [threading.Thread(target=post, args=(message,), daemon=True) for message in messages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def record(message: Message) -> None:
        answer = answers[message.id]
        error, gone = (beginning(answer.message, 500), False) if isinstance(answer, CkptError) else answer
        if not error:
            box.sent(message, now)
            return
        tries = message.tries  # this one included
        retry_at = None if gone or tries > len(SCHEDULE) else now + timedelta(seconds=SCHEDULE[tries - 1])
        box.unsent(message, now, error, retry_at)
        _log.warning("cannot notify %s (%s), next try: %s", message.endpoint, error, retry_at or "none")

    for_each(record, messages)
    return len(messages)


def _post(
    message: Message, target: NotifyTarget, client: httpx.Client, env: Mapping[str, str], now: datetime
) -> tuple[str, bool]:
    """Send one message. Return the error, or "", and whether the target wants no more messages."""
    body = json.dumps(message.body, separators=(",", ":"), sort_keys=True).encode()
    headers = signed(message.id, body, env[target.secret], now)
    # The body of the reply is not read.
    with client.stream(
        "POST", target.url, content=body, headers=headers, timeout=TIMEOUT, follow_redirects=False
    ) as answer:
        return "" if answer.is_success else f"HTTP {answer.status_code}", answer.status_code == GONE


def signed(id: str, body: bytes, secret: str, now: datetime) -> dict[str, str]:
    """Return the signed headers of one try. id: the message's id, the same on every try."""
    time = str(int(now.timestamp()))
    key = key_of(secret, _STANDARD.key)
    return {
        "content-type": "application/json",
        "webhook-id": id,
        "webhook-timestamp": time,
        "webhook-signature": sign(_STANDARD, key, body, id=id, time=time),
    }
