"""Place a rank's layers and tensors in the full model, by the arguments and Megatron's partition rules.

A rank of Megatron-LM holds a slice of each parameter (tensor parallel, expert parallel) for some of
the layers (pipeline parallel), under a local name. `place` returns its global name and box, by a table
of name patterns. Global names are those of Megatron-Core's distributed checkpoints: layers (and experts)
are stacked into one tensor, gate rows of all ranks precede up rows of all ranks, and norms have the names
of Transformer Engine's fused layers
(megatron/core/{tensor_parallel/layers,transformer/mlp,transformer/moe/experts,models/gpt/gpt_layer_specs}.py).
Layers are numbered through the chunks in the order (chunk of a stage, stage): with two chunks a stage, the
first chunks of all stages come before the second ones. The arguments give the number of layers of a chunk
(megatron/core/transformer/{transformer_block,transformer_layer,pipeline_parallel_layer_layout}.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ckptcore.core.box import Box
from ckptcore.core.object_tree import Named
from ckptcore.errors import MalformedCheckpoint, UnsupportedFormat

Counts = list[list[int]]  # [chunk of a stage][stage] -> layers
_MAX_LAYOUT, _MAX_LAYERS = 100_000, 10_000
_DECODER = ("t", "decoder")


@dataclass(frozen=True, slots=True)
class World:
    """Parallel sizes, and the facts about a model that the rules need.

    Attributes:
        tp: Ranks of a tensor-parallel group.
        pp: Pipeline stages.
        ep: Ranks of an expert-parallel group.
        etp: Ranks of an expert-tensor-parallel group.
        layers: Layers of the full model.
        experts: Experts of the full model.
        gated: Whether fc1 holds a gate and an up projection.
        stacked: Whether the layers of a block are one tensor.
        norms_fused: Whether norms with their own modules get the names of those in fused layers.
        rows: Name pattern -> extent of the first dim of the global tensor, where the arguments give it.
        heads: Attention heads.
        qkv: Order of the QKV rows, a key of `QKV_ORDERS`.
    """

    tp: int
    pp: int = 1
    ep: int = 1
    etp: int = 1
    layers: int = 0
    experts: int = 0
    gated: bool = True
    stacked: bool = True
    norms_fused: bool = False
    rows: Mapping[str, int] | None = None
    heads: int = 0
    qkv: str = "by group"


@dataclass(frozen=True, slots=True)
class Rank:
    """The rank that has a tensor. first_layer: number of its chunk's first layer in the full model."""

    tp: int = 0
    ep: int = 0
    first_layer: int = 0


