"""Run the receiver: settings, database, Prefect client and HTTP server in one process.

Background threads start and follow runs, send notifications, and reload watched roots. Notifications have a
thread of their own, because they wait for other servers. Starts wait only for Prefect and the database.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import httpx
from fastapi import FastAPI

import flows  # noqa: F401  # sets Prefect's environment first
from ckptcore.catalog import unset_warning
from ckptcore.errors import CkptError
from ckptcore.page import http_server
from ckptcore.redaction import beginning
from ckptcore.utils import terminal
from deployments.metrics import ReceiverMetrics, registry_of, serving
from deployments.receiver.app import make_app
from deployments.receiver.dispatch import (
    EventsWait,
    FlowRuns,
    PrefectError,
    announce_aliases,
    require_progress,
    work,
)
from deployments.receiver.inbox import EventQueues
from deployments.receiver.notify import send_due
from deployments.receiver.settings import NotifyTarget, ReceiverSettings, Sender, is_plain, load

IDLE = 2.0  # seconds between rounds without news; rows of other receivers are noticed then
STOP_SECONDS = 15.0
STUCK_SECONDS = 90.0  # for a step: more than three answers that take as long as they may
ROOTS_SECONDS = 15.0  # between two reads of the watched roots from the catalog
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
    from deployments.receiver.prefect_runs import PrefectRuns

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
    runs: FlowRuns,
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


class StepThread:
    """A thread that repeats steps until it is stopped. A failed step is reported and repeated later."""

    def __init__(
        self,
        steps: Mapping[str, Callable[[], int]],
        idle: float = IDLE,
        beside: StepThread | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # beside: another loop that starts and stops with this one; `trouble` reports both. clock: returns
        # seconds that only grow.
        self._steps, self._idle, self._beside, self._clock = steps, idle, beside, clock
        self._now: tuple[str, float] | None = None  # the step that runs, and since when
        self._news, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"receiver-{'-'.join(steps)}", daemon=True)
        self._trouble: dict[str, str] = {}

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        if self._beside is not None:
            self._beside.start()

    def wake(self) -> None:
        """Run the steps now."""
        self._news.set()

    def stop(self) -> None:
        """Stop after the current step. The next process continues from the rows."""
        until = time.monotonic() + STOP_SECONDS
        loops = [self] if self._beside is None else [self, self._beside]
        for loop in loops:
            loop._end.set()
            loop._news.set()
        for loop in loops:
            if loop._thread.is_alive():
                loop._thread.join(max(0.0, until - time.monotonic()))

    def trouble(self) -> str:
        """Return the steps that failed in their last round, or do not end, with the reasons, or ""."""
        reasons = [f"{name}: {why}" for name, why in sorted(self._trouble.items())]
        running = self._now
        if running is not None and (seconds := self._clock() - running[1]) > STUCK_SECONDS:
            reasons.append(f"{running[0]}: it has not ended for {seconds:.0f} s")
        if self._thread.ident is not None and not self._thread.is_alive() and not self._end.is_set():
            reasons.append(f"{'-'.join(self._steps)}: its thread has ended; restart the receiver")
        beside_reasons = self._beside.trouble() if self._beside is not None else ""
        return "; ".join([*reasons, beside_reasons] if beside_reasons else reasons)

    def round(self) -> tuple[bool, bool]:
        """Run every step once. Return whether one had work, and whether one failed."""
        busy = failed = False
        for name, step in self._steps.items():
            if self._end.is_set():
                break
            self._now = (name, self._clock())
            try:
                busy = step() > 0 or busy
                self._trouble.pop(name, None)
            except EventsWait as waiting:  # the step itself is done
                self._report(name, waiting)
            except Exception as error:  # the thread must survive any error of the database or Prefect
                self._report(name, error)
                failed = True
            finally:
                self._now = None
        return busy, failed

    def _report(self, name: str, error: Exception) -> None:
        if name not in self._trouble:
            # An unreachable database or Prefect server needs no traceback.
            foreseen = isinstance(error, CkptError | PrefectError | EventsWait)
            _log.error("%s failed and is retried: %s", name, error, exc_info=not foreseen)
        text = str(error) if isinstance(error, EventsWait) else f"{type(error).__name__}: {error}"
        self._trouble[name] = beginning(text, 2000)

    def _run(self) -> None:
        while not self._end.is_set():
            self._news.clear()
            busy, failed = self.round()
            if failed:  # a new event does not repair it
                self._end.wait(self._idle)
            elif not busy:
                self._news.wait(self._idle)


class RootsRefresher:
    """Updates the senders' watched roots from the catalog, if the configuration wants that.

    One thread calls `refresh`; another one reads the senders.
    """

    def __init__(self, box: EventQueues, senders: Mapping[str, Sender]) -> None:
        self._box, self._next = box, 0.0
        self._senders = [sender for sender in senders.values() if sender.watches]

    def refresh(self) -> int:
        """Read the roots if it is time. Raises `CatalogError`; the earlier roots then stay allowed."""
        if self._senders and time.monotonic() >= self._next:
            watched_roots = self._box.watched()
            odd = [root for root in watched_roots if not is_plain(root)]
            if odd:
                _log.warning("watched roots that events cannot name: %s", ", ".join(odd))
            for sender in self._senders:
                sender.watched = tuple(root for root in watched_roots if root not in odd)
            self._next = time.monotonic() + ROOTS_SECONDS
        return 0
