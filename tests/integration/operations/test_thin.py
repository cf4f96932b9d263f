"""Steps lose their optimizer in place: what goes, what stays, who decides, and what a kill leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
from datetime import UTC, datetime, timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp
from retiring import snapshot
from sqlalchemy import text

from ckptcore import api
from ckptcore.catalog import holds, obligations, open_catalog, retirements, set_aside
from ckptcore.catalog import watched_roots as roots
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import convert
from ckptcore.conversion.staging import local_staging
from ckptcore.errors import Conflict, DestinationExists, UsageError
from ckptcore.operations.automation.sweep import SweepSettings, sweep
from ckptcore.operations.retention import thin as module
from ckptcore.operations.retention.purge import purge, restore
from ckptcore.operations.retention.thin import ThinOutcome, ThinRules, thin
from ckptcore.planning.request import Request, Settings

MEANS = Settings(memory=32 << 20, workers=1, fingerprint=True)
NOW = ThinRules(min_age_s=0)
SHAPES = {"embed.weight": (64, 32), "layers.0.weight": (32, 32), "norm.weight": (32,)}


def state(step, **more):
    generator = torch.Generator().manual_seed(step)
    weights = {f"model.{n}": torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}
    moments = {
        f"optim.state.{n}.{key}": torch.randn(shape, generator=generator)
        for n, shape in SHAPES.items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    plain = {"optim.param_groups.0.lr": 0.1, "lr_scheduler.last_epoch": step, "step": step}
    return weights | moments | plain | more


def nested(step, **more):
    """As trainers save it: paths tell the model from the rest, also without an optimizer."""
    tree = {}
    for name, value in state(step, **more).items():
        top, _, rest = name.partition(".")
        if top == "optim":
            kind, _, rest = rest.partition(".")
            tree.setdefault(top, {}).setdefault(kind, {})[rest] = value
        elif rest:
            tree.setdefault(top, {})[rest] = value
        else:
            tree[top] = value
    return tree


class Steps:
    """Three steps of a run, of which the last one stays."""

    def __init__(self, catalog, runs):
        self.catalog, self.run = catalog, runs / "llama"
        for step in (1, 2, 3):
            dcp.save(nested(step), checkpoint_id=self.place(step), no_dist=True)
        self.first = self.place(1)

    def place(self, step):
        return self.run / f"step-{step}"

    def thin(self, *steps, rules=NOW, yes=True):
        found = thin(self.catalog, [str(self.place(s)) for s in steps or (1,)], rules, MEANS, yes=yes)
        self.report = found
        return found.items[0]

    def keeps(self, says, *steps, outcome=ThinOutcome.KEPT, **options):
        before = snapshot(self.run)
        found = self.thin(*steps, **options)
        assert found.outcome is outcome, (found.outcome, found.why)
        assert says in " ".join(found.why), found.why
        assert snapshot(self.run) == before
        return found

    def is_thin(self, step=1):
        """The step has its model, bit for bit, by torch's own loader, and nothing of the optimizer."""
        wanted = {n: v for n, v in state(step).items() if n.startswith("model.")}
        loaded = {name: torch.zeros_like(value) for name, value in wanted.items()}
        dcp.load(loaded, checkpoint_id=self.place(step), no_dist=True)
        assert all(torch.equal(loaded[name], value) for name, value in wanted.items())
        manifest = api.open(str(self.place(step)))
        assert {t.fqn for t in manifest.tensors} == set(wanted)
        return {b.key: b.tree for b in manifest.blobs} == {"lr_scheduler.last_epoch": step, "step": step}

    def purge(self):
        later = self.catalog.now() + timedelta(days=8)
        return list(purge(self.catalog, MEANS, None, due=later))

    def homes(self):
        return sorted(self.run.glob(".*.ckptcore"))


@pytest.fixture
def steps(catalog, runs):
    return Steps(catalog, runs)


