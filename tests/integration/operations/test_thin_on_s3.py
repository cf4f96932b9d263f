"""On an object store a step is thinned object by object, without grace; a killed run is ended by the next."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import fault_s3
import pytest
import torch
import torch.distributed.checkpoint as dcp
from retiring import MEANS
from sqlalchemy import text

from ckptcore import api
from ckptcore.catalog import open_catalog
from ckptcore.conversion.pipeline import convert
from ckptcore.conversion.staging import remote_publication
from ckptcore.errors import Conflict
from ckptcore.operations import abandoned
from ckptcore.operations.retention import thin as module
from ckptcore.operations.retention.thin import ThinOutcome, ThinRules, thin
from ckptcore.planning.request import Request
from ckptcore.store.objects import lease

STEP = "s3://b/runs/llama/step-1"
NOW = ThinRules(min_age_s=0, grace=timedelta(0))


def state(step):
    generator = torch.Generator().manual_seed(step)
    weights = {n: torch.randn(64, 32, generator=generator) for n in "abc"}
    moments = {
        n: {k: torch.randn(64, 32, generator=generator) for k in ("exp_avg", "exp_avg_sq")} for n in "abc"
    }
    return {"model": weights, "optim": {"state": moments, "param_groups": {"0": {"lr": 0.1}}}, "step": step}


@pytest.fixture
def bucket(tmp_path):
    with fault_s3.serving() as server:
        for step in (1, 2):
            dcp.save(state(step), checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
            for file in (tmp_path / f"step-{step}").iterdir():
                server.put(f"b/runs/llama/step-{step}/{file.name}", file.read_bytes())
        server.put("b/runs/llama/step-1/notes.txt", b"of the user")
        yield server


def is_thin(catalog):
    manifest = api.open(STEP)
    assert {t.fqn for t in manifest.tensors} == {f"model.{n}" for n in "abc"}
    assert all(torch.equal(api.read(manifest, f"model.{n}"), state(1)["model"][n]) for n in "abc")
    entry = catalog.show(STEP).checkpoint
    return (entry.num_tensors, entry.state, entry.kind) == (3, "present", "source")


def test_a_step_is_thinned_without_grace(bucket, tmp_path):
    with open_catalog(str(tmp_path / "catalog.sqlite")) as catalog:
        before = {n: o.data for n, o in bucket.objects.items()}
        (item,) = thin(catalog, [STEP], ThinRules(min_age_s=0), MEANS, yes=True).items
        assert (item.outcome, "--grace" in str(item.why) or "cannot be moved" in str(item.why)) == (
            ThinOutcome.UNSAFE,
            True,
        )
        assert {n: o.data for n, o in bucket.objects.items()} == before
        (item,) = thin(catalog, [STEP], NOW, MEANS, yes=True).items
        assert (item.outcome, item.home, item.why) == (ThinOutcome.THINNED, "", ())
        assert is_thin(catalog)
        names = sorted(n for n in bucket.objects if "step-1" in n)
        assert names == [f"b/runs/llama/step-1/{n}" for n in (".metadata", "__0_0.distcp", "notes.txt")]
        assert bucket.objects["b/runs/llama/step-1/notes.txt"].data == b"of the user"
        assert sum(len(bucket.objects[n].data) for n in names) == item.before - item.freed


@pytest.mark.parametrize(
    "step", ["_remove", *(pytest.param(n, marks=pytest.mark.soak) for n in ("_begin", "_put_all", "_end"))]
)
def test_a_killed_run_is_ended_by_the_next(bucket, tmp_path, step):
    url = str(tmp_path / "catalog.sqlite")
    kill_thin(url, step)
    is_ended(bucket, url)


def kill_thin(url, step="_remove", rules=NOW):
    """Thin in a process that is killed behind a step of the publication."""
    child = os.fork()
    if not child:
        real = getattr(remote_publication, step)

        def dying(*given, **options):
            real(*given, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(remote_publication, step, dying)
        try:
            with open_catalog(url) as catalog:
                thin(catalog, [STEP], rules, MEANS, yes=True)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def is_ended(bucket, url):
    with open_catalog(url) as catalog:
        (item,) = thin(catalog, [STEP], NOW, MEANS, yes=True).items
        assert item.outcome in (ThinOutcome.THIN, ThinOutcome.THINNED), item.why
        assert is_thin(catalog)
        assert not [n for n in bucket.objects if ".ckptcore" in n]


# Half published, a step is complete only with what is staged: who removes that removes the step.


@pytest.mark.alike(1)
@pytest.mark.parametrize("options", [{}, {"overwrite_foreign": True}])
def test_no_conversion_replaces_a_step_that_is_half_thinned(bucket, tmp_path, options):
    url = str(tmp_path / "catalog.sqlite")
    kill_thin(url)
    over = Request(
        "s3://b/runs/llama/step-2", STEP, to="dcp", overwrite=True, overwrite_in_place=True, **options
    )
    with pytest.raises(Conflict, match="thin"):
        convert(over, MEANS, None, url)
    is_ended(bucket, url)


def test_a_second_run_that_was_asked_before_keeps_what_a_killed_one_staged(bucket, tmp_path, monkeypatch):
    url, real = str(tmp_path / "catalog.sqlite"), module.plan_thin

    def planned(*given):
        plan = real(*given)
        if given[0] == STEP:
            monkeypatch.undo()
            kill_thin(url)
        return plan

    with open_catalog(url) as catalog:
        monkeypatch.setattr(module, "plan_thin", planned)
        (item,) = thin(catalog, [STEP], NOW, MEANS, yes=True).items
        assert (item.outcome, "conflict" in str(item.why)) == (ThinOutcome.KEPT, True)
    is_ended(bucket, url)


def test_a_run_that_lost_its_lease_removes_nothing_of_the_next_one(bucket, tmp_path, monkeypatch):
    url = str(tmp_path / "catalog.sqlite")

    def proven(*given):
        bucket.objects.pop("b/runs/llama/.step-1.ckptcore/lease.json")  # it was stopped for minutes
        time.sleep(0.8)  # until it is to be renewed
        monkeypatch.undo()
        with open_catalog(url) as other, other.writing() as conn:
            conn.execute(text("UPDATE conversion SET state = 'failed'"))
        kill_thin(url)
        raise OSError("the disk for temporary files is full")

    with open_catalog(url) as catalog:
        monkeypatch.setattr(module, "prove_thin", proven)
        monkeypatch.setattr(lease, "TTL_S", 2)
        (item,) = thin(catalog, [STEP], NOW, MEANS, yes=True).items
        assert item.outcome is not ThinOutcome.THINNED
    is_ended(bucket, url)


def test_gc_looks_at_the_record_under_the_lease(bucket, tmp_path, monkeypatch):
    url = str(tmp_path / "catalog.sqlite")
    bucket.put("b/runs/llama/.step-1.ckptcore/plan/thin.json", b"{}")  # of a run that was killed before
    real = abandoned.open_staging

    def opened(*given):
        monkeypatch.undo()
        bucket.objects.pop("b/runs/llama/.step-1.ckptcore/plan/thin.json", None)
        kill_thin(url)
        return real(*given)

    monkeypatch.setattr(abandoned, "open_staging", opened)
    (item,) = abandoned.collect("s3://b/runs", older_than_s=0)
    assert item.fate is abandoned.LeftFate.PUBLISHING
    is_ended(bucket, url)