@dataclass(frozen=True, slots=True)
class PartitionedBox:
    """A box of the rank's tensor that is a box of the global tensor.

    Attributes:
        inner: The box in the rank's tensor with shape `Placement.source`.
        dims: For each dim of the global tensor, the rank's dim, or None for one of extent 1.
        offset: Where the box begins in the global tensor.
    """

    inner: Box
    dims: tuple[int | None, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a rank's tensor belongs.

    Attributes:
        fqn: Name of the global tensor.
        shape: Shape of the global tensor.
        source: Shape in which the rank's row-major elements are read.
        parts: Disjoint boxes that cover the rank's tensor.
    """

    fqn: str
    shape: tuple[int, ...]
    source: tuple[int, ...]
    parts: tuple[PartitionedBox, ...]


# Local name below its layer -> how it is split over the ranks; the first match counts.
ROWS, COLS, GATED, REPLICATED = "rows", "columns", "gate and up rows", "replicated"
BY_ROWS = "rows or replicated"
RULES: tuple[tuple[str, str], ...] = (
    ("embedding.word_embeddings.weight", ROWS),
    ("embedding.position_embeddings.weight", REPLICATED),
    ("embedding.tokentype_embeddings.weight", REPLICATED),
    ("rotary_pos_emb.inv_freq", REPLICATED),
    ("output_layer.weight", ROWS),
    ("output_layer.bias", ROWS),
    ("*.layer_norm_weight", REPLICATED),  # fused into the linear layer behind it
    ("*.layer_norm_bias", REPLICATED),
    ("*layernorm.weight", REPLICATED),
    ("*layernorm.bias", REPLICATED),
    ("*norm.weight", REPLICATED),  # final_norm; enorm and hnorm of multi-token prediction
    ("*norm.bias", REPLICATED),
    ("*.linear_qkv.weight", ROWS),
    ("*.linear_qkv.bias", ROWS),
    ("*.linear_q.weight", ROWS),  # cross attention
    ("*.linear_q.bias", ROWS),
    ("*.linear_kv.weight", ROWS),
    ("*.linear_kv.bias", ROWS),
    ("*.linear_q_proj.weight", ROWS),  # multi-latent attention
    ("*.linear_q_up_proj.weight", ROWS),
    ("*.linear_kv_up_proj.weight", ROWS),
    # Column parallel with Megatron's own layers, replicated with Transformer Engine's.
    ("*.linear_q_down_proj.weight", BY_ROWS),
    ("*.linear_kv_down_proj.weight", BY_ROWS),
    ("*.linear_qkv_down_proj.weight", BY_ROWS),
    ("*.core_attention.softmax_offset", ROWS),
    ("*.linear_proj.weight", COLS),
    ("*.linear_proj.bias", REPLICATED),
    ("*.dense_h_to_4h_2.weight", ROWS),  # of NeMo's own modules: up projection, where gate is another matrix
    ("*.dense_h_to_4h_2.bias", ROWS),
    ("*.linear_fc1.weight", GATED),
    ("*.linear_fc1.bias", GATED),
    ("*.linear_fc2.weight", COLS),
    ("*.linear_fc2.bias", REPLICATED),
    ("mlp.router.weight", REPLICATED),
    ("mlp.router.bias", REPLICATED),
    ("mlp.router.expert_bias", REPLICATED),
    ("mlp.shared_experts.gate_weight", REPLICATED),
    ("*eh_proj.weight", ROWS),
    ("lm_head.dense.*", REPLICATED),  # BERT's heads
    ("pooler.dense.*", REPLICATED),
    ("binary_head.*", REPLICATED),
)
LAYERS = "decoder.layers."
_LAYER = re.compile(r"^(decoder|encoder)\.layers\.(\d{1,9})\.(.+)$")
_MTP = re.compile(r"^mtp\.layers\.(\d{1,9})\.(?:(transformer_layer|mtp_model_layer)\.)?(.+)$")
_SEQUENTIAL = re.compile(r"^mlp\.experts\.local_experts\.(\d{1,9})\.(linear_fc[12]\.(?:weight|bias))$")
_GROUPED_TE = re.compile(r"^mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d{1,9})$")
_GROUPED = re.compile(r"^mlp\.experts\.weight([12])$")
# Megatron's own norm modules -> the names in distributed checkpoints (`sharded_state_dict_keys_map`).
_FUSED = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)


# Positions of [query or key or value, head, row of the head] among the dims of a rank's QKV rows:
# checkpoint_version 0, 1.0, and later (megatron/checkpointing.py, fix_query_key_value_ordering).
QKV_ORDERS: dict[str, tuple[int, int, int] | None] = {
    "version 0": (0, 1, 2),
    "version 1.0": (2, 0, 1),
    "by group": None,
}


@dataclass(frozen=True, slots=True)
class LocalName:
    """The parts of a rank's name ``block.layers.layer.rest``; block is "" outside any layer."""

    block: str
    layer: int
    rest: str


def parse_name(name: str) -> LocalName:
    """Split a rank's name into its parts.

    >>> parse_name("decoder.layers.3.mlp.linear_fc1.weight")
    LocalName(block='decoder', layer=3, rest='mlp.linear_fc1.weight')
    """
    match = _LAYER.match(name)
    if match:
        return LocalName(match[1], int(match[2]), match[3])
    match = _MTP.match(name)
    if match:  # megatron/core/transformer/multi_token_prediction.py stores the older name
        return LocalName("mtp", int(match[1]), ("transformer_layer." if match[2] else "") + match[3])
    return LocalName("", 0, name)


def place(name: str, shape: tuple[int, ...], rank: Rank, world: World) -> Placement | None:
    """Return where a rank's tensor belongs in the full model.

    Args:
        name: The rank's name.
        shape: The rank's shape.
        rank: The rank.
        world: Parallel sizes, and facts about the model.

    Returns:
        The placement; None for a name without a rule, on more than one tensor rank.

    Raises:
        MalformedCheckpoint: The shape contradicts the arguments.
        UnsupportedFormat: The arguments do not determine how the tensor is split.
    """
    local = parse_name(name)
    inside = local.rest.removeprefix("transformer_layer.") if local.block == "mtp" else local.rest
    lead = local.rest[: len(local.rest) - len(inside)]
    grouped = _GROUPED.match(inside)
    if grouped:
        return _place_grouped_experts(local, lead, grouped[1], shape, rank, world)
    expert, inside = _expert(inside)
    tp, tp_rank = (world.tp, rank.tp) if expert is None else (world.etp, rank.tp % world.etp)
    rule = REPLICATED if tp == 1 and _rule_of(inside) is None else _rule_of(inside)
    if rule is None:
        return None
    rule = _resolve_rule(rule, inside, shape, tp, world, name)
    order = QKV_ORDERS[world.qkv] if "self_attention.linear_qkv." in inside and rule == ROWS else None
    if order is not None:
        return _reordered(local, order, shape, rank, world, name)
    global_shape, parts = _partitioned(rule, shape, tp, tp_rank, name)
    if expert is not None:
        count = _experts_here(world, name)
        if not 0 <= expert < count:
            raise MalformedCheckpoint(f"the expert of {name} must be below {count}, the experts of a rank")
        global_shape, parts = _one_of_stack(global_shape, parts, world.experts, rank.ep * count + expert)
    return _placement(local, lead + inside, shape, global_shape, parts, rank, world)


def global_name(name: str, rank: Rank, world: World) -> str | None:
    """Return the global name that `place` gives a rank's tensor, whatever its shape; None as there."""
    local = parse_name(name)
    inside = local.rest.removeprefix("transformer_layer.") if local.block == "mtp" else local.rest
    lead = local.rest[: len(local.rest) - len(inside)]
    grouped = _GROUPED.match(inside)
    if grouped:
        return _fqn(local, f"{lead}mlp.experts.experts.linear_fc{grouped[1]}.weight", rank, world)
    expert, inside = _expert(inside)
    if _rule_of(inside) is None and (world.tp if expert is None else world.etp) > 1:
        return None
    return _fqn(local, lead + inside, rank, world)


def cut_shape(name: str, shape: tuple[int, ...], ranks: int, *, copied: bool) -> tuple[int, ...] | None:
    """Return the local shape of a global parameter; None where no rule gives it.

    Args:
        name: A rank's name of the parameter.
        shape: The global shape.
        ranks: Tensor-parallel ranks.
        copied: Whether parameters that are split by rows or replicated are replicated.
    """
    rest = parse_name(name).rest
    rule = _rule_of(_expert(rest)[1])
    if rule is None:
        return shape if ranks == 1 else None
    if rule == REPLICATED or (rule == BY_ROWS and copied):
        return shape
    axis = 1 if rule == COLS else 0
    if len(shape) <= axis or shape[axis] % ranks:
        return None
    return (*shape[:axis], shape[axis] // ranks, *shape[axis + 1 :])


def _expert(rest: str) -> tuple[int | None, str]:
    """Return (local number of the expert or None, name below the layer in the full model)."""
    match = _SEQUENTIAL.match(rest)
    if match:
        return int(match[1]), f"mlp.experts.experts.{match[2]}"
    match = _GROUPED_TE.match(rest)
    if match:
        return int(match[2]), f"mlp.experts.experts.{match[1]}"
    return None, rest


def _rule_of(rest: str) -> str | None:
    return next((rule for pattern, rule in RULES if fnmatchcase(rest, pattern)), None)


def _resolve_rule(rule: str, rest: str, shape: tuple[int, ...], tp: int, world: World, name: str) -> str:
    """Return the rule that applies to the shape; check the extent where it is known."""
    if rule == GATED and not world.gated:
        rule = ROWS
    want = next((n for p, n in (world.rows or {}).items() if fnmatchcase(rest, p)), None)
    if rule == BY_ROWS:
        if tp == 1:
            return REPLICATED
        if want is None:
            raise UnsupportedFormat(
                f"cannot place {name} {list(shape)}, which may be one of {tp} slices or a copy: the "
                "arguments do not give the sizes of the latent projections",
                hint="the checkpoint's `args` lack q_lora_rank, kv_lora_rank or qk_pos_emb_head_dim",
            )
        rule = REPLICATED if shape[:1] == (want,) else ROWS
    if want is not None and shape and rule in (ROWS, GATED, REPLICATED):
        have = shape[0] * (1 if rule == REPLICATED else tp)
        if have != want:
            raise MalformedCheckpoint(
                f"{name} must have {want} rows by the arguments (got {have} on {tp} ranks)"
            )
    return rule


def _partitioned(
    rule: str, shape: tuple[int, ...], tp: int, tp_rank: int, name: str
) -> tuple[tuple[int, ...], tuple[PartitionedBox, ...]]:
    """Return (global shape, parts) of a tensor that a rule splits."""
    dims = tuple(range(len(shape)))
    zero = (0,) * len(shape)
    if rule == REPLICATED:
        return shape, (PartitionedBox(Box(zero, shape), dims, zero),)
    axis = 1 if rule == COLS else 0
    if len(shape) <= axis:
        raise MalformedCheckpoint(f"cannot split {name} {list(shape)} along dim {axis}")
    n = shape[axis]
    global_shape = (*shape[:axis], n * tp, *shape[axis + 1 :])
    if rule != GATED:
        begin = (*zero[:axis], tp_rank * n, *zero[axis + 1 :])
        return global_shape, (PartitionedBox(Box(zero, shape), dims, begin),)
    if n % 2:
        raise MalformedCheckpoint(f"{name} must have an even number of gate and up rows (got {n})")
    # Two boxes: the gate rows of all ranks come first, then the up rows of all ranks.
    half = n // 2
    return global_shape, tuple(
        PartitionedBox(
            Box((k * half, *zero[1:]), (half, *shape[1:])), dims, ((k * tp + tp_rank) * half, *zero[1:])
        )
        for k in (0, 1)
    )


def _reordered(
    local: LocalName, order: tuple[int, int, int], shape: tuple[int, ...], rank: Rank, world: World, name: str
) -> Placement:
    """Place QKV rows of an old order, as [head, query or key or value, row]."""
    if not world.heads or world.heads % world.tp or shape[0] % (3 * (world.heads // world.tp)):
        raise MalformedCheckpoint(
            f"cannot split {name} {list(shape)}: {world.heads} heads on {world.tp} ranks do not fit"
        )
    heads = world.heads // world.tp
    size = shape[0] // (3 * heads)
    extent = {order[0]: 3, order[1]: heads, order[2]: size}
    source = (extent[0], extent[1], extent[2], *shape[1:])
    tail = tuple(range(1, len(shape)))
    parts = []
    for head in range(heads):
        for kind in range(3):
            low, count = [0] * len(source), list(source)
            low[order[0]], count[order[0]] = kind, 1
            low[order[1]], count[order[1]] = head, 1
            row = ((rank.tp * heads + head) * 3 + kind) * size
            parts.append(
                PartitionedBox(
                    Box(tuple(low), tuple(count)),
                    (order[2], *(2 + d for d in tail)),
                    (row, *(0 for _ in tail)),
                )
            )
    global_shape = (shape[0] * world.tp, *shape[1:])
    return _placement(local, local.rest, source, global_shape, tuple(parts), rank, world)


def _place_grouped_experts(
    local: LocalName, lead: str, which: str, shape: tuple[int, ...], rank: Rank, world: World
) -> Placement:
    """Place a tensor of GroupedMLP: all experts of a rank, each as [in, out] (mcore up to 0.16).

    weight1 [H, E_local * rows] holds (E_local, H, rows); weight2 [E_local * F, H] holds (E_local, F, H).
    """
    name = f"{local.block}.layers.{local.layer}.{local.rest}"
    count = _experts_here(world, name)
    if len(shape) != 2 or shape[1 if which == "1" else 0] % count:
        raise MalformedCheckpoint(f"cannot split {name} {list(shape)} into {count} experts")
    tp, tp_rank = world.etp, rank.tp % world.etp
    first = rank.ep * count
    rest = f"{lead}mlp.experts.experts.linear_fc{which}.weight"
    if which == "1":
        hidden, rows = shape[0], shape[1] // count
        source = (count, hidden, rows)
        halves = 2 if world.gated else 1
        if rows % halves:
            raise MalformedCheckpoint(f"{name} must have an even number of gate and up rows (got {rows})")
        n = rows // halves
        global_shape = (world.experts, rows * tp, hidden)
        parts = tuple(
            PartitionedBox(
                Box((0, 0, k * n), (count, hidden, n)), (0, 2, 1), (first, (k * tp + tp_rank) * n, 0)
            )
            for k in range(halves)
        )
    else:
        inner, hidden = shape[0] // count, shape[1]
        source = (count, inner, hidden)
        global_shape = (world.experts, hidden, inner * tp)
        parts = (PartitionedBox(Box((0, 0, 0), source), (0, 2, 1), (first, 0, tp_rank * inner)),)
    return _placement(local, rest, source, global_shape, parts, rank, world)


def _experts_here(world: World, name: str) -> int:
    if world.experts <= 0 or world.experts % world.ep:
        raise MalformedCheckpoint(
            f"cannot place {name}: {world.experts} experts do not divide into "
            f"{world.ep} expert-parallel ranks"
        )
    return world.experts // world.ep


def _one_of_stack(
    global_shape: tuple[int, ...], parts: tuple[PartitionedBox, ...], count: int, index: int
) -> tuple[tuple[int, ...], tuple[PartitionedBox, ...]]:
    """Return shape and parts of one of ``count`` tensors along a new first dim."""
    return (count, *global_shape), tuple(
        PartitionedBox(p.inner, (None, *p.dims), (index, *p.offset)) for p in parts
    )


def _placement(
    local: LocalName,
    rest: str,
    source: tuple[int, ...],
    global_shape: tuple[int, ...],
    parts: tuple[PartitionedBox, ...],
    rank: Rank,
    world: World,
) -> Placement:
    fqn = _fqn(local, rest, rank, world)
    if local.block not in ("", "mtp") and world.stacked:
        global_shape, parts = _one_of_stack(global_shape, parts, world.layers, rank.first_layer + local.layer)
    return Placement(fqn, global_shape, source, parts)


def _fqn(local: LocalName, rest: str, rank: Rank, world: World) -> str:
    """Return the global name of ``rest``, a name below its layer."""
    if not local.block:
        return rest
    rest = _fused_norm_name(rest, world)
    if local.block == "mtp":
        return f"mtp.layers.{local.layer}.{rest}"
    layer = rank.first_layer + local.layer
    if layer >= world.layers:
        raise MalformedCheckpoint(
            f"{local.block}.layers.{local.layer}.{rest} is in layer {layer}, the model has {world.layers}"
        )
    return f"{local.block}.layers.{rest}" if world.stacked else f"{local.block}.layers.{layer}.{rest}"


def _fused_norm_name(rest: str, world: World) -> str:
    if not world.norms_fused:
        return rest
    lead = "transformer_layer." if rest.startswith("transformer_layer.") else ""
    inside = rest.removeprefix(lead)
    return lead + next(
        (new + inside.removeprefix(old) for old, new in _FUSED if inside.startswith(old)), inside
    )


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
    if isinstance(entry, Named) and entry.kind in ("enum", "enummember"):  # LayerType.decoder
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
