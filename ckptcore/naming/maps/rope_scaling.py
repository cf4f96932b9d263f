"""Read how configs scale rotary embeddings, and compare configs.

No tensor shows it: a model whose config lacks its scaling opens, and is wrong beyond short texts.

Sources: Megatron-LM, ``core/models/common/embeddings/rotary_pos_embedding.py`` (``_apply_scaling`` has
Llama 3's frequencies as constants), ``training/arguments.py``, ``core/transformer/transformer_config.py``
(``MLATransformerConfig``); Megatron-Bridge, ``models/gpt_provider.py``; OLMo-core 3.0.0, ``nn/rope.py``
(``to_hf_config`` of each class); torchtitan 0.3.0, ``models/common/rope.py``, and earlier
``models/llama3/model/args.py``; nanotron, ``nn/rotary.py``; transformers, ``modeling_rope_utils.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptcore.naming.maps.hub_config import PLAIN_ROPE, ROPE, HubFields
from ckptcore.utils.text import short_repr

_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
_LLAMA3_FACTOR = 8.0  # without --rope-scaling-factor
# Fields of arguments, and of Megatron-Bridge's run_config.yaml.
_SWITCHES = ("use_rope_scaling", "rope_scaling")
_STRETCHED = ("rotary_seq_len_interpolation_factor", "seq_len_interpolation_factor")
_YARN = ("original_max_position_embeddings", "beta_fast", "beta_slow")
_OWN_ROPE = "rope"  # the place in the configs of OLMo and torchtitan
# Field that only this scaling of OLMo-core has -> transformers' name for it; a new base is no scaling.
_OLMO_KINDS = {
    "beta_fast": "yarn",
    "low_freq_proportion": "llama3",
    "low_freq_factor": "llama3",
    "new_theta": PLAIN_ROPE,
    "factor": "linear",
}
_OLMO_PARAMETERS = {"original_max_position_embeddings": "old_context_len"}
_INTERPOLATED = "rope_seq_len_interpolation_factor"  # nanotron's
_TITAN_ARGUMENTS = "rope_scaling_args"
_TITAN_KINDS = {"llama": ("llama3", "scaling_factor"), "yarn": ("yarn", "rope_factor")}
# Parameters by transformers' names that say other frequencies. The rest is derived, or of attention's scale.
_PARAMETERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
)


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of one config.

    Attributes:
        text: The field and its value, for messages.
        kind: By transformers' name: ``default``, ``linear``, ``llama3``, ``yarn``, ....
        parameters: Those of `_PARAMETERS` that the config has.
    """

    text: str
    kind: str
    parameters: Mapping[str, float]


def same_scaling(first: RopeScaling, second: RopeScaling) -> bool:
    """Return whether two configs scale alike; a parameter that one does not say differs in nothing."""
    shared = first.parameters.keys() & second.parameters.keys()
    return first.kind == second.kind and all(first.parameters[k] == second.parameters[k] for k in shared)


def rope_scaling_of_megatron(content: Mapping[str, Any]) -> RopeScaling | None:
    """Read Megatron's arguments; None where they do not say it."""
    latent = content.get("multi_latent_attention") is True
    embedding = content.get("position_embedding_type")
    if latent or embedding == "yarn":
        place = "rotary_scaling_factor" if latent else "yarn_rotary_scaling_factor"
        factor = _number(content.get(place))
        if latent and content.get("rope_type") == "rope":
            return _scaling("rope_type", "rope", PLAIN_ROPE, {})
        if factor is None or (latent and content.get("rope_type") != "yarn"):
            return None
        stored = {k: _number(content.get(k if latent else f"yarn_{k}")) for k in _YARN}
        return _scaling(place, factor, "yarn", {"factor": factor, **stored})
    if embedding not in ("rope", "mrope", None) or (embedding is None and "rotary_base" not in content):
        return None
    switch = next((k for k in _SWITCHES if isinstance(content.get(k), bool)), "")
    if switch and content[switch]:
        factor = _number(content.get("rope_scaling_factor"))
        factor = _LLAMA3_FACTOR if factor is None else factor
        return _scaling(switch, True, "llama3", {"factor": factor, **_LLAMA3})
    for place in _STRETCHED:
        stretched = _number(content.get(place))
        if stretched is not None:
            return _scaling(place, stretched, "linear", {"factor": stretched})
    # Releases before the switch only have a factor of the other kind.
    stated_field = switch or next((k for k in _STRETCHED if k in content), "")
    return _scaling(stated_field, content[stated_field], PLAIN_ROPE, {}) if stated_field else None


def megatron_rope_arguments(scaling: RopeScaling, *, latent: bool) -> dict[str, Any]:
    """Return Megatron's arguments for a scaling, as `rope_scaling_of_megatron` reads them; {} for others.

    latent: whether attention is multi-head latent, whose arguments have other names.
    """
    factor = scaling.parameters.get("factor")
    if scaling.kind == "yarn":
        stated = {k: scaling.parameters[k] for k in _YARN if k in scaling.parameters}
        if latent:
            return {"rope_type": "yarn", "rotary_scaling_factor": factor, **stated}
        return {
            "position_embedding_type": "yarn",
            "yarn_rotary_scaling_factor": factor,
            **{f"yarn_{k}": value for k, value in stated.items()},
        }
    if latent:
        return {"rope_type": "rope"} if scaling.kind == PLAIN_ROPE else {}
    by_kind: dict[str, dict[str, Any]] = {
        PLAIN_ROPE: {"use_rope_scaling": False},
        "llama3": {"use_rope_scaling": True, "rope_scaling_factor": factor},
        "linear": {"rotary_seq_len_interpolation_factor": factor},
    }
    return by_kind.get(scaling.kind, {})


