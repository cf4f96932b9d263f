"""Make the run_config.yaml by which Megatron-Bridge builds the model of an iteration.

``load_model_config`` instantiates its section ``model``, and a load reads ``checkpoint``
(megatron/bridge/training/model_load_save.py, checkpointing.py; 0.3.1 and git 067f987). The class is the
provider of most bridges (models/gpt_provider.py, mla_provider.py); fields are those of
Megatron's TransformerConfig, which most arguments are called like.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PROVIDERS = {
    False: "megatron.bridge.models.gpt_provider.GPTModelProvider",
    True: "megatron.bridge.models.mla_provider.MLAModelProvider",
}
LATENT = "multi_latent_attention"
# Argument -> field, where both differ (megatron/training/arguments.py, core_transformer_config_from_args).
_RENAMED = {
    "norm_epsilon": "layernorm_epsilon",
    "num_experts": "num_moe_experts",
    "use_rope_scaling": "rope_scaling",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
}
_SAME = frozenset(
    {
        "add_bias_linear",
        "add_qkv_bias",
        "beta_fast",
        "beta_slow",
        "expert_model_parallel_size",
        "ffn_hidden_size",
        "gated_linear_unit",
        "hidden_size",
        "kv_channels",
        "kv_lora_rank",
        "layernorm_zero_centered_gamma",
        "make_vocab_size_divisible_by",
        "moe_apply_probs_on_input",
        "moe_ffn_hidden_size",
        "moe_layer_freq",
        "moe_router_enable_expert_bias",
        "moe_router_group_topk",
        "moe_router_num_groups",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_topk",
        "moe_router_topk_scaling_factor",
        "moe_shared_expert_intermediate_size",
        "mscale",
        "mscale_all_dim",
        "mtp_num_layers",
        LATENT,
        "no_rope_freq",
        "normalization",
        "num_attention_heads",
        "num_layers",
        "num_query_groups",
        "original_max_position_embeddings",
        "pipeline_model_parallel_size",
        "position_embedding_type",
        "q_lora_rank",
        "qk_head_dim",
        "qk_layernorm",
        "qk_pos_emb_head_dim",
        "rope_scaling_factor",
        "rope_type",
        "rotary_base",
        "rotary_interleaved",
        "rotary_percent",
        "rotary_scaling_factor",
        "softmax_scale",
        "softmax_type",
        "tensor_model_parallel_size",
        "v_head_dim",
        "vocab_size",
    }
)
_ACTIVATIONS = {
    "swiglu": "torch.nn.functional.silu",
    "squared_relu": "megatron.core.activations.squared_relu",
    "openai_gelu": "megatron.core.activations.fast_gelu",
    "quick_geglu": "megatron.core.activations.quick_gelu",
}
_SWITCHES = {"bfloat16": "bf16", "float16": "fp16"}  # dtype -> the field that says it; neither is float32
_PLAIN_GELU = "torch.nn.functional.gelu"
_LENGTH, _UNTIED = "max_position_embeddings", "untie_embeddings_and_output_weights"
# Arguments of a job, and those that other fields say.
_OF_JOB = frozenset(
    {"ckpt_format", "group_query_attention", "no_save_optim", "no_save_rng", "padded_vocab_size"}
)
# Values of arguments without a field with which a model is as if it had none.
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1)


def run_config(arguments: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the content of run_config.yaml for Megatron's arguments, each of which has a field.

    Args:
        arguments: As common.pt has them.
        dtype: Of the embeddings, which a provider gives its parameters.
    """
    model = {name: value for name, value in arguments.items() if name in _SAME}
    model |= {field: arguments[name] for name, field in _RENAMED.items() if name in arguments}
    flag = next((name for name in _ACTIVATIONS if arguments.get(name)), "")
    model |= {
        "_target_": _PROVIDERS[bool(arguments.get(LATENT))],
        "activation_func": {"_target_": _ACTIVATIONS.get(flag, _PLAIN_GELU), "_call_": False},
        "share_embeddings_and_output_weights": not arguments[_UNTIED],
        "should_pad_vocab": True,
    }
    if dtype in _SWITCHES:
        model |= {_SWITCHES[dtype]: True, "params_dtype": {"_target_": f"torch.{dtype}", "_call_": False}}
    if _LENGTH in arguments:
        model["seq_length"] = arguments[_LENGTH]
    checkpoint = {
        "_target_": "megatron.bridge.training.config.CheckpointConfig",
        "ckpt_format": arguments["ckpt_format"],
        "fully_parallel_save": False,
        "save_optim": False,
        "save_rng": False,
    }
    return {"checkpoint": checkpoint, "model": dict(sorted(model.items()))}


def without_field(arguments: Mapping[str, Any]) -> list[str]:
    """Return the arguments that change the model, and that no field of a provider says."""
    with_field = _SAME | _RENAMED.keys() | _ACTIVATIONS.keys() | _OF_JOB | {_LENGTH, _UNTIED}
    return sorted(
        name for name, value in arguments.items() if name not in with_field and value not in _NEUTRAL
    )
