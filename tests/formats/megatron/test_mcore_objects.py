"""Objects of Megatron-Core's folders: common state, grids of shards, extra state of fp8 layers."""

from __future__ import annotations

import json
import shutil
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from samples import SAMPLES
from torch.distributed.checkpoint import DefaultSavePlanner

import ckptcore
from ckptcore.core.object_tree import Named, TensorRef, decode

COMMON = "common_state/shard_0_1"


def save(folder: Path, state: dict[str, Any], common: Any = None) -> Path:
    """Write a torch_dist folder like 0.19, or with ``common`` in common.pt like earlier releases."""
    dcp.save(state, checkpoint_id=folder, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    if common is not None:
        torch.save(common, folder / "common.pt")
        config |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(config))
    return folder


def opened(folder: Path) -> tuple[ckptcore.Manifest, dict[str, Any]]:
    manifest = ckptcore.open(str(folder))
    assert manifest.format == "torch_dist"
    return manifest, {b.key: decode(b.tree) for b in manifest.blobs if b.known}


def errors(manifest: ckptcore.Manifest) -> dict[str, str]:
    return {f.code: f.message for f in ckptcore.check(manifest, "coverage").findings if f.severity != "info"}


# --- the common state -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("place", ["an object", "common.pt"])
def test_the_common_state_is_spread(kind: Any, place: str, tmp_path: Path) -> None:
    """One object per key in either place; a tensor among them keeps its key as its name."""
    tensor = torch.arange(5)
    common = kind({"iteration": 7, "args": types.SimpleNamespace(lr=0.1), "seen": tensor, "$": "x"})
    weights = {"w": torch.ones(2, 3)}
    if place == "an object":
        folder = save(tmp_path / "x", {**weights, COMMON: [common]})
    else:
        folder = save(tmp_path / "x", weights, common)
    manifest, found = opened(folder)
    assert found == {
        "iteration": 7,
        "args": Named("namespace", {"lr": 0.1}),
        "seen": TensorRef("seen"),
        "$": "x",
    }
    assert torch.equal(ckptcore.read(manifest, "seen"), tensor)
    assert torch.equal(ckptcore.read(manifest, "w"), weights["w"])
    assert not errors(manifest)


@pytest.mark.parametrize("common", [5, [1, 2]], ids=["a number", "a list"])
def test_a_common_state_of_another_form_stays_one_object(common: Any, tmp_path: Path) -> None:
    manifest, found = opened(save(tmp_path / "x", {"w": torch.ones(2), COMMON: [common]}))
    assert found == {COMMON: common}
    assert torch.equal(ckptcore.read(manifest, "w"), torch.ones(2))


@pytest.mark.parametrize("common", [5, {1: 2}, [1]], ids=["a number", "keys that are numbers", "a list"])
def test_a_common_file_of_another_form_is_reported(common: Any, tmp_path: Path) -> None:
    manifest, _ = opened(save(tmp_path / "x", {"w": torch.ones(2)}, common))
    assert f"dict of common state (got {type(common).__name__})" in errors(manifest)["malformed-item"]
    assert torch.equal(ckptcore.read(manifest, "w"), torch.ones(2))


def test_tensors_that_a_class_hides_in_the_common_file(tmp_path: Path) -> None:
    """Their bytes are counted: unreadable tensors are an error, not an omission."""
    common = {"iteration": 7, "layer": torch.nn.Linear(10, 10, bias=False)}
    manifest, found = opened(save(tmp_path / "x", {"w": torch.ones(2)}, common))
    assert found == {"iteration": 7}
    reported = errors(manifest)
    assert "400 bytes" in reported["refused-tensors"]
    assert "torch.nn.modules.linear.Linear" in reported["refused-global"]


# --- grids of shards ------------------------------------------------------------------------------


def test_a_shard_outside_its_grid(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A leftover file of a larger save is neither a shard of this grid nor ignored."""
    (root,) = (s.root for s in request.config.stash[SAMPLES] if s.name == "api_zarr_0.12.3")
    folder = Path(shutil.copytree(root / "ckpt", tmp_path / "x"))
    assert not errors(ckptcore.open(str(folder)))
    shutil.copy(folder / "rng_state" / "shard_0.0_2.2.pt", folder / "rng_state" / "shard_2.1_2.2.pt")
    reported = errors(ckptcore.open(str(folder)))
    assert reported.keys() == {"out-of-bounds"}
    assert "shard 2.1 is outside its grid 2.2" in reported["out-of-bounds"]


@pytest.mark.parametrize("lost", [[], [(0, 1)], [(1, 0), (1, 1)]], ids=["none", "one", "a row"])
def test_shards_of_an_object(lost: list[tuple[int, int]], tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.ones(2), COMMON: [{"iteration": 1}]}
    cells = {(i, j) for i in range(2) for j in range(2)}
    state |= {f"rng_state/shard_{i}.{j}_2.2": [[{"seed": 10 * i + j}]] for i, j in cells - set(lost)}
    manifest, found = opened(save(tmp_path / "x", state))
    for i, j in cells - set(lost):
        assert found[f"rng_state/shard_{i}.{j}_2.2"] == [{"seed": 10 * i + j}]
    reported = errors(manifest)
    assert reported.keys() == ({"hole"} if lost else set())
    for i, j in lost:
        assert f"{i}.{j}" in reported["hole"]


# --- extra state ----------------------------------------------------------------------------------


EXTRA = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_1"


def test_extra_state_is_bytes(tmp_path: Path) -> None:
    """Transformer Engine's is a pickle in a byte tensor: kept as it is, never opened, not a weight."""
    raw = torch.arange(40, dtype=torch.uint8)
    manifest, found = opened(save(tmp_path / "x", {COMMON: [{}], EXTRA: [raw[8:24]], "w": torch.ones(1)}))
    assert found[EXTRA] == Named("bytetensor", bytes(range(8, 24)))
    assert [t.fqn for t in manifest.tensors] == ["w"]


ODD = {"two dims": torch.zeros(4, 4, dtype=torch.uint8), "strided": torch.zeros(40, dtype=torch.uint8)[::2]}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_extra_state_in_another_layout_is_reported(value: torch.Tensor, tmp_path: Path) -> None:
    manifest, found = opened(save(tmp_path / "x", {COMMON: [{}], EXTRA: [value], "w": torch.ones(1)}))
    assert "unknown layout" in errors(manifest)["malformed-item"]
    assert EXTRA not in found
    assert torch.equal(ckptcore.read(manifest, "w"), torch.ones(1))
