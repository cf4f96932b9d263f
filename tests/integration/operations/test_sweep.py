"""Test that sweep converts complete checkpoints once, leaves others alone, and reports broken ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from datetime import UTC, datetime

import pytest
from checkpoints import save
from safetensors.torch import load_file

from ckptcore.catalog import claims, open_catalog, sightings
from ckptcore.catalog import watched_roots as roots
from ckptcore.checking.check import Report
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import convert
from ckptcore.conversion.staging.local_staging import LocalStaging
from ckptcore.errors import Busy, DiskFull, Finding, NotComplete, SourceUnreadable, UnknownFormat
from ckptcore.operations import readiness as settling
from ckptcore.operations.automation.sweep import SweepSettings, sweep
from ckptcore.operations.claims import key_of
from ckptcore.planning.request import Request, Settings

AT_ONCE = SweepSettings(settle_s=0)

WRONG = Finding("truncated-file", "files", "a file is shorter than its metadata says")


def test_complete_checkpoints_are_converted_oldest_first_and_once(runs, watch, swept, tmp_path):
    for step in (10, 2):
        save(runs / "llama" / f"step-{step}", step)
    watch(destination="{root}/../exports/{run}/step-{step}")
    items, made = swept()
    assert [i.standing for i in items.values()] == ["made", "made"]
    assert [r.destination.rsplit("/", 1)[-1] for r in made] == ["step-2", "step-10"]
    out = load_file(tmp_path / "exports/llama/step-10/model.safetensors")
    assert float(out["scale"]) == 10
    items, made = swept()
    assert ([i.standing for i in items.values()], made) == (["converted", "converted"], [])
    save(runs / "llama" / "step-20")
    assert len(swept()[1]) == 1


def test_a_dry_run_changes_nothing(runs, watch, swept, catalog, tmp_path):
    save(runs / "llama" / "step-1")
    watch()
    items, made = swept(dry_run=True)
    assert (items["step-1"].standing, made) == ("ready", [])
    assert items["step-1"].destination == str(tmp_path / "exports/llama/step-1")
    with catalog.reading() as conn:
        assert sightings.below(conn, str(runs)) == {}
        assert roots.get(conn, "r").swept_at is None
    assert not (tmp_path / "exports").exists()


def test_an_incomplete_checkpoint_is_broken_only_when_it_stops_changing(runs, watch, swept, catalog):
    source = save(runs / "llama" / "step-1")
    metadata = (source / ".metadata").read_bytes()
    (source / ".metadata").unlink()
    watch()
    items, _ = swept(settle_s=60)
    assert items["step-1"].standing == "writing"
    assert "s ago" in items["step-1"].why
    items, made = swept()  # it has lain still for long enough
    assert (items["step-1"].standing, made) == ("broken", [])
    assert [f.code for f in items["step-1"].findings] == ["not-complete"]
    with catalog.reading() as conn:
        seen = sightings.below(conn, str(runs))[str(source)]
    assert (seen.state, seen.findings[0].code, seen.step) == ("broken", "not-complete", 1)
    (source / ".metadata").write_bytes(metadata)  # it was not dead, only slow
    assert swept(settle_s=60)[0]["step-1"].standing == "writing"
    assert swept()[0]["step-1"].standing == "made"


def test_a_broken_checkpoint_counts_once_however_many_outputs_are_made_of_it(runs, catalog, url, capsys):
    (save(runs / "llama" / "step-1") / ".metadata").unlink()
    with catalog.writing() as conn:
        targets = [{"destination": f"{{root}}/../{place}/{{name}}"} for place in ("a", "b")]
        roots.add(conn, datetime.now(UTC), "r", str(runs), targets=targets)
    run(["sweep", "--min-age", "0s", "--catalog", url])
    line, counted = capsys.readouterr().out.splitlines()
    assert line.startswith(f"broken    {runs}/llama/step-1: has *.distcp files but no .metadata")
    assert counted == "1 broken"
    with catalog.reading() as conn:
        assert roots.get(conn, "r").swept_note == "1 broken"


def test_an_unchanged_checkpoint_is_not_reopened(runs, watch, swept, monkeypatch):
    save(runs / "llama" / "step-1")
    (save(runs / "llama" / "step-2") / ".metadata").unlink()
    watch()
    swept()
    opened = []
    monkeypatch.setattr(settling, "inspect", lambda *a: opened.append(a))
    items, _ = swept()
    assert [i.standing for i in items.values()] == ["converted", "broken"]
    assert opened == []


def test_a_build_with_other_readers_rechecks_broken_checkpoints(runs, watch, swept, monkeypatch):
    save(runs / "llama" / "step-1")
    save(runs / "llama" / "step-2")
    watch()
    refused = settling.inspect

    def older(uri, *more):
        if uri.endswith("step-2"):
            raise UnknownFormat(f"{uri} is of no known format")
        return refused(uri, *more)

    with monkeypatch.context() as patch:
        patch.setattr(settling, "inspect", older)
        assert [i.standing for i in swept()[0].values()] == ["made", "broken"]
    assert swept()[0]["step-2"].standing == "broken"  # it is remembered
    opened = []
    monkeypatch.setattr(settling, "inspect", lambda uri, *more: opened.append(uri) or refused(uri, *more))
    monkeypatch.setattr(settling, "readers_digest", lambda: "of another build")
    assert [i.standing for i in swept()[0].values()] == ["converted", "made"]
    assert [uri.rsplit("/", 1)[-1] for uri in opened] == ["step-2"]  # a complete one is not reopened


def test_retry_failed_rechecks_broken_checkpoints(runs, watch, swept, monkeypatch):
    save(runs / "llama" / "step-1")
    watch()
    with monkeypatch.context() as patch:
        patch.setattr(settling, "validate", lambda *a: Report("coverage", "dcp", 1, 4, (WRONG,)))
        assert swept()[0]["step-1"].standing == "broken"
    assert swept()[0]["step-1"].standing == "broken"
    assert swept(retry_failed=True)[0]["step-1"].standing == "made"


def test_a_target_with_recover_rechecks_broken_checkpoints(runs, watch, swept, catalog, monkeypatch):
    save(runs / "llama" / "step-1")
    watch()
    asked = []
    real = settling.inspect

    def strict(uri, recover):
        asked.append(recover)
        if not recover:
            raise NotComplete(f"{uri}: the save did not finish")
        return real(uri, recover)

    monkeypatch.setattr(settling, "inspect", strict)
    assert swept()[0]["step-1"].standing == "broken"
    with catalog.writing() as conn:
        roots.remove(conn, "r")
    watch(recover=True)
    assert swept()[0]["step-1"].standing == "made"
    with catalog.writing() as conn:
        roots.remove(conn, "r")
    watch(destination="{root}/../others/{name}")
    assert swept()[0]["step-1"].standing == "broken"  # complete only with `recover`
    assert asked == [False, True, False]


def test_a_broken_one_is_among_the_damaged_checkpoints(runs, watch, swept, catalog):
    source = save(runs / "llama" / "step-1")
    data = next(source.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-100])
    watch()
    assert swept()[0]["step-1"].standing == "broken"
    [row] = catalog.list(state="damaged")
    assert (row.uri, row.run, row.step) == (str(source), "llama", 1)
    assert "truncated-file" in {f.code for f in catalog.show(row.id).findings}


def test_a_rewritten_source_is_outdated_and_replaced_only_on_request(runs, watch, swept, catalog, tmp_path):
    source = save(runs / "llama" / "step-1", 1)
    watch()
    swept()
    shutil.rmtree(source)
    save(source, 2)
    items, made = swept()
    assert (items["step-1"].standing, made) == ("outdated", [])
    with catalog.writing() as conn:
        roots.remove(conn, "r")
    watch(overwrite=True)
    items, made = swept()
    assert (items["step-1"].standing, len(made)) == ("made", 1)
    assert float(load_file(tmp_path / "exports/llama/step-1/model.safetensors")["scale"]) == 2
    assert swept()[0]["step-1"].standing == "converted"


def test_outputs_below_the_root_are_not_swept(runs, watch, swept):
    save(runs / "llama" / "step-1")
    watch(destination="{root}/out/{run}/{name}")
    assert set(swept()[0]) == {"step-1"}
    items, made = swept()
    assert (len(items), made) == (1, [])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_outputs_that_were_recorded_behind_another_mount_are_not_swept(runs, swept, catalog, url, tmp_path):
    for step in (1, 2):
        save(runs / f"llama/step-{step}", step)
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    bind = ["mount", "--bind", str(runs), str(mounted)]
    if subprocess.run(bind, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        convert(Request(str(runs / "llama/step-1"), str(runs / "llama/full/step-9")), Settings(), None, url)
        with catalog.writing() as conn:
            roots.add(
                conn,
                datetime.now(UTC),
                "m",
                str(mounted),
                targets=[{"destination": f"{tmp_path}/o/{{path}}"}],
            )
        assert set(swept(dry_run=True)[0]) == {"step-1", "step-2"}
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_two_that_would_collide_are_refused(runs, watch, swept):
    save(runs / "a" / "step-1")
    save(runs / "b" / "step-1")
    save(runs / "b" / "step-2")
    watch(destination="/nowhere/{step}")
    items, made = swept(dry_run=True)
    assert items["step-2"].standing == "ready"
    assert (items["step-1"].standing, made) == ("refused", [])
    assert "two checkpoints" in items["step-1"].why


def test_a_failure_stops_nothing_else_and_is_retried_later(runs, watch, swept, catalog, url):
    for step in (1, 2):
        save(runs / "llama" / f"step-{step}")
    watch()
    tried = []

    def full(request):
        tried.append(request.source)
        if request.source.endswith("1"):
            raise DiskFull("no room")

    found = sweep(catalog, full, settings=AT_ONCE)
    assert [i.standing for i in found.items] == ["failed", "made"]
    assert found.exit_code == 1
    assert "disk-full: no room" in found.items[0].why
    found = sweep(catalog, full, settings=AT_ONCE)
    assert ([i.standing for i in found.items], len(tried)) == (["failed", "converted"], 2)
    assert "retried after" in found.items[0].why
    sweep(catalog, full, settings=SweepSettings(settle_s=0, retry_failed=True))
    assert len(tried) == 3


def test_a_claim_of_another_worker_is_respected(runs, watch, swept, catalog):
    save(runs / "llama" / "step-1")
    watch()
    item = swept(dry_run=True)[0]["step-1"]
    key = key_of(item.request, item.source_digest)
    with catalog.writing() as conn:
        taken = claims.take(conn, datetime.now(UTC), key, item.source, "a webhook's flow")
    items, made = swept()
    assert (items["step-1"].standing, made) == ("claimed", [])
    with catalog.writing() as conn:
        claims.done(conn, datetime.now(UTC), taken)
    assert swept()[0]["step-1"].standing == "converted"


def test_the_staging_folder_of_a_killed_sweep_is_removed(runs, watch, swept, catalog, tmp_path, monkeypatch):
    save(runs / "llama" / "step-1")
    watch()
    with monkeypatch.context() as patch:
        patch.setattr(LocalStaging, "remove", lambda self: None)  # killed right before
        assert swept()[0]["step-1"].standing == "made"
    assert (tmp_path / "exports/llama/.step-1.ckptcore").is_dir()
    with catalog.writing() as conn:
        conn.exec_driver_sql("UPDATE claims SET state = 'taken', ended_at = NULL, due_at = taken_at")
    assert swept()[0]["step-1"].standing == "converted"
    assert [path.name for path in (tmp_path / "exports/llama").iterdir()] == ["step-1"]


def test_a_missing_permission_is_not_a_broken_checkpoint(runs, watch, swept, monkeypatch):
    save(runs / "llama" / "step-1")
    watch()

    def shut(*_):
        raise SourceUnreadable("permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(settling, "inspect", shut)
        assert swept()[0]["step-1"].standing == "unread"
    assert swept()[0]["step-1"].standing == "made"


def test_a_user_who_converts_the_same_is_waited_for(runs, watch, swept, catalog):
    save(runs / "llama" / "step-1")
    watch()

    def busy(_request):
        raise Busy("another process is writing")

    found = sweep(catalog, busy, settings=AT_ONCE)
    assert ([i.standing for i in found.items], found.exit_code) == (["claimed"], 0)


def test_paused_roots_are_swept_by_name_only(runs, watch, swept, catalog):
    save(runs / "llama" / "step-1")
    watch()
    with catalog.writing() as conn:
        roots.enable(conn, "r", False)
    assert swept() == ({}, [])
    assert swept(names=["r"])[0]["step-1"].standing == "made"


def test_an_unreadable_root_is_reported_and_others_are_swept(runs, watch, swept, catalog, tmp_path):
    save(runs / "llama" / "step-1")
    watch("z")
    with catalog.writing() as conn:
        roots.add(conn, datetime.now(UTC), "a", str(tmp_path / "nowhere"))
    items, _ = swept()
    assert {k: i.standing for k, i in items.items()} == {"nowhere": "unread", "step-1": "made"}


def test_the_command_line(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", str(tmp_path / "catalog.sqlite"))
    (save(runs / "llama" / "step-1") / ".metadata").unlink()
    save(runs / "llama" / "step-2")
    assert run(["catalog", "root", "add", "r", str(runs), "--to", "safetensors", "--dtype", "bfloat16"]) == 0
    assert run(["sweep", "--dry-run"]) == 0  # a later sweep converts them
    assert capsys.readouterr().out.count("writing") == 3
    old = time.time() - 3600
    for path in runs.rglob("*"):
        os.utime(path, (old, old))
    assert run(["sweep", "--min-age", "0s", "--output", "json", "--strict", "--dry-run"]) == 1
    assert json.loads(capsys.readouterr().out)["counts"] == {"broken": 1, "ready": 1}
    assert run(["sweep", "--min-age", "0s", "--output", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["counts"] == {"broken": 1, "made": 1}
    assert answer["items"][0]["findings"][0]["code"] == "not-complete"
    assert run(["catalog", "root", "pause", "r"]) == 0
    assert run(["sweep"]) == 0
    assert "no checkpoint was found" in capsys.readouterr().out
    assert run(["catalog", "root", "resume", "r"]) == 0
    assert run(["catalog", "root", "add", "s", str(runs), "--verb", "paint"]) == 2
    assert run(["sweep", "nobody"]) == 2


def test_a_value_of_one_step_is_not_recorded_for_all(runs, url, monkeypatch, capsys):
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", url)
    for step in (1, 2):
        save(runs / "llama" / f"step-{step}", step)
    target = ["--destination", "{root}/../exports/{name}"]
    assert run(["catalog", "root", "add", "r", str(runs), *target]) == 0
    command = ["sweep", "--min-age", "0s", "--meta", "user=ada", "--meta", "metrics.loss=2.31"]
    for dry in (["--dry-run"], []):
        assert run([*command, "--meta", "consumed_samples=7", *dry]) == 2
        error = capsys.readouterr().err
        assert "metrics.loss, samples" in error
        assert "ckptcore catalog meta ID metrics.loss=VALUE" in error
    assert not (runs.parent / "exports").exists()
    assert run(command[:-2]) == 0
    for step in (1, 2):
        assert run(["catalog", "meta", str(runs / "llama" / f"step-{step}"), f"metrics.loss={step}"]) == 0
    with open_catalog(url) as catalog:
        for step in (1, 2):
            for uri in (runs / "llama" / f"step-{step}", runs.parent / "exports" / f"step-{step}"):
                facts = catalog.show(str(uri), tensors=False).training.facts
                assert (facts.user, facts.metrics["loss"].value) == ("ada", step)
