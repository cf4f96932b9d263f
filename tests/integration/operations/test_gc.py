"""Test that what killed conversions left on an object store is found, and removed if it is ours."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fault_s3
import pytest
import torch
from safetensors.torch import load, save_file

import ckptcore
from ckptcore.cli.main import run
from ckptcore.conversion.staging.open_staging import open_staging
from ckptcore.errors import CkptError, DestinationExists, UsageError
from ckptcore.operations import abandoned
from ckptcore.operations.abandoned import collect
from ckptcore.store.objects.journal import UploadEntry, UploadJournal

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # aiobotocore leaves its session


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[fault_s3.FaultyS3]:
    monkeypatch.setenv("CKPTCORE_REQUEST_DEADLINE", "4")
    with fault_s3.serving() as running:
        yield running


@pytest.fixture
def source(tmp_path: Path) -> str:
    save_file({"weight": torch.arange(6000.0)}, tmp_path / "model.safetensors")
    return str(tmp_path)


@pytest.mark.parametrize("name", ["_uploads_of", "_staging"])
def test_one_staging_prefix_in_trouble_leaves_the_others_alone(
    server: fault_s3.FaultyS3,
    source: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    for folder in ("a", "b"):
        ckptcore.execute(ckptcore.prepare(source, f"s3://bucket/runs/{folder}", verb="export"))
    inner = getattr(abandoned, name)

    def breaking(client: object, folder: str, *more: object) -> object:
        if folder.endswith(".a.ckptcore"):
            raise RuntimeError("unforeseen")
        return inner(client, folder, *more)

    with monkeypatch.context() as patch:
        patch.setattr(abandoned, name, breaking)
        assert run(["gc", "s3://bucket/runs", "--older-than", "0s", "--output", "json"]) == 1
    found = {item["url"]: item for item in json.loads(capsys.readouterr().out) if item["kind"] == "staging"}
    assert {url[-10:]: item["fate"] for url, item in found.items()} == {
        "a.ckptcore": "unread",
        "b.ckptcore": "removed",
    }
    assert "unforeseen" in found["s3://bucket/runs/.a.ckptcore"]["why"]
    assert {i.fate.value for i in collect("s3://bucket/runs", older_than_s=0)} == {"removed"}


def test_abandoned_uploads_are_removed_and_those_of_others_are_kept(
    server: fault_s3.FaultyS3, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b/c"):
        ckptcore.execute(ckptcore.prepare(source, f"s3://bucket/runs/{name}", verb="export"))
    ckptcore.convert(source, "s3://bucket/runs/done", verb="export")
    server.uploads["theirs"] = fault_s3.Upload("bucket/runs/other.bin", {})
    server.objects["bucket/runs/.x.ckptcore/precious"] = fault_s3.Stored(b"x", "x")
    assert len(server.uploads) == 3
    before = dict(server.objects)
    assert {i.fate.value for i in collect("s3://bucket/runs", older_than_s=3600)} == {"young", "foreign"}
    would = collect("s3://bucket/runs", older_than_s=0, dry_run=True)
    assert sorted(i.fate.value for i in would) == ["foreign", "foreign", "would-remove", "would-remove"]
    assert server.objects == before
    assert len(server.uploads) == 3
    with open_staging("s3://bucket/runs/a").lock():
        found = {i.url: i.fate.value for i in collect("s3://bucket/runs", older_than_s=0)}
    assert found["s3://bucket/runs/.a.ckptcore"] == "in-use"
    assert found["s3://bucket/runs/b/.c.ckptcore"] == "removed"
    assert not run(["gc", "s3://bucket", "--older-than", "0s", "--output", "json"])
    fates = {row["url"]: row["fate"] for row in json.loads(capsys.readouterr().out)}
    assert fates == {
        "s3://bucket/runs/.a.ckptcore": "removed",
        "s3://bucket/runs/.x.ckptcore": "foreign",
        "s3://bucket/runs/other.bin": "foreign",
    }
    assert list(server.uploads) == ["theirs"]
    assert sorted(server.below("bucket/runs/")) == [
        ".x.ckptcore/precious",
        "done/README.md",
        "done/model.safetensors",
    ]
    with pytest.raises(UsageError, match="not on an S3 store"):
        collect(source, older_than_s=0)


ENDINGS = ["gc", "finish", "another plan"]


def end(source: str, ending: str) -> dict[str, str]:
    """End what a conversion began; return the fates of what gc found."""
    if ending == "gc":
        return {i.url: i.fate.value for i in collect("s3://bucket/runs", older_than_s=0)}
    options = {"dtype": "bf16", "resume": False} if ending == "another plan" else {}
    ckptcore.convert(source, "s3://bucket/runs/a", verb="export", **options)  # type: ignore[arg-type]
    return {}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_upload_that_others_have_just_begun_to_our_key_is_kept(
    server: fault_s3.FaultyS3, source: str, ending: str
) -> None:
    """Every upload of ours is recorded, unless a reply was lost: one without a part is theirs, too."""
    ckptcore.execute(ckptcore.prepare(source, "s3://bucket/runs/a", verb="export"))
    key = "bucket/runs/a/model.safetensors"
    server.uploads["theirs"] = fault_s3.Upload(key, {}, algorithm="CRC32")
    fates = end(source, ending)
    assert list(server.uploads) == ["theirs"]
    if ending == "gc":
        assert fates == {"s3://bucket/runs/.a.ckptcore": "removed", f"s3://{key}": "foreign"}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_upload_whose_id_was_lost_is_aborted(server: fault_s3.FaultyS3, source: str, ending: str) -> None:
    """The reply to the first request is lost, and the upload that it began has no entry."""
    server.fault("CreateMultipartUpload", action="lost")
    ckptcore.execute(ckptcore.prepare(source, "s3://bucket/runs/a", verb="export"))
    assert len(server.uploads) == 2
    key = "bucket/runs/a/model.safetensors"
    server.uploads["parts"] = fault_s3.Upload(key, {}, {1: fault_s3.Stored(b"precious", "e")})
    server.uploads["other sums"] = fault_s3.Upload(key, {}, algorithm="CRC64NVME")
    server.uploads["old"] = fault_s3.Upload(key, {}, when=1e9)
    end(source, ending)
    assert sorted(server.uploads) == ["old", "other sums", "parts"]


def test_an_entry_that_a_list_lacks_is_not_removed_before_its_upload(
    server: fault_s3.FaultyS3, source: str
) -> None:
    ckptcore.execute(ckptcore.prepare(source, "s3://bucket/runs/a", verb="export"))
    assert len(server.uploads) == 1
    # The journal's own list; the list of the bucket, which comes before it, has the entry.
    server.fault("ListObjectsV2", query="uploads", action="missing", skip=1, times=1)
    for _ in range(2):
        collect("s3://bucket/runs", older_than_s=0)
    assert server.uploads == {}
    assert not server.below("bucket/runs/")


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_upload_whose_id_was_not_recorded_is_aborted(
    server: fault_s3.FaultyS3, source: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends between the answer and the record of it."""
    put = UploadJournal._put

    def killed(journal: UploadJournal, entry: UploadEntry, **given: bool) -> None:
        if entry.upload_id:
            raise KeyboardInterrupt
        put(journal, entry, **given)

    prepared = ckptcore.prepare(source, "s3://bucket/runs/a", verb="export")
    with monkeypatch.context() as patch:
        patch.setattr(UploadJournal, "_put", killed)
        with pytest.raises(KeyboardInterrupt):
            ckptcore.execute(prepared)
    assert len(server.uploads) == 1
    end(source, ending)
    assert not server.uploads


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_upload_of_others_to_our_key_is_kept(server: fault_s3.FaultyS3, source: str, ending: str) -> None:
    """Parts are sent only to uploads whose id is recorded: one that has a part, and is not, is theirs."""
    prepared = ckptcore.prepare(source, "s3://bucket/runs/a", verb="export")
    ckptcore.execute(prepared)
    key = "bucket/runs/a/model.safetensors"
    server.uploads["theirs"] = fault_s3.Upload(key, {}, {1: fault_s3.Stored(b"precious", "e")})
    fates = end(source, ending)
    if ending == "gc":
        assert fates == {"s3://bucket/runs/.a.ckptcore": "removed", f"s3://{key}": "foreign"}
    assert list(server.uploads) == ["theirs"]


