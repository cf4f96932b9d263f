"""Recognise the world of a model's names, by patterns that only one trainer's modules make.

The result is only a suspicion: a map must then account for every tensor. Names that match no pattern stay as
they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# Patterns of no other world, each with a part of every name that it matches. torchtitan's names are those of
# Meta's Llama.
_MARKS: tuple[tuple[str, str, re.Pattern[str]], ...] = tuple(
    (world, part, re.compile(pattern))
    for world, part, pattern in (
        ("megatron", "word_embeddings", r"(.*\.)?embedding\.word_embeddings\.weight"),
        (
            "megatron",
            "self_attention.linear_",
            r"(.*\.)?decoder\.layers\.(\d+\.)?self_attention\.linear_(qkv|proj|q_proj|kv_up_proj)\..+",
        ),
        ("megatron", "linear_fc", r"(.*\.)?decoder\.layers\.(\d+\.)?mlp\.(.+\.)?linear_fc[12]\..+"),
        ("megatron", "mixer.", r"(.*\.)?decoder\.layers\.(\d+\.)?mixer\..+"),
        ("torchtitan", "_norm.", r"layers\.\d+\.(attention_norm|ffn_norm)\.weight"),
        ("torchtitan", ".attention.wqkv.", r"layers\.\d+\.attention\.wqkv\.layer_norm_weight"),
        (
            "gpt_neox",
            ".attention.query_key_value.",
            r"(sequential\.)?\d+\.attention\.query_key_value\.weight",
        ),
        ("nanotron", ".pp_block.attn.", r"model\.decoder\.\d+\.pp_block\.attn\.(qkv|o)_proj\.weight"),
        ("olmo_core", "blocks.", r"blocks\.\d+\.(attention\.w_(q|k|v|out)|feed_forward_norm)\.weight"),
        ("olmo", "blocks.", r"transformer\.blocks\.\d+\.(att_proj|attn_out|ff_proj|q_proj)\.weight"),
    )
)
HUB = "hf-hub"
LIVE = "hf-live"
PEFT = "peft"
# World -> generations of its names, the newest first: a map to it makes that one unless another is named.
# torchtitan's are called like its projections of queries, Megatron's and GPT-NeoX's like how they store
# layers, OLMo-core's like its modules of experts, nanotron's like how it stores rotary pairs.
GENERATIONS: Mapping[str, tuple[str, ...]] = {
    "torchtitan": ("qkv_linear", "wqkv", "wq"),
    "megatron": ("stacked", "fused", "layers", "grouped", "sequential", "transformer-engine"),
    "gpt_neox": ("pipeline", "sequential"),
    "olmo_core": ("default", "dropless"),
    "nanotron": ("halves", "interleaved"),
}
# World and generation -> numbers that no config of the hub has: they are chosen with the generation.
GENERATION_NUMBERS: Mapping[tuple[str, str], Mapping[str, int]] = {
    ("nanotron", "halves"): {"rotary_inner": 1},
    ("nanotron", "interleaved"): {"rotary_inner": 2},
}
_WORLDS = {HUB, LIVE, PEFT, "verl", *(world for world, *_ in _MARKS)}


def worlds() -> tuple[str, ...]:
    """Return the names of all worlds."""
    return tuple(sorted(_WORLDS))


def is_world(name: str) -> bool:
    """Return whether a world has this name."""
    return name in _WORLDS


def suspected(names: Iterable[str]) -> str | None:
    """Return the trainer's world that most names match; None if no name matches any."""
    votes: dict[str, int] = {}
    for name in names:
        for world, part, mark in _MARKS:
            if part in name and mark.fullmatch(name):
                votes[world] = votes.get(world, 0) + 1
    return max(votes, key=lambda w: votes[w], default=None)


def parse_world(text: str) -> tuple[str, str]:
    """Return (world, generation of its names or "") of ``WORLD[:GENERATION]``.

    >>> parse_world("torchtitan:wq"), parse_world("hf-hub")
    (('torchtitan', 'wq'), ('hf-hub', ''))
    """
    world, _, generation = text.partition(":")
    return world, generation
