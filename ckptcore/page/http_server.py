"""Run an HTTP server of this project: one configuration and one strict protocol for all of them."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from typing import Any

import uvicorn

from ckptcore.errors import UsageError
from ckptcore.page.http_protocol import MAX_HEAD, Protocol
from ckptcore.utils import terminal


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; port 0 picks a free one. Raises `UsageError`."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint="--host must be an address of this machine, and --port free there; 0 picks one",
        ) from error


def server_of(app: Any, *, connections: int, grace: int) -> uvicorn.Server:
    """Return a server of an application.

    Args:
        app: The ASGI application.
        connections: How many may be open at a time.
        grace: Seconds for open requests after a signal.
    """
    return uvicorn.Server(
        uvicorn.Config(
            app,
            # The client's address is that of the connection: uvicorn would take it from a header of any
            # client on this machine. Applications that know their proxies read it themselves.
            proxy_headers=False,
            log_level="warning",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=grace,
            limit_concurrency=connections,
            h11_max_incomplete_event_size=MAX_HEAD,
            http=Protocol,
            ws="none",
        )
    )


def serve(app: Any, listener: socket.socket, *, connections: int, grace: int, lines: Sequence[str]) -> None:
    """Serve an application until SIGTERM or SIGINT.

    Args:
        app: The ASGI application.
        listener: The socket, which listens.
        connections: As in `server_of`.
        grace: As in `server_of`.
        lines: What to print on stdout; from then on, a signal ends the server in order.
    """
    server = server_of(app, connections=connections, grace=grace)

    def end(*_: object) -> None:
        # While it runs, uvicorn has handlers of its own. It raises the signal again after an orderly
        # shutdown, and that must not kill the process.
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    for line in lines:
        terminal.line(line)
    server.run(sockets=[listener])
