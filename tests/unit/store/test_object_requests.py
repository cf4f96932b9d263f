"""Requests to S3: which failures are repeated, what they are called, and the checksums that stores keep."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
import zlib
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

from ckptcore.errors import (
    CkptError,
    DamagedCheckpoint,
    DestinationUnwritable,
    SourceChanged,
    SourceUnreadable,
    StorageTrouble,
    UsageError,
)
from ckptcore.store.objects import Checksum
from ckptcore.store.objects import ledger as ledgers
from ckptcore.store.objects.checksums import ALGORITHMS, checksum_of, kept_checksums
from ckptcore.store.objects.ledger import Ledger
from ckptcore.store.objects.retry import (
    DEADLINE_VARIABLE,
    Kind,
    ShortBody,
    deadline_s,
    explained,
    kind_of,
    with_retries,
)
from ckptcore.store.objects.small_reads import SmallReads


def answered(status: int, code: str = "", headers: dict[str, str] | None = None) -> ClientError:
    meta = {"HTTPStatusCode": status, "HTTPHeaders": headers or {}}
    return ClientError({"Error": {"Code": code or str(status)}, "ResponseMetadata": meta}, "GetObject")


@pytest.mark.parametrize(
    ("error", "kind", "cls"),
    [
        (answered(503, "SlowDown"), Kind.TROUBLE, StorageTrouble),
        (answered(500, "InternalError"), Kind.TROUBLE, StorageTrouble),
        (answered(504), Kind.TROUBLE, StorageTrouble),
        (answered(429), Kind.TROUBLE, StorageTrouble),
        (answered(400, "RequestTimeout"), Kind.TROUBLE, StorageTrouble),
        (answered(400, "BadDigest"), Kind.TROUBLE, StorageTrouble),
        (ConnectionResetError(), Kind.TROUBLE, StorageTrouble),
        (TimeoutError(), Kind.TROUBLE, StorageTrouble),
        (EndpointConnectionError(endpoint_url="http://h"), Kind.TROUBLE, StorageTrouble),
        (ShortBody("short"), Kind.TROUBLE, StorageTrouble),
        (answered(404, "NoSuchKey"), Kind.MISSING, SourceUnreadable),
        (answered(404), Kind.MISSING, SourceUnreadable),
        (answered(404, "NoSuchUpload"), Kind.NO_UPLOAD, SourceUnreadable),
        (answered(403, "AccessDenied"), Kind.DENIED, SourceUnreadable),
        (answered(403, "SignatureDoesNotMatch"), Kind.CREDENTIALS, SourceUnreadable),
        (answered(400, "ExpiredToken"), Kind.CREDENTIALS, SourceUnreadable),
        (NoCredentialsError(), Kind.CREDENTIALS, SourceUnreadable),
        (answered(412, "PreconditionFailed"), Kind.CHANGED, SourceChanged),
        (answered(416, "InvalidRange"), Kind.RANGE, SourceUnreadable),
        (answered(501, "NotImplemented"), Kind.UNSUPPORTED, SourceUnreadable),
        (answered(400, "InvalidBucketName"), Kind.INVALID, SourceUnreadable),
    ],
    ids=str,
)
def test_kinds_of_failures(error: Exception, kind: Kind, cls: type[CkptError]) -> None:
    assert kind_of(error) is kind
    found = explained(error, "s3://b/k", attempts=2)
    assert type(found) is cls
    assert found.values["kind"] == kind.value
    assert found.values["attempts"] == 2
    assert kind_of(found) is kind


def test_conditions_of_writes() -> None:
    lost = answered(412, "PreconditionFailed")
    assert explained(lost, "s3://b/k", writing=True, create=True).values["kind"] == "exists"
    found = explained(lost, "s3://b/k", writing=True)
    assert (type(found), found.values["kind"]) == (DestinationUnwritable, "changed")


def test_a_defect_is_not_repeated() -> None:
    assert kind_of(AttributeError("x")) is None


def run(failures: list[Exception], deadline: float) -> tuple[Any, int]:
    sent = 0

    def call() -> str:
        nonlocal sent
        sent += 1
        if len(failures) >= sent:
            raise failures[sent - 1]
        return "done"

    try:
        return with_retries(call, "s3://b/k", deadline=deadline), sent
    except CkptError as error:
        return error, sent


def test_repeats_end_at_the_deadline() -> None:
    assert run([ConnectionResetError()] * 2, 30) == ("done", 3)
    error, sent = run([ConnectionResetError()] * 99, 0)
    assert (type(error), sent) == (StorageTrouble, 1)
    error, sent = run([answered(503, "SlowDown", {"retry-after": "3600"})] * 9, 5)
    assert (type(error), sent) == (StorageTrouble, 1)  # the store asks for more than there is
    error, sent = run([answered(404, "NoSuchKey")], 60)
    assert (type(error), sent) == (SourceUnreadable, 1)


def test_a_wait_ends_when_the_request_is_given_up() -> None:
    sent, given_up = [], threading.Event()

    def call() -> None:
        sent.append(time.monotonic())
        threading.Timer(0.2, given_up.set).start()
        raise answered(503, "SlowDown", {"retry-after": "500"})

    with pytest.raises(StorageTrouble, match="SlowDown"):
        with_retries(call, "s3://b/k", deadline=600.0, given_up=given_up.is_set)
    assert len(sent) == 1
    assert time.monotonic() - sent[0] < 120


def test_the_deadline_is_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert deadline_s() == 60
    monkeypatch.setenv(DEADLINE_VARIABLE, "2.5")
    assert deadline_s() == 2.5
    for wrong in ("soon", "-1", "nan", "1e9"):
        monkeypatch.setenv(DEADLINE_VARIABLE, wrong)
        with pytest.raises(UsageError, match=DEADLINE_VARIABLE):
            deadline_s()


def test_messages_have_no_credentials() -> None:
    error = OSError("http://user:pw-secret@host/b?X-Amz-Signature=abc123 key=AKIAABCDEFGHIJKLMNOP hunter22")
    text = explained(error, "s3://me:word-secret@b/k", secrets=["hunter22"]).message
    for secret in ("pw-secret", "abc123", "ABCDEFGHIJKLMNOP", "word-secret", "hunter22"):
        assert secret not in text


@pytest.mark.parametrize(
    ("name", "value"), [("CRC32", "y/Q5Jg=="), ("CRC32C", "4waSgw=="), ("CRC64NVME", "rosUhgp5mIg=")]
)
def test_checksums_are_the_published_ones_and_add_up(name: str, value: str) -> None:
    assert checksum_of(name, b"123456789").value == value
    parts = [b"1", b"2345", b"", b"6789"]
    algorithm, total = ALGORITHMS[name], 0
    assert algorithm.update is not None
    assert algorithm.combine is not None
    for part in parts:
        total = algorithm.combine(total, algorithm.update(part, 0), len(part))
    assert algorithm.encoded(total) == Checksum(name, value)
    assert zlib.crc32(b"123456789").to_bytes(4, "big") == base64.b64decode("y/Q5Jg==")


def test_only_checksums_of_complete_objects_count() -> None:
    assert kept_checksums({"ChecksumCRC32": "y/Q5Jg==-3"}) == ()
    assert kept_checksums({"ChecksumCRC32": "y/Q5Jg==", "ChecksumType": "COMPOSITE"}) == ()
    found = kept_checksums({"ChecksumSHA256": checksum_of("SHA256", b"x").value, "ChecksumCRC32": "y/Q5Jg=="})
    assert [c.algorithm for c in found] == ["CRC32", "SHA256"]


@pytest.mark.parametrize("step", [ledgers._STEP, 700])  # bytes that are received at a time
@pytest.mark.parametrize("name", ["CRC64NVME", "CRC32C", "CRC32", "SHA256"])
def test_the_ledger_proves_and_disproves(name: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "_STEP", step)
    data = bytearray(hashlib.shake_256(b"x").digest(10_000))
    kept = (checksum_of(name, bytes(data)),)
    received: list[tuple[int, int]] = []

    def receive(start: int, into: memoryview) -> None:
        received.append((start, len(into)))
        into[:] = data[start : start + len(into)]

    def ledger(flipped: int | None = None) -> Ledger:
        found = Ledger()
        found.prefer("f", kept)
        for start in (2000, 6000):
            block = bytearray(data[start : start + 4000])
            if flipped is not None and start <= flipped < start + 4000:
                block[flipped - start] ^= 1
            found.add("f", start, memoryview(block), "f")
        return found

    assert ledger().proves("f", 10_000, kept, receive, "f")
    assert (0, min(step, 2000)) in received  # the head was never received before
    assert max(n for _, n in received) <= step
    assert not ledger().proves("f", 10_000, (), receive, "f")
    with pytest.raises(StorageTrouble, match="differ"):
        ledger(7000).proves("f", 10_000, kept, receive, "f")
    data[100] ^= 1
    with pytest.raises(DamagedCheckpoint, match=name):
        ledger().proves("f", 10_000, kept, receive, "f")


@pytest.mark.parametrize("have", [2000, 4999, 5000, 9000])
@pytest.mark.parametrize("cheap", [ledgers._CHEAP, 1000])
def test_more_than_was_read_is_not_received_for_a_proof(
    have: int, cheap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to half of a file is, and any part of a file that is not large."""
    monkeypatch.setattr(ledgers, "_CHEAP", cheap)
    data = hashlib.shake_256(b"x").digest(10_000)
    received = 0

    def receive(start: int, into: memoryview) -> None:
        nonlocal received
        received += len(into)
        into[:] = data[start : start + len(into)]

    kept = (checksum_of("CRC32", data),)
    ledger = Ledger()
    ledger.prefer("f", kept)
    ledger.add("f", 0, memoryview(data)[:have], "f")
    proven = ledger.proves("f", len(data), kept, receive, "f")
    assert proven == (have >= 5000 or cheap > 1000)
    assert received == (len(data) - have if proven else 0)


