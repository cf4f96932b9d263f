"""Serve the files of an export over HTTP, computed from the checkpoint when they are read.

Read-only: GET and HEAD with ranges (RFC 9110, section 14), entity tags, and a list of the files at the root.
``python -m ckptcore.page.file_server`` is what `ckptcore serve` becomes; its request is in the environment.
"""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from ckptcore.conversion.virtual_folder import VirtualFile, VirtualFolder
from ckptcore.core.columnar_file import canonical_json
from ckptcore.errors import CkptError
from ckptcore.page.virtual_program import open_reported, run
from ckptcore.planning.request import Request, Settings
from ckptcore.utils import terminal
from ckptcore.utils.extras import needed

REQUEST, TOKEN = "CKPTCORE_SERVED", "CKPTCORE_SERVE_TOKEN"
CONNECTIONS = 64  # open at a time
PIECE = 1 << 20  # bytes that are sent at a time; a connection has no more in memory
MOST_RANGES = 64
_LISTENING = ("host", "port", "hosts")  # of a request
_RANGE = re.compile(r"(\d{0,19})-(\d{0,19})")
_BOUNDARY = "ckptcore-range"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Sequence[tuple[str, str]]


class Range(NamedTuple):
    """Bytes [start, end) of a file."""

    start: int
    end: int


class Unsatisfiable(Exception):
    """No byte of the file is in the ranges that were asked for."""


def ranges_of(header: str | None, nbytes: int) -> tuple[Range, ...] | None:
    """Return the ranges of a request in its order; None for the entire file.

    >>> ranges_of("bytes=0-3, -2", 10), ranges_of("lines=1-2", 10)
    ((Range(start=0, end=4), Range(start=8, end=10)), None)

    Args:
        header: The header ``range``; one that is malformed, or in another unit, is ignored.
        nbytes: Size of the file.

    Raises:
        Unsatisfiable: No range has a byte of the file, or there are more than `MOST_RANGES`.
    """
    unit, equals, text = (header or "").partition("=")
    if unit.strip().lower() != "bytes" or not equals:
        return None
    ranges = []
    specs = [spec.strip() for spec in text.split(",") if spec.strip()]
    for spec in specs:
        match = _RANGE.fullmatch(spec)
        if match is None or spec == "-":
            return None
        first, last = match.groups()
        if first and last and int(first) > int(last):
            return None
        start = int(first) if first else max(nbytes - int(last), 0)
        end = min(int(last) + 1, nbytes) if first and last else nbytes
        if start < end:
            ranges.append(Range(start, end))
    if not specs:
        return None
    if not ranges or len(specs) > MOST_RANGES:
        raise Unsatisfiable
    return tuple(ranges)


