"""The table of tiny configs: every family of models that exports are tried with. A new map adds a line to it.

Nothing here waits for torch: the pages' tables are made from it, too.
"""

from __future__ import annotations

from typing import Any

_SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
_MOE = {"num_experts": 4, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
_DELTA = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 16,
    "patch_size": 2,
    "fullatt_block_indexes": [0],
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}
# Architecture -> (model type, config, trainers' worlds that have a map for it).
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", {}, ("megatron", "torchtitan", "olmo_core", "nanotron")),
    "mistral": ("mistral", {}, ("megatron", "torchtitan")),
    "qwen2": ("qwen2", {}, ("megatron", "olmo_core", "nanotron")),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {
            "text_config": {**_SMALL, "rms_norm_eps": 1e-6, "rope_parameters": _MROPE},
            "vision_config": _VISION,
            "image_token_id": 39,
            "video_token_id": 38,
            "vision_start_token_id": 37,
        },
        ("megatron",),
    ),
    "qwen3": ("qwen3", {"head_dim": 8}, ("megatron", "torchtitan", "olmo_core")),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "head_dim": 8}, ("megatron", "torchtitan")),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, ("megatron", "torchtitan")),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}, ("gpt_neox",)),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, ("megatron", "olmo_core")),
    "olmo": ("olmo", {}, ("olmo",)),
    "olmo2": ("olmo2", {}, ("olmo_core", "olmo")),
    "olmo3": ("olmo3", {}, ("olmo_core",)),
    "flex_olmo": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}, ("olmo_core",)),
    "minimax_m2": (
        "minimax_m2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
        ("megatron",),
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "head_dim": 8,
            "use_qk_norm": True,
            "attention_bias": True,
        },
        ("megatron",),
    ),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
        ("megatron", "torchtitan"),
    ),
    "deepseek_v2": ("deepseek_v2", _LATENT, ("megatron",)),
    "deepseek_v3": ("deepseek_v3", _LATENT, ("megatron", "torchtitan")),
    "deepseek_v32": (
        "deepseek_v32",
        {**_LATENT, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4},
        ("megatron",),
    ),
    "phi3": ("phi3", {}, ("megatron",)),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, ("megatron",)),
    "llama4": (
        "llama4_text",
        {
            "num_local_experts": 4,
            "head_dim": 8,
            "intermediate_size_mlp": 20,
            "interleave_moe_layer_step": 2,
            "attn_temperature_tuning": False,
        },
        ("megatron", "torchtitan"),
    ),
    "gpt2": (
        "gpt2",
        {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 16, "tie_word_embeddings": True},
        ("megatron",),
    ),
    "gemma2": ("gemma2", {"head_dim": 8, "tie_word_embeddings": True}, ("megatron",)),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
        ("megatron", "olmo_core"),
    ),
    "qwen3_next": ("qwen3_next", {**_MOE, **_DELTA, "shared_expert_intermediate_size": 12}, ("megatron",)),
    "qwen3_5": ("qwen3_5_text", _DELTA, ("megatron", "torchtitan")),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**_MOE, **_DELTA, "shared_expert_intermediate_size": 12},
        ("megatron", "torchtitan"),
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "moe_shared_expert_intermediate_size": 12,
        },
        ("megatron",),
    ),
    "mamba": ("mamba", {}, ()),
    "mamba2": ("mamba2", {"head_dim": 8, "num_heads": 4, "n_groups": 2, "state_size": 8}, ()),
}
# World of a trainer -> the forms in which its checkpoints come.
FORMS: dict[str, tuple[str, ...]] = {
    "megatron": ("stacked", "layers", "grouped", "sequential"),
    "torchtitan": ("old", "linear", "fused"),
    "olmo_core": ("one", "dropless"),
    "olmo": ("one",),
    "gpt_neox": ("pipeline", "sequential"),
    "nanotron": ("halves", "interleaved"),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def forms(family: str, world: str) -> tuple[str, ...]:
    """In which of a world's forms a family's models come."""
    _, config, _ = FAMILIES[family]
    if world == "torchtitan" and family in ("mistral", "mixtral"):
        return ("old",)  # of Mistral itself, which has the names of Meta's Llama
    if world == "torchtitan" and family in ("qwen3_5", "qwen3_5_moe"):
        return ("linear",)  # torchtitan has it since then
    if world == "torchtitan" and family == "deepseek_v3":
        return ("old", "linear")
    if world == "megatron" and not any(k in config for k in _EXPERTS):
        return ("stacked", "layers") if family != "gpt2" else ("layers",)
    if world == "olmo_core" and "num_experts" not in config:
        return ("one",)
    return FORMS[world]


def tiny_config(family: str) -> Any:
    """The config of a family's tiny model, of the installed transformers.

    Raises KeyError where it does not have the family.
    """
    import transformers

    library: Any = transformers
    kind, more, _ = FAMILIES[family]
    cls = library.CONFIG_MAPPING[kind]
    known = {*cls().to_dict(), *cls.attribute_map}
    return cls(**({k: v for k, v in _SMALL.items() if k in known} | more))


def model_class(config: Any) -> Any:
    """The class of transformers that builds the model of a config: with a head, and all its modules."""
    import transformers

    library: Any = transformers
    language, pictures = library.AutoModelForCausalLM, library.AutoModelForImageTextToText
    return language if type(config) in language._model_mapping else pictures
