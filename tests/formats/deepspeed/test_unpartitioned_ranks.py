"""Optimizers without ZeRO on tensor- and pipeline-parallel ranks: each rank's file has its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_files import MOMENTS, model_states, moment, save, tensors

import ckptcore

MODEL = "mp_rank_{:02d}_model_states.pt"
LAYER = "layer_{:02d}-model_states.pt"
SHAPES = {"up": (8, 6), "down": (6, 4), "norm": (6,)}
INFO = {"tp_replicated_parameter_patterns": ["norm"], "parameter_with_row_parallelism_patterns": ["down"]}


def state_of(values: dict[str, torch.Tensor], *, masters: bool) -> dict[str, Any]:
    """Return what torch's AdamW stores for parameters in this order, or DeepSpeed's wrapper around it."""
    states = {
        n: {"step": torch.tensor(5.0)} | {k: moment(k, v) for k in MOMENTS}
        for n, v in enumerate(values.values())
    }
    inner = {"state": states, "param_groups": [{"lr": 0.1, "params": [*states]}]}
    return {"optimizer_state_dict": inner, "fp32_groups": [[*values.values()]]} if masters else inner


def shards(values: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    dims = {"up": 0, "down": 1}
    return {n: v.chunk(2, dims[n])[rank].clone() if n in dims else v.clone() for n, v in values.items()}


@pytest.mark.parametrize("masters", [False, True])
def test_shards_of_tensor_parallel_ranks_are_joined(tmp_path: Path, masters: bool) -> None:
    full = tensors(SHAPES)
    files = {}
    for rank in (0, 1):
        own = shards(full, rank)
        low = {n: v.to(torch.bfloat16) if masters else v for n, v in own.items()}
        files[MODEL.format(rank)] = model_states(
            1,
            2,
            module=low,
            optimizer=state_of(own, masters=masters),
            universal_checkpoint_info=INFO,
            ds_config={},
        )
    manifest = ckptcore.open(str(save(tmp_path / "ckpt", files)))
    report = ckptcore.check(manifest, "bytes")
    assert report.ok, report.findings
    for name, value in full.items():
        stored = value.to(torch.bfloat16) if masters else value
        assert torch.equal(ckptcore.read(manifest, f"module.{name}"), stored)
        for key in MOMENTS:
            found = ckptcore.read(manifest, f"optimizer.state.{name}.{key}")
            assert torch.equal(found, moment(key, value)), (name, key)
        if masters:
            assert torch.equal(ckptcore.read(manifest, f"optimizer.state.{name}.fp32"), value)
    groups = next(b for b in manifest.blobs if b.key == "optimizer.param_groups")
    assert "up" in str(groups.tree)


def test_shards_that_nothing_says_how_to_join_are_named(tmp_path: Path) -> None:
    full = tensors(SHAPES)
    files = {
        MODEL.format(r): model_states(
            1, 2, module=shards(full, r), optimizer=state_of(shards(full, r), masters=False), ds_config={}
        )
        for r in (0, 1)
    }
    manifest = ckptcore.open(str(save(tmp_path / "ckpt", files)))
    unread = {b.key for b in manifest.blobs if b.unread is not None}
    assert unread >= {"module.up", "optimizer.state.up.exp_avg", "optimizer.state.norm.exp_avg_sq"}
    assert not any(t.fqn in unread for t in manifest.tensors)


def test_optimizers_of_pipeline_stages_stay_with_their_stage(tmp_path: Path) -> None:
    """Their weights are in the files of layers: nothing says which stage has which."""
    stages = [tensors({"w": (4, 3)}, 1), tensors({"w": (5, 2)}, 2)]
    files: dict[str, Any] = {}
    for stage, values in enumerate(stages):
        files[LAYER.format(stage)] = values
        optimizer = state_of(values, masters=False)
        tree = model_states(1, 2, module=None, optimizer=optimizer, ds_config={})
        files[MODEL.format(stage)] = tree | {
            "checkpoint_parallel_dimensions": {"tp_degree": 1, "pp_degree": 2}
        }
    manifest = ckptcore.open(str(save(tmp_path / "ckpt", files)))
    assert ckptcore.check(manifest, "bytes").ok
    unnamed = {f.file for f in manifest.findings if f.code == "unnamed-states"}
    assert unnamed == {MODEL.format(0), MODEL.format(1)}
    for stage, values in enumerate(stages):
        assert torch.equal(ckptcore.read(manifest, f"module.{stage}.w"), values["w"])
        name = f"optimizer/{MODEL.format(stage).removesuffix('.pt')}.state.0.exp_avg"
        assert torch.equal(ckptcore.read(manifest, name), moment("exp_avg", values["w"]))
