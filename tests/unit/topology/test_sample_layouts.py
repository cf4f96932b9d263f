"""Topologies of real checkpoints: every element is on some rank, once per replica, with the optimizer."""

from __future__ import annotations

import pytest
from samples import SAMPLES
from topologies import described

import ckptcore
from ckptcore.core.manifest import Manifest
from ckptcore.planning.rank_layout import lay_out

# Sample: (folder in it, a parameter, state with its layout, how on pp=2,fsdp=2,tp=2).
HEAD = "lm_head.weight"
ROW = "transformer.blocks.1.attn_out.weight"
COLUMN = "blocks.0.attention.w_q.weight"
STACKED = "decoder.layers.self_attention.linear_proj.weight"
REAL = {
    "verl_fsdp2_4r": ("ckpt", HEAD, HEAD, "fsdp:S2(0) tp:S(0) @pp[1]"),  # no state in it
    "olmo1_local_ws2": ("step2", f"model.{ROW}", f"optim.state.{ROW}.exp_avg", "fsdp:S(0) tp:S(1) @pp[1]"),
    "v3_bf16params_ws2": (
        "step3",
        f"model.{COLUMN}",
        f"optim.state.{COLUMN}.exp_avg_sq",
        "fsdp:S2(0) tp:S(0) @pp[0]",
    ),
    "optim_llama_tp2dp2_fully_sharded_model_space_0.12.3": (
        "ckpt",
        STACKED,
        f"optimizer.state.exp_avg.{STACKED}",
        "pp:S(0) fsdp:S(0) tp:S(2)",
    ),
}


def opened(name: str, request: pytest.FixtureRequest) -> Manifest:
    root = next(s.root for s in request.config.stash[SAMPLES] if s.name == name)
    return ckptcore.open(str(root / REAL[name][0]))


@pytest.mark.parametrize("name", REAL)
def test_state_beside_parameters(name: str, request: pytest.FixtureRequest) -> None:
    _, parameter, state, layout = REAL[name]
    topology = lay_out(opened(name, request), "pp=2,fsdp=2,tp=2")
    assert described(topology, parameter) == described(topology, state) == layout


@pytest.mark.parametrize("mesh", ["fsdp=3", "pp=2,fsdp=2,tp=2", "dp_replicate=2,tp=2", "fsdp=2,tp=4"])
@pytest.mark.parametrize("name", REAL)
def test_every_element_is_written_once(name: str, mesh: str, request: pytest.FixtureRequest) -> None:
    manifest = opened(name, request)
    topology = lay_out(manifest, mesh)
    for spec in manifest.tensors:
        owned = [box for _, box in topology.owners(spec.fqn, spec.shape)]
        numel = 1
        for n in spec.shape:
            numel *= n
        assert sum(box.numel for box in owned) == numel, spec.fqn
        assert all(a.intersect(b) is None for k, a in enumerate(owned) for b in owned[:k]), spec.fqn