def test_a_step_loses_its_optimizer_and_all_is_named(steps, catalog):
    (steps.first / "notes.txt").write_text("of the user")
    os.utime(steps.first, (1000, 1000))
    planned = steps.keeps("", outcome=ThinOutcome.READY, yes=False)
    found = steps.thin(1, 2, 3)
    assert [i.outcome.value for i in steps.report.items] == ["thinned", "thinned", "kept"]
    assert steps.is_thin()
    assert (steps.first / "notes.txt").read_text() == "of the user"
    assert os.stat(steps.first).st_mtime == 1000, "trainers that rotate by time find the old order"
    names = {f"optim.state.{n}.{k}" for n in SHAPES for k in ("exp_avg", "exp_avg_sq")}
    names.add("optim.param_groups.0.lr")
    assert {g.name for g in found.given_up} == names == {g.name for g in planned.given_up}
    before, after = catalog.show(str(steps.first)).checkpoint, catalog.show(found.checkpoint).checkpoint
    assert (before.id, after.kind, after.step, after.run) == (after.id, "source", 1, "llama")
    with catalog.reading() as conn:
        (row,) = (r for r in set_aside.every(conn) if r.uri == str(steps.first))
        recorded = retirements.of(conn, row.checkpoint)
    assert {g.name for g in recorded.given_up} == names
    assert (recorded.proof, recorded.child, recorded.freed) == ("thinned", found.checkpoint, found.freed)
    assert [c.verb for c in catalog.show(found.checkpoint).written_by] == ["thin"]


def test_two_thirds_of_an_adam_step_are_freed(steps):
    """What is beside the tensors is a constant: 1.5 KiB an item here."""
    big = {"model": {f"w{n}": torch.randn(512, 512) for n in range(4)}}
    moments = {n: {k: torch.randn(512, 512) for k in ("exp_avg", "exp_avg_sq")} for n in big["model"]}
    big["optim"] = {"state": moments}
    for step in (4, 5):
        dcp.save(big, checkpoint_id=steps.place(step), no_dist=True)
    found = steps.thin(4)
    assert found.freed / found.before >= 0.65
    assert sum(f.stat().st_size for f in steps.place(4).iterdir()) == found.before - found.freed


def test_the_old_step_is_restored_or_purged_when_the_new_one_is_proven(steps):
    old = snapshot(steps.first)
    steps.thin(1, 2)
    assert steps.thin(1).outcome is ThinOutcome.THIN
    back = restore(steps.catalog, str(steps.first), "step-1-full")
    assert snapshot(back) == old
    (home,) = steps.homes()
    (file,) = steps.place(2).glob("*.distcp")
    data = file.read_bytes()
    at = data.index(state(2)["model.embed.weight"].numpy().tobytes()[:64])
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    (kept,) = steps.purge()
    assert (kept.fate, home.exists()) == ("kept", True)
    file.write_bytes(data)
    assert [p.fate for p in steps.purge()] == ["purged"]
    assert not steps.homes()
    assert steps.is_thin(2)


def test_without_grace_the_old_step_is_gone_at_once(steps):
    found = steps.thin(rules=ThinRules(min_age_s=0, grace=timedelta(0)))
    assert (found.outcome, found.why, found.home) == (ThinOutcome.THINNED, (), "")
    assert not steps.homes()
    assert steps.is_thin()


def test_the_newest_steps_that_can_resume_stay(steps):
    steps.keeps("one of the last 1 complete steps", 3)
    two = ThinRules(min_age_s=0, keep_last=2)
    steps.keeps("one of the last 2 complete steps", 2, rules=two)
    assert steps.thin(1, rules=two).outcome is ThinOutcome.THINNED
    # A save that has begun, and one without an optimizer, are no steps to resume from.
    (steps.run / "step-4").mkdir()
    (steps.run / "step-4" / "__0_0.distcp").write_bytes(b"half")
    model = {n: v for n, v in state(5).items() if n.startswith("model.")}
    dcp.save(model, checkpoint_id=steps.place(5), no_dist=True)
    steps.keeps("one of the last 1 complete steps", 3)
    with pytest.raises(UsageError, match="at least 1"):
        ThinRules(keep_last=0)


