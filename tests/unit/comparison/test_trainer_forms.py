"""Compare the two forms of one trainer, and tell what a reshard drops apart from what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import driver
import pytest
import samples
import torch
import torch.distributed.checkpoint as dcp

import ckptcore
from ckptcore.errors import UsageError

FACTS = {"pytorch-lightning_version": "2.5.0", "epoch": 1, "global_step": 7, "loops": {"a": 1}}
GROUP = {"lr": 0.1, "betas": (0.9, 0.95)}
WEIGHTS = {"net.b": torch.arange(6.0), "net.a": torch.ones(2, 3)}
STATES = {name: {"exp_avg": 2 * w, "step": torch.tensor(7.0)} for name, w in WEIGHTS.items()}


def folder(path: Path, *, model: str = "model", optimizer: bool = True) -> str:
    """A Trainer's folder, as FSDPStrategy saves it."""
    state: dict[str, Any] = {model: WEIGHTS}
    if optimizer:
        state["optimizer_0"] = {"state": STATES, "param_groups": [{**GROUP, "params": list(WEIGHTS)}]}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    torch.save(FACTS, path / "meta.pt")
    return str(path)


def file(path: Path, *, numbers: bool = True, **changes: Any) -> str:
    """The same in one file, with the states by number as torch's optimizers keep them, or by name."""
    weights = {name: changes.get(name, w) for name, w in WEIGHTS.items()}
    keys: list[Any] = list(range(len(STATES))) if numbers else list(STATES)
    states = dict(zip(keys, STATES.values(), strict=True))
    optimizer = {"state": states, "param_groups": [{**GROUP, "params": changes.get("params", keys)}]}
    optimizer["state"] = {**states, **changes.get("states", {})}
    torch.save(
        {**FACTS, "state_dict": weights, "optimizer_states": [optimizer], **changes.get("facts", {})}, path
    )
    return str(path)


@pytest.mark.alike(2)
@pytest.mark.parametrize("model", ["model", "state_dict"])
@pytest.mark.parametrize("numbers", [True, False])
def test_a_folder_equals_its_file(model: str, numbers: bool, tmp_path: Path) -> None:
    one, two = folder(tmp_path / "a.ckpt", model=model), file(tmp_path / "b.ckpt", numbers=numbers)
    for a, b in ((one, two), (two, one)):
        found = ckptcore.diff(a, b)
        assert found.equal, found.as_dict()
        assert found.equal_tensors == 6
    assert "Lightning's Trainer" in found.b.form
    assert bool(found.a.form) == numbers  # the file's states got names
    # Copies in other formats have the names of their source.
    ckptcore.convert(one, str(tmp_path / "c.safetensors"))
    ckptcore.convert(two, str(tmp_path / "d.pt"), to="torch_save")
    assert ckptcore.diff(str(tmp_path / "c.safetensors"), two).equal
    assert ckptcore.diff(one, str(tmp_path / "d.pt")).equal is not numbers  # a copy proves no numbers


def test_what_differs_between_forms_is_found(tmp_path: Path) -> None:
    """Every kind of change: a weight, a state, two states exchanged, an option, the order of parameters."""
    one = folder(tmp_path / "a.ckpt")
    exchanged = {0: STATES["net.a"], 1: STATES["net.b"]}
    changes: list[tuple[dict[str, Any], set[str], set[str]]] = [
        ({"net.a": torch.ones(2, 3).index_fill(0, torch.tensor(1), 3)}, {"state_dict.net.a"}, set()),
        (
            {"states": {0: {"exp_avg": torch.zeros(6), "step": torch.tensor(7.0)}}},
            {"optimizer_states.0.state.net.b.exp_avg"},
            set(),
        ),
        ({"facts": {"epoch": 2}}, set(), {"epoch"}),
    ]
    for n, (change, tensors, objects) in enumerate(changes):
        found = ckptcore.diff(one, file(tmp_path / f"{n}.ckpt", **change))
        assert not found.equal
        assert {t.name for t in found.tensors} == tensors
        assert {o.name for o in found.objects} == objects
        assert all(t.a is not None and t.a.fqn.startswith(("model.", "optimizer_0.")) for t in found.tensors)
    found = ckptcore.diff(one, file(tmp_path / "names.ckpt", numbers=False, params=["net.a", "net.b"]))
    assert {o.name.rpartition(".")[0] for o in found.objects} == {"optimizer_states.0.param_groups.0.params"}
    found = ckptcore.diff(one, file(tmp_path / "exchanged.ckpt", states=exchanged))
    assert (
        not found.equal
    )  # shapes contradict the numbers: nothing is named, and nothing is equal by accident
    assert any("state.0" in t.name for t in found.tensors)


