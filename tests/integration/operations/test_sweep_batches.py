"""Test that a sweep converts small checkpoints in batches, each with its own claim, row and verdict."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import weakref
from dataclasses import replace

import pytest
import warm
from checkpoints import save
from paths import ROOT
from safetensors.torch import load_file
from sqlalchemy import select

from ckptcore.catalog import claims
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.models import Conversion, Sighting
from ckptcore.catalog.sightings import Condition
from ckptcore.cli.main import run as main
from ckptcore.conversion import batch, registration
from ckptcore.conversion.batch import convert_batch
from ckptcore.conversion.pipeline import convert
from ckptcore.errors import DamagedCheckpoint, DiskFull, Interrupted, UsageError
from ckptcore.operations.automation.sweep import SMALL, SweepSettings, batches, sweep
from ckptcore.operations.automation.sweep_items import SweepItem, SweepState
from ckptcore.operations.claims import key_of
from ckptcore.planning.request import Request, Settings
from ckptcore.utils import processes

AT_ONCE = SweepSettings(settle_s=0)

COUNT = 5
SETTINGS = Settings(memory=256 << 20)


@pytest.fixture
def steps(runs, watch, tmp_path):
    """Checkpoints below a watched root."""
    for step in range(COUNT):
        save(runs / "llama" / f"step-{step}", step)
    watch(destination="{root}/../exports/{name}")
    return tmp_path / "exports"


def swept(catalog, url, settings=AT_ONCE, **more):
    """Sweep as the command does; return the standing of each step."""
    found = sweep(
        catalog,
        lambda request: convert(request, SETTINGS, None, url),  # the last one alone
        settings=settings,
        convert_each=lambda r: convert_batch(r, SETTINGS, catalog, catalog_url=url),
        **more,
    )
    return {item.source.rsplit("/", 1)[-1]: item for item in found.items}


def test_exports_are_verified_and_a_wrong_one_has_failed(
    catalog, url, runs, watch, tmp_path, monkeypatch, capsys
):
    """As the flow does: a verdict is recorded (unproven without a config), a wrong output is an error."""
    for step in range(3):
        save(runs / "llama" / f"step-{step}", step)
    watch(verb="export", config="none", destination="{root}/../exports/{name}")
    inner = batch.convert_batch

    def convert_batch_and_damage_one(*args, **more):
        results = inner(*args, **more)
        weights = tmp_path / "exports" / "step-1" / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        return results

    monkeypatch.setattr(batch, "convert_batch", convert_batch_and_damage_one)
    assert main(["sweep", "--min-age", "0s", "--catalog", url, "--output", "json"]) == 1
    items = {item["source"][-6:]: item for item in json.loads(capsys.readouterr().out)["items"]}
    assert {name: item["standing"] for name, item in items.items()} == {
        "step-0": "made",
        "step-1": "failed",
        "step-2": "made",
    }
    assert "does not match its source" in items["step-1"]["why"]
    with catalog.reading() as conn:
        verdicts = conn.execute(select(Conversion.destination_uri, Conversion.export_verdict)).all()
    assert {uri[-6:]: verdict for uri, verdict in verdicts} == {
        "step-0": "unproven",
        "step-1": "failed",
        "step-2": "unproven",
    }


def standings(items):
    return [item.standing.value for item in items.values()]


def claim_states(catalog, items):
    with catalog.reading() as conn:
        found = [claims.current(conn, key_of(i.request, i.source_digest)) for i in items.values()]
    return [c and c.state for c in found]


def is_complete(exports, step):
    return float(load_file(exports / f"step-{step}" / "model.safetensors")["scale"]) == step


def test_each_has_its_claim_and_its_row(catalog, url, steps, monkeypatch):
    reported, written = [], []
    writing = Catalog.writing

    def counted(self, **more):
        written.append(more)
        return writing(self, **more)

    monkeypatch.setattr(Catalog, "writing", counted)
    items = swept(catalog, url, on_item=lambda item: reported.append(item.step))
    assert (standings(items), reported) == (["made"] * COUNT, list(range(COUNT)))
    assert claim_states(catalog, items) == ["done"] * COUNT
    rows = catalog.conversions(None)
    assert sorted(row.destination_uri for row in rows) == [str(steps / f"step-{n}") for n in range(COUNT)]
    assert {row.state for row in rows} == {"succeeded"}
    assert all(is_complete(steps, n) for n in range(COUNT))
    assert list(steps.glob(".*")) == []  # no staging folder is left
    # The states; the claims, the begins, the results; the claims' ends; the root's note.
    assert len(written) == 6
    assert [more for more in written if more] == [{"durable": True}]
    assert standings(swept(catalog, url)) == ["converted"] * COUNT


def test_one_that_fails_does_not_stop_the_others(catalog, url, steps, monkeypatch):
    publishing = batch.publishing

    def refused(request, *more, **named):
        if request.source.endswith("step-1"):
            raise DiskFull("no room")
        return publishing(request, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(batch, "publishing", refused)
        items = swept(catalog, url)
    assert standings(items) == ["made", "failed", "made", "made", "made"]
    assert items["step-1"].why == "disk-full: no room"
    assert claim_states(catalog, items) == ["done", "failed", "done", "done", "done"]
    assert sorted(row.state for row in catalog.conversions(None)) == ["failed"] + ["succeeded"] * 4
    second = swept(catalog, url, replace(AT_ONCE, retry_failed=True))
    assert standings(second) == ["converted", "made", "converted", "converted", "converted"]


def test_one_that_cannot_be_recorded_does_not_lose_the_others(catalog, url, steps, monkeypatch):
    made = registration._made

    def odd(about, result, source):
        row = made(about, result, source)
        if result.destination.endswith("step-2"):  # no column can store it
            row["derived"] = replace(row["derived"], run="\ud800")
            row["facts"] = replace(row["facts"], bytes_out=1 << 70)
        return row

    with monkeypatch.context() as patch:
        patch.setattr(registration, "_made", odd)
        items = swept(catalog, url)
    assert standings(items) == ["made", "made", "failed", "made", "made"]
    assert "is published, but not registered" in items["step-2"].why
    assert (steps / ".step-2.ckptcore").exists()  # what the next run ends
    second = swept(catalog, url, replace(AT_ONCE, retry_failed=True))
    assert standings(second) == ["converted", "converted", "made", "converted", "converted"]
    assert list(steps.glob(".*")) == []


def test_one_that_cannot_be_claimed_does_not_stop_the_others(catalog, url, steps, monkeypatch):
    take = claims.take

    def refused(conn, now, key, source, *more, **named):
        if source.endswith("step-4"):
            raise UsageError("the catalog cannot store this text")
        return take(conn, now, key, source, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(claims, "take", refused)
        items = swept(catalog, url)
    assert standings(items) == ["made"] * 4 + ["failed"]
    assert claim_states(catalog, items) == ["done"] * 4 + [None]
    assert standings(swept(catalog, url)) == ["converted"] * 4 + ["made"]


def test_a_stop_keeps_what_was_published(catalog, url, steps, monkeypatch):
    publishing = batch.publishing

    def stopped(request, *more, **named):
        if request.source.endswith("step-3"):
            raise KeyboardInterrupt
        return publishing(request, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(batch, "publishing", stopped)
        patch.setattr(batch, "WIDTH", 1)
        with pytest.raises(Interrupted):
            sweep(
                catalog,
                None,
                settings=AT_ONCE,
                convert_each=lambda r: convert_batch(r, SETTINGS, catalog, catalog_url=url),
            )
    states = {row.destination_uri.rsplit("/", 1)[-1]: row.state for row in catalog.conversions(None)}
    assert states == {f"step-{n}": "succeeded" if n < 3 else "failed" for n in range(COUNT)}
    items = swept(catalog, url, replace(AT_ONCE, retry_failed=True))
    assert standings(items) == ["converted"] * 3 + ["made"] * 2


KILLED = """
import os, signal, sys
from ckptcore.catalog import open_catalog
from ckptcore.conversion import batch
from ckptcore.operations.automation.sweep import SweepSettings, sweep
from ckptcore.planning.request import Settings
url, moment = sys.argv[1:]
publish, count = batch._publish, [0]
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def counted(row, *more):
    publish(row, *more)
    count[0] += 1
    if count[0] == 3:
        die()