def test_a_sweep_thins_what_is_converted_by_the_retention_of_its_root(steps, catalog, url):
    kept = {"keep_optimizer_last": 2}
    with catalog.writing() as conn:
        target = {"destination": "{root}/../out/{run}/{name}"}
        roots.add(conn, catalog.now(), "llama", str(steps.run), targets=[target], retention=kept)
    assert run(["catalog", "root", "retain", "llama", '{"keep_optimizer_last": 0}', "--catalog", url]) == 2
    for rules in (NOW, ThinRules(min_age_s=0, keep_last=3)):  # of the root, and of the user
        planned = thin(catalog, ["llama"], rules, MEANS).items
        assert {item.outcome for item in planned} <= {ThinOutcome.KEPT}
    settings = SweepSettings(settle_s=0)

    def convert_one(request):
        convert(request, MEANS, None, url)

    def refuse_the_first(request):
        if request.source.endswith("step-1"):
            raise Conflict("later")
        convert_one(request)

    # The output of a step is not made yet: it may hold the optimizer.
    swept = sweep(catalog, refuse_the_first, settings=settings)
    assert swept.counts == {"failed": 1, "made": 2}
    before = snapshot(steps.run)
    planned = sweep(catalog, convert_one, settings=SweepSettings(settle_s=0, dry_run=True))
    assert snapshot(steps.run) == before
    swept = sweep(catalog, convert_one, settings=SweepSettings(settle_s=0, retry_failed=True))
    assert swept.counts == {"made": 1, "converted": 2, "thinned": 1}
    assert steps.is_thin(1)
    # Thinned steps are made no second time, and the next step lets the next one go.
    dcp.save(nested(4), checkpoint_id=steps.place(4), no_dist=True)
    swept = sweep(catalog, convert_one, settings=settings)
    assert swept.counts == {"made": 1, "converted": 3, "thinned": 1}
    assert steps.is_thin(2)
    steps.keeps("one of the last 2 complete steps", 3, rules=ThinRules(min_age_s=0, keep_last=2))
    with catalog.reading() as conn:
        assert roots.get(conn, "llama").swept_note == "3 converted, 1 made, 1 thinned"


def test_users_and_what_is_at_work_keep_a_step(steps, catalog, url):
    steps.keeps("changed", rules=ThinRules())
    convert(Request(str(steps.first), str(steps.run.parent / "out")), MEANS, None, url)
    with catalog.writing() as conn:
        hold = holds.place(conn, catalog.now(), str(steps.first), "the paper's")
    steps.keeps("held: the paper's")
    with catalog.writing() as conn:
        holds.release(conn, catalog.now(), hold.id if hasattr(hold, "id") else hold)
    reads = catalog.begin(
        {}, source_uri=str(steps.first), destination_uri="/elsewhere/x", verb="export", tool_version="1"
    )
    steps.keeps("reads it")
    catalog.fail(reads, code="x", message="x")
    other = module.open_staging(str(steps.first))
    with other.lock(make=True):
        steps.keeps("another process")
    other.remove()
    assert steps.thin().outcome is ThinOutcome.THINNED


def test_what_is_not_the_optimizer_goes_by_its_name_and_no_weight_goes(steps):
    unsafe = {"outcome": ThinOutcome.UNSAFE}
    steps.keeps(
        "a part of the model is never given up", rules=ThinRules(("model.norm*",), min_age_s=0), **unsafe
    )
    (steps.first / "notes.txt").write_text("x")
    rules = ThinRules(("scheduler", "notes.txt"), min_age_s=0)
    found = steps.thin(rules=rules)
    assert {g.name: g.kind for g in found.given_up} == {
        "lr_scheduler.last_epoch": "scheduler",
        "notes.txt": "file",
    }
    assert not (steps.first / "notes.txt").exists()
    assert len(api.open(str(steps.first)).tensors) == 3 * len(SHAPES)


