"""Run an HTTP server of this project: one configuration and one strict protocol for all of them.

The protocol is uvicorn's HTTP/1.1 with timeouts and strict parsing of request heads. The head of a request
must arrive in time, and so must its body. A proxy and the receiver must agree where requests begin and end.
So these are refused: lines that end without a carriage return, folded headers, and two declarations of a
body's length. Bytes that arrive before the reply never count as a second request.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from ckptcore.errors import UsageError
from ckptcore.page.http_errors import RequestRefused
from ckptcore.utils import terminal

HEAD_SECONDS = 10.0  # for the head of a request, from its first byte or from the start of the connection
BODY_SECONDS = 15.0  # for its body; the application's shorter limit replies with an error before that
MAX_HEAD = 64 << 10  # bytes
MAX_HEADERS = 100
END = b"\r\n\r\n"
# A line feed alone, a carriage return alone, a folded header, a NUL.
_WRONG = re.compile(rb"(?<!\r)\n|\r(?=[^\n])|\r\n[ \t]|\x00")
_ONCE = (b"content-length", b"transfer-encoding", b"host", b"content-type")
_HERE = ("127.0.0.1", "::1", "localhost")  # addresses that only this machine reaches
GRACE = 5  # seconds for open requests after a signal
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")  # names under which browsers reach them


def is_local(host: str, hosts: Sequence[str], example: str) -> bool:
    """Return whether only this machine reaches an address. Raises `UsageError` elsewhere without a name."""
    if host not in _HERE and not hosts:
        raise UsageError(
            f"cannot serve at {host} without a name", hint=f"name it with --allow-host, as in {example}"
        )
    return host in _HERE


def address_of(host: str, listener: socket.socket) -> str:
    """Return the address of the page of a server."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/"


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


class Protocol(H11Protocol):
    """One connection."""

    _head = bytearray()  # the part of a request's head that has arrived
    _watch: asyncio.TimerHandle | None = None
    _more = False  # whether bytes arrived after a request without a reply

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Start the timer for the first request."""
        super().connection_made(transport)
        self._head = bytearray()
        self._wait(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Forward a head once it is complete, and bodies as they arrive."""
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE:
            if self._watch is None:  # the next request of this connection
                self._wait(HEAD_SECONDS)
            self._unset_keepalive_if_required()
            nbytes_checked = len(self._head)
            self._head += data
            try:
                if not _is_complete(self._head, nbytes_checked):
                    return
            except RequestRefused as refused:
                self._refuse(refused)
                return
            data, self._head = bytes(self._head), bytearray()
            self._wait(BODY_SECONDS)
        super().data_received(data)
        if self.conn.their_state is not h11.SEND_BODY:
            self._unwatch()
        if self.conn.their_state is not h11.IDLE and self.conn.trailing_data[0]:
            self._more = True

    def on_response_complete(self) -> None:
        """Wait for the next request, unless bytes arrived before the reply."""
        if self._more and not self.transport.is_closing():
            self.server_state.total_requests += 1
            self.transport.close()
            return
        super().on_response_complete()

    def _wait(self, seconds: float) -> None:
        self._unwatch()
        self._watch = self.loop.call_later(seconds, self._late)

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _late(self) -> None:
        self._watch = None
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self._head:
            self._refuse(RequestRefused("too-slow", "its head is incomplete"))
        elif self.conn.their_state is h11.IDLE:
            self.transport.close()  # no request has begun
        else:
            self.transport.abort()  # a sender this slow reads no reply

    def _refuse(self, refused: RequestRefused) -> None:
        self.logger.warning("refused while reading the head: %d %s", refused.status, refused.why)
        self._unwatch()
        body = json.dumps(refused.reply).encode()
        lines = (
            f"HTTP/1.1 {refused.status} {STATUS_PHRASES.get(refused.status, b'').decode()}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
            "",
            "",
        )
        self.transport.write("\r\n".join(lines).encode() + body)
        self.transport.close()


def _is_complete(head: bytearray, nbytes_checked: int) -> bool:
    """Return whether the head of a request is complete. Raises `RequestRefused` if it is not valid.

    nbytes_checked: how many bytes were checked before, so that no byte is checked many times.
    """
    end = head.find(END, max(0, nbytes_checked - len(END) + 1))
    size = len(head) if end < 0 else end + len(END)
    wrong = _WRONG.search(head, max(0, nbytes_checked - 2), size)
    if wrong is not None:
        raise RequestRefused(
            "malformed", f"a line of the head does not end with CR LF (at byte {wrong.start()})"
        )
    if size > MAX_HEAD:
        raise RequestRefused("headers-too-large", f"the maximum is {MAX_HEAD} bytes")
    if end < 0:
        return False
    request, *lines = bytes(head[:end]).split(b"\r\n")
    if len(lines) > MAX_HEADERS:
        raise RequestRefused("headers-too-large", f"the maximum is {MAX_HEADERS} headers")
    named = Counter(line.partition(b":")[0].strip().lower() for line in lines)
    for name in _ONCE:
        if named[name] > 1:
            raise RequestRefused("malformed", f"the header {name.decode()} is repeated")
    if named[b"transfer-encoding"] and (named[b"content-length"] or not request.endswith(b"HTTP/1.1")):
        raise RequestRefused("malformed", "the length of the body is declared in two ways")
    return True
