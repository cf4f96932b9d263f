"""Megatron's arguments against config.json and the map: what no shape shows is refused with both values."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

from export_sources import WRITERS, Tiny  # noqa: E402
from trainer_names import WORLDS  # noqa: E402

import ckptcore  # noqa: E402
from ckptcore.errors import NameMismatch, UsageError  # noqa: E402

pytestmark = pytest.mark.usefixtures("asked_here")
Tinies = Callable[[str], Tiny]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def trained(tiny: Tiny, folder: Path, **more: Any) -> str:
    """A torch_dist folder whose arguments say more."""
    source = WRITERS["megatron"](tiny, "layers", folder)
    common = torch.load(source / "common.pt", weights_only=False)
    vars(common["args"]).update(more)
    torch.save(common, source / "common.pt")
    return str(source)


def config(tiny: Tiny, folder: Path, **more: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny.config | more))
    return str(folder)


def export(source: str, target: Path, **options: Any) -> Any:
    return ckptcore.convert(source, str(target), verb="export", catalog=False, **options)


@pytest.mark.parametrize(
    ("arguments", "hub", "mine", "theirs"),
    [
        ({"normalization": "LayerNorm"}, {}, 'normalization = "LayerNorm"', '"RMSNorm"'),
        ({"position_embedding_type": "learned_absolute"}, {}, '= "learned_absolute"', '"rope"'),
        ({"use_rope_scaling": True, "rope_scaling_factor": 8.0}, {}, "factor = 8", "'default'"),
        ({"use_rope_scaling": False}, {"rope_parameters": LLAMA3}, "= False", "'llama3'"),
        (
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
            {"rope_parameters": LLAMA3},
            "factor = 32",
            "factor = 8",
        ),
        ({"no_rope_freq": 4}, {}, "no_rope_freq = 4", "one without it"),
        ({"no_rope_freq": [0, 0, 0, 1]}, {}, "no_rope_freq = [0, 0, 0, 1]", "one without it"),
        ({"window_size": (3, 0)}, {}, "window_size = ", "one without it"),
        ({"softmax_scale": 0.5}, {}, "softmax_scale = 0.5", "one without it"),
        ({"softmax_type": "off-by-one"}, {}, 'softmax_type = "off-by-one"', '"vanilla"'),
        ({"attn_logit_softcapping": 50.0}, {}, "attn_logit_softcapping = 50", "no attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, {}, "final_logit_softcapping = 30", "no final_logit_softcapping"),
        ({"qk_l2_norm": True}, {}, "qk_l2_norm = true", "false"),
        ({"quick_geglu": True}, {}, "quick_geglu = True", "hidden_act = 'silu'"),
        ({"squared_relu": True}, {}, "squared_relu = True", "hidden_act = 'silu'"),
        ({"activation_func_clamp_value": 7.0}, {}, "activation_func_clamp_value = 7.0", "one without it"),
        ({"glu_linear_offset": 1.0}, {}, "glu_linear_offset = 1.0", "one without it"),
        (
            {"activation_func": {"_target_": "torch.nn.functional.gelu"}},
            {},
            "_target_ = 'torch.nn.functional.gelu'",
            "hidden_act = 'silu'",
        ),
        (
            {"apply_residual_connection_post_layernorm": True},
            {},
            "apply_residual_connection_post_layernorm = true",
            "false",
        ),
    ],
)
@pytest.mark.parametrize("arch", ["auto", "llama"])
def test_what_contradicts_the_config_is_refused(
    tinies: Tinies,
    tmp_path: Path,
    arguments: dict[str, Any],
    hub: dict[str, Any],
    mine: str,
    theirs: str,
    arch: str,
) -> None:
    tiny = tinies("llama")
    source = trained(tiny, tmp_path / "source", **{"position_embedding_type": "rope", **arguments})
    with pytest.raises(NameMismatch) as error:
        export(source, tmp_path / "out", config=config(tiny, tmp_path / "config", **hub), arch=arch)
    assert mine in error.value.message
    assert theirs in error.value.message
    assert not (tmp_path / "out").exists()


def test_a_config_beside_the_checkpoint_that_another_one_replaces(tinies: Tinies, tmp_path: Path) -> None:
    tiny = tinies("llama")
    (tmp_path / "run").mkdir()
    source = WRITERS["hf-live"](tiny, "one", tmp_path / "run/step")
    form = json.loads((tiny.hub / "config.json").read_text())
    (tmp_path / "run/config.json").write_text(json.dumps(form | {"rms_norm_eps": 3e-3}))
    result = ckptcore.convert(str(source), str(tmp_path / "out"), verb="export", config=str(tiny.hub))
    (warning,) = [w for w in result.warnings if w.code == "config-contradicted"]
    assert "rms_norm_eps = 0.003" in warning.message
    (tmp_path / "run/config.json").write_text(json.dumps(form))
    result = ckptcore.convert(str(source), str(tmp_path / "same"), verb="export", config=str(tiny.hub))
    assert "config-contradicted" not in {w.code for w in result.warnings}


def test_the_same_scaling_is_exported(tinies: Tinies, tmp_path: Path) -> None:
    tiny = tinies("llama")
    arguments = {"use_rope_scaling": True, "rope_scaling_factor": 8.0, "normalization": "RMSNorm"}
    source = trained(tiny, tmp_path / "source", position_embedding_type="rope", **arguments)
    hub = config(tiny, tmp_path / "config", rope_parameters=LLAMA3)
    export(source, tmp_path / "out", config=hub)
    assert json.loads((tmp_path / "out/config.json").read_text())["rope_parameters"] == LLAMA3


@pytest.mark.parametrize("kind", [dict, argparse.Namespace])
def test_arguments_in_a_plain_dcp_folder_decide_without_a_config(
    tinies: Tinies, tmp_path: Path, kind: Callable[..., Any]
) -> None:
    """DCP stores a dict of arguments value by value, and a namespace as one pickle."""
    tiny = tinies("llama")
    state = {n: t.contiguous() for n, t in WORLDS["megatron"][0](tiny.config, tiny.state, "layers").items()}
    args = {"num_attention_heads": 4, "num_query_groups": 2, "group_query_attention": True}
    args |= {"vocab_size": tiny.config["vocab_size"], "position_embedding_type": "rope"}
    dcp.save({"model": state, "args": kind(**args)}, checkpoint_id=tmp_path / "source", no_dist=True)
    export(str(tmp_path / "source"), tmp_path / "out", config="none")
    dcp.save(
        {"model": state, "args": kind(**args | {"position_embedding_type": "none"})},
        checkpoint_id=tmp_path / "other",
        no_dist=True,
    )
    with pytest.raises(NameMismatch, match='"none"'):
        export(str(tmp_path / "other"), tmp_path / "again", config="none")


def test_heads_of_a_pickled_namespace_limit_the_mesh(tinies: Tinies, tmp_path: Path) -> None:
    tiny = tinies("llama")
    state = {n: t.contiguous() for n, t in WORLDS["megatron"][0](tiny.config, tiny.state, "layers").items()}
    args = argparse.Namespace(num_attention_heads=4, num_query_groups=2, group_query_attention=True)
    dcp.save({"model": state, "args": args}, checkpoint_id=tmp_path / "source", no_dist=True)
    with pytest.raises(UsageError, match=r"4 attention heads with tp=3: the checkpoint's `args`"):
        ckptcore.convert(str(tmp_path / "source"), str(tmp_path / "out"), verb="reshard", mesh="tp=3")


# As Megatron-LM and Megatron-Bridge store them by default.
DEFAULTS: dict[str, Any] = {
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "qk_l2_norm": False,
    "quick_geglu": False,
    "squared_relu": False,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_apply_probs_on_input": False,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
SIGMOID = {"moe_router_score_function": "sigmoid"}


@pytest.mark.parametrize(
    ("family", "arguments", "hub"),
    [
        ("llama", {}, {}),
        ("llama", {"softmax_scale": 0.25, "kv_channels": 16}, {}),
        ("granitemoe", {"kv_channels": 4}, {"attention_multiplier": 0.5}),
        ("mistral", {}, {}),
        ("qwen2", {}, {}),
        ("qwen3", {}, {}),
        ("phi3", {}, {}),
        ("mixtral", {}, {}),
        ("qwen3_moe", {}, {"norm_topk_prob": True}),
        ("qwen3_moe", {"moe_router_pre_softmax": True}, {"norm_topk_prob": False}),
        ("olmoe", {"moe_router_pre_softmax": True}, {"norm_topk_prob": False}),
        ("glm4_moe", SIGMOID, {"norm_topk_prob": True}),
        ("minimax_m2", SIGMOID, {}),
        ("deepseek_v3", SIGMOID, {"norm_topk_prob": True}),
        ("gpt_oss", {"quick_geglu": True, "softmax_type": "learnable"}, {}),
    ],
)
def test_defaults_that_change_nothing_are_no_contradiction(
    tinies: Tinies, tmp_path: Path, family: str, arguments: dict[str, Any], hub: dict[str, Any]
) -> None:
    tiny = tinies(family)
    source = trained(tiny, tmp_path / "source", **DEFAULTS | arguments)
    export(source, tmp_path / "out", config=config(tiny, tmp_path / "config", **hub))


@pytest.mark.parametrize(
    ("family", "arguments", "hub", "named"),
    [
        ("mixtral", SIGMOID, {}, "moe_router_score_function"),
        ("mixtral", {"moe_router_pre_softmax": True}, {}, "moe_router_pre_softmax"),
        ("qwen3_moe", {}, {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("qwen3_moe", {"moe_router_pre_softmax": True}, {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("deepseek_v3", {}, {"norm_topk_prob": True}, "moe_router_score_function"),
        ("deepseek_v3", SIGMOID, {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("glm4_moe", {}, {"norm_topk_prob": True}, "moe_router_score_function"),
        ("gemma2", {"attn_logit_softcapping": 20.0}, {}, "attn_logit_softcapping = 20"),
        ("gemma2", {"final_logit_softcapping": 20.0}, {}, "final_logit_softcapping = 20"),
        ("gemma2", {"query_pre_attn_scalar": 144}, {}, "query_pre_attn_scalar = 144"),
        ("granitemoe", {"softmax_scale": 0.5}, {}, "softmax_scale = 0.5"),
        ("granitemoe", {"kv_channels": 4}, {}, "1 / sqrt(kv_channels) = 0.5"),
        (
            "glm4_moe",
            SIGMOID | {"moe_router_topk": 1},
            {"num_experts_per_tok": 1},
            "score_function = sigmoid",
        ),
    ],
)
def test_what_a_family_does_not_compute_is_refused(
    tinies: Tinies, tmp_path: Path, family: str, arguments: dict[str, Any], hub: dict[str, Any], named: str
) -> None:
    tiny = tinies(family)
    source = trained(tiny, tmp_path / "source", **DEFAULTS | arguments)
    with pytest.raises(NameMismatch) as error:
        export(source, tmp_path / "out", config=config(tiny, tmp_path / "config", **hub))
    assert named in error.value.message
