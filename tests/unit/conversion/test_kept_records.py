"""Test what a run that holds a lease asks the store for, and what it need not ask for."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fault_s3
import pytest
import torch
from safetensors.torch import load, save_file

import ckptcore
from ckptcore.conversion import pipeline
from ckptcore.errors import SourceChanged
from ckptcore.store.objects.client import S3Client
from ckptcore.store.objects.small_reads import SHARED
from ckptcore.store.s3 import KeptRecords

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning"
)  # aiobotocore leaves its session to the exit
STAGING = "bucket/.out.ckptcore/"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[fault_s3.FaultyS3]:
    """A source of three files."""
    save_file({"a": torch.arange(5000.0)}, tmp_path / "x.safetensors")
    with fault_s3.serving(min_part=64 << 10) as running:
        for n in range(3):
            save_file({f"layers.{n}.weight": torch.full((60, 100), float(n))}, tmp_path / "one")
            running.put(f"bucket/src/model-{n + 1:05d}-of-00003.safetensors", (tmp_path / "one").read_bytes())
        yield running


def convert() -> ckptcore.Result:
    return ckptcore.convert("s3://bucket/src", "s3://bucket/out", catalog=False)


def test_no_record_is_read_back(server: fault_s3.FaultyS3) -> None:
    convert()
    written: set[str] = set()
    asked: Counter[str] = Counter()
    for method, path, _, status, name in server.log:
        if not path.startswith(STAGING) or "lease.json" in path:
            continue
        if name == "PutObject" and status == 200:
            written.add(path)
        if method in ("GET", "HEAD"):
            assert path not in written
            asked[path] += 1
    assert written
    assert set(asked.values()) == {1}
    assert load(server.below("bucket/")["out/model.safetensors"])["layers.2.weight"].eq(2).all()


def test_the_source_is_listed_first_and_before_publishing(server: fault_s3.FaultyS3) -> None:
    convert()
    names = [name if "prefix=src" not in query else "source" for *_, query, _, name in server.log]
    assert names.count("source") == 2
    assert names.index("CompleteMultipartUpload") > max(n for n, x in enumerate(names) if x == "source")
    assert max(n for n, x in enumerate(names) if x == "source") > names.index("UploadPart")


@pytest.mark.parametrize("when", ["compose", "execute_files"])
def test_a_source_that_is_replaced_meanwhile_is_refused(
    server: fault_s3.FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """An object of equal size and header: neither the manifest nor a length shows it."""
    replaced = "bucket/src/model-00002-of-00003.safetensors"
    save_file({"layers.1.weight": torch.full((60, 100), 9.0)}, tmp_path / "one")
    step: Any = getattr(pipeline, when)

    def then(*given: Any, **more: Any) -> Any:
        found = step(*given, **more)
        server.put(replaced, (tmp_path / "one").read_bytes())
        return found

    monkeypatch.setattr(pipeline, when, then)
    with pytest.raises(SourceChanged):
        convert()
    assert not [name for name in server.below("bucket/") if name.startswith("out")]


def test_records_are_kept_within_their_memory() -> None:
    kept, asked = KeptRecords(10), list[str]()

    def fetch(key: str, data: bytes | None) -> bytes | None:
        def ask() -> bytes | None:
            asked.append(key)
            return data

        return kept.fetch(key, ask)

    kept.put("p/a", b"12345")
    kept.put("p/large", b"1234567")
    assert (fetch("p/a", None), fetch("p/large", b"1234567"), fetch("p/none", None)) == (
        b"12345",
        b"1234567",
        None,
    )
    assert (asked, fetch("p/none", b"x")) == (["p/large", "p/none"], None)
    kept.put("p/a", b"1234567890")  # in the place of its own bytes
    assert (fetch("p/a", None), asked) == (b"1234567890", ["p/large", "p/none"])
    kept.forget("p/a")
    assert (fetch("p/a", b"y"), asked[2:]) == (b"y", ["p/a"])


def test_what_was_removed_is_not_asked_for() -> None:
    kept = KeptRecords(4)
    kept.put("p/a", b"1")
    kept.put("q/a", b"2")
    kept.emptied("p/")

    def never() -> bytes:
        raise AssertionError

    assert kept.fetch("p/a", never) is None
    assert kept.fetch("q/a", never) == b"2"
    kept.put("p/a", b"12345")  # more than is kept
    assert kept.fetch("p/a", lambda: b"12345") == b"12345"


def test_an_answer_that_is_older_than_what_was_written_is_not_kept() -> None:
    kept = KeptRecords()

    def ask() -> bytes:
        kept.put("a", b"new")
        return b"old"

    kept.fetch("a", ask)
    assert kept.fetch("a", ask) == b"new"


def test_requests_wait_for_few_others(server: fault_s3.FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes the time to the store and back: what needs nothing of each other is one step."""
    steps: list[str] = []
    send, each = S3Client._send, S3Client.each

    def counts() -> bool:
        return not threading.current_thread().name.startswith("ckptcore-request")

    def sent(self: S3Client, method: str, asked: Any) -> Any:
        if counts():
            steps.append(method)
        return send(self, method, asked)

    def at_once(self: S3Client, call: Any, items: Any) -> Any:
        given = list(items)
        if counts() and len(given) > 1:
            steps.append(f"several {len(given)}")
        return each(self, call, given)

    monkeypatch.setattr(S3Client, "_send", sent)
    monkeypatch.setattr(S3Client, "each", at_once)
    SHARED.clear()  # what other tests have read of equal objects
    convert()
    done = steps.index("complete_multipart_upload")
    # The source's list and headers; who has the lease; the lease; its test and what is there; the plan; its
    # head; the checksums of three source files. The upload is begun meanwhile.
    ready = ["put_object", "several 5", "several 2", "put_object", "several 3"]
    assert steps[:10] == ["list_objects_v2", *["get_object"] * 4, *ready]
    assert "create_multipart_upload" not in steps
    # The checks; the record and what is there; then the output, its record, and the removal of all records.
    checks = ["put_object", "several 4", "several 3"]
    # Who has the lease is asked right before it ends, and not beside anything. The last record is
    # written beside the one before, and copied.
    ends = ["several 3", "several 3", "several 8", "several 2", "get_object", "delete_object"]
    assert (steps[done - 3 : done], steps[done + 1 :]) == (checks, ends)


def test_a_lease_that_another_run_has_taken_is_left_to_it(server: fault_s3.FaultyS3) -> None:
    """A process that is stopped while it removes its records may wake up long after its lease."""
    key = "bucket/.out.ckptcore/lease.json"
    taken: list[bytes] = []

    def take_over() -> None:
        time.sleep(0.3)  # what is asked at the same time is answered
        holder = json.loads(server.below("bucket/.out.ckptcore/")["lease.json"])
        taken.append(json.dumps({**holder, "token": "another run's", "fence": holder["fence"] + 1}).encode())
        server.put(key, taken[0])

    server.fault("DeleteObject", path="publishing.json", action="", call=take_over)
    convert()
    assert server.below("bucket/.out.ckptcore/") == {"lease.json": taken[0]}