def test_objects_of_others_in_a_staging_prefix_are_kept(
    server: fault_s3.FaultyS3, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.objects["bucket/runs/.a.ckptcore/precious"] = fault_s3.Stored(b"x", "x")
    ckptcore.convert(source, "s3://bucket/runs/a", verb="export")
    assert list(server.below("bucket/runs/.a.ckptcore/")) == ["precious"]
    assert "no conversion writes precious" in caplog.text


def test_a_half_published_output_is_left_to_its_conversion(server: fault_s3.FaultyS3, source: str) -> None:
    server.fault("PUT", path="out/README.md", action="status", times=1000, status=403, code="AccessDenied")
    with pytest.raises(CkptError):
        ckptcore.convert(source, "s3://bucket/out", verb="export")
    server.calm()
    assert [i.fate.value for i in collect("s3://bucket", older_than_s=0)] == ["publishing"]
    ckptcore.convert(source, "s3://bucket/out", verb="export")
    assert collect("s3://bucket", older_than_s=0) == ()
    assert sorted(server.below("bucket/")) == ["out/README.md", "out/model.safetensors"]


RUN = """
import sys, ckptcore.store.objects.part_plan as plan
plan.PART = 64 << 10
from ckptcore.cli.main import run
sys.exit(run(["export", sys.argv[1], sys.argv[2], "--no-catalog", "--max-file-size", "130000"]))
"""
# Requests of a conversion, in order: a signal befalls what comes before and behind it.
MOMENTS = {
    "begin": {"method": "POST", "query": "uploads"},
    "part": {"method": "PUT", "query": "partNumber", "skip": 1},
    "receipt": {"method": "PUT", "path": "receipts/"},
    "publishing": {"method": "PUT", "path": "publishing.json"},
    "complete": {"method": "POST", "query": "uploadId"},
    "second": {"method": "POST", "query": "uploadId", "skip": 1},
    "card": {"method": "PUT", "path": "out/README.md"},
    "index": {"method": "PUT", "path": "out/model.safetensors.index.json"},
    "done": {"method": "PUT", "path": "publishing.json", "skip": 2},
    "cleanup": {"method": "DELETE", "path": "plan/"},
}


def stopped_at(
    server: fault_s3.FaultyS3, source: str, moment: dict[str, object], number: int, action: str
) -> None:
    """Run a conversion in a process of its own, and send it a signal at a request."""
    process: list[subprocess.Popen[bytes]] = []

    def stop() -> None:
        process[0].send_signal(number)
        if number == signal.SIGKILL:
            process[0].wait()

    server.fault(**moment, action=action, call=stop)  # type: ignore[arg-type]
    environment = {**os.environ, **server.environment}
    arguments = [sys.executable, "-c", RUN, source, "s3://bucket/out"]
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        process.append(run)
        _, error = run.communicate(timeout=100)
    assert b"Traceback" not in error, error.decode()
    assert run.returncode != 0, "it was not stopped"


def require_right_after_a_rerun(
    server: fault_s3.FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, number: int
) -> None:
    monkeypatch.setattr("ckptcore.store.objects.part_plan.PART", 64 << 10)
    server.min_part = 64 << 10
    tensors = {f"w{n}": torch.randn(150, 100) for n in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    folder = tmp_path / "sharded"
    ckptcore.convert(str(tmp_path / "model.safetensors"), str(folder), verb="export", max_file_size=130_000)
    stopped_at(server, str(folder), MOMENTS[moment], number, "")
    # Half-published: a reader would accept it. The index names every file.
    names = server.below("bucket/out/")
    if "model.safetensors.index.json" in names or "model.safetensors" in names:
        ckptcore.convert("s3://bucket/out", str(tmp_path / "early"), verb="export")
    server.calm()
    with contextlib.suppress(DestinationExists):  # the stopped run had published, and cleaned up
        ckptcore.convert(str(folder), "s3://bucket/out", verb="export", max_file_size=130_000)
    assert server.uploads == {}
    found = server.below("bucket/out/")
    data = {k: v for n, raw in found.items() if n.endswith(".safetensors") for k, v in load(raw).items()}
    assert data.keys() == tensors.keys()
    assert all(torch.equal(data[name], tensors[name]) for name in tensors)
    left = [name for name in server.below("bucket/") if not name.startswith("out/")]
    if left:
        time.sleep(0.01)
        collect("s3://bucket", older_than_s=0)
    assert [name for name in server.below("bucket/") if not name.startswith("out/")] == []


@pytest.mark.alike(1)
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("moment", "number"), [("part", signal.SIGKILL), ("complete", signal.SIGTERM)])
def test_a_stopped_run_is_resumed(
    server: fault_s3.FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, number: int
) -> None:
    require_right_after_a_rerun(server, tmp_path, monkeypatch, moment, number)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("moment", list(MOMENTS))
def test_a_run_that_is_stopped_anywhere_is_resumed(
    server: fault_s3.FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, number: int
) -> None:
    require_right_after_a_rerun(server, tmp_path, monkeypatch, moment, number)
