"""An S3 server in this process that answers reads, with faults at chosen moments.

    server.put("b/step-3/model.safetensors", data)
    server.fault("flip", skip=2, at=0.3)          the third answer with a body has a flipped bit
    server.fault("cut", skip=1, times=2)          two bodies end half-way

A store may keep checksums of objects or none, and may ignore If-Match.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from awscrt.checksums import crc32c, crc64nvme

FAULTS = ("status", "throttle", "reset", "cut", "cut-reset", "flip", "stall", "swap")


def _number(value: int, width: int) -> str:
    return base64.b64encode(value.to_bytes(width, "big")).decode()


CHECKSUMS: dict[str, Callable[[bytes], str]] = {
    "crc64nvme": lambda data: _number(crc64nvme(data), 8),
    "crc32c": lambda data: _number(crc32c(data), 4),
    "crc32": lambda data: _number(zlib.crc32(data), 4),
    "sha256": lambda data: base64.b64encode(hashlib.sha256(data).digest()).decode(),
}


@dataclass
class Fault:
    """What befalls some answers to GET: the first ``skip`` are spared, the next ``times`` are not."""

    action: str
    skip: int = 0
    times: int = 1
    at: float = 0.5
    path: str = ""
    call: Callable[[], object] | None = None


class ReadServer:
    """The server.

    Args:
        keeps: A name of `CHECKSUMS` that it keeps of every object, or None.
        conditions: Whether it honours If-Match.
        listing: Whether clients may list.
        parts: Whether ETags are those of uploads in parts, which prove nothing.
    """

    def __init__(
        self, *, keeps: str | None = None, conditions: bool = True, listing: bool = True, parts: bool = True
    ) -> None:
        self.keeps, self.conditions, self.listing, self.parts = keeps, conditions, listing, parts
        self.objects: dict[str, bytes] = {}
        self.log: list[tuple[str, str, int]] = []  # (method or "LIST", path, bytes of the range)
        self.stall_s = 2.0
        self._etags: dict[str, str] = {}
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        handler = type("BoundReads", (_Handler,), {"store": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def put(self, path: str, data: bytes) -> None:
        self.objects[path] = data
        self._etags[path] = hashlib.md5(data).hexdigest() + ("-1" if self.parts else "")

    def etag(self, path: str) -> str:
        return self._etags[path]

    def fault(self, action: str, **given: Any) -> Fault:
        rule = Fault(action, **given)
        self._faults.append(rule)
        return rule

    def calm(self) -> None:
        self._faults.clear()
        self.log.clear()

    def count(self, method: str, path: str = "") -> int:
        return sum(m == method and bool(re.search(path, p)) for m, p, _ in self.log)

    def pick(self, path: str) -> Fault | None:
        with self._lock:
            for rule in self._faults:
                if rule.times <= 0 or not re.search(rule.path, path):
                    continue
                if rule.skip > 0:
                    rule.skip -= 1
                    continue
                rule.times -= 1
                return rule
        return None

    def __enter__(self) -> ReadServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def read_server(**given: Any) -> Iterator[ReadServer]:
    """Run a server, and point this process's clients to it."""
    import fsspec

    with ReadServer(**given) as server:
        wanted = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": server.url,
        }
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        try:
            yield server
        finally:
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: ReadServer
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, ValueError):
            super().handle()

    def do_GET(self) -> None:
        store, url = self.store, urlsplit(self.path)
        path, query = unquote(url.path).lstrip("/"), dict(parse_qsl(url.query, keep_blank_values=True))
        if "/" not in path.rstrip("/"):
            self._list(path.rstrip("/"), query)
            return
        rule = store.pick(path) if self.command == "GET" else None
        if rule is not None and rule.call is not None:
            rule.call()
        action = rule.action if rule is not None else ""
        data = store.objects.get(path)
        if data is None:
            self._error(404, "NoSuchKey")
            return
        if action in ("status", "throttle"):
            store.log.append((self.command, path, 0))
            self._error(*((500, "InternalError") if action == "status" else (503, "SlowDown")))
            return
        if action == "reset":
            self._reset()
        match = (self.headers.get("If-Match") or "").strip('"')
        if match and store.conditions and match != store.etag(path):
            store.log.append((self.command, path, 0))
            self._error(412, "PreconditionFailed")
            return
        headers = {"ETag": f'"{store.etag(path)}"'}
        wanted = re.match(r"bytes=(\d+)-(\d+)$", self.headers.get("Range") or "")
        begin, end, status = 0, len(data), 200
        if wanted is not None:
            begin, end, status = int(wanted[1]), min(int(wanted[2]) + 1, len(data)), 206
            if begin >= end:
                self._error(416, "InvalidRange")
                return
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        elif store.keeps is not None and self.headers.get("x-amz-checksum-mode"):
            headers[f"x-amz-checksum-{store.keeps}"] = CHECKSUMS[store.keeps](data)
            headers["x-amz-checksum-type"] = "FULL_OBJECT"
        store.log.append((self.command, path, end - begin))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(end - begin)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self._send(data[begin:end], action, rule.at if rule is not None else 0.0)

    do_HEAD = do_GET

    def _send(self, body: bytes, action: str, at: float) -> None:
        place = min(int(len(body) * at), max(0, len(body) - 1))
        if action == "flip" and body:
            body = body[:place] + bytes([body[place] ^ 4]) + body[place + 1 :]
        if action in ("cut", "cut-reset", "stall"):
            self.wfile.write(body[:place])
            self.wfile.flush()
            if action == "stall":
                time.sleep(self.store.stall_s)
            if action == "cut":
                self.connection.shutdown(socket.SHUT_RDWR)
            self._reset()
        self.wfile.write(body)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        self.store.log.append(("LIST", query.get("prefix", ""), 0))
        if not self.store.listing:
            self._error(403, "AccessDenied")
            return
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        names = [
            n.removeprefix(f"{bucket}/") for n in sorted(self.store.objects) if n.startswith(f"{bucket}/")
        ]
        names = [n for n in names if n.startswith(prefix) and n > after]
        page, more = names[:1000], len(names) > 1000
        rows = "".join(
            f"<Contents><Key>{escape(n)}</Key><Size>{len(self.store.objects[f'{bucket}/{n}'])}</Size>"
            f"<ETag>&quot;{self.store.etag(f'{bucket}/{n}')}&quot;</ETag></Contents>"
            for n in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        self._xml(
            200,
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}</ListBucketResult>",
        )

    def _error(self, status: int, code: str) -> None:
        self._xml(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>")

    def _xml(self, status: int, text: str) -> None:
        body = ('<?xml version="1.0" encoding="UTF-8"?>' + text).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
        raise ConnectionAbortedError
