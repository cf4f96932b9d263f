"""Make the config.json of an OLMo-core step folder: the model's config, and its tokenizer's numbers.

``TransformerConfig.from_dict`` builds the model from the section ``model``, and ``TokenizerConfig`` has what
a generation needs (olmo_core/nn/transformer/config.py, olmo_core/data/tokenizer.py; OLMo-core 3.0.0).
Parameters are float32, as a trainer has them, whatever the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any

from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import encode
from ckptcore.errors import Finding, NameMismatch, UsageError, finding
from ckptcore.naming.maps.hub_config import PLAIN_ROPE, term
from ckptcore.naming.maps.hyperparameters import Config
from ckptcore.naming.maps.rope_scaling import RopeScaling
from ckptcore.naming.worlds import HUB
from ckptcore.planning.name_maps import NameMap
from ckptcore.planning.stated_arguments import stated_numbers, unstated

_WORLD, _OBJECT, _PLACE = "olmo_core", "config", "config.json for OLMo-core"
_CLASS = "_CLASS_"  # the key by which OLMo-core finds the class of a config
_NN = "olmo_core.nn"
_DTYPE = {"dtype": "float32"}
_BLOCK, _EXPERTS = "model.block.name", "model.block.feed_forward_moe.name"  # what a map requires
_KIND = "model.block.local.name"  # of a map whose layers are of several kinds
_SCALED = frozenset({"gemma3"})  # architectures that multiply embeddings by the root of their width
_FULL = -1  # the window of a layer that attends to all tokens
_LAYER = "blocks.0."  # the shapes of all layers are alike
_LENGTH = ("old_context_len", "original_max_position_embeddings", int)
# Kind of scaling by transformers' name -> class, and its fields: name, transformers' parameter, and how its
# value becomes that of the field (nn/rope.py, `to_hf_config` of each class).
_SCALINGS: Mapping[str, tuple[str, tuple[tuple[str, str, Callable[[float], float]], ...]]] = {
    "linear": ("PIRoPEScalingConfig", (("factor", "factor", float),)),
    "llama3": (
        "StepwiseRoPEScalingConfig",
        (
            ("factor", "factor", float),
            ("low_freq_proportion", "low_freq_factor", lambda factor: 1 - 1 / factor),
            ("high_freq_proportion", "high_freq_factor", lambda factor: 1 / factor),
            _LENGTH,
        ),
    ),
    "yarn": (
        "YaRNRoPEScalingConfig",
        (
            ("factor", "factor", float),
            ("beta_fast", "beta_fast", int),
            ("beta_slow", "beta_slow", int),
            _LENGTH,
        ),
    ),
}


def step_config(
    naming: NameMap, tensors: Sequence[TensorSpec], mesh: Mapping[str, int]
) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Return the config as an object, and findings about what it does not say.

    Args:
        naming: How the tensors got OLMo-core's names.
        tensors: Under these names.
        mesh: Axis -> ranks; a step has the same config for all.

    Raises:
        NameMismatch: No field of OLMo-core's says what the config does.
        UsageError: No config says a number of it.
    """
    numbers = stated_numbers(naming, _PLACE, "layer", "hidden", "heads", "kv_heads", "norm_eps", "rope_theta")
    hub = next((c for c in naming.configs if c.world == HUB), None)
    shapes = {spec.fqn: spec.shape for spec in tensors}
    required = naming.rules.target_requires if naming.rules is not None else {}
    by_kind = _KIND in required  # of layers: those with a window are blocks of another name
    if by_kind:
        stated_numbers(naming, _PLACE, "local_rope_theta", "window")
    norm = {
        "name": "rms",
        "eps": numbers["norm_eps"],
        "bias": False,
        **_DTYPE,
        _CLASS: f"{_NN}.layer_norm.LayerNormConfig",
    }
    experts = next(iter(required.get(_EXPERTS, ())), "")
    attention = _attention(naming, numbers, shapes, norm, None if by_kind else hub)
    block = {
        "name": next(iter(required.get(_KIND if by_kind else _BLOCK, ("default",)))),
        "sequence_mixer": attention,
        "layer_norm": norm,
        _CLASS: f"{_NN}.transformer.config.TransformerBlockConfig",
    }
    block |= (
        {"feed_forward_moe": _experts(str(experts), numbers, shapes, hub)}
        if experts
        else {"feed_forward": _feed_forward(naming, shapes)}
    )
    head = {
        "name": "default",
        "layer_norm": norm,
        "bias": False,
        **_DTYPE,
        _CLASS: f"{_NN}.lm_head.LMHeadConfig",
    }
    model = {
        "name": "moe" if experts else "default",
        "d_model": numbers["hidden"],
        "vocab_size": shapes["embeddings.weight"][0],
        "n_layers": numbers["layer"],
        "block": block,
        "lm_head": head,
        **_DTYPE,
        _CLASS: f"{_NN}.transformer.config.TransformerConfig",
    }
    if by_kind and hub is not None:
        model |= _blocks_by_kind(block, attention, numbers, hub)
    if naming.arch in _SCALED:
        model["embed_scale"] = sqrt(numbers["hidden"])
    if hub is not None and hub.at("tie_word_embeddings") is True:
        model["tie_word_embeddings"] = True
    content: dict[str, Any] = {"model": model}
    if tokenizer := _tokenizer(numbers, shapes, hub):
        content["dataset"] = {"tokenizer": tokenizer}
    findings = [*unstated(naming, Config(_PLACE, _WORLD, content), "config.json")]
    if not tokenizer:
        message = "config.json has no tokenizer, because no config says eos_token_id"
        findings.append(finding("unstated-arguments", "coverage", message))
    return {_OBJECT: encode(content)}, tuple(findings)


