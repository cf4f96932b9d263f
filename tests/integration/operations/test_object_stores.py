"""Test that roots on object stores are swept, and that readers never see a half-deleted source."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import fsspec
import pytest
import torch
from checkpoints import save
from fault_s3 import Stored, serving
from retiring import delete_now as retire

from ckptcore.catalog import watched_roots as roots
from ckptcore.conversion.pipeline import convert
from ckptcore.operations.automation.sweep import SweepSettings, sweep
from ckptcore.operations.retention import setting_aside
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.scrub import scrub
from ckptcore.planning.request import Request, Settings

AT_ONCE = SweepSettings(settle_s=0)

_MEANS = Settings(memory=32 << 20, workers=1)


@pytest.fixture
def bucket(tmp_path):
    """A folder of two steps in memory."""
    memory = fsspec.filesystem("memory")
    for n in (1, 2):
        for file in save(tmp_path / f"s{n}", n).iterdir():
            memory.pipe_file(f"/tending/runs/llama/step-{n}/{file.name}", file.read_bytes())
    yield memory
    memory.rm("/tending", recursive=True)


class Steps:
    """Steps of a run in a bucket, each with many objects beside its files; lists come in pages of 10 rows."""

    page, extra = 10, 23

    def __init__(self, server, folder):
        self.server = server
        self.files = {f.name: f.read_bytes() for f in save(folder, 1).iterdir() if f.is_file()}
        self.files |= {f"rest/{n}": b"" for n in range(self.extra)}

    def add(self, *steps, run="llama", etag="e", when=1e9):
        for n in steps:
            for name, data in self.files.items():
                self.server.objects[f"b/runs/{run}/step-{n}/{name}"] = Stored(data, f"{etag}{n}", when=when)

    def pages(self, rows):
        return -(-rows // self.page)


@pytest.fixture
def steps(catalog, tmp_path):
    with serving(page=Steps.page) as server:
        with catalog.writing() as conn:
            roots.add(conn, datetime.now(UTC), "r", "s3://b/runs")
        assert not server.log
        yield Steps(server, tmp_path / "s")


def swept(catalog, server, **more):
    """Sweep, and return the standings, and how many requests were listings and others."""
    server.log.clear()
    counts = sweep(catalog, lambda request: None, settings=replace(AT_ONCE, **more)).counts
    listings = server.count("ListObjectsV2")
    return counts, listings, len(server.log) - listings


def test_requests_of_a_sweep(catalog, steps):
    """Converted steps cost a row of their folder's listing; a new one also its own listing, and reads."""
    server, known = steps.server, 27
    steps.add(*range(known))
    counts, listings, _ = swept(catalog, server)
    assert counts == {"made": known}
    everything = steps.pages(known * len(steps.files))
    assert listings >= everything
    # The root has one folder, the run has one for each step.
    assert swept(catalog, server) == ({"converted": known}, 1 + steps.pages(known), 0)
    steps.add(known)
    counts, listings, others = swept(catalog, server)
    assert counts == {"converted": known, "made": 1}
    # It is listed to find it, and once more to read it.
    assert listings == 1 + steps.pages(known + 1) + 2 * steps.pages(len(steps.files))
    assert 0 < others <= len(steps.files)
    assert swept(catalog, server) == ({"converted": known + 1}, 1 + steps.pages(known + 1), 0)
    counts, listings, _ = swept(catalog, server, relist=True)
    assert counts == {"converted": known + 1}
    assert listings == steps.pages((known + 1) * len(steps.files))


def test_what_is_not_complete_is_listed_by_every_sweep(catalog, steps):
    server = steps.server
    steps.add(1, 2)
    commit = server.objects.pop("b/runs/llama/step-2/.metadata")
    assert swept(catalog, server)[0] == {"made": 1, "broken": 1}
    assert swept(catalog, server)[0] == {"converted": 1, "broken": 1}
    server.objects["b/runs/llama/step-2/.metadata"] = commit
    assert swept(catalog, server)[0] == {"converted": 1, "made": 1}


def test_a_step_that_is_removed_or_moved(catalog, steps):
    server = steps.server
    steps.add(1, 2)
    steps.add(1, run="qwen")
    assert swept(catalog, server)[0] == {"made": 3}
    for name in [n for n in server.objects if "llama/step-2/" in n or "/qwen/" in n]:
        del server.objects[name]
    assert swept(catalog, server)[0] == {"converted": 1}


