"""Requests of S3 in threads: bodies are not copied, cancelled requests end, and forks share no connection."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from botocore.utils import parse_timestamp
from fault_s3 import FaultyS3, serving
from s3fs import S3FileSystem

from ckptcore.conversion.staging.s3_staging import object_places
from ckptcore.errors import DestinationUnwritable, SourceUnreadable, StorageTrouble, UsageError
from ckptcore.store.objects import RECORD, session
from ckptcore.store.objects.checksums import checksum_of
from ckptcore.store.objects.client import RequestThreads, S3Client
from ckptcore.store.objects.retry import DEADLINE_VARIABLE
from ckptcore.store.objects.session import PartBody, S3Session

DATA = os.urandom(3_000_000)


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyS3]:
    with serving() as found:
        yield found


@pytest.fixture
def client(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Client]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(DEADLINE_VARIABLE, "1")
    S3FileSystem.clear_instance_cache()
    yield S3Client("s3://bucket/x")
    server.calm()
    S3FileSystem.clear_instance_cache()


def received(client: S3Client, key: str, start: int, length: int) -> bytes:
    into = bytearray(length)
    client.get(key, start, None, memoryview(into))
    return bytes(into)


def test_a_part_is_signed_and_sent_in_large_pieces(client: S3Client, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int | None] = []
    original = PartBody.read

    def counted(self: PartBody, size: int | None = -1, /) -> bytes:
        reads.append(size)
        return original(self, size)

    monkeypatch.setattr(PartBody, "read", counted)
    monkeypatch.setattr(PartBody, "readinto", lambda *_: pytest.fail("its bytes are copied"))
    upload = client.begin("part")
    part = client.start_part(
        "part", upload, 1, memoryview(bytearray(DATA)), checksum_of("CRC32", DATA)
    ).result()
    client.complete("part", upload, [part])
    assert len(reads) <= 5  # of 1 MiB, and one that finds the end
    assert received(client, "part", 0, len(DATA)) == DATA


def test_bodies_are_received_from_their_beginning_and_from_within(client: S3Client) -> None:
    client.put("body", DATA)
    assert received(client, "body", 0, len(DATA)) == DATA
    assert received(client, "body", 1_000_001, 1_500_000) == DATA[1_000_001:2_500_001]


def test_connections_are_reused(client: S3Client) -> None:
    client.put("again", DATA)
    for start in (0, 10, 20):
        received(client, "again", start, 2_000_000)
    manager = client._session.client()._endpoint.http_session._manager
    (pool,) = (manager.pools.get(key) for key in manager.pools.keys())  # noqa: SIM118 - no mapping
    assert pool.num_connections == 1


def test_small_objects_come_in_one_request(client: S3Client, server: FaultyS3) -> None:
    client.put("small", b"abc")
    client.put("empty", b"")
    before = sum(client.requests.values())
    assert client.fetch("small") == b"abc"
    assert client.fetch("empty") == b""
    assert client.fetch("none") is None
    assert sum(client.requests.values()) == before + 3


def test_what_is_larger_than_expected_is_not_received(client: S3Client, server: FaultyS3) -> None:
    """An answer says how long it is: that many bytes are not allocated because of it."""
    client.put("large", b"x" * 5000)
    assert client.fetch("large", 5000) == b"x" * 5000
    before = sum(client.requests.values())
    with pytest.raises(
        SourceUnreadable, match=r"s3://bucket/large: it must have at most 4999 bytes \(got 5000\)"
    ) as caught:
        client.fetch("large", 4999)
    assert "move it away" in caught.value.hint
    assert sum(client.requests.values()) == before + 1
    for name in ("lease.json", "uploads/file-00000.json"):
        server.put(f"bucket/models/.out.ckptcore/{name}", b" " * (RECORD + 1))
    places = object_places("s3://bucket/models/out", "s3://bucket/models/.out.ckptcore")
    assert places is not None
    looks = {SourceUnreadable: places.journal.entries, DestinationUnwritable: places.lease().require_free}
    for error, look in looks.items():
        with pytest.raises(error, match=f"at most {RECORD} bytes"):
            look()


def test_a_small_object_that_arrives_altered_is_requested_twice(client: S3Client, server: FaultyS3) -> None:
    client.put("flipped", b"abc" * 1000)
    server.fault("GET", path="flipped", action="flip", times=1)
    assert client.fetch("flipped") == b"abc" * 1000
    server.fault("GET", path="flipped", action="flip", times=1000)
    with pytest.raises(StorageTrouble, match="does not match"):
        client.fetch("flipped")


def test_a_process_makes_its_own_connections(client: S3Client, monkeypatch: pytest.MonkeyPatch) -> None:
    first = client._session.client()
    assert client._session.client() is first
    here = os.getpid()
    monkeypatch.setattr("os.getpid", lambda: here + 1)
    assert client._session.client() is not first


def test_only_the_usual_signature_is_replaced() -> None:
    assert session._signer("v4", {"auth_type": "v4"}) == session._SIGNER
    assert session._signer("s3v4", {}) == session._SIGNER
    for version, kind in (("v4", "v4a"), ("v4", "v4-s3express"), ("s3", None), ("v4", "none"), (None, None)):
        assert session._signer(version, {"auth_type": kind}) is None
    assert session._signer("v4", {"auth_type": "v4", "unsigned_payload": True}) is None


@pytest.mark.parametrize(
    "text", ["2026-01-02T03:04:05.678Z", "Fri, 02 Jan 2026 03:04:05 GMT", "2026-01-02T03:04:05", "1767323045"]
)
def test_times_of_answers_are_those_of_botocore(text: str) -> None:
    assert session._moment(text) == parse_timestamp(text)


def test_requests_name_their_sender(
    client: S3Client, server: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SDK_UA_APP_ID", "training")
    sent: list[str] = []
    client._session.client().meta.events.register(
        "before-send.s3", lambda request, **_: sent.append(request.headers["User-Agent"].decode())
    )
    client.head("x")
    assert sent[0].startswith("ckptcore Botocore/")
    assert sent[0].endswith(" app/training")


def test_a_session_object_is_refused() -> None:
    with pytest.raises(UsageError, match="session"):
        S3Session(S3FileSystem(session=object(), skip_instance_cache=True)).client()


def test_requests_run_at_once_and_a_cancelled_one_is_not_begun() -> None:
    threads, both, end = RequestThreads(2), threading.Barrier(3, timeout=30), threading.Event()

    def waits(given_up) -> bool:
        both.wait()
        end.wait(30)
        return given_up()

    running = [threads.start(waits) for _ in range(2)]
    begun: list[int] = []
    waiting = threads.start(lambda _: begun.append(1))
    both.wait()
    assert waiting.cancel()
    assert running[0].cancel()  # it sees that itself
    last = threads.start(lambda _: "done")
    end.set()
    assert running[1].result(30) is False
    assert last.result(30) == "done"
    assert not begun
    with pytest.raises(ZeroDivisionError):
        threads.start(lambda _: 1 // 0).result(30)
