"""Protocol: raw bytes at a real socket. Half a request, a request with two meanings, and one too many."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ckptcore.page import http_server as protocol
from ckptcore.page.http_server import MAX_HEAD, server_of

BODY = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
seen: list[tuple[str, str, bytes]] = []


async def application(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
    if scope["type"] != "http":
        return
    body, more = b"", scope["path"] != "/unread"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message.get("body", b""), message.get("more_body", False)
    seen.append((scope["method"], scope["path"], body))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = server_of(application, connections=1024, grace=10)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(120)
    listener.close()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.6)
    monkeypatch.setattr(protocol, "BODY_SECONDS", 1.0)
    seen.clear()


@pytest.fixture
def patient(hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long timeouts, so that a request can arrive byte by byte on a busy machine."""
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 300)
    monkeypatch.setattr(protocol, "BODY_SECONDS", 300)


def answer(port: int, *parts: bytes, pause: float = 0.0, wait: float = 120) -> bytes:
    """Send each part as a packet of its own, and return the reply until the other side closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        arrived = select.poll()  # `select.select` refuses descriptors above 1023
        arrived.register(client, select.POLLIN)
        found = b""
        try:
            for part in parts:
                if arrived.poll(0):
                    break  # it has answered, or closed
                client.sendall(part)
                time.sleep(pause)
            while part := client.recv(65536):
                found += part
        except ConnectionError:
            pass
        return found


CLOSE = b"Connection: close\r\n\r\n"
REFUSED = {
    "bare LF": b"GET /a HTTP/1.1\nHost: x\n\n",
    "bare LF in a header": b"GET /a HTTP/1.1\r\nHost: x\nX-A: b\r\n\r\n",
    "bare LF at the end": b"GET /a HTTP/1.1\r\nHost: x\r\n\n",
    "bare CR": b"GET /a HTTP/1.1\r\nHost: x\rX-A: b\r\n\r\n",
    "obs-fold": b"GET /a HTTP/1.1\r\nHost: x\r\nX-A: b\r\n c\r\n\r\n",
    "obs-fold with a tab": b"GET /a HTTP/1.1\r\nHost: x\r\nX-A: b\r\n\tc\r\n\r\n",
    "folded first": b"GET /a HTTP/1.1\r\n Host: x\r\n\r\n",
    "an empty line first": b"\r\nGET /a HTTP/1.1\r\nHost: x\r\n\r\n",
    "NUL": b"GET /a HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
    "length twice": BODY + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
    "the same length twice": BODY + b"Content-Length: 2\r\ncontent-length: 2\r\n\r\nab",
    "length and chunks": BODY + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": BODY + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "chunks twice": BODY + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "odd chunks": BODY + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunks of 1.0": b"POST /a HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "space before the colon": BODY + b"Content-Length : 2\r\n\r\nab",
    "a signed length": BODY + b"Content-Length: +2\r\n\r\nab",
    "lengths": BODY + b"Content-Length: 2, 3\r\n\r\nab",
    "two hosts": b"GET /a HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "no request": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\n",
    "a long chunk size": BODY + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
}


@pytest.mark.parametrize("name", REFUSED)
def test_ambiguous_requests_are_refused(name: str, port: int) -> None:
    began = time.monotonic()
    found = answer(port, REFUSED[name])
    assert found.split(b" ")[1] in (b"400", b"501"), found
    assert time.monotonic() - began < 120
    assert b"connection: close" in found.lower()
    assert seen == []


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("name", ["bare LF", "obs-fold", "bare CR", "length and chunks"])
def test_ambiguous_requests_are_refused_byte_by_byte(name: str, port: int) -> None:
    found = answer(port, *(bytes([byte]) for byte in REFUSED[name]))
    assert b" 400 " in found
    assert seen == []


@pytest.mark.usefixtures("patient")
def test_valid_requests_are_answered(port: int) -> None:
    for parts in (
        [GET[:-2] + CLOSE],
        [bytes([byte]) for byte in GET[:-2] + CLOSE],
        [BODY + b"Content-Length: 3\r\n" + CLOSE + b"a\nb"],
        [BODY + b"Content-Length: 3\r\n" + CLOSE, b"a", b"\n ", b""],
        [BODY + b"Transfer-Encoding: chunked\r\n" + CLOSE + b"3\r\na\nb\r\n0\r\n\r\n"],
        [BODY + b"Transfer-Encoding: chunked\r\n" + CLOSE, b"3\r", b"\na\nb\r\n0\r\n", b"\r\n"],
    ):
        found = answer(port, *parts)
        assert b" 200 " in found, parts
    assert {body for _, _, body in seen} == {b"", b"a\nb", b"a\n "}


def test_a_connection_serves_successive_requests(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=120) as client:
        for number in range(3):
            client.sendall(GET if number else BODY + b"Content-Length: 2\r\n\r\nab")
            found = b""
            while not found.endswith(b"ok"):
                found += client.recv(65536)
            time.sleep(
                0.8 if number == 0 else 0
            )  # longer than a head may take, whose time counts from its first byte
        client.sendall(b"GET /a HTTP/1.1\nHost: x\n\n")
        assert b" 400 " in client.recv(65536)
    assert len(seen) == 3


@pytest.mark.parametrize("smuggled", [GET, b"GET /admin HTTP/1.1\nHost: x\n\n", b"\r\n" + GET, GET * 50])
def test_bytes_before_the_reply_are_not_a_second_request(smuggled: bytes, port: int) -> None:
    first = BODY + b"Content-Length: 2\r\n\r\nab"
    chunked = BODY + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n"
    for parts in (
        [first + smuggled],
        [first, smuggled],
        [chunked + b"\r\n" + smuggled],
        [chunked + b"X: y\n\n" + smuggled],
    ):
        seen.clear()
        found = answer(port, *parts)
        assert "/admin" not in [path for _, path, _ in seen]
        if len(parts) == 1:  # or the first could be answered before the second arrives
            assert found.count(b"HTTP/1.1 200") == len(seen) <= 1


@pytest.mark.parametrize("part", [b"", b"G", GET[:-2], b"GET /a HTTP/1.1\r\nX-Slow: "])
def test_an_incomplete_head_times_out(part: bytes, port: int) -> None:
    began = time.monotonic()
    found = answer(port, part)
    assert 0.4 < time.monotonic() - began < 120
    assert found.startswith(b"HTTP/1.1 408 ") if part else found == b""


def test_slow_bytes_do_not_extend_the_timeout(port: int) -> None:
    began = time.monotonic()
    found = answer(port, GET[:-2], *(b"X-%d: 1\r\n" % n for n in range(200)), pause=0.1)
    assert b" 408 " in found or found == b""
    assert time.monotonic() - began < 120
    assert seen == []


@pytest.mark.parametrize("path", [b"/a", b"/unread"])
def test_an_incomplete_body_times_out(path: bytes, port: int) -> None:
    head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    began = time.monotonic()
    answer(port, head, *([b"x"] * 40), pause=0.1)
    assert 0.5 < time.monotonic() - began < 120


def test_a_large_head_is_refused(port: int) -> None:
    long = b"GET /a HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (MAX_HEAD + 10) + b"\r\n\r\n"
    many = b"GET /a HTTP/1.1\r\nHost: x\r\n" + b"X: a\r\n" * 200 + b"\r\n"
    for request in (long, many, long[: MAX_HEAD + 5]):
        assert b" 431 " in answer(port, request)
    assert seen == []


def test_many_incomplete_requests_do_not_block_others(port: int) -> None:
    with ExitStack() as opened:
        half = [
            opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=120))
            for _ in range(300)
        ]
        for one in half:
            one.sendall(b"GET /a HTTP/1.1\r\nX: ")
        assert b" 200 " in answer(port, GET[:-2] + CLOSE)
        for one in half:
            while one.recv(4096):
                pass
