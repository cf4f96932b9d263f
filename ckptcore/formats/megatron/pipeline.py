"""Read the sizes of a model from Megatron's arguments: layers of each pipeline stage, rows of parameters.

Layers are numbered through the chunks in the order (chunk of a stage, stage): with two chunks a stage, the
first chunks of all stages come before the second ones. The arguments give the number of layers of a chunk
(megatron/core/transformer/{transformer_block,transformer_layer,pipeline_parallel_layer_layout}.py). The
ranks' slices are checked against the first dims of global parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckptcore.core.object_tree import Named

Counts = list[list[int]]  # [chunk of a stage][stage] -> layers
_MAX_LAYOUT, _MAX_LAYERS = 100_000, 10_000
_DECODER = ("t", "decoder")


def layers_per_chunk(args: Mapping[str, Any], pp: int, vpp: int) -> Counts | None:
    """Return the layers of every chunk by the arguments, or None where these do not determine them.

    Args:
        args: The training arguments.
        pp: Pipeline stages.
        vpp: Model chunks of a stage.
    """
    layers = args.get("num_layers")
    if type(layers) is not int or not 0 <= layers <= _MAX_LAYERS or not 0 < pp * vpp <= _MAX_LAYOUT:
        return None
    layout = args.get("pipeline_model_parallel_layout")
    if layout:
        return _laid_out(layout, pp, vpp)
    first, last = (
        args.get(f"decoder_{end}_pipeline_num_layers", args.get(f"num_layers_in_{end}_pipeline_stage"))
        for end in ("first", "last")
    )
    if pp > 1 and (first is not None or last is not None):
        stages = _uneven(layers, pp, first, last)
    else:
        extra = [bool(args.get(f"account_for_{layer}_in_pipeline_split")) for layer in ("embedding", "loss")]
        stages = [(layers + sum(extra)) // pp] * pp if (layers + sum(extra)) % pp == 0 else None
        if stages and any(n % vpp for n in stages):
            stages = None
        if stages:
            counts = [[n // vpp for n in stages] for _ in range(vpp)]
            counts[0][0] -= extra[0]
            counts[-1][-1] -= extra[1]
            return counts
    if stages is None or any(n % vpp for n in stages):
        return None
    return [[n // vpp for n in stages] for _ in range(vpp)]


def first_layers(counts: Counts) -> Counts:
    """Return the number of each chunk's first layer in the full model.

    >>> first_layers([[1, 2], [3, 1]])
    [[0, 1], [3, 6]]
    """
    out: Counts = []
    layer = 0
    for row in counts:
        out.append([])
        for n in row:
            out[-1].append(layer)
            layer += n
    return out


def _uneven(layers: int, pp: int, first: Any, last: Any) -> list[int] | None:
    if any(n is not None and type(n) is not int for n in (first, last)):
        return None
    middle = pp - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    if left < 0 or min(first or 0, last or 0) < 0 or (middle and left % middle) or (not middle and left):
        return None
    per_stage = left // middle if middle else 0
    stages = [per_stage] * pp
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    return stages


def _laid_out(layout: Any, pp: int, vpp: int) -> Counts | None:
    """Count layers of ``--pipeline-model-parallel-layout``: "Et*2|(tt|)*2L", or a list of lists of names."""
    if isinstance(layout, Named) and layout.kind == "record":  # PipelineParallelLayerLayout
        layout = layout.value[1].get("input_data")
    if type(layout) is str:
        rows: Sequence[Any] | None = _unrolled(layout)
    else:
        rows = layout
    if not isinstance(rows, Sequence) or len(rows) != pp * vpp:
        return None
    if any(type(row) not in (str, list, tuple) for row in rows):
        return None
    counts = [sum(_layer_kind(x) in _DECODER for x in row) for row in rows]
    return [counts[v * pp : (v + 1) * pp] for v in range(vpp)]


def _unrolled(text: str) -> list[str] | None:
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        # Checked before the expansion, whose length the text chooses.
        repeats = re.findall(pattern, text)
        if sum(len(body) * int(times) for body, times in repeats if len(times) < 7) > _MAX_LAYOUT or any(
            len(times) >= 7 for _, times in repeats
        ):
            return None
        text = re.sub(pattern, lambda m: m[1] * int(m[2]), text)
    return text.split("|") if set(text) <= set("ELtm|") else None


def _layer_kind(entry: Any) -> Any:
    if isinstance(entry, Named) and entry.kind == "enum":  # LayerType.decoder, by name or value
        kind = entry.value[1]  # a number or text
        return "decoder" if kind == 4 else kind
    # Megatron ignores the case of names in a list, and spaces around them.
    return entry.strip().lower() if type(entry) is str else entry


def known_rows(args: Mapping[str, Any]) -> dict[str, int]:
    """Return name pattern -> first dim of global parameters, where the arguments determine it."""
    rows: dict[str, int] = {}

    def number(key: str) -> int:
        value = args.get(key)
        return value if type(value) is int and value > 0 else 0

    heads, head = number("num_attention_heads"), number("kv_channels")
    groups = number("num_query_groups") if args.get("group_query_attention", True) else 0
    alike = not any(args.get(f"heterogeneous_layers_config_{k}") for k in ("path", "encoded_json"))
    if heads and head and alike and not args.get("multi_latent_attention"):
        # num_query_groups of None: every head has its own key and value. Some versions then store 1.
        queries = heads * (2 if args.get("attention_output_gate") else 1)
        rows["self_attention.linear_qkv.weight"] = (queries + 2 * (groups or heads)) * head
    if number("padded_vocab_size"):
        rows["embedding.word_embeddings.weight"] = number("padded_vocab_size")
    query, pair, position = number("q_lora_rank"), number("kv_lora_rank"), number("qk_pos_emb_head_dim")
    if query:
        rows["self_attention.linear_q_down_proj.weight"] = query
    if pair:
        rows["self_attention.linear_kv_down_proj.weight"] = pair + position
    if query and pair:
        rows["self_attention.linear_qkv_down_proj.weight"] = query + pair + position
    return rows
