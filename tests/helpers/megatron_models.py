"""Megatron-Core's own GPTModel, asked in an interpreter that has it: its names, and its logits.

``CKPTCORE_MEGATRON_PYTHON`` names the interpreter: megatron-core 0.19.2, which asks for Python 3.12 and runs
under 3.11 when it is installed with ``--ignore-requires-python``.
`FAMILIES` is the table of what Megatron's config says where the hub's says something else.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import JOBS

State = dict[str, torch.Tensor]
VARIABLE = "CKPTCORE_MEGATRON_PYTHON"

_MOE = {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather"}
_SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
_MLA: dict[str, Any] = {
    **_MOE,
    **_SIGMOID,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "rope_type": "rope",
    "moe_router_pre_softmax": True,
}
_DELTA: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "attention_output_gate": True,
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "deterministic_mode": True,
}
# Architecture -> fields of TransformerConfig, ahead of those that `megatron_config` takes from the hub's.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "phi3": {},
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
    "qwen3_moe": {**_MOE, "qk_layernorm": True, "moe_router_pre_softmax": True},
    "mixtral": _MOE,
    "granitemoe": {**_MOE, "softmax_scale": 1.0},
    "glm4_moe": {**_MOE, **_SIGMOID, "qk_layernorm": True, "add_qkv_bias": True},
    "llama4": {
        **_MOE,
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "moe_router_topk": 1,
        "qk_l2_norm": True,
        "rotary_interleaved": True,
        "moe_layer_freq": [0, 1],
    },
    "gpt_oss": {
        **_MOE,
        "softmax_type": "learnable",
        "add_bias_linear": True,
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "moe_ffn_hidden_size": 24,
    },
    "deepseek_v2": {**_MLA, "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False},
    "deepseek_v3": _MLA,
    "deepseek_v32": {
        **_MLA,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": 2,
        "dsa_indexer_head_dim": 8,
        "dsa_indexer_topk": 4,
        "dsa_indexer_loss_coeff": 0.0,
        "dsa_indexer_rotate_activation": False,
    },
    "qwen3_next": {**_MOE, **_DELTA, "moe_shared_expert_gate": True},
    "qwen3_5": _DELTA,
    "qwen3_5_moe": {**_MOE, **_DELTA, "moe_shared_expert_gate": True},
    "nemotron_h": {
        **_MOE,
        **_SIGMOID,
        "is_hybrid_model": True,
        "use_mamba_mem_eff_path": False,
        "gated_linear_unit": False,
        "activation_func": "relu2",
    },
    "gpt2": {
        "add_bias_linear": True,
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
        "activation_func": "gelu_tanh",
    },
}


# Kind of a layer on the hub -> Megatron's symbol (models/hybrid/hybrid_layer_allocation.py).
SYMBOLS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}


def interpreter() -> str:
    """The interpreter with Megatron-Core; skips where none is named."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"no interpreter with megatron-core: {VARIABLE} can name one")
    return python


Answer = tuple[State, torch.Tensor]


class Answers(dict[str, dict[str, Any]]):
    """Question -> what Megatron-Core says; a test of what this release does not know is skipped."""

    def __call__(self, name: str) -> Answer:
        answer = self[name]
        if "lacks" in answer:
            pytest.skip(f"this megatron-core has no such model: {answer['lacks']}")
        return answer["state"], answer["logits"]


def question(
    config: Mapping[str, Any], model: Mapping[str, Any], ids: torch.Tensor, state: State | None = None
) -> dict[str, Any]:
    """For `answers`. state: weights by Megatron's names, None for random ones."""
    return {"config": dict(config), "model": dict(model), "ids": ids, "state": state}


