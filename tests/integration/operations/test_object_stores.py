"""Test that roots on object stores are swept, and that readers never see a half-deleted source."""

from __future__ import annotations

from datetime import UTC, datetime

import fsspec
import pytest
import torch
from checkpoints import save
from fault_s3 import Stored, serving

from ckptcore.catalog import watched_roots as roots
from ckptcore.conversion.pipeline import convert
from ckptcore.operations import retire as module
from ckptcore.operations.retention import Policy
from ckptcore.operations.retire import retire
from ckptcore.operations.scrub import scrub
from ckptcore.operations.sweep import sweep
from ckptcore.planning.request import Request, Settings


@pytest.fixture
def bucket(tmp_path):
    """A folder of two steps in memory."""
    memory = fsspec.filesystem("memory")
    for n in (1, 2):
        for file in save(tmp_path / f"s{n}", n).iterdir():
            memory.pipe_file(f"/tending/runs/llama/step-{n}/{file.name}", file.read_bytes())
    yield memory
    memory.rm("/tending", recursive=True)


def test_requests_of_a_sweep(catalog, tmp_path):
    """A root costs nothing; a sweep of converted steps one listing for 1,000 objects, and a read a step."""
    steps, files = 12, [f for f in save(tmp_path / "s", 1).iterdir() if f.is_file()]
    with serving() as server:
        for n in range(steps):
            for file in files:
                key = f"b/runs/llama/step-{n}/{file.name}"
                server.objects[key] = Stored(file.read_bytes(), f"e{n}", when=1e9)
        with catalog.writing() as conn:
            roots.add(conn, datetime.now(UTC), "r", "s3://b/runs")
        assert not server.log
        assert sweep(catalog, lambda request: None, settle_s=0).counts == {"made": steps}
        server.log.clear()
        assert sweep(catalog, lambda request: None, settle_s=0).counts == {"converted": steps}
        listings = server.count("GET", "list-type")
        assert listings == -(-steps * len(files) // 1000)
        assert len(server.log) - listings <= steps


def test_a_root_in_a_bucket(bucket, catalog, url, monkeypatch):
    means = Settings(memory=32 << 20, workers=1, fingerprint=True)
    with catalog.writing() as conn:
        target = {"destination": "{root}/../exports/{run}/{name}"}
        roots.add(conn, datetime.now(UTC), "r", "memory://tending/runs", target=target)

    def make(request):
        return convert(request, means, None, url)

    found = sweep(catalog, make, settle_s=0)
    assert [i.destination for i in found.items] == [
        "memory://tending/exports/llama/step-1",
        "memory://tending/exports/llama/step-2",
    ]
    assert found.counts == {"made": 2}
    assert sweep(catalog, make, settle_s=0).counts == {"converted": 2}
    assert scrub(catalog, share=1).counts == {"proven": 4}

    removed = []
    remove = type(bucket).rm_file
    monkeypatch.setattr(type(bucket), "rm_file", lambda fs, p: removed.append(p) or remove(fs, p))
    done = retire(catalog, Policy(1), yes=True)
    assert done.counts == {"deleted": 1, "kept": 1}, [i.why for i in done.items]
    assert removed[0].endswith("/.metadata")
    assert not bucket.exists("/tending/runs/llama/step-1")
    assert bucket.exists("/tending/runs/llama/step-2/.metadata")


@pytest.mark.parametrize("when", ["prove", "_mark"])
def test_a_source_saved_meanwhile_in_a_bucket_is_not_deleted(when, bucket, catalog, url, monkeypatch):
    means = Settings(memory=32 << 20, workers=1, fingerprint=True)
    with catalog.writing() as conn:
        roots.add(conn, datetime.now(UTC), "r", "memory://tending/runs")
    for n in (1, 2):
        there = f"memory://tending/exports/step-{n}"
        convert(Request(f"memory://tending/runs/llama/step-{n}", there), means, None, url)
    before = getattr(module, when)

    def meanwhile(*given):
        data = next(p for p in bucket.find("/tending/runs/llama/step-1") if p.endswith(".distcp"))
        bucket.pipe_file(data, bucket.cat_file(data))
        return before(*given)

    monkeypatch.setattr(module, when, meanwhile)
    assert retire(catalog, Policy(1), yes=True).counts == {"unsafe": 1, "kept": 1}
    monkeypatch.setattr(module, when, before)
    assert bucket.exists("/tending/runs/llama/step-1/.metadata")
    retire(catalog, Policy(1), yes=True, take=means)
    assert not bucket.exists("/tending/runs/llama/step-1")


def test_an_object_that_is_one_save(tmp_path, catalog, url):
    memory = fsspec.filesystem("memory")
    with catalog.writing() as conn:
        roots.add(conn, datetime.now(UTC), "r", "memory://tending/runs")
    for n in (1, 2):
        torch.save({"w": torch.arange(4) + n}, tmp_path / "one.pt")
        memory.pipe_file(f"/tending/runs/pl/step={n}.pt", (tmp_path / "one.pt").read_bytes())
        means = Settings(memory=32 << 20, workers=1, fingerprint=True)
        request = Request(f"memory://tending/runs/pl/step={n}.pt", str(tmp_path / f"o{n}"))
        convert(request, means, None, url)
    assert retire(catalog, Policy(1), yes=True).counts == {"deleted": 1, "kept": 1}
    assert memory.find("/tending/runs") == ["/tending/runs/pl/step=2.pt"]
    memory.rm("/tending", recursive=True)
