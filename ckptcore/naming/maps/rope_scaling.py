"""Read how configs scale rotary embeddings, and compare configs.

No tensor shows it: a model whose config lacks its scaling opens, and is wrong beyond short texts.

Sources: Megatron-LM, ``core/models/common/embeddings/rotary_pos_embedding.py`` (``_apply_scaling`` has
Llama 3's frequencies as constants), ``training/arguments.py``, ``core/transformer/transformer_config.py``
(``MLATransformerConfig``); Megatron-Bridge, ``models/gpt_provider.py``; transformers,
``modeling_rope_utils.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptcore.errors import NameMismatch
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.text import short_repr

NONE = "default"  # what transformers calls rotary embeddings without scaling
_PLAIN = frozenset({NONE, "mrope"})  # sections of the second for pictures, no other frequencies
_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
_LLAMA3_FACTOR = 8.0  # without --rope-scaling-factor
# Fields of arguments, and of Megatron-Bridge's run_config.yaml.
_SWITCHES = ("use_rope_scaling", "rope_scaling")
_STRETCHED = ("rotary_seq_len_interpolation_factor", "seq_len_interpolation_factor")
# Parameters by transformers' names that say other frequencies. The rest is derived, or of attention's scale.
_PARAMETERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of one config.

    Attributes:
        text: The config, the field, and its value, for messages.
        kind: By transformers' name: ``default``, ``linear``, ``llama3``, ``yarn``, ....
        parameters: Those of `_PARAMETERS` that the config has.
    """

    text: str
    kind: str
    parameters: Mapping[str, float]


def require_same_scaling(found: Iterable[RopeScaling | None]) -> None:
    """Require that configs agree; None is a config without an answer.

    Raises:
        NameMismatch: With what both say.
    """
    known = [f for f in found if f is not None]
    for other in known[1:]:
        first = known[0]
        shared = first.parameters.keys() & other.parameters.keys()
        if first.kind != other.kind or any(first.parameters[k] != other.parameters[k] for k in shared):
            raise NameMismatch(
                f"two configs contradict each other: {first.text}, {other.text}",
                hint="try the config of the model that was trained",
            )


def rope_scaling_of_megatron(name: str, content: Mapping[str, Any]) -> RopeScaling | None:
    """Read Megatron's arguments; None where they do not say it."""
    latent = content.get("multi_latent_attention") is True
    embedding = content.get("position_embedding_type")
    if latent or embedding == "yarn":
        place = "rotary_scaling_factor" if latent else "yarn_rotary_scaling_factor"
        factor = _number(content.get(place))
        if latent and content.get("rope_type") == "rope":
            return _scaling(name, "rope_type", "rope", NONE, {})
        if factor is None or (latent and content.get("rope_type") != "yarn"):
            return None
        original = "original_max_position_embeddings"
        length = _number(content.get(original if latent else f"yarn_{original}"))
        return _scaling(name, place, factor, "yarn", {"factor": factor, original: length})
    if embedding not in ("rope", "mrope"):
        return None
    switch = next((k for k in _SWITCHES if isinstance(content.get(k), bool)), "")
    if switch and content[switch]:
        factor = _number(content.get("rope_scaling_factor"))
        factor = _LLAMA3_FACTOR if factor is None else factor
        return _scaling(name, switch, True, "llama3", {"factor": factor, **_LLAMA3})
    for place in _STRETCHED:
        stretched = _number(content.get(place))
        if stretched is not None:
            return _scaling(name, place, stretched, "linear", {"factor": stretched})
    return _scaling(name, switch, False, NONE, {}) if switch else None


def rope_scaling_of_hub(name: str, content: Mapping[str, Any]) -> RopeScaling | None:
    """Read a config.json; None where it does not say it, or says it for each kind of layer."""
    below = content.get("text_config")
    for root in (content, *([below] if isinstance(below, Mapping) else [])):
        if "rope_local_base_freq" in root:
            return None
        for place in ("rope_scaling", "rope_parameters"):
            form = root.get(place)
            if not isinstance(form, Mapping):
                continue
            if any(isinstance(v, Mapping) for v in form.values()):
                return None
            kind = form.get("rope_type", form.get("type", NONE))
            if not isinstance(kind, str):
                return None
            parameters = {k: _number(form.get(k)) for k in _PARAMETERS}
            return _scaling(name, f"{place}.rope_type", kind, kind, parameters)
        if _number(root.get("rope_theta")) is not None:
            return _scaling(name, "rope_scaling", root.get("rope_scaling"), NONE, {})
    return None


def _scaling(
    name: str, place: str, value: Any, kind: str, parameters: Mapping[str, float | None]
) -> RopeScaling:
    known = {k: v for k, v in parameters.items() if v is not None}
    if kind in _PLAIN or (kind in ("linear", "llama3", "yarn") and known.get("factor") == 1):
        return RopeScaling(f"{name} says {place} = {short_repr(value)}", NONE, {})
    of = ", ".join(f"{k} = {v:.15g}" for k, v in known.items())
    return RopeScaling(
        f"{name} says {place} = {short_repr(value)} ({kind}{f': {of}' if of else ''})", kind, known
    )


def _number(value: Any) -> float | None:
    """Return a number of a config; None for any other value."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