def test_what_comes_twice_must_be_equal() -> None:
    ledger = Ledger()
    ledger.add("f", 0, memoryview(b"abcd"), "f")
    ledger.add("f", 0, memoryview(b"abcd"), "f")
    with pytest.raises(StorageTrouble):
        ledger.add("f", 0, memoryview(b"abce"), "f")
    ledger.forget("f", 3, 1)
    ledger.add("f", 0, memoryview(b"abce"), "f")


def test_bytes_outside_of_blocks_prove_nothing() -> None:
    ledger = Ledger()
    kept = (checksum_of("CRC32", b"abcd"),)
    ledger.prefer("f", kept)
    ledger.add("f", 0, memoryview(b"abcd"), "f")
    ledger.doubt("f")
    assert not ledger.proves("f", 4, kept, lambda at, into: None, "f")


def test_small_reads_are_kept_within_their_memory() -> None:
    kept, version = SmallReads(100), ("b", "k", '"e"')
    for n in range(5):
        kept.keep(version, n * 30, bytes([n]) * 30)
    assert kept.find(version, 0, 10) is None
    assert kept.find(version, 100, 5) == bytes([3]) * 5
    assert kept.find(version, 100, 30) is None  # over two pieces
    assert kept.find(("b", "k", '"other"'), 100, 5) is None
    kept.forget(version, 119, 2)
    assert kept.find(version, 100, 5) is None
    assert len(kept.pieces(version)) == 1