class FileServer:
    """An ASGI application with the files of one folder.

    Args:
        folder: The files.
        hosts: Names under which it is reached; a browser that was sent here under another one gets nothing.
        threads: How many reads are computed at a time.
        token: What a client must send as ``Authorization: Bearer``; None for no login.
    """

    def __init__(
        self, folder: VirtualFolder, hosts: Iterable[str], threads: int, token: str | None = None
    ) -> None:
        self._folder, self._token = folder, token
        self._hosts = frozenset(host.lower() for host in hosts)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        status, why = self._refusal(str(scope["method"]), headers)
        path = unquote(scope["raw_path"].partition(b"?")[0].decode("ascii", "replace")).removeprefix("/")
        file = self._folder.files.get(path)
        if status == 200 and file is None and path:
            status, why = 404, "no such file"
        answer = _Answer(send, body=scope["method"] != "HEAD")
        if status != 200:
            extra = (("allow", "GET, HEAD"),) if status == 405 else ()
            await answer.text(status, json.dumps({"error": why}) + "\n", "application/json", extra)
        elif file is None:
            await self._list(answer, headers)
        else:
            await self._file(answer, file, headers)

    def _refusal(self, method: str, headers: Mapping[str, str]) -> tuple[int, str]:
        """Return the status of a request that is refused, and why; 200 for no other."""
        host = headers.get("host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in self._hosts:
            return 421, "this server is not reached under that name; --allow-host adds it"
        if self._token is not None:
            sent = headers.get("authorization", "").partition(" ")
            if sent[0].lower() != "bearer" or not secrets.compare_digest(
                sent[2].encode(), self._token.encode()
            ):
                return 401, "send the token of the server as Authorization: Bearer TOKEN"
        return (200, "") if method in ("GET", "HEAD") else (405, "files are read only")

    async def _list(self, answer: _Answer, headers: Mapping[str, str]) -> None:
        files = self._folder.files.values()
        if "application/json" in headers.get("accept", ""):
            rows = [{"path": f.path, "bytes": f.nbytes, "etag": f'"{f.tag}"'} for f in files]
            await answer.text(200, canonical_json({"files": rows}).decode() + "\n", "application/json")
            return
        items = "".join(
            f'<li><a href="{quote(f.path)}">{html.escape(f.path)}</a> {f.nbytes}</li>\n' for f in files
        )
        page = f"<!DOCTYPE html>\n<title>Files</title>\n<ul>\n{items}</ul>\n"
        await answer.text(200, page, "text/html; charset=utf-8")

    async def _file(self, answer: _Answer, file: VirtualFile, headers: Mapping[str, str]) -> None:
        tag = f'"{file.tag}"'
        common = [("etag", tag), ("accept-ranges", "bytes"), ("cache-control", "no-cache")]
        if _matches(headers.get("if-none-match", ""), tag):
            await answer.start(304, common)
            await answer.end()
            return
        if "if-match" in headers and not _matches(headers["if-match"], tag):
            await answer.text(412, "", "text/plain", common)
            return
        asked = headers.get("range") if headers.get("if-range", tag) == tag else None
        try:
            ranges = ranges_of(asked, file.nbytes)
        except Unsatisfiable:
            await answer.text(416, "", "text/plain", [*common, ("content-range", f"bytes */{file.nbytes}")])
            return
        kind = "application/json" if file.path.endswith(".json") else "application/octet-stream"
        if ranges is None or len(ranges) == 1:
            (span,) = ranges or (Range(0, file.nbytes),)
            sized = [*common, ("content-type", kind), ("content-length", str(span.end - span.start))]
            if ranges is not None:
                sized.append(("content-range", f"bytes {span.start}-{span.end - 1}/{file.nbytes}"))
            parts: list[tuple[bytes, Range]] = [(b"", span)]
            await self._send(answer, file, 206 if ranges else 200, sized, parts, b"")
            return
        parts = [(_part_head(span, kind, file.nbytes), span) for span in ranges]
        tail = f"\r\n--{_BOUNDARY}--\r\n".encode()
        length = sum(len(head) + span.end - span.start for head, span in parts) + len(tail)
        kind = f"multipart/byteranges; boundary={_BOUNDARY}"
        sized = [*common, ("content-type", kind), ("content-length", str(length))]
        await self._send(answer, file, 206, sized, parts, tail)

    async def _send(
        self,
        answer: _Answer,
        file: VirtualFile,
        status: int,
        headers: Headers,
        parts: Sequence[tuple[bytes, Range]],
        tail: bytes,
    ) -> None:
        """Send parts of a file. The first bytes are read before the head: an error of theirs is a status."""
        if not answer.body:
            await answer.start(status, headers)
            await answer.end()
            return
        pieces = self._pieces(file, parts)
        try:
            first = await anext(pieces, b"")
        except CkptError as error:
            terminal.line(f"{error.code}: {error.message}", err=True)
            await answer.text(
                500, json.dumps({"error": error.code, "message": error.message}) + "\n", "application/json"
            )
            return
        await answer.start(status, headers)
        await answer.more(first)
        try:
            async for piece in pieces:
                await answer.more(piece)
        except CkptError as error:
            # The length was declared: a connection that ends before it is an error for every client.
            terminal.line(f"{error.code}: {error.message}", err=True)
            return
        await answer.more(tail)
        await answer.end()

    async def _pieces(self, file: VirtualFile, parts: Sequence[tuple[bytes, Range]]) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        for head, span in parts:
            if head:
                yield head
            for start in range(span.start, span.end, PIECE):
                nbytes = min(PIECE, span.end - start)
                yield await loop.run_in_executor(self._pool, self._folder.read, file.path, start, nbytes)


class _Answer:
    """The reply to one request. body: False for HEAD, whose reply has only a head."""

    def __init__(self, send: Send, *, body: bool) -> None:
        self._send, self.body = send, body

    async def text(self, status: int, text: str, kind: str, headers: Headers = ()) -> None:
        """Send a short reply."""
        data = text.encode()
        await self.start(status, [*headers, ("content-type", kind), ("content-length", str(len(data)))])
        await self.more(data)
        await self.end()

    async def start(self, status: int, headers: Headers) -> None:
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        raw.append((b"x-content-type-options", b"nosniff"))
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def more(self, data: bytes) -> None:
        if data and self.body:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _matches(header: str, tag: str) -> bool:
    """Return whether a list of entity tags has one, or is ``*``."""
    tags = [text.strip().removeprefix("W/") for text in header.split(",")]
    return tag in tags or "*" in tags


def _part_head(span: Range, kind: str, nbytes: int) -> bytes:
    lines = f"content-type: {kind}\r\ncontent-range: bytes {span.start}-{span.end - 1}/{nbytes}"
    return f"\r\n--{_BOUNDARY}\r\n{lines}\r\n\r\n".encode()


def serve(request: Request, settings: Settings, host: str, port: int, hosts: Sequence[str]) -> None:
    """Serve an export until SIGTERM or SIGINT. Prints the address on stdout, and findings on stderr.

    Args:
        request: The export.
        settings: Memory and threads.
        host: The address to listen on. Elsewhere than on loopback, reading needs a token.
        port: 0 picks a free one.
        hosts: Further names under which clients reach this server.
    """
    with needed("page", "serve files"):
        from ckptcore.page import http_server
    local = http_server.is_local(host, hosts, "files.example")
    token = None if local else os.environ.get(TOKEN) or secrets.token_urlsafe(24)
    with open_reported(request, settings) as folder, http_server.listening(host, port) as listener:
        app = FileServer(folder, [*http_server.LOOPBACK, *hosts] if local else hosts, settings.threads, token)
        nbytes = sum(file.nbytes for file in folder.files.values())
        address = http_server.address_of(host, listener)
        lines = [f"serving {len(folder.files)} files, {nbytes} bytes, at {address}"]
        if token is not None and not os.environ.get(TOKEN):
            lines.append(f"clients send this token as Authorization: Bearer: {token}")
        http_server.serve(app, listener, connections=CONNECTIONS, grace=http_server.GRACE, lines=lines)


if __name__ == "__main__":
    run(REQUEST, lambda request, settings, form: serve(request, settings, *(form[n] for n in _LISTENING)))
