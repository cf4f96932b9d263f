"""Run the receiver: settings, database, Prefect client and HTTP server in one process.

Background threads start and follow runs, send notifications, and reload watched roots. Notifications have a
thread of their own, because they wait for other servers. Starts wait only for Prefect and the database.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import httpx
from fastapi import FastAPI

import flows  # noqa: F401  # sets Prefect's environment first
from ckptcore.catalog import unset_warning
from ckptcore.page import http_server
from ckptcore.utils import terminal
from deployments.metrics import ReceiverMetrics, registry_of, serving
from deployments.receiver.app import make_app
from deployments.receiver.dispatch import RootsRefresher, StepThread, announce_aliases, require_progress, work
from deployments.receiver.inbox import EventQueues
from deployments.receiver.notify import send_due
from deployments.receiver.prefect_runs import PrefectRuns
from deployments.receiver.settings import NotifyTarget, ReceiverSettings, Sender, load

_log = logging.getLogger("deployments.receiver")
CONNECTIONS = 1024  # open at a time; each body is at most `max_body`, and takes at most ten seconds
GRACE = 10  # seconds for open requests after a signal


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
