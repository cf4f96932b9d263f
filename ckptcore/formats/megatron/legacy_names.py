"""Translate names from before Megatron-Core to those of Megatron-Core.

Until 2024 Megatron-LM kept models as nested dicts; ``language_model.encoder`` ("transformer" until 2021)
held the layers (megatron/model/{language_model,transformer}.py, later megatron/legacy/model). The last
stage's copy of tied embeddings is ``word_embeddings_for_head``, of NeMo's own modules ``word_embeddings``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckptcore.errors import MalformedCheckpoint, UnsupportedFormat

NAME = "megatron_legacy"
FILE = re.compile(r"^(mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?)/model_optim_rng\.pt$")
NEMO_FILE = re.compile(r"^((?:mp|tp)_rank_(\d{2,6})(?:_pp_rank_(\d{3,6}))?)/model_weights\.ckpt$")
_MAX_DEPTH = 16
_LAYERS = r"^language_model\.(?:encoder|transformer)\."
# Before Megatron-Core -> since; applied in this order.
RENAMES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(old), new)
    for old, new in (
        (r"^language_model\.embedding\.", "embedding."),
        (r"^language_model\.rotary_pos_emb\.", "rotary_pos_emb."),
        (r"^language_model\.output_layer\.", "output_layer."),
        (r"^word_embeddings(?:_for_head)?\.", "output_layer."),
        (_LAYERS + r"final_(?:layer)?norm\.", "decoder.final_layernorm."),
        (_LAYERS + r"layers\.", "decoder.layers."),
        (r"\.(?:self_)?attention\.query_key_value\.", ".self_attention.linear_qkv."),
        (r"\.(?:self_)?attention\.dense\.", ".self_attention.linear_proj."),
        (r"^(decoder\.layers\.\d+)\.input_norm\.", r"\1.input_layernorm."),
        (r"^(decoder\.layers\.\d+)\.post_attention_(?:layer)?norm\.", r"\1.pre_mlp_layernorm."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
    )
)
_OLD = ("language_model", "word_embeddings_for_head")


def current_names(state: Mapping[str, Any], label: str) -> tuple[dict[str, Any], bool]:
    """Return a model's state dict with Megatron-Core's names, and whether its names were older.

    Args:
        state: The state dict, flat or nested.
        label: Name of the dict, for messages.

    Raises:
        MalformedCheckpoint: The dict nests too deeply, or two tensors get one name.
        UnsupportedFormat: The model has an encoder and a decoder.
    """
    if not any(key.split(".", 1)[0] in _OLD for key in state):
        return dict(state), False
    out: dict[str, Any] = {}
    for name, value in _flat_names(state, "", 0, label):
        if name.startswith("language_model.decoder."):
            raise UnsupportedFormat(
                f"cannot read {label}: it is an encoder-decoder model from before Megatron-Core",
                hint="convert it with the Megatron-LM that wrote it",
            )
        for old, new in RENAMES:
            name = old.sub(new, name)
        if name in out:
            raise MalformedCheckpoint(f"{label} has two tensors with the name {name}")
        out[name] = value
    return out, True


def _flat_names(tree: Any, name: str, depth: int, label: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        yield name, tree
        return
    if depth > _MAX_DEPTH or any(type(k) is not str for k in tree):
        raise MalformedCheckpoint(f"{label} must be a nested state dict")
    for key, value in tree.items():
        yield from _flat_names(value, f"{name}.{key}" if name else key, depth + 1, label)
