"""An S3 server in this process, with faults at chosen moments; `s3_answers` has what it answers.

A rule names requests, by HTTP method or by S3's operation, and what befalls them:

    server.fault("UploadPart", action="reset", times=2)      the connection is reset before the answer
    server.fault("CompleteMultipartUpload", action="lost")   the work is done, and the reply is lost
    server.fault("GetObject", action="flip", at=0.3)         a bit of the body flips on the wire
    server.fault("PUT", action="status", status=503, code="SlowDown", skip=3)
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from s3_answers import CHECKSUMS, Answer, Asked, S3Answers, Stored, Upload, error, operation

__all__ = ["ACTIONS", "CHECKSUMS", "Fault", "FaultyS3", "Stored", "Upload", "serving"]
# What may befall a request.
ACTIONS = (
    "",  # nothing; a rule's `call` is called before the request is carried out
    "status",  # an error answer, and nothing is done
    "error200",  # an error in the body of an answer with status 200, and nothing is done
    "reset",  # the connection is reset, and nothing is done
    "lost",  # it is done, and the connection is reset instead of an answer
    "late",  # it is done, and no answer comes until the client gives up
    "cut",  # half of a body goes over the wire, and the connection ends; `cut-reset`: it is reset
    "cut-reset",
    "stall",  # half of an answer, and then nothing
    "flip",  # a bit of a body flips on the wire, on its way in or out
    "missing",  # a list lacks a row
)


@dataclass
class Fault:
    """What befalls some requests: the first ``skip`` are spared, the next ``times`` are not.

    Attributes:
        method: An HTTP method, a name of S3's operations, or "*".
        path: Pattern of the path, with the bucket.
        query: Pattern of the query.
        skip: Requests that are spared.
        times: Requests that it befalls.
        action: One of `ACTIONS`.
        status: Of an error answer.
        code: Of an error answer.
        at: Where in a body or list, from 0 to 1.
        call: Called before the request is carried out.
    """

    method: str
    path: str = ""
    query: str = ""
    skip: int = 0
    times: int = 1
    action: str = "status"
    status: int = 503
    code: str = "SlowDown"
    at: float = 0.5
    call: Callable[[], object] | None = None


class FaultyS3(S3Answers):
    """The server; options are those of `S3Answers`.

    Attributes:
        log: (method, path, query, status or 0, operation) of every request.
        stall_s: How long a stalled answer is silent before the connection ends.
        after: Called after each request that changed something, with the path.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.log: list[tuple[str, str, str, int, str]] = []
        self.stall_s = 2.0
        self.after: Callable[[str], object] | None = None
        self._faults: list[Fault] = []
        handler = type("BoundHandler", (_Handler,), {"store": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs."""
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
        }

    def fault(self, method: str, **given: Any) -> Fault:
        """Add a rule; the first that fits a request befalls it."""
        rule = Fault(method, **given)
        assert rule.action in ACTIONS
        self._faults.append(rule)
        return rule

    def calm(self) -> None:
        """Remove all rules, and forget the log."""
        self._faults.clear()
        self.log.clear()
        self.denied.clear()
        self.after = None

    def count(self, method: str, query: str = "", path: str = "") -> int:
        """Count the requests in the log, by method or operation."""
        return sum(
            method in (m, name) and bool(re.search(query, q)) and bool(re.search(path, p))
            for m, p, q, _, name in self.log
        )

    def pick(self, name: str, method: str, path: str, query: str) -> Fault | None:
        """Return the rule for a request."""
        with self.lock:
            for rule in self._faults:
                if rule.times <= 0 or rule.method not in (method, name, "*"):
                    continue
                if not re.search(rule.path, path) or not re.search(rule.query, query):
                    continue
                if rule.skip > 0:
                    rule.skip -= 1
                    continue
                rule.times -= 1
                return rule
        return None

    def __enter__(self) -> FaultyS3:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def serving(**given: Any) -> Iterator[FaultyS3]:
    """Run a server, and point this process's clients to it."""
    import fsspec

    with FaultyS3(**given) as server:
        before = {name: os.environ.get(name) for name in server.environment}
        os.environ.update(server.environment)
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
    store: FaultyS3
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, ValueError):
            super().handle()

    def do_any(self) -> None:
        url = urlsplit(self.path)
        path, given = unquote(url.path).lstrip("/"), dict(parse_qsl(url.query, keep_blank_values=True))
        name = operation(self.command, path, given, self.headers)
        rule = self.store.pick(name, self.command, path, url.query)
        action = rule.action if rule is not None else ""
        if rule is not None and rule.call is not None:
            rule.call()
        sent = int(self.headers.get("Content-Length") or 0)
        if action == "reset" or (sent and action in ("cut", "cut-reset")):
            self.rfile.read(0 if action == "reset" else sent // 2)
            self._note(path, url.query, 0, name)
            self._reset()
        body = self._body(sent)
        if action == "flip" and body:
            body = _flipped(body, rule)
        try:
            self._act(Asked(self.command, path, given, self.headers, body), rule)
        except Answer as answer:
            self._note(path, url.query, answer.status, name)
            if self.store.after is not None and self.command in ("PUT", "POST", "DELETE"):
                self.store.after(path)
            if action == "late":
                time.sleep(self.store.stall_s)
            if action in ("lost", "late"):
                self._reset()
            self._reply(answer, rule if not sent else None)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_any

    def _note(self, path: str, query: str, status: int, name: str) -> None:
        with self.store.lock:
            self.store.log.append((self.command, path, query, status, name))

    def _act(self, asked: Asked, rule: Fault | None) -> None:
        """Raise the answer to a request."""
        action = rule.action if rule is not None else ""
        if rule is not None and action == "status":
            raise error(rule.status, rule.code)
        if rule is not None and action == "error200":
            raise Answer(200, error(200, rule.code).body, {"Content-Type": "application/xml"})
        self.store.answer(asked, missing=rule.at if rule is not None and action == "missing" else None)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
        raise ConnectionAbortedError

    def _reply(self, answer: Answer, rule: Fault | None) -> None:
        body, action = answer.body, rule.action if rule is not None else ""
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if action == "flip" and body and answer.status < 300:
            body = _flipped(body, rule)
        if action in ("cut", "cut-reset", "stall"):
            assert rule is not None
            self.wfile.write(body[: int(len(body) * rule.at)])
            self.wfile.flush()
            if action == "stall":
                time.sleep(self.store.stall_s)
            if action == "cut":
                self.connection.shutdown(socket.SHUT_RDWR)
            self._reset()
        self.wfile.write(body)

    def _body(self, sent: int) -> bytes:
        raw = self.rfile.read(sent)
        if "aws-chunked" not in (self.headers.get("Content-Encoding") or ""):
            return raw
        found, at = b"", 0
        while True:
            end = raw.index(b"\r\n", at)
            size = int(raw[at:end].split(b";")[0], 16)
            if not size:
                return found
            found += raw[end + 2 : end + 2 + size]
            at = end + 2 + size + 2


def _flipped(body: bytes, rule: Fault | None) -> bytes:
    place = min(int(len(body) * (rule.at if rule is not None else 0.0)), len(body) - 1)
    return body[:place] + bytes([body[place] ^ 4]) + body[place + 1 :]
