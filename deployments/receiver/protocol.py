"""Protocol: what is looked at before a request is one?

uvicorn's HTTP/1.1 with what it leaves out: a time in which the head of a request must have arrived, and
another for its body; and no leniency about where a head ends. A proxy in front and we must see the same
requests in the same bytes. So lines that end without a carriage return, folded headers, and two ways of
saying how long the body is are refused, and what is sent before an answer is taken for no second request.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from deployments.receiver.http_errors import RequestRefused

HEAD_SECONDS = 10.0  # for the head of a request to arrive, from the first byte or the connection on
BODY_SECONDS = 15.0  # for its body; the application's own time, which it says in words, is over before
MAX_HEAD = 64 << 10  # bytes
MAX_HEADERS = 100
END = b"\r\n\r\n"
# A line feed alone, a carriage return alone, a header that goes on in the next line, a NUL.
_WRONG = re.compile(rb"(?<!\r)\n|\r(?=[^\n])|\r\n[ \t]|\x00")
_ONCE = (b"content-length", b"transfer-encoding", b"host", b"content-type")


class Protocol(H11Protocol):
    """One connection."""

    _head = bytearray()  # of a request that has begun to arrive
    _watch: asyncio.TimerHandle | None = None
    _more = False  # whether bytes came after a request that is not answered yet

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Gives the sender some time to say what it wants."""
        super().connection_made(transport)
        self._head = bytearray()
        self._wait(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets it."""
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Hands a head on when all of it is there, and bodies as they come."""
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE:
            if self._watch is None:  # the next request of this connection
                self._wait(HEAD_SECONDS)
            self._unset_keepalive_if_required()
            seen = len(self._head)
            self._head += data
            try:
                if not _is_whole(self._head, seen):
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
        """Waits for the next request, unless the sender did not wait for the answer."""
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
            self._refuse(RequestRefused("too-slow", "its head"))
        elif self.conn.their_state is h11.IDLE:
            self.transport.close()  # nothing was asked
        else:
            self.transport.abort()  # whoever sends a body for so long reads no answer

    def _refuse(self, refused: RequestRefused) -> None:
        self.logger.warning("refused before it was a request: %d %s", refused.status, refused.why)
        self._unwatch()
        body = json.dumps(refused.told).encode()
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


def _is_whole(head: bytearray, seen: int) -> bool:
    """Whether the head of a request is there, and as it must be; raises `RequestRefused`.

    seen: how much of it was looked at before; no byte is looked at many times.
    """
    end = head.find(END, max(0, seen - len(END) + 1))
    size = len(head) if end < 0 else end + len(END)
    wrong = _WRONG.search(head, max(0, seen - 2), size)
    if wrong is not None:
        raise RequestRefused(
            "malformed", f"a line of its head does not end with CR LF (at byte {wrong.start()})"
        )
    if size > MAX_HEAD:
        raise RequestRefused("headers-too-large", f"{MAX_HEAD} bytes are")
    if end < 0:
        return False
    request, *lines = bytes(head[:end]).split(b"\r\n")
    if len(lines) > MAX_HEADERS:
        raise RequestRefused("headers-too-large", f"{MAX_HEADERS} headers are")
    named = Counter(line.partition(b":")[0].strip().lower() for line in lines)
    for name in _ONCE:
        if named[name] > 1:
            raise RequestRefused("malformed", f"{name.decode()} is given twice")
    if named[b"transfer-encoding"] and (named[b"content-length"] or not request.endswith(b"HTTP/1.1")):
        raise RequestRefused("malformed", "the length of its body is given in two ways")
    return True
