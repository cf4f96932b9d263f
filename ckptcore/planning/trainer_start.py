"""Make what a trainer's loader reads beside the weights of a model that a run begins from.

What Megatron and OLMo-core read is in modules of their own. For nanotron it is the model_config.json, whose
keys are those of `LlamaConfig` and `Qwen2Config` (nanotron/config/models_config.py). Sizes come from the
config and the tensors; nanotron's own converter copies the other fields (examples/llama/convert_weights.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import encode
from ckptcore.errors import Finding
from ckptcore.naming.maps.hyperparameters import Config, stated_in
from ckptcore.naming.worlds import HUB
from ckptcore.planning.megatron_arguments import common_state
from ckptcore.planning.name_maps import NameMap
from ckptcore.planning.olmo_core_config import step_config
from ckptcore.planning.stated_arguments import stated_numbers, unstated

_WORLD, _OBJECT, _PLACE = "nanotron", "model_config", "model_config.json for nanotron"
# Architecture -> the field by which nanotron knows the class of its config.
_MARKS = {"llama": "is_llama_config", "qwen2": "is_qwen2_config"}
# Fields of a config.json that have the same name, and change no tensor.
_COPIED = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings")


def _nanotron_config(
    naming: NameMap, tensors: Sequence[TensorSpec], mesh: Mapping[str, int]
) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Return the config of nanotron, which any number of ranks loads: see `start_state`."""
    numbers = stated_numbers(naming, _PLACE, "layer", "hidden", "heads", "kv_heads", "norm_eps", "rope_theta")
    terms = {name: text for config in reversed(naming.configs) for name, (text, _) in config.terms.items()}
    hub = next((c for c in naming.configs if c.world == HUB), None)
    content = stated_in(_WORLD, numbers, terms, "")
    if hub is not None:
        copied = {field: hub.at(field) for field in _COPIED}
        content |= {f: v for f, v in copied.items() if type(v) in (int, float)}
    shapes = {spec.fqn: spec.shape for spec in tensors}
    ends = {spec.fqn.rpartition("pp_block.")[2]: spec.shape for spec in tensors}
    content |= {
        _MARKS[naming.arch]: True,
        "vocab_size": shapes["model.token_position_embeddings.pp_block.token_embedding.weight"][0],
        "intermediate_size": ends["mlp.down_proj.weight"][1],
        "attention_bias": "attn.qkv_proj.bias" in ends,
        "tie_word_embeddings": "model.lm_head.pp_block.weight" not in shapes,
        "rope_interleaved": numbers["rotary_inner"] == 2,
    }
    written = Config(_PLACE, _WORLD, content)
    findings = tuple(unstated(naming, written, "model_config.json"))
    return {_OBJECT: encode(dict(sorted(content.items())))}, findings


StartState = Callable[
    [NameMap, Sequence[TensorSpec], Mapping[str, int]], tuple[dict[str, Any], tuple[Finding, ...]]
]
# World of names -> the objects that a format's layout of a start puts into files of their own.
_STATES: Mapping[str, StartState] = {
    "megatron": common_state,
    "nanotron": _nanotron_config,
    "olmo_core": step_config,
}


def start_state(
    naming: NameMap, tensors: Sequence[TensorSpec], mesh: Mapping[str, int]
) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Return key -> JSON form of the objects beside the weights, and findings about what they do not say.

    Args:
        naming: How the tensors got the trainer's names.
        tensors: Under these names.
        mesh: Axis -> ranks.

    Raises:
        NameMismatch: No config of the trainer says what the model's does.
        UsageError: The trainer cannot cut the model for this mesh.
    """
    return _STATES[naming.to](naming, tensors, mesh)
