"""Test that this version resumes the work of older versions, or refuses it with the next step."""

from __future__ import annotations

import importlib
import inspect as python
import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import TypeAdapter

from ckptcore.catalog import claims, open_catalog, sightings, upgrade
from ckptcore.catalog.database import HEAD
from ckptcore.catalog.queues import inbox, outbox
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import convert, execute, prepare
from ckptcore.operations import readiness
from ckptcore.planning.request import Request, Settings
from deployments import parameters
from deployments.receiver.run_request import order_of
from deployments.receiver.settings import load
from flows.arrived import arrived

SECRETS = (
    "TRAINER_SECRET",
    "SLURM_TOKEN",
    "SLURM_TOKEN_OLD",
    "EVENTS_TOKEN",
    "MLFLOW_SECRET",
    "WANDB_SECRET",
    "DET_WEBHOOKS_SIGNING_KEY",
    "GITHUB_SECRET",
    "EVENTBRIDGE_KEY",
    "EVALUATION_SECRET",
)
PARAMETERS = json.loads((Path(__file__).parents[2] / "fixtures" / "upgrade" / "parameters.json").read_text())
WHSEC = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def answer(capsys, *argv):
    code = run([*map(str, argv), "--output", "json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_catalog_asks_to_be_upgraded_and_then_answers(old, old_revision, either, capsys):
    if HEAD not in old_revision:
        code, refused = answer(capsys, "catalog", "list")
        assert (code, refused["error"]["code"]) == (16, "catalog")
        assert "ckptcore catalog upgrade" in refused["error"]["hint"]
    upgrade(either)
    code, listed = answer(capsys, "catalog", "list")
    assert code == 0
    uris = {row["uri"] for row in listed}
    assert {str(old / "out-1"), str(old / "exports" / "kept" / "step-8")} <= uris
    code, found = answer(capsys, "catalog", "show", "best")
    assert code == 0
    assert found["checkpoint"]["uri"] == str(old / "out-1")
    assert {f["path"]: f["digest"] for f in found["files"]}["model.safetensors"]


def test_queues_claims_and_sightings_are_unchanged(old, either):
    upgrade(either)
    with open_catalog(either) as catalog:
        with catalog.reading() as conn:
            assert inbox.depth(conn) == {"waiting": 1, "taken": 1, "done": 0, "failed": 1}
            assert outbox.depth(conn)["waiting"] == 1
            seen = sightings.below(conn, str(old / "kept"))
        assert {uri.rsplit("/", 1)[1]: row.state for uri, row in seen.items()} == {
            "step-8": "whole",
            "step-9": "broken",
        }
        with catalog.queueing() as conn:  # the lease of the one that was at work ends
            due = datetime.now(UTC) + timedelta(days=1)
            assert len(inbox.take(conn, due, limit=9)) == 2
            assert inbox.retry(conn, due, None)


def test_a_sweep_does_not_reopen_complete_checkpoints_of_the_older_version(old, capsys, monkeypatch):
    upgrade(f"sqlite:///{old}/catalog.sqlite")
    opened = []
    real = readiness.inspect
    monkeypatch.setattr(
        readiness, "inspect", lambda uri, *more: opened.append(Path(uri).name) or real(uri, *more)
    )
    code, swept = answer(capsys, "sweep", "kept", "--min-age", "0s")
    assert code in (0, 1)
    assert {Path(i["source"]).name: i["standing"] for i in swept["items"]} == {
        "step-8": "converted",
        "step-9": "broken",
    }
    assert opened == ["step-9"]  # the readers of this build may read more


def test_claims_are_kept(old, capsys):
    upgrade(f"sqlite:///{old}/catalog.sqlite")
    source, made = old / "runs" / "llama" / "step-1", old / "out-1"
    code, found = answer(capsys, "consolidate", source, made, "--wait", "1s")
    assert (code, found) == (0, {"destination": str(made), "already": True})
    source, output = old / "runs" / "llama" / "step-4", old / "out-4"
    code, found = answer(capsys, "consolidate", source, output, "--wait", "1s")
    assert (code, found["error"]["code"]) == (17, "busy")
    with open_catalog() as catalog, catalog.writing() as conn:
        conn.exec_driver_sql("UPDATE claims SET due_at='2020-01-01 00:00:00.000000' WHERE state='taken'")
        assert claims.of_destination(conn, str(output))
    assert answer(capsys, "consolidate", source, output, "--wait", "1s")[0] == 0


def test_a_half_done_conversion_goes_on(old):
    request = Request(str(old / "runs" / "llama" / "step-2"), str(old / "out-2"), max_file_size=5000)
    staged = old / ".out-2.ckptcore" / "files" / "model-00001-of-00003.safetensors"
    inode = staged.stat().st_ino
    result = convert(request, catalog_url=False)
    assert [r.reused for r in result.files] == [True, False, False, False]
    assert (old / "out-2" / staged.name).stat().st_ino == inode
    fresh = Request(request.source, str(old / "fresh"), max_file_size=5000)
    convert(fresh, catalog_url=False)
    assert bytes_of(old / "out-2") == bytes_of(old / "fresh")
    assert not staged.parents[1].exists()


def test_workers_of_the_new_version_take_files_of_the_old_plan(old):
    receipts = execute(str(old / ".out-2.ckptcore" / "plan"), [0, 1], Settings(workers=1))
    assert [r.reused for r in receipts] == [True, False]


def test_a_published_output_is_not_remade(old):
    request = Request(str(old / "runs" / "llama" / "step-2"), str(old / "out-5"))
    before = (old / "out-5" / "model.safetensors").stat()
    convert(request, catalog_url=False)
    after = (old / "out-5" / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert not (old / ".out-5.ckptcore").exists()


def test_a_saved_plan_is_carried_out(old, capsys):
    upgrade(f"sqlite:///{old}/catalog.sqlite")
    code, made = answer(capsys, "apply", old / "saved")
    assert (code, made["destination"]) == (0, str(old / "out-3"))


def test_a_saved_plan_of_another_source_is_refused(old, capsys):
    shutil.copy(old / "runs/llama/step-1/__0_0.distcp", old / "runs/llama/step-3/__0_0.distcp")
    code, refused = answer(capsys, "apply", old / "saved")
    assert (code, refused["error"]["code"]) == (11, "source-changed")


@pytest.fixture
def planned_otherwise(tmp_path, monkeypatch):
    """A source with plain values, with a saved plan and half of a conversion by a version that wrote them
    in another form: release 0.1 gave the form no version."""
    source = tmp_path / "source.pt"
    torch.save({f"w{n}": torch.arange(700.0) for n in range(4)} | {"step": 7}, source)
    half = Request(str(source), str(tmp_path / "half"), max_file_size=3000)
    with monkeypatch.context() as patch:
        patch.setattr("ckptcore.formats.huggingface.safetensors.VERSION", 0)
        execute(prepare(half).plan_uri, [0, 1])
        plan = ["plan", source, tmp_path / "out", "--save", tmp_path / "saved"]
        assert run(list(map(str, plan))) == 0
    return half


def test_a_plan_that_differs_now_is_refused_with_the_next_step(planned_otherwise, tmp_path, capsys):
    capsys.readouterr()
    code, refused = answer(capsys, "apply", tmp_path / "saved")
    assert (code, refused["error"]["code"]) == (11, "source-changed")
    assert "ckptcore plan SRC DST --save DIR" in refused["error"]["hint"]
    assert not (tmp_path / "out").exists()


def test_a_half_done_conversion_that_differs_now_starts_anew(planned_otherwise, tmp_path):
    result = convert(planned_otherwise, catalog_url=False)
    assert not any(receipt.reused for receipt in result.files)
    fresh = Request(planned_otherwise.source, str(tmp_path / "fresh"), max_file_size=3000)
    convert(fresh, catalog_url=False)
    assert bytes_of(tmp_path / "half") == bytes_of(tmp_path / "fresh")
    assert not (tmp_path / ".half.ckptcore").exists()


def test_scrub_verifies_published_outputs(old, capsys):
    upgrade(f"sqlite:///{old}/catalog.sqlite")
    shutil.rmtree(old / "kept" / "step-9")
    code, found = answer(capsys, "scrub", "--share", "1")
    proofs = {Path(c["uri"]).name: c["proof"] for c in found["checkpoints"]}
    assert proofs["out-1"] == "proven"
    weights = old / "out-1" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    code, found = answer(capsys, "scrub", "--share", "1")
    assert code == 1
    assert {Path(c["uri"]).name: c["proof"] for c in found["checkpoints"]}["out-1"] == "damaged"


def test_open_events_become_runs_that_the_flow_accepts(old):
    url = f"sqlite:///{old}/catalog.sqlite"
    upgrade(url)
    config = old / "receiver.toml"
    text = config.read_text().replace(
        'roots = ["/checkpoints", "s3://team/checkpoints"]', f'roots = ["{old}/runs"]'
    )
    config.write_text(text)
    _, senders = load(config, dict.fromkeys(SECRETS, WHSEC))
    with open_catalog(url) as catalog, catalog.reading() as conn:
        events = [e for e in inbox.listed(conn) if e.state in ("waiting", "taken")]
    assert len(events) == 2
    for event in events:
        order = order_of(senders[event.source], event.uri, event.run, event.step)
        assert order.deployment == "arrived/arrived"
        assert arrived.validate_parameters(dict(order.parameters))


def test_deployments_of_the_older_version_start_flows_of_this_one(old):
    made = yaml.safe_load((old / "prefect.yaml").read_text())["deployments"]
    assert len(made) >= 8
    for one in made:
        module, _, name = one["entrypoint"].rpartition(".")
        flow = getattr(importlib.import_module(module), name)
        known = python.signature(flow.fn).parameters
        given = set(one.get("parameters") or {})
        for trigger in one.get("triggers") or ():
            given |= set(trigger.get("parameters") or {})
        for schedule in one.get("schedules") or ():
            given |= set(schedule.get("parameters") or {})
        assert given <= set(known), f"{one['name']}: {given - set(known)}"
        for key, value in (one.get("parameters") or {}).items():
            TypeAdapter(
                known[key].annotation if not isinstance(known[key].annotation, str) else object
            ).validate_python(value)


def test_events_of_the_older_version_still_start_flows(old):
    """The events that senders send (`ckptcore.<flow>.requested`) are a contract, too."""
    before, now = (
        yaml.safe_load(path.read_text())["deployments"] for path in (old / "prefect.yaml", parameters.FILE)
    )
    heard = {one["name"]: _events(one) for one in now}
    assert sum(map(len, heard.values())) >= 5
    assert all(_events(one) <= heard[one["name"]] for one in before)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_that_a_deployment_of_the_older_version_stored_are_accepted(name):
    """Every parameter that its flow had, with its former default."""
    flow = getattr(importlib.import_module(f"flows.{name}"), name)
    stored = PARAMETERS[name]
    taken = flow.validate_parameters(dict(stored))  # with the defaults of what is new
    assert {key: taken[key] for key in stored} == stored


def _events(deployment):
    return {event for trigger in deployment.get("triggers") or () for event in trigger["expect"]}


def test_retire_does_not_trust_the_clocks_of_the_older_version(old, capsys):
    upgrade(f"sqlite:///{old}/catalog.sqlite")
    source, newer = old / "runs" / "llama" / "step-1", old / "runs" / "llama" / "step-2"
    assert answer(capsys, "consolidate", newer, old / "newer")[0] == 0
    code, kept = answer(capsys, "retire", "llama", "--keep-last", "1", "--yes")
    (fate,) = [c for c in kept["checkpoints"] if c["uri"] == str(source)]
    assert (code, fate["fate"]) == (0, "unsafe")
    assert "--fingerprint" in " ".join(fate["why"])
    assert bytes_of(source)
    code, done = answer(
        capsys, "retire", "llama", "--keep-last", "1", "--yes", "--grace", "0", "--fingerprint"
    )
    (fate,) = [c for c in done["checkpoints"] if c["uri"] == str(source)]
    assert (fate["fate"], source.exists()) == ("deleted", False)
