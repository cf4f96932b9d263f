"""Keep the weights, give the optimizer up: an export proves the model part of its source, nothing else."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime

import pytest
import torch
import torch.distributed.checkpoint as dcp
from retiring import delete_now as retire
from sqlalchemy import text

from ckptcore import api
from ckptcore.catalog import audit, holds, retirements
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import convert
from ckptcore.errors import AmbiguousModel, DestinationExists
from ckptcore.operations.retention import purge as module
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.replacement import Allowed
from ckptcore.operations.retention.retire import Fate
from ckptcore.planning.request import Request, Settings

MEANS = Settings(memory=32 << 20, workers=1, fingerprint=True)
WEIGHTS = Allowed.of(["optimizer"])
SHAPES = {"embed.weight": (8, 4), "layers.0.weight": (4, 4), "norm.weight": (4,)}


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


class Steps:
    """Two watched steps of a run, the first of which may go; both are exported."""

    def __init__(self, catalog, url, runs, tmp_path):
        self.catalog, self.url, self.runs, self.out = catalog, url, runs / "llama", tmp_path / "out"
        self.source, self.child = self.runs / "step-1", self.out / "step-1"

    def make(self, more=None, **options):
        for step in (1, 2):
            place = self.runs / f"step-{step}"
            dcp.save(state(step, **(more or {})), checkpoint_id=place, no_dist=True)
            self.export(place, self.out / f"step-{step}", **options)
        return self

    def export(self, source, child, **options):
        request = Request(str(source), str(child), verb="export", **({"names": "stored"} | options))
        return convert(request, MEANS, None, self.url)

    def retire(self, allowed=WEIGHTS, *, yes=True, **more):
        self.answer = retire(self.catalog, Policy(1), yes=yes, allowed=allowed, verify_settings=MEANS, **more)
        return next(i for i in self.answer.items if i.source.step == 1)

    def deletes(self, *args, **more):
        found = self.retire(*args, **more)
        assert found.fate.value == "deleted", found.why
        assert not self.source.exists()
        assert (self.runs / "step-2").exists()
        return found

    def keeps(self, says, *args, **more):
        before = {p: p.read_bytes() for p in self.source.rglob("*")}
        found = self.retire(*args, **more)
        assert found.fate.value in ("unsafe", "kept")
        assert says in " ".join(found.why), found.why
        assert before
        assert {p: p.read_bytes() for p in self.source.rglob("*")} == before
        assert found.freed == 0
        return found


@pytest.fixture
def steps(catalog, url, runs, watch, tmp_path):
    watch()
    return Steps(catalog, url, runs, tmp_path)


def size(folder):
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("take", [None, MEANS])
def test_the_model_part_is_proven_and_the_rest_given_up_by_name(steps, catalog, take):
    steps.make()
    steps.keeps(
        "--accept-loss optimizer" if take else "fingerprint is not known", None, fingerprint_settings=take
    )
    before, own = size(steps.runs), size(steps.source)
    planned = steps.retire(yes=False, fingerprint_settings=take)
    assert planned.fate is Fate.TO_RETIRE, planned.why
    assert (planned.freed, steps.answer.before, size(steps.runs)) == (own, before, before)
    found = steps.deletes(fingerprint_settings=take)
    assert (steps.answer.before, steps.answer.freed) == (before, own)
    assert steps.answer.as_dict()["files"]["after"] == size(steps.runs)
    given = {(g.name, g.kind, g.nbytes) for g in found.given_up}
    assert ("optim.state.embed.weight.exp_avg", "optimizer", 128) in given
    assert {("step", "progress", None), ("lr_scheduler.last_epoch", "scheduler", None)} <= given
    assert not [name for name, _, _ in given if name.startswith("model.")]
    assert len(given) == 2 * len(SHAPES) + 3
    with catalog.reading() as conn:
        recorded = retirements.of(conn, found.source.id)
        (row,) = audit.listed(conn, subject=found.source.id)
    assert recorded.proof == "model part"
    assert {(g.name, g.kind, g.nbytes) for g in recorded.given_up} == given
    assert recorded.freed == own
    assert row.action == "checkpoint.retire"
    assert {(g["name"], g["kind"], g["bytes"]) for g in row.detail["given_up"]} == given
    there = api.open(str(steps.child))
    for name in SHAPES:
        assert torch.equal(api.read(there, name), state(1)[f"model.{name}"])


def test_the_weights_are_the_only_copy_now(steps):
    steps.make()
    steps.deletes()
    with pytest.raises(DestinationExists, match="only proven copy"):
        steps.export(steps.runs / "step-2", steps.child, overwrite=True)


@pytest.mark.parametrize("take", [None, MEANS])
def test_a_cast_needs_its_own_name_and_is_recomputed(steps, catalog, take):
    steps.make(dtype="bf16")
    steps.keeps("is cast and does not prove its source", fingerprint_settings=take)
    both = Allowed.of(["optimizer", "cast"])
    (file,) = steps.child.glob("*.safetensors")
    right = file.read_bytes()
    file.write_bytes(right[:-2] + bytes([right[-2] ^ 1]) + right[-1:])  # the last bit of one element
    with catalog.writing() as conn:  # a forged digest, so that the bytes alone speak
        conn.execute(text("UPDATE checkpoint_file SET digest = NULL"))
    steps.keeps("1 of 4 elements differ from the source, after the cast", both, fingerprint_settings=take)
    file.write_bytes(right)
    steps.deletes(both, fingerprint_settings=take)  # what it holds is read, and the cast was computed again


def test_a_proven_cast_replaces_its_source(steps):
    steps.make(dtype="bf16")
    found = steps.deletes(Allowed.of(["optimizer", "cast"]))
    cast = {g.name: g.nbytes for g in found.given_up if g.kind == "cast"}
    assert cast == {"embed.weight": 64, "layers.0.weight": 32, "norm.weight": 8}
    assert torch.equal(
        api.read(api.open(str(steps.child)), "norm.weight"), state(1)["model.norm.weight"].bfloat16()
    )


def test_other_weights_are_no_training_state(steps):
    """An average of the weights may be the better model: it goes by its own name only."""
    steps.make({"ema_state.embed.weight": torch.ones(8, 4), "note": "try 3"})
    found = steps.keeps("ema_state.embed.weight (average)")
    assert ("note", "object") in found.unproven
    steps.deletes(Allowed.of(["optimizer", "ema_state.*", "note"]))


def test_names_of_trainers_entries_cover_no_weights(steps):
    """Modules may be called as trainers call their entries, and an optimizer may hold an average."""
    more = {
        "sampler.proj.weight": torch.ones(4, 4),
        "scaler.mean": torch.ones(4),
        "rng.net.weight": torch.ones(4, 4),
        "step.proj.weight": torch.ones(4, 4),
        "optim.ema.embed.weight": torch.ones(8, 4),  # NeMo
        "optim.state.embed.weight.ax": torch.ones(8, 4),  # torch's ASGD
        "optim.state.embed.weight.unheard_of": torch.ones(8, 4),
        "optim.encoder.weight": torch.ones(4, 4),
    }
    steps.make(more)
    found = steps.keeps("does not contain")
    assert {name for name, _ in found.unproven} == set(more)
    steps.deletes(Allowed.of(["optimizer", *more]))


def test_a_trained_tensor_is_model_wherever_it_is(steps):
    """An export asks about it; whatever it leaves out is no training state, and is not given up."""
    name = "scheduler.proj.weight"
    moments = {f"optim.state.{name}.{key}": torch.ones(4, 4) for key in ("exp_avg", "exp_avg_sq")}
    steps.make({name: torch.ones(4, 4), **moments}, exclude=("scheduler.*",))
    with pytest.raises(AmbiguousModel, match=r"1 tensor outside of model.: scheduler\.proj\.weight"):
        steps.export(steps.source, steps.out / "asked")
    steps.keeps("a part of the model is never given up", Allowed.of(["optimizer", "*"]))


class Commands:
    """Ordinary commands over three steps of a run, of which the newest stays."""

    def __init__(self, runs, url, tmp_path, capsys):
        self.runs, self.url, self.out, self.capsys = runs, url, tmp_path / "out", capsys

    def save(self, more):
        for step in (1, 2, 3):
            named = {
                f"optimizer.{n.removeprefix('optim.')}" if n.startswith("optim.") else n: value
                for n, value in state(step, **more).items()
            }
            dcp.save(named, checkpoint_id=self.runs / f"llama/step-{step}", no_dist=True)

    def __call__(self, *arguments):
        code = run([*map(str, arguments), "--catalog", self.url])
        captured = self.capsys.readouterr()
        return code, captured.out, captured.err

    def watch(self, **retention):
        kept = json.dumps({"keep_last": 1} | retention)
        added = ("catalog", "root", "add", "r", self.runs, "--verb", "export")
        assert self(*added, "--destination", f"{self.out}/{{name}}", "--retention", kept)[0] == 0

    def steps(self):
        return sorted(place.name for place in (self.runs / "llama").iterdir())


@pytest.fixture
def commands(runs, url, tmp_path, capsys):
    return Commands(runs, url, tmp_path, capsys)


NO_STATE = {
    "optimizer.ema.embed.weight": torch.ones(8, 4),  # NeMo's average
    "sampler.proj.weight": torch.ones(4, 4),
    "scaler.mean": torch.ones(4),
}


@pytest.mark.parametrize("by", ["rest", "accept-loss"])
def test_commands_give_no_weights_up_for_training_state(commands, by):
    commands.save(NO_STATE)
    commands.watch(**({"rest": "weights"} if by == "rest" else {}))
    source = commands.runs / "llama/step-1"
    code, out, _ = commands("export", source, commands.out / "asked", "--output", "json")
    messages = " ".join(each["message"] for each in json.loads(out)["warnings"])
    assert code == 0
    assert "left out, an average of weights (1 tensor, 128 B): optimizer.ema.embed.weight" in messages
    assert "no training state (2 tensors, 80 B): sampler.proj.weight, scaler.mean" in messages
    assert commands("sweep", "--min-age", "0s", "--fingerprint")[0] == 0
    loss = ("--accept-loss", "optimizer") if by == "accept-loss" else ()
    going = ("retire", "--yes", "--grace", "0", *loss)
    _, out, _ = commands(*going, "--output", "json")
    items = {item["step"]: item for item in json.loads(out)["checkpoints"]}
    assert {step: item["fate"] for step, item in items.items()} == {1: "unsafe", 2: "unsafe", 3: "kept"}
    assert {each["name"] for each in items[1]["unproven"]} == set(NO_STATE)
    assert commands.steps() == ["step-1", "step-2", "step-3"]
    # Each goes by its own name.
    named = [option for name in NO_STATE for option in ("--accept-loss", name)]
    assert commands("retire", "--yes", "--grace", "0", "--accept-loss", "optimizer", *named)[0] == 0
    assert commands.steps() == ["step-3"]


def test_commands_ask_about_what_the_optimizer_trains_elsewhere(commands):
    """A sweep converts none of it; an export that leaves it out is no reason to delete it."""
    name = "scheduler.proj.weight"
    moments = {f"optimizer.state.{name}.{key}": torch.ones(4, 4) for key in ("exp_avg", "exp_avg_sq")}
    commands.save({name: torch.ones(4, 4), **moments})
    source, out = commands.runs / "llama/step-1", commands.out / "asked"
    code, _, err = commands("export", source, out)
    assert code == 12
    assert f"the optimizer has state for 1 tensor outside of model.: {name}" in err
    assert not out.exists()
    commands.watch(rest="weights")
    _, swept, _ = commands("sweep", "--min-age", "0s", "--fingerprint")
    assert "ambiguous-model" in swept
    for step in (1, 2):  # the user decides: it is left out
        made = ("export", commands.runs / f"llama/step-{step}", commands.out / f"step-{step}")
        assert commands(*made, "--exclude", "scheduler.*", "--fingerprint")[0] == 0
    _, answer, _ = commands("retire", "--yes", "--grace", "0", "--accept-loss", "*", "--output", "json")
    items = {item["step"]: item for item in json.loads(answer)["checkpoints"]}
    assert [items[step]["fate"] for step in (1, 2)] == ["unsafe", "unsafe"]
    assert "a part of the model is never given up" in " ".join(items[1]["why"])
    assert commands.steps() == ["step-1", "step-2", "step-3"]


@pytest.mark.parametrize("take", [None, MEANS])
def test_a_part_of_the_model_is_never_given_up(steps, take):
    steps.make(exclude=("*norm*",))
    everything = Allowed.of(["*", "optimizer", "cast"])
    steps.keeps("a part of the model is never given up", everything, fingerprint_settings=take)


def test_without_the_word_a_star_gives_no_optimizer_up(steps):
    steps.make()
    steps.keeps("", Allowed.of(["*", "cast"]), fingerprint_settings=MEANS)


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE conversion SET map_digest = 'x'", "mapped in another way"),
        ("UPDATE conversion SET fingerprint = 'x'", "has other tensors"),
        ("UPDATE conversion SET source_stamp = 'x'", "written or moved since"),
    ],
)
def test_a_record_that_does_not_fit_proves_nothing(steps, catalog, statement, says):
    steps.make()
    with catalog.writing() as conn:
        conn.execute(text(statement))
    steps.keeps(says)
    steps.deletes(fingerprint_settings=MEANS)  # reading both does


def test_an_export_of_other_weights_replaces_nothing(steps):
    """Someone wrote other numbers into the export, and into the catalog."""
    steps.make()
    (file,) = steps.child.glob("*.safetensors")
    (other,) = (steps.out / "step-2").glob("*.safetensors")
    file.write_bytes(other.read_bytes())
    steps.keeps("differ from the source", fingerprint_settings=MEANS)
    steps.keeps("")


def test_a_hold_wins(steps, catalog):
    steps.make()
    with catalog.writing() as conn:
        holds.place(conn, datetime.now(UTC), str(steps.source), "paper")
    steps.keeps("held: paper")


def test_a_failed_deletion_leaves_no_record(steps, catalog, monkeypatch):
    steps.make()
    monkeypatch.setattr(module, "_read_child", lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    found = steps.retire()
    assert (found.fate.value, found.why) == ("unsafe", ("RuntimeError: stop",))
    assert steps.source.exists()
    with catalog.reading() as conn:
        assert conn.execute(text("SELECT count(*) FROM given_up")).scalar() == 0
        assert conn.execute(text("SELECT count(*) FROM retirement")).scalar() == 0


def test_a_file_with_another_name_frees_nothing(steps, tmp_path):
    steps.make()
    os.link(steps.source / "__0_0.distcp", tmp_path / "kept")
    found = steps.retire(yes=False, fingerprint_settings=MEANS)
    assert found.freed == size(steps.source) - (tmp_path / "kept").stat().st_size


def test_the_recipe_of_the_page_works_from_end_to_end(runs, url, tmp_path, capsys):
    """A root with --verb export and a retention: every second step is kept, and the newest."""
    for step in (1, 2, 3):
        dcp.save(state(step), checkpoint_id=runs / f"llama/step-{step}", no_dist=True)

    def cli(*arguments):
        code = run([*map(str, arguments), "--catalog", url])
        return code, capsys.readouterr().out

    kept = json.dumps({"keep_last": 1, "keep_every": 2, "rest": "weights"})
    place = f"{tmp_path}/out/{{name}}"
    added = ["catalog", "root", "add", "r", runs, "--verb", "export", "--destination", place]
    assert cli(*added, "--retention", kept)[0] == 0
    assert cli("sweep", "--min-age", "0s", "--fingerprint")[0] == 0
    before = size(runs)
    code, out = cli("retire", "--yes", "--grace", "0", "--output", "json")
    answer = json.loads(out)
    assert (code, answer["counts"]) == (0, {"deleted": 1, "kept": 2})
    freed = before - size(runs)
    assert answer["files"] == {
        "before": before,
        "freed": freed,
        "after": size(runs),
        "purged": 0,
        "waiting": 0,
    }
    assert sorted(p.name for p in (runs / "llama").iterdir()) == ["step-2", "step-3"]
    # What is named wins over the root's own.
    _, out = cli("retire", "--keep-every", 5, "--rest", "full", "--fingerprint")
    assert "step-2" in out
    assert "other tensors" in out
    assert cli("catalog", "root", "retain", "r", '{"keep_last": 1, "rest": "weights"}')[0] == 0
    code, out = cli("retire", "--yes", "--grace", "0")
    assert code == 0
    assert "given up: optim.state.embed.weight.exp_avg (optimizer, 128 B)" in out
    assert " KiB before, " in out
    assert [p.name for p in (runs / "llama").iterdir()] == ["step-3"]
    assert cli("catalog", "root", "retain", "r", '{"keep_lots": 1}')[0] == 2


def test_several_targets_of_one_root(catalog, runs, swept, url, tmp_path, capsys):
    dcp.save(state(1), checkpoint_id=runs / "llama/step-1", no_dist=True)
    also = {"verb": "export", "names": "stored", "dtype": "bf16", "destination": f"{tmp_path}/bf16/{{name}}"}
    arguments = ["catalog", "root", "add", "r", str(runs), "--catalog", url, "--also", json.dumps(also)]
    assert run([*arguments, "--destination", also["destination"]]) == 2
    assert "both write to" in capsys.readouterr().err
    assert run([*arguments, "--destination", f"{tmp_path}/whole/{{name}}"]) == 0
    _, made = swept()
    assert sorted(r.destination for r in made) == [f"{tmp_path}/bf16/step-1", f"{tmp_path}/whole/step-1"]
    assert swept()[1] == []
    # The whole copy comes first, and nothing is given up.
    dcp.save(state(2), checkpoint_id=runs / "llama/step-2", no_dist=True)
    swept()
    found = retire(catalog, Policy(1), allowed=WEIGHTS, fingerprint_settings=MEANS)
    assert next(i for i in found.items if i.source.step == 1).given_up == ()
