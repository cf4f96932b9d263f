"""Sizes of whole parameters that Megatron's arguments tell, against which the ranks' slices are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def known_rows(args: Mapping[str, Any]) -> dict[str, int]:
    """First dims of whole parameters, by name pattern, as far as the arguments tell them."""
    told: dict[str, int] = {}

    def number(key: str) -> int:
        value = args.get(key)
        return value if type(value) is int and value > 0 else 0

    heads, head = number("num_attention_heads"), number("kv_channels")
    groups = number("num_query_groups") if args.get("group_query_attention", True) else 0
    alike = not any(args.get(f"heterogeneous_layers_config_{k}") for k in ("path", "encoded_json"))
    if heads and head and alike and not args.get("multi_latent_attention"):
        # num_query_groups of None: every head has its own key and value. Some versions store 1 then.
        queries = heads * (2 if args.get("attention_output_gate") else 1)
        told["self_attention.linear_qkv.weight"] = (queries + 2 * (groups or heads)) * head
    if number("padded_vocab_size"):
        told["embedding.word_embeddings.weight"] = number("padded_vocab_size")
    query, pair, position = number("q_lora_rank"), number("kv_lora_rank"), number("qk_pos_emb_head_dim")
    if query:
        told["self_attention.linear_q_down_proj.weight"] = query
    if pair:
        told["self_attention.linear_kv_down_proj.weight"] = pair + position
    if query and pair:
        told["self_attention.linear_qkv_down_proj.weight"] = query + pair + position
    return told