def test_names_that_the_user_gives_win(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "a.ckpt"), file(tmp_path / "b.ckpt", numbers=False)
    found = ckptcore.diff(one, two, rename=[("model.", "state_dict.")])
    assert {t.name.split(".")[0] for t in found.tensors} == {"optimizer_0", "optimizer_states"}
    # Globs fit the common names.
    assert ckptcore.diff(one, two, include=["state_dict.*"]).equal_tensors == 2
    with pytest.raises(UsageError, match="matches nothing") as caught:
        ckptcore.diff(one, two, include=["model.*"])
    assert "names as in its one file" in caught.value.hint
    assert ckptcore.diff(one, two, model=True).equal_tensors == 2


def test_other_trainers_keep_their_names(tmp_path: Path) -> None:
    """Without the Trainer's own key nothing is moved, whatever the names are."""
    torch.save({"model": {"w": torch.ones(2)}, "optimizer_0": {"a": torch.ones(1)}}, tmp_path / "a.pt")
    torch.save({"state_dict": {"w": torch.ones(2)}}, tmp_path / "b.pt")
    found = ckptcore.diff(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"))
    assert len(found.tensors) == 3
    assert found.a.form == found.b.form == ""


def sample(name: str, request: pytest.FixtureRequest) -> str:
    found = next(s for s in request.config.stash[samples.SAMPLES] if s.name == name)
    return str(next(p for p in sorted(found.root.iterdir()) if not p.name.startswith("expected")))


def test_a_trainers_own_folder_and_its_consolidated_file(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = sample("lightning_trainer_fsdp_sharded_2r", request)
    ckptcore.convert(source, str(tmp_path / "x.ckpt"), to="lightning")
    found = ckptcore.diff(source, str(tmp_path / "x.ckpt"))
    assert found.equal
    assert (found.equal_tensors, len(found.tensors)) == (68, 0)


# --- what a reshard drops ---------------------------------------------------------------------------


def trained(path: Path) -> str:
    state = {
        "model": {"w": torch.arange(8.0)},
        "rng": {"cpu": torch.ones(16, dtype=torch.uint8), "python": (3, 1)},
        "dataloader": {"dp_rank_0": b"a", "dp_rank_1": b"b", "world_size": 2},
        "step": 7,
    }
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return str(path)


DROPPED = {"rng.cpu", "rng.python", "dataloader.dp_rank_0", "dataloader.dp_rank_1", "dataloader.world_size"}


def test_a_reshard_differs_in_what_it_drops(tmp_path: Path) -> None:
    source, out = trained(tmp_path / "a"), str(tmp_path / "b")
    done = ckptcore.convert(source, out, to="dcp", verb="reshard", mesh="fsdp=4")
    assert {name for name, _ in done.dropped} == DROPPED
    for a, b, side in ((source, out, "only-in-a"), (out, source, "only-in-b")):
        found = ckptcore.diff(a, b)
        assert not found.equal
        assert (found.tensors, found.objects) == ((), ())
        assert {(d.name, d.what, d.recorded) for d in found.dropped} == {(n, side, False) for n in DROPPED}
        assert ckptcore.diff(a, b, ignore_dropped=True).equal
    (tmp_path / "record.json").write_text(json.dumps(done.as_dict()))
    found = ckptcore.diff(source, out, record=str(tmp_path / "record.json"))
    assert found.equal
    assert all(d.recorded for d in found.dropped)
    # A record that lacks one of them leaves that one unaccounted.
    short = {"dropped": [d for d in done.as_dict()["dropped"] if d[0] != "rng.cpu"]}
    (tmp_path / "short.json").write_text(json.dumps(short))
    assert not ckptcore.diff(source, out, record=str(tmp_path / "short.json")).equal


def test_what_differs_is_never_ignored(tmp_path: Path) -> None:
    """A weight that is gone, or a random state that both sides have with other values, stays a difference."""
    source, out = trained(tmp_path / "a"), tmp_path / "b"
    dcp.save({"rng": {"cpu": torch.zeros(16, dtype=torch.uint8)}, "step": 8}, checkpoint_id=out, no_dist=True)
    found = ckptcore.diff(source, str(out), ignore_dropped=True)
    assert not found.equal
    assert {t.name: t.what for t in found.tensors} == {"rng.cpu": ("values",), "model.w": ("only-in-a",)}
    assert {o.name for o in found.objects} == {"step"}
    assert {d.name for d in found.dropped} == DROPPED - {"rng.cpu"}


def test_exit_codes_and_answers(tmp_path: Path, cli: driver.Cli) -> None:
    source, out, plan = trained(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "plan")
    made = ("--to", "dcp", "--mesh", "fsdp=4", "--save", plan)
    assert cli("plan", source, out, *made).code == 0
    assert cli("apply", plan).code == 0
    found = cli("diff", source, out, "--output", "json")
    form = found.json
    assert (found.code, form["equal"], form["tensors"], form["objects"]) == (1, False, [], [])
    assert {(d["name"], d["what"]) for d in form["dropped"]} == {(name, "only-in-a") for name in DROPPED}
    assert cli("diff", source, out, "--ignore-dropped").code == 0
    found = cli("diff", source, out, "--record", plan, "--output", "json")
    assert (found.code, found.json["equal"]) == (0, True)
    text = cli("diff", source, out)
    assert text.code == 1
    assert "5 left out by a conversion" in text.stdout
    assert "--ignore-dropped" in text.stdout
    assert cli("diff", source, out, "--record", str(tmp_path / "none.json")).code == 2
    for record in (tmp_path / "a", tmp_path / "none.json"):
        with pytest.raises(UsageError, match="as a record"):
            ckptcore.diff(source, out, record=str(record))


@pytest.mark.alike(1)
@pytest.mark.parametrize(
    ("name", "to", "mesh"),
    [
        ("dcp_torchtitan_like_4r", "dcp", "fsdp=2"),
        ("accelerate_fsdp2_2r", "dcp", "fsdp=4"),
        ("v3_bf16params_ws2", "olmo_core", "fsdp=4"),
        ("gpt_mixtral_ep2pp2_0.19.2", "torch_dist", "fsdp=1"),
    ],
)
def test_a_trainers_reshard_equals_its_source_but_for_what_it_drops(
    name: str, to: str, mesh: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source, out = sample(name, request), str(tmp_path / "out")
    ckptcore.convert(source, out, to=to, verb="reshard", mesh=mesh)
    found = ckptcore.diff(source, out)
    assert not found.equal
    assert (found.tensors, found.objects) == ((), ())
    assert ckptcore.diff(source, out, ignore_dropped=True).equal


# --- options without effect -------------------------------------------------------------------------


def test_a_fingerprint_warns_of_options_without_effect(tmp_path: Path, cli: driver.Cli) -> None:
    source = trained(tmp_path / "a")
    plain = ckptcore.fingerprint(source)
    assert plain.warnings == ()
    taken = ckptcore.fingerprint(
        source, exclude=["nothing.*"], include=["*", "none.*"], rename=[("no.", "x.")]
    )
    assert taken.fingerprint == plain.fingerprint
    assert [(w.code, w.severity) for w in taken.warnings] == [("unused-option", "warning")] * 3
    assert [w.message.split(" matches")[0] for w in taken.warnings] == [
        "--include none.*",
        "--exclude nothing.*",
        "--rename no.",
    ]
    # A plain value is no tensor of the fingerprint.
    assert [w.message for w in ckptcore.fingerprint(source, exclude=["step"]).warnings] == [
        "--exclude step matches no tensor"
    ]
    assert not ckptcore.fingerprint(source, exclude=["rng.*"]).warnings
    with pytest.raises(UsageError, match="no tensor is left"):
        ckptcore.fingerprint(source, include=["none.*"])
    done = cli("fingerprint", source, "--exclude", "nothing.*", "--no-catalog")
    assert done.code == 0
    assert "unused-option" in done.stdout