setattr(batch, *{"writing": ("_publish", counted), "recording": ("register_each", die)}[moment])
with open_catalog(url) as catalog:
    sweep(catalog, None, settings=SweepSettings(settle_s=0), who="one",
          convert_each=lambda r: batch.convert_batch(r, Settings(memory=256 << 20), catalog, catalog_url=url))
"""


@pytest.mark.parametrize("moment", ["writing", "recording"])
def test_a_killed_batch_is_resumed_at_once(catalog, url, steps, moment, monkeypatch):
    killed = subprocess.run([*warm.python(), "-c", KILLED, url, moment], cwd=ROOT, check=False)
    assert killed.returncode == -9
    assert {row.state for row in catalog.conversions(None)} == {"running"}
    published = list(steps.glob("step-*"))
    with monkeypatch.context() as patch:  # another machine cannot know, and waits until the lease ends
        here = processes._this_identity()
        patch.setattr(processes, "_this_identity", lambda: (*here[:3], "another boot"))
        assert standings(swept(catalog, url, who="other")) == ["claimed"] * COUNT
        assert list(steps.glob("step-*")) == published
    items = swept(catalog, url, who="other")
    assert standings(items) == ["made"] * COUNT
    assert claim_states(catalog, items) == ["done"] * COUNT
    assert all(is_complete(steps, n) for n in range(COUNT))
    assert list(steps.glob(".*")) == []
    states = sorted(row.state for row in catalog.conversions(None))
    assert states == ["failed"] * COUNT + ["succeeded"] * COUNT  # the killed ones are known to be gone


def test_a_checkpoint_that_breaks_meanwhile_fails_alone(catalog, url, steps, runs):
    real = convert_batch

    def late(requests, *more, **named):
        shutil.rmtree(runs / "llama" / "step-0")
        return real(requests, *more, **named)

    found = sweep(
        catalog, None, settings=AT_ONCE, convert_each=lambda r: late(r, SETTINGS, catalog, catalog_url=url)
    )
    assert [i.standing.value for i in found.items] == ["failed"] + ["made"] * 4
    assert found.exit_code == 1


def test_an_error_of_one_thread_is_returned_and_frees_its_place(catalog, url, steps, runs):
    data = next((runs / "llama" / "step-1").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-50])
    requests = [Request(str(runs / "llama" / f"step-{n}"), str(steps / f"step-{n}")) for n in range(2)]
    fine, broken = convert_batch(requests, SETTINGS, catalog, catalog_url=url)
    assert fine.destination == str(steps / "step-0")
    assert isinstance(broken, DamagedCheckpoint)
    assert list(steps.glob(".*")) == []


def test_what_may_meet_is_not_in_one_batch():
    def item(destination, nbytes=1, **more):
        return SweepItem(
            "r", "/s", 1, SweepState.READY, request=Request("/s", destination, **more), nbytes=nbytes
        )

    items = [
        item("/out/a"),
        item("/out/b"),
        item("/out/b/c"),  # inside another one
        item("/out/d", overwrite=True),
        item("/out/e", SMALL + 1),
        item("s3://bucket/f"),
        item("/out/g"),
        item("/out/g2"),  # not inside
    ]
    assert list(batches(items, range(8))) == [[0, 1], [2], [3], [4], [5], [6, 7]]
    assert list(batches(items[:2] + items[6:], range(4), most=3)) == [[0, 1, 2], [3]]
    many = [item(f"/out/{n}", SMALL) for n in range(2 * batch.MOST + 1)]
    assert [len(b) for b in batches(many, range(len(many)))] == [batch.MOST, batch.MOST, 1]


@pytest.mark.alike(2)
@pytest.mark.parametrize("noted", [1, 2, COUNT, COUNT + 1])
def test_states_are_recorded_few_at_a_time(catalog, url, steps, runs, monkeypatch, noted):
    monkeypatch.setattr("ckptcore.operations.automation.sweep._NOTED", noted)
    items = swept(catalog, url)
    assert standings(items) == ["made"] * COUNT
    with catalog.reading() as conn:
        rows = conn.execute(select(Sighting.uri, Sighting.state)).all()
    state = Condition.COMPLETE.value
    assert sorted(map(tuple, rows)) == [(str(runs / f"llama/step-{n}"), state) for n in range(COUNT)]


def test_a_batch_collects_the_garbage_of_the_one_before(catalog):
    class Node:
        pass

    node = Node()
    node.itself, left = node, weakref.ref(node)
    gc.disable()  # as good as in a command, which collects after 200,000 new objects
    try:
        del node
        assert left() is not None
        assert convert_batch([], Settings(), catalog) == []
        assert left() is None
    finally:
        gc.enable()
