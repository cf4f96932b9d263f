"""Serve: settings, database, Prefect and HTTP put together in one process."""

from __future__ import annotations

from pathlib import Path

import httpx
import uvicorn

import flows  # noqa: F401  # settles Prefect's environment
from deployments.receiver.app import make_app
from deployments.receiver.inbox import Box
from deployments.receiver.loop import Loop
from deployments.receiver.notify import send_due
from deployments.receiver.settings import load
from deployments.receiver.start import work

GRACE = 10  # seconds that open requests get when the process is told to end


def check(config: Path) -> None:
    """Raise `UsageError` or `CatalogError` when the receiver could not serve with this file."""
    settings, _ = load(config)
    Box(settings.catalog).close()


def serve(config: Path, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    from deployments.receiver.prefect_runs import PrefectRuns

    settings, senders = load(config)
    runs = PrefectRuns()
    # Two engines: requests never wait for the loop's transactions in a pool of connections.
    box, rows = Box(settings.catalog), Box(settings.catalog)
    with httpx.Client() as client:
        loop = Loop(
            {
                "start": lambda: work(rows, runs, senders, settings.notify),
                "notify": lambda: send_due(rows, settings.notify, client),
            }
        )
        app = make_app(senders, box, loop)
        uvicorn.run(
            app, host=host, port=port, log_level="warning", access_log=False, server_header=False,
            timeout_graceful_shutdown=GRACE, h11_max_incomplete_event_size=64 << 10,
        )  # fmt: skip
    rows.close()