def test_places_that_cannot_be_exchanged_are_refused(steps, tmp_path):
    unsafe = {"outcome": ThinOutcome.UNSAFE}
    (steps.first / "link").symlink_to(tmp_path)
    steps.keeps("is a link or no file", **unsafe)
    (steps.first / "link").unlink()
    (steps.first / "empty").mkdir()
    steps.keeps("lacks empty/", **unsafe)
    (steps.first / "empty").rmdir()
    (steps.first / ".metadata").rename(tmp_path / "away")
    steps.keeps("it is broken")
    (tmp_path / "away").rename(steps.first / ".metadata")


def test_what_an_obligation_counts_on_does_not_go(steps, catalog, url, tmp_path):
    """A copy was deleted because this step holds the optimizer, too."""
    with catalog.writing() as conn:
        from ckptcore.custody.holdings import objects_of, tensors_read
        from ckptcore.custody.obligation_records import Obligation, add_obligations
        from ckptcore.fingerprints.holdings import numbered, pack_specs

        manifest = api.open(str(steps.first))
        contents = (*numbered(tensors_read(manifest, MEANS)), *objects_of(manifest))
        row = obligations.ObligationRow(
            "1" * 8, "", "/gone/copy", str(steps.first), pack_specs(contents), datetime.now(UTC)
        )
        obligation = Obligation.of(row, contents)
        obligations.put(conn, row, obligation.packed)
    add_obligations(str(steps.first), [obligation])
    steps.keeps("it holds the only proven copy of 7 contents", outcome=ThinOutcome.UNSAFE)
    copy = tmp_path / "copy"
    convert(Request(str(steps.first), str(copy)), MEANS, None, url)
    steps.keeps("an obligation counts on what would go")


def test_a_purge_in_favour_of_a_copy_is_an_obligation_on_it(steps, catalog, url, tmp_path):
    """The trainer has saved the thinned step anew: only a copy has what the thinned one had."""
    copy = tmp_path / "copy"
    convert(Request(str(steps.first), str(copy)), MEANS, None, url)
    steps.thin()
    shutil.rmtree(steps.first)
    dcp.save(nested(9), checkpoint_id=steps.first, no_dist=True)
    assert [item.fate for item in steps.purge()] == ["purged"]
    with catalog.reading() as conn:
        rows = conn.execute(text("SELECT source, place FROM obligation")).all()
    assert [tuple(row) for row in rows] == [(str(steps.first), str(copy))]
    assert list(tmp_path.glob(".copy.obligations.ckptcore/*.json"))
    with pytest.raises(DestinationExists, match="only proven copy"):
        convert(Request(str(steps.place(2)), str(copy), overwrite=True), MEANS, None, url)


def test_a_thinned_step_that_differs_is_not_published(steps, monkeypatch):
    """The bytes that are copied are altered on their way."""
    real = module.stage

    def altered(staging, *arguments):
        written = real(staging, *arguments)
        (file,) = (p for p in os.listdir(staging.files.url) if p.endswith(".distcp"))
        path = os.path.join(staging.files.url, file)
        with open(path, "r+b") as opened:
            data = opened.read()
            at = data.index(state(1)["model.embed.weight"].numpy().tobytes()[:64])
            opened.seek(at)
            opened.write(bytes([data[at] ^ 1]))
        return written

    monkeypatch.setattr(module, "stage", altered)
    steps.keeps("", outcome=ThinOutcome.UNSAFE)


def test_a_step_whose_model_only_its_optimizer_tells_is_refused(steps):
    """Flat names: without the optimizer, `model.` may be a part of every name."""
    for step in (4, 5):
        dcp.save(state(step), checkpoint_id=steps.place(step), no_dist=True)
    steps.keeps("nothing tells that its model is model", 4, outcome=ThinOutcome.UNSAFE)