def _blocks_by_kind(
    block: Mapping[str, Any], attention: Mapping[str, Any], numbers: Mapping[str, Any], hub: Config
) -> dict[str, Any]:
    """Return the blocks of layers with and without a window, and which is which; raise where none says it."""
    sliding = hub.sliding_layers
    if sliding is None:
        raise UsageError(
            f"cannot write {_PLACE}: no config says which layers have a window",
            hint="add --config with the model's config.json, or write the weights alone: --to dcp",
        )
    local = {
        **attention,
        "rope": {**attention["rope"], "theta": int(numbers["local_rope_theta"])},
        "sliding_window": _window([int(numbers["window"])]),
    }
    local["rope"].pop("scaling", None)
    return {
        "block": {"local": {**block, "sequence_mixer": local}, "global": block},
        "block_pattern": ["local" if slides else "global" for slides in sliding[0]],
    }


def _window(pattern: Sequence[int]) -> dict[str, Any]:
    return {
        "pattern": list(pattern),
        "force_full_attention_on_first_layer": False,
        "force_full_attention_on_last_layer": False,
        _CLASS: f"{_NN}.attention.SlidingWindowAttentionConfig",
    }


def _attention(
    naming: NameMap,
    numbers: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    norm: Mapping[str, Any],
    hub: Config | None,
) -> dict[str, Any]:
    before = f"{_LAYER}attention."
    of_queries = shapes.get(f"{before}q_norm.weight")
    rows, key_rows = (shapes[f"{before}{name}.weight"][0] for name in ("w_q", "w_k"))
    heads, kv_heads = int(numbers["heads"]), int(numbers["kv_heads"])
    if rows % heads or key_rows != rows // heads * kv_heads:
        raise NameMismatch(
            f"{rows} rows of queries and {key_rows} of keys are not {heads} and {kv_heads} heads",
            hint="try --config with the config of the model that this is",
        )
    rope: dict[str, Any] = {
        "name": "default",
        "theta": int(numbers["rope_theta"]),
        _CLASS: f"{_NN}.rope.RoPEConfig",
    }
    scaling = next((s for c in naming.configs if (s := c.rope_scaling) is not None), None)
    if scaling is not None and scaling.kind != PLAIN_ROPE and scaling.kind in _SCALINGS:
        rope["scaling"] = _scaling(scaling)
    attention = {
        "name": "default",
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": rows // heads,
        "bias": f"{before}w_q.bias" in shapes,
        "rope": rope,
        "qk_norm": norm if of_queries is not None else None,
        "use_head_qk_norm": of_queries is not None and of_queries[0] != rows,
        **_DTYPE,
        "type": "attention",
        _CLASS: f"{_NN}.attention.AttentionConfig",
    }
    sliding = hub.sliding_layers if hub is not None else None
    if sliding is not None and any(sliding[0]):
        window = int(numbers["window"])
        attention["sliding_window"] = _window([window if slides else _FULL for slides in sliding[0]])
    return attention


def _scaling(scaling: RopeScaling) -> dict[str, Any]:
    name, fields = _SCALINGS[scaling.kind]
    pairs = {field: (scaling.parameters.get(hub_field), convert) for field, hub_field, convert in fields}
    stated = {field: convert(value) for field, (value, convert) in pairs.items() if value}
    return {**stated, _CLASS: f"{_NN}.rope.{name}"}


def _feed_forward(naming: NameMap, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    activation = next((c.terms["activation"][0] for c in naming.configs if "activation" in c.terms), None)
    form = {
        "name": "default",
        "hidden_size": shapes[f"{_LAYER}feed_forward.w1.weight"][0],
        "bias": False,
        **_DTYPE,
        _CLASS: f"{_NN}.feed_forward.FeedForwardConfig",
    }
    return form | ({} if activation is None else {"activation": term(activation)})


def _experts(
    form: str, numbers: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], hub: Config | None
) -> dict[str, Any]:
    router = {
        "name": "default",
        "top_k": numbers["experts_of_token"],
        "gating_function": "softmax",
        _CLASS: f"{_NN}.moe.router.MoERouterConfig",
    }
    sums = hub.sums_to_one if hub is not None else None
    if sums is not None and sums[0]:
        router["normalize_expert_weights"] = 1.0  # by the norm of this order
    rows, _ = shapes[f"{_LAYER}feed_forward_moe.experts.mlp.w2"]
    return {
        "name": form,
        "num_experts": numbers["experts"],
        "hidden_size": rows // int(numbers["experts"]),
        "router": router,
        **_DTYPE,
        _CLASS: f"{_NN}.moe.moe.MoEConfig",
    }


def _tokenizer(
    numbers: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], hub: Config | None
) -> dict[str, Any]:
    """Return the numbers of the tokenizer, as ``TokenizerConfig.from_hf`` takes them from a config.json.

    None without an end of sequence, which ``TokenizerConfig`` needs.
    """
    ids = {name: None if hub is None else hub.at(f"{name}_token_id") for name in ("eos", "pad", "bos")}
    first = {name: v[0] if isinstance(v, (list, tuple)) and v else v for name, v in ids.items()}
    if type(first["eos"]) is not int:
        return {}
    return {
        "vocab_size": numbers.get("vocab", shapes["embeddings.weight"][0]),
        "eos_token_id": first["eos"],
        "pad_token_id": first["eos"] if first["pad"] is None else first["pad"],
        "bos_token_id": first["bos"],
        _CLASS: "olmo_core.data.tokenizer.TokenizerConfig",
    }