def rope_scaling_of_olmo_core(content: Mapping[str, Any]) -> RopeScaling | None:
    """Read OLMo-core's config; None where it does not say it, or says it for each layer."""
    model = _mapping(content, "model")
    block = _mapping(model, "block")
    mixer = next((m for k in ("sequence_mixer", "attention") if (m := _mapping(block, k))), {})
    rope = mixer.get(_OWN_ROPE)
    if not isinstance(rope, Mapping) or model.get("block_overrides"):
        return None
    stated = rope.get("scaling")
    if not isinstance(stated, Mapping):
        return _scaling("rope.scaling", None, PLAIN_ROPE, {}) if stated is None else None
    kind = next((kind for key, kind in _OLMO_KINDS.items() if key in stated), "")
    if not kind:
        return None
    parameters = {k: _number(stated.get(_OLMO_PARAMETERS.get(k, k))) for k in _PARAMETERS}
    low, high = (_number(stated.get(f"{end}_freq_proportion")) for end in ("low", "high"))
    if low is not None and high is not None and 0 <= low < 1 and 0 < high <= 1:
        parameters |= {"low_freq_factor": 1.0 / (1 - low), "high_freq_factor": 1.0 / high}
    return _scaling("rope.scaling", dict(stated), kind, parameters)


def rope_scaling_of_olmo(content: Mapping[str, Any]) -> RopeScaling | None:
    """Read the config of allenai/OLMo, which scales nothing; None where it has no rotary embeddings."""
    rotary = _mapping(content, "model").get(_OWN_ROPE)
    return _scaling("model.rope", rotary, PLAIN_ROPE, {}) if rotary is True else None


def rope_scaling_of_torchtitan(content: Mapping[str, Any]) -> RopeScaling | None:
    """Read torchtitan's config, or earlier its arguments of Llama; None where they do not say it."""
    model = _mapping(content, "model") or content
    if _TITAN_ARGUMENTS in model:
        stated = model[_TITAN_ARGUMENTS]
        if not isinstance(stated, Mapping):
            return _scaling(_TITAN_ARGUMENTS, None, PLAIN_ROPE, {}) if stated is None else None
        kind, factor, place = "llama3", "scaling_factor", _TITAN_ARGUMENTS
    else:
        stated = _mapping(model, _OWN_ROPE)
        named, place = stated.get("scaling"), "rope.scaling"
        if named == "none":
            return _scaling(place, named, PLAIN_ROPE, {})
        if not isinstance(named, str) or named not in _TITAN_KINDS:
            return None
        kind, factor = _TITAN_KINDS[named]
    length = "original_seq_len" if kind == "yarn" else "original_max_position_embeddings"
    titan_names = {"factor": factor, "original_max_position_embeddings": length}
    used = ("beta_fast", "beta_slow") if kind == "yarn" else ("low_freq_factor", "high_freq_factor")
    parameters = {k: _number(stated.get(titan_names.get(k, k))) for k in (*titan_names, *used)}
    return _scaling(place, stated.get("scaling", dict(stated)), kind, parameters)


def rope_scaling_of_hub(fields: HubFields) -> RopeScaling | None:
    """Read a config.json; None where it does not say it, or says it for each kind of layer."""
    if fields.rope_by_layer:
        return None
    kind = fields.get(f"{ROPE}.rope_type")
    if kind is None or not isinstance(kind.value, str):
        return None
    stated = {k: fields.get(f"{ROPE}.{k}") for k in _PARAMETERS}
    parameters = {k: None if s is None else _number(s.value) for k, s in stated.items()}
    scaling = _scaling(kind.place, kind.value, kind.value, parameters)
    return replace(scaling, text=str(kind)) if kind.text else scaling


def _scaling(place: str, value: Any, kind: str, parameters: Mapping[str, float | None]) -> RopeScaling:
    stated_parameters = {k: v for k, v in parameters.items() if v is not None}
    if kind == PLAIN_ROPE or (kind in ("linear", "llama3", "yarn") and stated_parameters.get("factor") == 1):
        return RopeScaling(f"{place} = {short_repr(value)}", PLAIN_ROPE, {})
    of = ", ".join(f"{k} = {v:.15g}" for k, v in stated_parameters.items())
    return RopeScaling(
        f"{place} = {short_repr(value)} ({kind}{f': {of}' if of else ''})", kind, stated_parameters
    )


def _mapping(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a config inside another one, or an empty one."""
    inside = content.get(key)
    return inside if isinstance(inside, Mapping) else {}


def _number(value: Any) -> float | None:
    """Return a number of a config; None for any other value."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def rope_scaling_of_nanotron(content: Mapping[str, Any]) -> RopeScaling | None:
    """Read model_config.json, whose models may interpolate positions; none reads ``rope_scaling``."""
    if content.get("rope_scaling") is not None:
        return None
    factor = _number(content.get(_INTERPOLATED))
    text = f"{_INTERPOLATED} = {short_repr(content.get(_INTERPOLATED))}"
    return RopeScaling(text, "linear", {"factor": factor}) if factor else RopeScaling(text, PLAIN_ROPE, {})


# World of a trainer -> what reads its config.
BY_WORLD: Mapping[str, Callable[[Mapping[str, Any]], RopeScaling | None]] = {
    "megatron": rope_scaling_of_megatron,
    "olmo_core": rope_scaling_of_olmo_core,
    "olmo": rope_scaling_of_olmo,
    "torchtitan": rope_scaling_of_torchtitan,
    "nanotron": rope_scaling_of_nanotron,
}