def test_what_was_made_of_a_step_is_not_outdated(steps, catalog, url, watch, tmp_path):
    watch(verb="export", destination=str(tmp_path / "out" / "{name}"), names="stored", config="none")
    made = []

    def one(request):
        made.append(request)
        return convert(request, MEANS, None, url)

    sweep(catalog, one, (), SweepSettings(settle_s=0.0))
    assert len(made) == 3
    assert steps.thin(1, 2).outcome is ThinOutcome.THINNED
    later = sweep(catalog, one, (), SweepSettings(settle_s=0.0))
    assert {item.standing.value for item in later.items} == {"converted"}
    assert len(made) == 3


def test_an_export_is_verified_after_its_source_was_thinned(steps, url, tmp_path):
    export = str(tmp_path / "out")
    request = Request(str(steps.first), export, verb="export", names="stored", config="none")
    convert(request, MEANS, None, url)
    before = api.verify_export(export, catalog=url)
    for rules in (NOW, ThinRules(("scheduler", "progress"), min_age_s=0)):
        assert steps.thin(rules=rules).outcome is ThinOutcome.THINNED
        after = api.verify_export(export, catalog=url)
        assert "was thinned" in after.found_by, after.checks
        assert [(c.name, c.verdict) for c in after.checks] == [(c.name, c.verdict) for c in before.checks], (
            after.checks[0]
        )


def test_roots_and_runs_are_names_of_their_steps(steps, catalog, url, watch, capsys):
    watch()
    for step in (1, 2, 3):
        assert run(["validate", str(steps.place(step)), "--catalog", url]) == 0
    capsys.readouterr()
    line = ["thin", "--min-age", "0s", "--catalog", url, "--output", "json", "--keep-optimizer-last", "2"]
    assert run([*line, "llama"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["counts"], answer["thinned"]) == ({"kept": 2, "ready": 1}, False)
    assert run([*line, "--yes", "r"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["counts"] == {"kept": 2, "thinned": 1}
    assert answer["freed_bytes"] == sum(c["freed_bytes"] for c in answer["checkpoints"])
    assert run(["thin", str(steps.run / "step-9"), "--min-age", "0s", "--catalog", url]) == 1
    capsys.readouterr()


KILLS = {
    "half staged": (module, "stage", False),
    "staged": (module, "stage", True),
    "read": (module, "prove_thin", True),
    "admitted": (module, "judge", True),
    "before it is set aside": (module, "set_aside", False),
    "set aside in the catalog": (module, "set_aside", True),
    "recorded": (local_staging, "note", True),
    "exchanged": (local_staging, "_exchange", True),
    "before it is kept aside": (local_staging, "_keep_aside", False),
    "kept aside": (local_staging, "_keep_aside", True),
    "before it is registered": (module, "_record", False),
    "registered": (module, "_record", True),
}


FEW = ("staged", "set aside in the catalog", "exchanged", "before it is registered")


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.soak) for n in KILLS])
def test_a_killed_run_leaves_the_old_or_the_new_step(steps, catalog, url, name):
    old = snapshot(steps.first)
    child = os.fork()
    if not child:
        where, attribute, behind = KILLS[name]
        step = getattr(where, attribute)

        def dying(*given, **options):
            if behind:
                step(*given, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(where, attribute, dying)
        try:
            with open_catalog(url) as opened:
                thin(opened, [str(steps.first)], NOW, MEANS, yes=True)
        finally:
            os._exit(1)  # it was to die before
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    if snapshot(steps.first) != old:
        assert steps.is_thin()
    found = steps.thin()
    assert found.outcome in (ThinOutcome.THINNED, ThinOutcome.THIN), found.why
    assert steps.is_thin()
    entry = catalog.show(str(steps.first))
    assert (entry.checkpoint.num_tensors, entry.checkpoint.state) == (len(SHAPES), "present")
    with catalog.reading() as conn:
        (aside,) = (r for r in set_aside.every(conn) if os.path.isdir(f"{r.record}/step-1"))
        assert retirements.of(conn, aside.checkpoint).child == entry.checkpoint.id
    assert snapshot(f"{aside.record}/step-1") == old
    assert {p.fate for p in steps.purge()} == {"purged"}
    assert steps.homes() == []
    assert not [c for c in catalog.conversions() if c.state == "running"]
