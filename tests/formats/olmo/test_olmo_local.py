"""Refuse OLMo's local checkpoints that contradict themselves; read every spelling of parameter groups."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from olmo_samples import OUT, Info, change_local, codes, tensors, write_local
from safetensors.torch import load_file
from samples import value

import ckptcore
from ckptcore.core.object_tree import decode
from ckptcore.errors import MalformedCheckpoint, UnsupportedFormat

Handle = dict[str, Any]


@pytest.fixture
def step(tmp_path: Path) -> Path:
    write_local(tmp_path / "step1", "infos")
    return tmp_path / "step1"


def of_handle(step: Path, edit: Callable[[Handle], object], rank: int = 0) -> None:
    change_local(step / "model" / f"rank{rank}.pt", lambda tree: edit(tree["modules"][0]["handles"][0]))


# --- flat parameters ------------------------------------------------------------------------------

DATA, NAMES, SHAPES = "flat_param.data", "flat_param._fqns", "flat_param._shapes"
INFOS = "flat_param._shard_param_infos"
# Rank 0 of three holds the first 6 of "w.a" [3, 4].
ODD: dict[str, tuple[Callable[[Handle], object], str]] = {
    "two dims": (lambda h: h.update({DATA: h[DATA].view(2, 3)}), "no(t a)? flat tensor"),
    "no tensor": (lambda h: h.update({DATA: [1.0, 2.0]}), "no(t a)? flat tensor"),
    "a shape less": (lambda h: h[SHAPES].pop(), "differ in number"),
    "a place less": (lambda h: h.update({INFOS: h[INFOS][:1]}), "every parameter"),
    "a range of another length": (
        lambda h: h.update({INFOS: (Info(True, 0, 6, 0, 4), OUT)}),
        "elements 0 to 4 are not 6",
    ),
    "neither in nor out": (lambda h: h.update({INFOS: (Info(None, 0, 6, 0, 5), OUT)}), "is not a position"),
    "positions that are not integers": (
        lambda h: h.update({INFOS: (Info(True, 0.0, 6, 0, 5), OUT)}),
        "are not integers",
    ),
    "beyond the parameter's end": (
        lambda h: h.update({INFOS: (Info(True, 0, 6, 10, 15), OUT)}),
        r"outside top\.w\.a",
    ),
    "before its start": (lambda h: h.update({INFOS: (Info(True, 0, 6, -2, 3), OUT)}), "outside"),
    "beyond the flat parameter's end": (
        lambda h: h.update({INFOS: (Info(True, 1, 6, 0, 5), OUT)}),
        "6 elements at 1 of a flat",
    ),
    "a shape that is none": (lambda h: h.update({SHAPES: [(3, -4), (5,)]}), "is not a shape"),
    "dims that are not numbers": (lambda h: h.update({SHAPES: [("3", 4), (5,)]}), "is not a shape"),
    "a name that is none": (lambda h: h.update({NAMES: ["w.a", 7]}), "is not a name"),
    "one name twice": (lambda h: h.update({NAMES: ["w.a", "w.a"], SHAPES: [(3, 4), (3, 4)]}), "w.a twice"),
    "nothing": (lambda h: h.clear(), "must hold flat parameters"),
}


@pytest.mark.parametrize("name", ODD)
def test_flat_parameters_that_contradict_themselves(name: str, step: Path) -> None:
    edit, reason = ODD[name]
    of_handle(step, edit)
    with pytest.raises(MalformedCheckpoint, match=reason) as caught:
        ckptcore.open(str(step))
    assert "model/rank0.pt" in caught.value.message


def test_positions_of_an_old_torch_after_the_last_name(tmp_path: Path) -> None:
    write_local(tmp_path / "step1", "indices")
    of_handle(tmp_path / "step1", lambda h: h.update({"flat_param._shard_indices": (2, 2)}))
    with pytest.raises(MalformedCheckpoint, match="differ in number"):
        ckptcore.open(str(tmp_path / "step1"))


def test_a_slice_of_strided_memory_is_refused(step: Path) -> None:
    """A flat tensor that is a column of another would be read as its neighbours."""
    of_handle(step, lambda h: h.update({DATA: torch.randn(6, 2)[:, 0]}))
    with pytest.raises(MalformedCheckpoint, match="must be contiguous"):
        ckptcore.open(str(step))


def test_a_flat_tensor_inside_a_larger_storage(step: Path) -> None:
    """torch.save stores a complete storage and an offset: elements count from there."""
    wanted = tensors(ckptcore.open(str(step)))
    of_handle(step, lambda h: h.update({DATA: torch.cat([torch.full((5,), -1.0), h[DATA]])[5:]}))
    assert tensors(ckptcore.open(str(step))) == wanted
    assert not codes(step)


# --- between ranks --------------------------------------------------------------------------------


def test_a_rank_of_a_larger_save_is_not_read(step: Path) -> None:
    wanted = tensors(ckptcore.open(str(step)))
    (step / "model" / "rank3.pt").write_bytes((step / "model" / "rank0.pt").read_bytes())
    manifest = ckptcore.open(str(step))
    assert [(f.code, f.file) for f in manifest.findings] == [("stray-file", "model/rank3.pt")]
    assert tensors(manifest) == wanted


def test_a_parameter_of_another_shape_elsewhere(step: Path) -> None:
    of_handle(step, lambda h: h.update({SHAPES: [torch.Size([4, 3]), torch.Size([5])]}), rank=1)
    (found,) = (
        f for f in ckptcore.open(str(step)).findings if f.code == "mixed-saves" and "model." in str(f.fqn)
    )
    assert (found.severity, found.file) == ("error", "model/rank1.pt")
    assert "[4, 3]" in found.message
    assert "hole" in codes(step)


def test_options_that_differ_between_ranks(step: Path) -> None:
    for rank in range(3):
        change_local(
            step / "optim" / f"rank{rank}.pt", lambda t, r=rank: t["param_groups"][0].update(lr=0.1 * r)
        )
    found = [f for f in ckptcore.open(str(step)).findings if f.code == "rank-object"]
    assert [f.fqn for f in found] == ["optim.param_groups.0"]


def test_steps_that_are_numbers(step: Path) -> None:
    """Before torch 1.12 `step` was an int: an object of the checkpoint, and compared between ranks."""
    for rank in range(3):
        change_local(
            step / "optim" / f"rank{rank}.pt",
            lambda t: [state.update(step=4) for state in t["state"].values()],
        )
    manifest = ckptcore.open(str(step))
    found = {b.key: decode(b.tree) for b in manifest.blobs}
    assert (found["optim.state.top.w.a.step"], found["optim.state.top.w.b.step"]) == (4, 4)
    assert not manifest.findings


OPTIMIZERS: dict[str, tuple[Callable[[Any], object], str]] = {
    "no state": (lambda t: t.pop("state"), "optimizer's state dict"),
    "no groups": (lambda t: t.pop("param_groups"), "optimizer's state dict"),
    "a number that no group has": (lambda t: t["state"].update({9: {}}), "no parameter group names 9"),
    "a state that is none": (lambda t: t["state"].update({0: 5}), "no parameter group names 0"),
    "a state of another length": (
        lambda t: t["state"][0].update(exp_avg=torch.zeros(5)),
        r"must have 6 elements like its parameter \(got \[5\]\)",
    ),
    "a state of what is not here": (
        lambda t: [
            t["state"].update({2: {"exp_avg": torch.zeros(2)}}),
            t["param_groups"][0].update(params=[0, 1, 2], param_names=["top.w.a", "top.w.b", "top.w.c"]),
        ],
        "belongs to no flat",
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_contradict_themselves(name: str, step: Path) -> None:
    edit, reason = OPTIMIZERS[name]
    change_local(step / "optim" / "rank0.pt", edit)
    with pytest.raises(MalformedCheckpoint, match=reason) as caught:
        ckptcore.open(str(step))
    assert "optim/rank0.pt" in caught.value.message


@pytest.mark.parametrize(
    "groups",
    [
        5,
        [7],
        [{"params": [0], "param_names": ["top.w.a", "top.w.b"]}],
        [{"params": ["0", "1"], "param_names": ["top.w.a", "top.w.b"]}],
        [{"params": [0, 1], "param_names": ["top.w.a", "top.w.a"]}],
    ],
    ids=repr,
)
def test_groups_without_names(groups: Any, step: Path) -> None:
    """The state is reported as unreadable; the model beside it is complete."""
    for rank in range(3):
        change_local(step / "optim" / f"rank{rank}.pt", lambda t: t.update(param_groups=groups))
    manifest = ckptcore.open(str(step))
    assert codes(step) == {"refused-tensors"}
    assert {t.fqn for t in manifest.tensors} == {"model.top.w.a", "model.top.w.b"}
    kept = {b.key: decode(b.tree) for b in manifest.blobs if b.known}
    if groups == 5:
        assert kept["optim.param_groups"] == 5


# --- parameter groups, written in the form of 0.1 -------------------------------------------------


def saved(root: Path, optim: dict[str, Any]) -> Path:
    """Save a plain DCP folder with a model of two weights and this optimizer."""
    import torch.distributed.checkpoint as dcp

    state = {"model": {"a.w": torch.ones(2, 3), "b.w": torch.ones(4)}, "optim": optim}
    dcp.save(state, checkpoint_id=root / "step1" / "model_and_optim", no_dist=True)
    return root / "step1"


def pickled_groups(folder: Path) -> list[Any]:
    stored = load_file(folder / "optim" / "rank_0.safetensors")
    return [
        pickle.loads(stored[f"param_group{n}"].numpy().tobytes())
        for n in range(int(stored["num_param_groups"]))
    ]


@pytest.mark.parametrize("spelling", ["by option", "by name"])
def test_groups_become_those_of_0_1(spelling: str, tmp_path: Path) -> None:
    """OLMo-core 1.x has an object per group and option, later releases one per parameter and option."""
    moments = {n: {"exp_avg": torch.randn(s)} for n, s in (("a.w", (2, 3)), ("b.w", (4,)))}
    options = {"a.w": {"lr": 0.1, "betas": (0.9, 0.95)}, "b.w": {"lr": 0.2, "betas": (0.9, 0.95)}}
    groups: Any = [{**options[n], "params": [n]} for n in ("a.w", "b.w")]
    optim = {"state": moments, "param_groups": groups if spelling == "by option" else options}
    ckptcore.convert(str(saved(tmp_path, optim)), str(tmp_path / "out"), to="olmo_v01")
    found = pickled_groups(tmp_path / "out")
    assert [(g["lr"], tuple(g["betas"]), g["params"], g["_param_names"]) for g in found] == [
        (0.1, (0.9, 0.95), [0], ["a.w"]),
        (0.2, (0.9, 0.95), [1], ["b.w"]),
    ]
    written = tensors(ckptcore.open(str(tmp_path / "out")))
    assert written["optim.state.a.w.exp_avg"] == value(moments["a.w"]["exp_avg"])
    metadata = json.loads((tmp_path / "out" / "optim" / "metadata.json").read_text())["tensors"]
    assert metadata["state.b.w.__exp_avg"]["shape"] == [4]


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        (None, "no parameter groups"),
        ([{"lr": 0.1}], "not plain values"),
        ([{"lr": 0.1, "params": [0, 1]}], "numbers, no names"),
        ([{"lr": torch.ones(2), "params": ["a.w"]}], "cannot write optim.param_groups.0.lr"),
    ],
    ids=["none", "no parameters", "numbers", "a tensor"],
)
def test_groups_that_0_1_cannot_store(groups: Any, reason: str, tmp_path: Path) -> None:
    optim = {"state": {"a.w": {"exp_avg": torch.zeros(2, 3)}}} | (
        {} if groups is None else {"param_groups": groups}
    )
    step = saved(tmp_path, optim)
    with pytest.raises(UnsupportedFormat, match=reason):
        ckptcore.convert(str(step), str(tmp_path / "out"), to="olmo_v01")
    assert not (tmp_path / "out").exists()
    ckptcore.convert(str(step), str(tmp_path / "model"), to="olmo_v01", exclude=("optim.*",))
    assert tensors(ckptcore.open(str(tmp_path / "model")))["model.a.w"] == value(torch.ones(2, 3))
