"""Make the common state that Megatron's loader reads beside the weights of a model that it begins from.

``load_checkpoint`` takes the version of the layout of queries, keys and values from ``checkpoint_version``,
and compares ``args`` with those of the job; ``--use-checkpoint-args`` takes them
(megatron/training/checkpointing.py, ``load_args_from_checkpoint``). They are made from the model's config by
the tables that compare both (`ckptcore.naming.maps.hyperparameters`), from what the map requires of
Megatron's config, and from the tensors; then they are compared like those of a training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import Named, encode
from ckptcore.errors import Finding, UsageError, finding
from ckptcore.naming.maps.agreement import agreed
from ckptcore.naming.maps.hyperparameters import Config, stated_in
from ckptcore.naming.maps.rope_scaling import megatron_rope_arguments
from ckptcore.planning.bridge_config import LATENT, run_config, without_field
from ckptcore.planning.name_maps import VOCABULARY_STEP, NameMap
from ckptcore.planning.stated_arguments import unstated
from ckptcore.utils.text import listed

_WORLD = "megatron"
_VERSION = 3.0  # of the layout of queries, keys and values; an older one is permuted when it is loaded
# Argument -> names of tensors that only a model with it has.
_BY_TENSOR: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        LATENT: r".*\.self_attention\.linear_kv_up_proj\.weight",
        "qk_layernorm": r".*\.self_attention\.((q|k|kv)_layernorm|linear_kv_up_proj\.layer_norm)[._].*",
        "add_qkv_bias": r".*\.self_attention\.linear_qkv\.bias",
        "add_bias_linear": r".*\.linear_(proj|fc[12])\.bias",
        "untie_embeddings_and_output_weights": r"output_layer\.weight",
        "moe_router_enable_expert_bias": r".*\.mlp\.router\.expert_bias",
    }.items()
}
# Argument -> tensors whose last dim it is.
_WIDTHS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "ffn_hidden_size": r".*\.mlp\.linear_fc2\.weight",
        "moe_ffn_hidden_size": r".*\.mlp\.experts\.(.*\.)?linear_fc2\.weight\d*",
        "moe_shared_expert_intermediate_size": r".*\.mlp\.shared_experts\.linear_fc2\.weight",
    }.items()
}
_DELTA_NET = re.compile(r"decoder\.layers\.(\d+)\.self_attention\.A_log")
_ROUTER = re.compile(r"decoder\.layers\.(\d+)\.mlp\.router\.weight")
_EMBEDDING = "embedding.word_embeddings.weight"
_MESH = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
}


def common_state(
    naming: NameMap, tensors: Sequence[TensorSpec], mesh: Mapping[str, int]
) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Return key -> JSON form of the common state, and findings about what it does not say.

    Args:
        naming: How the tensors got Megatron's names.
        tensors: Under these names.
        mesh: Axis -> ranks.

    Raises:
        NameMismatch: No arguments of Megatron's say what the config does.
        UsageError: Its tensor parallel ranks do not divide the feed-forward network.
    """
    arguments = _of_config(naming) | _of_tensors(naming, tensors)
    tp = mesh.get("tp", 1)
    if uneven := next((name for name in _WIDTHS if arguments.get(name, 0) % tp), ""):
        raise UsageError(
            f"cannot cut {arguments[uneven]} rows of the feed-forward network with tp={tp}: {uneven}",
            hint="use a tp that divides them",
        )
    arguments |= {name: mesh.get(axis, 1) for name, axis in _MESH.items()}
    arguments |= {"no_save_optim": True, "no_save_rng": True, "ckpt_format": "torch_dist"}
    own = Config("the arguments for Megatron", _WORLD, arguments)
    findings = tuple(unstated(naming, own, "args in common.pt"))
    args = Named("namespace", dict(sorted(arguments.items())))
    state: dict[str, Any] = {"args": args, "checkpoint_version": _VERSION, "iteration": 0}
    if lacking := without_field(arguments):
        message = (
            "run_config.yaml for Megatron-Bridge is not written: no field of its providers says "
            f"{listed(lacking, 12)}"
        )
        findings += (finding("unstated-arguments", "coverage", message),)
    elif not findings:  # a provider of Bridge is the model, and no command line completes it
        dtype = next((t.dtype for t in tensors if t.fqn == _EMBEDDING), "")
        state["run_config"] = run_config(arguments, dtype)
        bridge = Config("run_config.yaml for Megatron-Bridge", _WORLD, state["run_config"]["model"])
        findings += tuple(unstated(naming, bridge, "run_config.yaml"))
    return {k: encode(v) for k, v in state.items()}, findings


def _of_config(naming: NameMap) -> dict[str, Any]:
    """Return the arguments for a config's numbers and terms, and for what the map requires."""
    configs = naming.configs
    terms: dict[str, str] = {}
    for config in configs:
        terms = {name: text for name, (text, _) in config.terms.items()} | terms
    hub = next((c for c in configs if c.fields is not None), None)
    kind = hub.fields.model_type if hub is not None and hub.fields is not None else ""
    # Sizes that no config states are those of the tensors.
    numbers = {name: value for name, (value, _) in {**naming.numbers, **agreed(configs)}.items()}
    required = naming.rules.target_requires if naming.rules is not None else {}
    out: dict[str, Any] = {k: values[0] for k, values in required.items() if values and "." not in k}
    out |= stated_in(_WORLD, numbers, terms, kind)
    if "rotary_base" in out:
        out.setdefault("position_embedding_type", "rope")
    if {"num_attention_heads", "num_query_groups"} <= out.keys():
        out["group_query_attention"] = out["num_query_groups"] < out["num_attention_heads"]
    if hub is not None:
        length = hub.at("max_position_embeddings")
        out |= {"max_position_embeddings": length} if isinstance(length, int) else {}
        sums = hub.sums_to_one
        if "num_experts" in out and sums is not None and out.get("moe_router_score_function") != "sigmoid":
            out["moe_router_pre_softmax"] = not sums[0]
    return out


def _of_tensors(naming: NameMap, tensors: Sequence[TensorSpec]) -> dict[str, Any]:
    """Return the arguments that names and shapes of tensors state, and the scaling of their attention."""
    names = [t.fqn for t in tensors]
    out: dict[str, Any] = {k: any(map(pattern.fullmatch, names)) for k, pattern in _BY_TENSOR.items()}
    for argument, pattern in _WIDTHS.items():
        widths = {t.shape[-1] for t in tensors if pattern.fullmatch(t.fqn)}
        out |= {argument: widths.pop()} if len(widths) == 1 else {}
    rows = next((t.shape[0] for t in tensors if t.fqn == _EMBEDDING), None)
    if rows is not None:
        out |= {"padded_vocab_size": rows, "make_vocab_size_divisible_by": VOCABULARY_STEP[_WORLD]}
    numbers = agreed(naming.configs)
    for argument, pattern in (("moe_layer_freq", _ROUTER), ("linear_attention_freq", _DELTA_NET)):
        layers = {int(m[1]) for m in map(pattern.fullmatch, names) if m is not None}
        if "layer" in numbers and layers:
            out[argument] = [int(n in layers) for n in range(int(numbers["layer"][0]))]
    scaling = next((s for c in naming.configs if (s := c.rope_scaling) is not None), None)
    return out | ({} if scaling is None else megatron_rope_arguments(scaling, latent=out[LATENT]))