def answers(folder: Path, questions: Mapping[str, Any]) -> Answers:
    """Question -> (weights by Megatron's names, logits), from one process."""
    request, answer = folder / "asked.pt", folder / "answer.pt"
    torch.save(list(questions.values()), request)
    argv = [interpreter(), "-W", "ignore", str(JOBS / "megatron_logits_job.py"), str(request), str(answer)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return Answers(zip(questions, torch.load(answer, weights_only=True), strict=True))


def megatron_config(config: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """TransformerConfig's fields of a model that the hub's config describes.

    more: fields ahead of these.
    """
    heads, layers = _of(config, "num_attention_heads", "n_head"), _of(config, "num_hidden_layers", "n_layer")
    layers = layers or len(config["layers_block_type"])
    hidden = _of(config, "hidden_size", "n_embd")
    out: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": config.get("intermediate_size_mlp")
        or config.get("intermediate_size")
        or 4 * hidden,
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads", heads),
        "kv_channels": config.get("head_dim") or hidden // heads,
        "layernorm_epsilon": config.get("rms_norm_eps") or config.get("layer_norm_epsilon"),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
    }
    experts = _of(config, "num_local_experts", "num_experts", "n_routed_experts")
    if experts:
        wide = config.get("moe_intermediate_size") or config["intermediate_size"]
        out |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": wide,
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_router_topk_scaling_factor": config.get("routed_scaling_factor"),
        }
        dense = config.get("first_k_dense_replace")
        if dense is not None:
            out["moe_layer_freq"] = [int(n >= dense) for n in range(layers)]
        if config.get("n_shared_experts") or config.get("intermediate_size_mlp"):
            out["moe_shared_expert_intermediate_size"] = wide
        elif config.get("shared_expert_intermediate_size"):
            out["moe_shared_expert_intermediate_size"] = config["shared_expert_intermediate_size"]
    if "mamba_num_heads" in config:
        out |= {f"mamba_{size}": config[f"mamba_{size}"] for size in ("num_heads", "head_dim")}
        out |= {"mamba_num_groups": config["n_groups"], "mamba_state_dim": config["ssm_state_size"]}
        out["moe_shared_expert_intermediate_size"] = config["moe_shared_expert_intermediate_size"]
    if "linear_conv_kernel_dim" in config:
        sizes = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
        out |= {f"linear_{size}": config[f"linear_{size}"] for size in sizes}
        out["linear_attention_freq"] = [int(kind == "linear_attention") for kind in config["layer_types"]]
    if "kv_lora_rank" in config:
        out |= {
            "q_lora_rank": config["q_lora_rank"],
            "kv_lora_rank": config["kv_lora_rank"],
            "qk_head_dim": config["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
            "v_head_dim": config["v_head_dim"],
            "kv_channels": config["v_head_dim"],
            "rotary_base": config["rope_parameters"]["rope_theta"],
        }
    return out | more


def gpt_model(config: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """GPTModel's own arguments, or HybridModel's. vocabulary: rows of the embedding, padding included."""
    if "layers_block_type" in config:
        return {
            "vocab_size": vocabulary,
            "max_sequence_length": 64,
            "hybrid_layer_pattern": "".join(SYMBOLS[kind] for kind in config["layers_block_type"]),
            "share_embeddings_and_output_weights": config["tie_word_embeddings"],
        }
    rope = config.get("rope_parameters")
    out = {
        "vocab_size": vocabulary,
        "max_sequence_length": 64,
        "position_embedding_type": "rope" if rope else "learned_absolute",
        "share_embeddings_and_output_weights": config["tie_word_embeddings"],
    }
    if rope:
        out |= {"rotary_base": rope["rope_theta"], "rotary_percent": rope.get("partial_rotary_factor", 1.0)}
    else:
        out["max_sequence_length"] = config["n_positions"]
    return out


def modules_of(stored: State) -> State:
    """GPTModel's own names of what a checkpoint holds, with layers and experts stacked and norms fused."""
    out: State = {}
    for name, tensor in stored.items():
        if name.startswith("decoder.layers.") and not name.split(".")[2].isdigit():
            rest = name.removeprefix("decoder.layers.")
            layers = {f"decoder.layers.{n}.{rest}": each for n, each in enumerate(tensor)}
        else:
            layers = {name: tensor}
        for each, value in layers.items():
            each = each.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
            each = each.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
            found = re.fullmatch(r"(.*\.mlp\.experts)\.experts\.(linear_fc[12])\.weight", each)
            if found is None:
                out[each] = value.float()
                continue
            for e, own in enumerate(value):
                out[f"{found[1]}.local_experts.{e}.{found[2]}.weight"] = own.float()
    return out


def _of(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[n] for n in names if config.get(n) is not None), None)