def test_a_step_rewritten_in_place_is_seen_in_a_day(catalog, steps, monkeypatch):
    server = steps.server
    steps.add(1, 2)
    assert swept(catalog, server)[0] == {"made": 2}
    steps.files[".metadata"] = steps.files[".metadata"][:-1]
    steps.add(1, etag="other")
    assert swept(catalog, server)[0] == {"converted": 2}
    assert swept(catalog, server, relist=True, dry_run=True)[0] == {"converted": 1, "broken": 1}
    monkeypatch.setattr("ckptcore.operations.automation.sweep._REMEMBERED", timedelta(0))
    assert swept(catalog, server)[0] == {"converted": 1, "broken": 1}


def test_a_remembered_step_is_listed_before_it_is_converted(catalog, steps):
    """It was complete when a sweep recorded it; what another target converts is what is there now."""
    server = steps.server
    steps.add(1, 2)
    assert swept(catalog, server)[0] == {"made": 2}
    with catalog.writing() as conn:
        roots.remove(conn, "r")
        roots.add(
            conn, datetime.now(UTC), "r", "s3://b/runs", targets=[{"destination": "{root}/../new/{name}"}]
        )
    del server.objects["b/runs/llama/step-1/.metadata"]
    counts, listings, _ = swept(catalog, server)
    assert counts == {"broken": 1, "made": 1}
    assert listings >= 2 + 2 * steps.pages(len(steps.files))


@pytest.mark.alike(1)
@pytest.mark.parametrize("top", ["{root}", "s3a://b/runs"])
def test_outputs_below_a_root_are_not_listed(catalog, steps, top):
    """Also where they are written under another scheme of the root's bucket."""
    server = steps.server
    steps.add(*range(5))
    with catalog.writing() as conn:
        roots.remove(conn, "r")
        target = {"destination": f"{top}/out/{{name}}"}
        roots.add(conn, datetime.now(UTC), "r", "s3://b/runs", targets=[target])
    made = sweep(catalog, lambda request: convert(request, _MEANS, None, catalog.url), settings=AT_ONCE)
    assert made.counts == {"made": 5}
    # The root, the run, and the folder of the outputs.
    assert swept(catalog, server) == ({"converted": 5}, 3, 0)


def test_a_root_in_a_bucket(bucket, catalog, url, monkeypatch):
    means = Settings(memory=32 << 20, workers=1, fingerprint=True)
    with catalog.writing() as conn:
        target = {"destination": "{root}/../exports/{run}/{name}"}
        roots.add(conn, datetime.now(UTC), "r", "memory://tending/runs", targets=[target])

    def make(request):
        return convert(request, means, None, url)

    found = sweep(catalog, make, settings=AT_ONCE)
    assert [i.destination for i in found.items] == [
        "memory://tending/exports/llama/step-1",
        "memory://tending/exports/llama/step-2",
    ]
    assert found.counts == {"made": 2}
    assert sweep(catalog, make, settings=AT_ONCE).counts == {"converted": 2}
    assert scrub(catalog, share=1).counts == {"proven": 4}

    removed = []
    remove = type(bucket).rm_file
    monkeypatch.setattr(type(bucket), "rm_file", lambda fs, p: removed.append(p) or remove(fs, p))
    done = retire(catalog, Policy(1), yes=True)
    assert done.counts == {"deleted": 1, "kept": 1}, [i.why for i in done.items]
    assert removed[0].endswith("/.metadata")
    assert not bucket.exists("/tending/runs/llama/step-1")
    assert bucket.exists("/tending/runs/llama/step-2/.metadata")


@pytest.mark.parametrize("when", ["_require_same", "_mark_retired"])
def test_a_source_saved_meanwhile_in_a_bucket_is_not_deleted(when, bucket, catalog, url, monkeypatch):
    means = Settings(memory=32 << 20, workers=1, fingerprint=True)
    with catalog.writing() as conn:
        roots.add(conn, datetime.now(UTC), "r", "memory://tending/runs")
    for n in (1, 2):
        there = f"memory://tending/exports/step-{n}"
        convert(Request(f"memory://tending/runs/llama/step-{n}", there), means, None, url)
    before = getattr(setting_aside, when)

    def meanwhile(*given):
        data = next(p for p in bucket.find("/tending/runs/llama/step-1") if p.endswith(".distcp"))
        bucket.pipe_file(data, bucket.cat_file(data))
        return before(*given)

    monkeypatch.setattr(setting_aside, when, meanwhile)
    assert retire(catalog, Policy(1), yes=True).counts == {"unsafe": 1, "kept": 1}
    monkeypatch.setattr(setting_aside, when, before)
    assert bucket.exists("/tending/runs/llama/step-1/.metadata")
    retire(catalog, Policy(1), yes=True, fingerprint_settings=means)
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
