"""Wrong configs of right exports: every field of a config, changed; and which way of verifying finds which.

`MISSES` is held against runs by tests/integration/exports/test_config_mutations.py; a page has it as a table.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any

# Kind of a field -> pattern of its names.
KINDS = {
    "rotary base": r"(?:.*\.)?rope_theta",
    "rotary scaling and its parameters": r"rope_parameters(?:\..*)?|partial_rotary_factor",
    "activation": r"hidden_act|hidden_activation|activation_function|mlp_hidden_act",
    "epsilon of norms": r".*eps(?:ilon)?",
    "heads, with the same rows": r"num_attention_heads|num_key_value_heads|n_head|head_dim",
    "sliding window": r"sliding_window",
    "experts per token, their weights and groups": (
        r"num_experts_per_tok|norm_topk_prob|routed_scaling_factor|n_group|topk_group"
    ),
    "caps of logits, scales": r".*softcapping|query_pre_attn_scalar|(?:attention|embedding)_multiplier",
    "which layers slide": r"layer_types|max_window_layers",
    "any other field": r".*",
}
FOUND, NAMED = "found", "named as unconfirmed"
# Way of verifying -> kinds that it does not find, but names. Every other kind is found.
BESIDE, ARGUMENTS, REFERENCE, TENSORS = (
    "a right config.json in or beside the source, or that of `--config`",
    "Megatron's arguments in the source",
    "`--reference`",
    "the source's tensors alone",
)
_LAST = "any other field"
MISSES: dict[str, frozenset[str]] = {
    BESIDE: frozenset(),
    ARGUMENTS: frozenset({_LAST}),
    REFERENCE: frozenset(),
    TENSORS: frozenset(KINDS),
}
_OTHER_ACTIVATION = {"relu": "silu"}
_SKIPPED = re.compile(
    r"_.*|architectures|transformers_version|dtype|id2label|label2id|model_type|problem_type"
)


def kind_of(field: str) -> str:
    """The kind of a field."""
    return next(kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, field))


def mutants(form: dict[str, Any], full: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(field, config.json with another value of it), for every field of a config and of its class.

    form: the config.json. full: with every field of the class.
    """
    for field, value in (full | form).items():
        if _SKIPPED.fullmatch(field):
            continue
        if field == "rope_parameters" and isinstance(value, dict):
            yield from _rope_mutants(form, value)
            continue
        yield from ((field, form | {field: other}) for other in _other_values(field, value))
        if form.get(field) is not None:
            yield field, {k: v for k, v in form.items() if k != field}
    heads, width = (form.get(k) for k in ("num_attention_heads", "head_dim"))
    if heads and width:
        groups = max(1, form.get("num_key_value_heads", heads) // 2)
        halved = {"num_attention_heads": heads // 2, "head_dim": width * 2, "num_key_value_heads": groups}
        yield "num_attention_heads", form | halved


def _rope_mutants(form: dict[str, Any], rope: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if any(isinstance(v, dict) for v in rope.values()):
        for layer, of in rope.items():
            for field, changed in _rope_mutants({}, of):
                yield field, form | {"rope_parameters": rope | {layer: changed["rope_parameters"]}}
        return
    theta = {"rope_theta": rope.get("rope_theta", 1e4)}
    yield (
        "rope_parameters.rope_theta",
        form | {"rope_parameters": rope | {"rope_theta": theta["rope_theta"] * 3}},
    )
    linear = {"rope_type": "linear", "factor": 3.0} | theta
    yarn = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 8} | theta
    for scaled in (linear, yarn):
        yield "rope_parameters.rope_type", form | {"rope_parameters": scaled | _kept(rope)}
    for field, value in rope.items():
        if field not in ("rope_theta", "rope_type"):
            for other in _other_values(field, value):
                yield f"rope_parameters.{field}", form | {"rope_parameters": rope | {field: other}}


def _kept(rope: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in rope.items() if k == "partial_rotary_factor"}


def _other_values(field: str, value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, max(value - 1, 1)] if value else [1]
    if isinstance(value, float):
        return [value * 1.5, value * 100] if value else [0.5]
    if isinstance(value, str):
        return [_OTHER_ACTIVATION.get(value, "relu")] if re.search("act", field) else []
    if isinstance(value, list) and value and len({*map(str, value)}) > 1:
        return [value[::-1], [value[-1]] * len(value)]
    if isinstance(value, list) and value and all(v == "full_attention" for v in value):
        return [["sliding_attention"] * len(value)]
    return [2] if value is None and re.search("window|softcap", field) else []


def _skipped(layer_types: list[str] | None) -> list[int] | None:
    """Megatron's list of layers that slide; None where all do."""
    return layer_types and [int(kind == "sliding_attention") for kind in layer_types]


def megatron_args(config: dict[str, Any], args: argparse.Namespace) -> None:
    """Adds what Megatron's own arguments have for a model with this config, every option among them."""
    rope = config.get("rope_parameters") or {}
    moe = "num_experts_per_tok" in config
    softmax = config["model_type"] in ("mixtral", "qwen3_moe")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    vars(args).update(
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rotary_percent=rope.get("partial_rotary_factor", 1.0),
        rotary_interleaved=False,
        rotary_seq_len_interpolation_factor=None,
        use_rope_scaling=False,
        swiglu=True,
        squared_relu=False,
        quick_geglu=False,
        openai_gelu=False,
        group_query_attention=True,
        kv_channels=config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]),
        window_size=None if window is None else (window - 1, 0),
        window_attn_skip_freq=_skipped(config.get("layer_types")) if window is not None else None,
        attn_logit_softcapping=config.get("attn_logit_softcapping"),
        final_logit_softcapping=config.get("final_logit_softcapping"),
        num_experts=next((config[k] for k in ("num_local_experts", "num_experts") if k in config), None),
        moe_router_topk=config.get("num_experts_per_tok", 2),
        moe_router_topk_scaling_factor=None,
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_router_score_function="softmax",
        moe_router_pre_softmax=moe and softmax and config.get("norm_topk_prob") is False,
    )
