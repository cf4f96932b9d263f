"""Megatron's rules: which part of which whole parameter is one rank's tensor?

A rank of Megatron-LM holds a slice of each parameter (tensor parallel, expert parallel) for some of
the layers (pipeline parallel), under a name local to the rank. `place` says under which name and in
which box it belongs in the whole model, as a table of name patterns. Names of the whole are those
of Megatron-Core's distributed checkpoints: layers (and experts) stacked into one tensor, gate rows of all
ranks before up rows of all ranks, norms under the names that Transformer Engine's fused layers give them
(megatron/core/{tensor_parallel/layers,transformer/mlp,transformer/moe/experts,models/gpt/gpt_layer_specs}.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckptcore.core.box import Box
from ckptcore.errors import MalformedCheckpoint, UnsupportedFormat


@dataclass(frozen=True, slots=True)
class World:
    """Parallel sizes and the facts of a model that its rules need.

    tp, pp, ep, etp: ranks per tensor, pipeline, expert and expert-tensor group. layers, experts: counts
    of the whole model. gated: whether fc1 holds a gate and an up projection. stacked: whether the layers
    of a block are one tensor. norms_fused: whether norms that have modules of their own are named as the
    fused layers name theirs. rows: name pattern -> extent of the first dim in the whole model, where the
    arguments tell it. heads: attention heads. qkv: how rows of QKV are ordered, a key of `QKV_ORDERS`.
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
    """Whose tensor it is. first_layer: number in the whole model of the chunk's first layer."""

    tp: int = 0
    ep: int = 0
    first_layer: int = 0


@dataclass(frozen=True, slots=True)
class PartitionedBox:
    """A box of the rank's tensor that is a box of the whole one.

    inner: in the rank's tensor, taken as `Placement.source`. dims: for each dim of the whole, the
    rank's dim it is, or None for one of extent 1. at: where the box begins in the whole.
    """

    inner: Box
    dims: tuple[int | None, ...]
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a rank's tensor belongs: name and shape of the whole; source: the shape its row-major elements
    are taken as; parts: disjoint, all elements of it."""

    fqn: str
    shape: tuple[int, ...]
    source: tuple[int, ...]
    parts: tuple[PartitionedBox, ...]


# Local name below its layer -> how it is cut over the ranks; the first match counts.
ROWS, COLS, GATED, WHOLE, BY_ROWS = "rows", "columns", "gate and up rows", "whole", "rows or whole"
RULES: tuple[tuple[str, str], ...] = (
    ("embedding.word_embeddings.weight", ROWS),
    ("embedding.position_embeddings.weight", WHOLE),
    ("embedding.tokentype_embeddings.weight", WHOLE),
    ("rotary_pos_emb.inv_freq", WHOLE),
    ("output_layer.weight", ROWS),
    ("output_layer.bias", ROWS),
    ("*.layer_norm_weight", WHOLE),  # fused into the linear layer behind it
    ("*.layer_norm_bias", WHOLE),
    ("*layernorm.weight", WHOLE),
    ("*layernorm.bias", WHOLE),
    ("*norm.weight", WHOLE),  # final_norm; enorm and hnorm of multi-token prediction
    ("*norm.bias", WHOLE),
    ("*.linear_qkv.weight", ROWS),
    ("*.linear_qkv.bias", ROWS),
    ("*.linear_q.weight", ROWS),  # cross attention
    ("*.linear_q.bias", ROWS),
    ("*.linear_kv.weight", ROWS),
    ("*.linear_kv.bias", ROWS),
    ("*.linear_q_proj.weight", ROWS),  # multi-latent attention
    ("*.linear_q_up_proj.weight", ROWS),
    ("*.linear_kv_up_proj.weight", ROWS),
    # Column parallel with Megatron's own layers, one copy a rank with Transformer Engine's.
    ("*.linear_q_down_proj.weight", BY_ROWS),
    ("*.linear_kv_down_proj.weight", BY_ROWS),
    ("*.linear_qkv_down_proj.weight", BY_ROWS),
    ("*.core_attention.softmax_offset", ROWS),
    ("*.linear_proj.weight", COLS),
    ("*.linear_proj.bias", WHOLE),
    ("*.linear_fc1.weight", GATED),
    ("*.linear_fc1.bias", GATED),
    ("*.linear_fc2.weight", COLS),
    ("*.linear_fc2.bias", WHOLE),
    ("mlp.router.weight", WHOLE),
    ("mlp.router.bias", WHOLE),
    ("mlp.router.expert_bias", WHOLE),
    ("mlp.shared_experts.gate_weight", WHOLE),
    ("*eh_proj.weight", ROWS),
    ("lm_head.dense.*", WHOLE),  # BERT's heads
    ("pooler.dense.*", WHOLE),
    ("binary_head.*", WHOLE),
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


# Where query, key and value of one head, of which head, and which row of it stand in a rank's QKV rows:
# checkpoint_version 0, 1.0, and later (megatron/checkpointing.py, fix_query_key_value_ordering).
QKV_ORDERS: dict[str, tuple[int, int, int] | None] = {
    "version 0": (0, 1, 2),
    "version 1.0": (2, 0, 1),
    "by group": None,
}


@dataclass(frozen=True, slots=True)
class LocalName:
    """A rank's name taken apart: ``block.layers.layer.rest``; block "" outside any layer."""

    block: str
    layer: int
    rest: str


def parse_name(name: str) -> LocalName:
    """
    >>> parse_name("decoder.layers.3.mlp.linear_fc1.weight")
    LocalName(block='decoder', layer=3, rest='mlp.linear_fc1.weight')
    """
    found = _LAYER.match(name)
    if found:
        return LocalName(found[1], int(found[2]), found[3])
    found = _MTP.match(name)
    if found:  # megatron/core/transformer/multi_token_prediction.py keeps the older name on disk
        return LocalName("mtp", int(found[1]), ("transformer_layer." if found[2] else "") + found[3])
    return LocalName("", 0, name)


def place(name: str, shape: tuple[int, ...], rank: Rank, world: World) -> Placement | None:
    """Where a rank's tensor belongs; None for a name that no rule knows, on more than one tensor rank.

    Raises `MalformedCheckpoint` where its shape is not what the arguments say, and
    `UnsupportedFormat` where they say too little.
    """
    local = parse_name(name)
    inside = local.rest.removeprefix("transformer_layer.") if local.block == "mtp" else local.rest
    lead = local.rest[: len(local.rest) - len(inside)]
    grouped = _GROUPED.match(inside)
    if grouped:
        return _grouped(local, lead, grouped[1], shape, rank, world)
    expert, inside = _expert(inside)
    tp, at = (world.tp, rank.tp) if expert is None else (world.etp, rank.tp % world.etp)
    rule = WHOLE if tp == 1 and _rule_of(inside) is None else _rule_of(inside)
    if rule is None:
        return None
    rule = _settled(rule, inside, shape, tp, world, name)
    order = QKV_ORDERS[world.qkv] if "self_attention.linear_qkv." in inside and rule == ROWS else None
    if order is not None:
        return _reordered(local, order, shape, rank, world, name)
    whole, parts = _partitioned(rule, shape, tp, at, name)
    if expert is not None:
        count = _experts_here(world, name)
        if not 0 <= expert < count:
            raise MalformedCheckpoint(f"{name}: {count} experts are on a rank")
        whole, parts = _one_of_stack(whole, parts, world.experts, rank.ep * count + expert)
    return _placement(local, lead + inside, shape, whole, parts, rank, world)


def whole_name(name: str, rank: Rank, world: World) -> str | None:
    """What `place` calls the tensor that a rank's is a part of, whatever its shape is; None as there."""
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
    """The shape that a whole parameter has on each of ``ranks`` tensor ranks; None where no rule tells.

    copied: whether what may be rows or whole is whole.
    """
    rest = parse_name(name).rest
    rule = _rule_of(_expert(rest)[1])
    if rule is None:
        return shape if ranks == 1 else None
    if rule == WHOLE or (rule == BY_ROWS and copied):
        return shape
    axis = 1 if rule == COLS else 0
    if len(shape) <= axis or shape[axis] % ranks:
        return None
    return (*shape[:axis], shape[axis] // ranks, *shape[axis + 1 :])


def _expert(rest: str) -> tuple[int | None, str]:
    """(local number of the expert or None, name below the layer in the whole model)."""
    found = _SEQUENTIAL.match(rest)
    if found:
        return int(found[1]), f"mlp.experts.experts.{found[2]}"
    found = _GROUPED_TE.match(rest)
    if found:
        return int(found[2]), f"mlp.experts.experts.{found[1]}"
    return None, rest


def _rule_of(rest: str) -> str | None:
    return next((rule for pattern, rule in RULES if fnmatchcase(rest, pattern)), None)


def _settled(rule: str, rest: str, shape: tuple[int, ...], tp: int, world: World, name: str) -> str:
    """The rule with what depends on shapes decided, and the extent checked where it is known."""
    if rule == GATED and not world.gated:
        rule = ROWS
    want = next((n for p, n in (world.rows or {}).items() if fnmatchcase(rest, p)), None)
    if rule == BY_ROWS:
        if tp == 1:
            return WHOLE
        if want is None:
            raise UnsupportedFormat(
                f"{name} {list(shape)} may be one of {tp} slices or a copy: the arguments do not tell "
                "the sizes of the latent projections",
                hint="the checkpoint's `args` lack q_lora_rank, kv_lora_rank or qk_pos_emb_head_dim",
            )
        rule = WHOLE if shape[:1] == (want,) else ROWS
    if want is not None and shape and rule in (ROWS, GATED, WHOLE):
        have = shape[0] * (1 if rule == WHOLE else tp)
        if have != want:
            raise MalformedCheckpoint(f"{name}: {have} rows on {tp} ranks, the arguments say {want}")
    return rule


def _partitioned(
    rule: str, shape: tuple[int, ...], tp: int, at: int, name: str
) -> tuple[tuple[int, ...], tuple[PartitionedBox, ...]]:
    """(shape of the whole, parts) of a tensor cut by a rule."""
    dims = tuple(range(len(shape)))
    zero = (0,) * len(shape)
    if rule == WHOLE:
        return shape, (PartitionedBox(Box(zero, shape), dims, zero),)
    axis = 1 if rule == COLS else 0
    if len(shape) <= axis:
        raise MalformedCheckpoint(f"{name} {list(shape)} cannot be cut along dim {axis}")
    n = shape[axis]
    whole = (*shape[:axis], n * tp, *shape[axis + 1 :])
    if rule != GATED:
        begin = (*zero[:axis], at * n, *zero[axis + 1 :])
        return whole, (PartitionedBox(Box(zero, shape), dims, begin),)
    if n % 2:
        raise MalformedCheckpoint(f"{name}: {n} rows are no gate and up projection")
    half = n // 2
    return whole, tuple(
        PartitionedBox(
            Box((k * half, *zero[1:]), (half, *shape[1:])), dims, ((k * tp + at) * half, *zero[1:])
        )
        for k in (0, 1)
    )


def _reordered(
    local: LocalName, order: tuple[int, int, int], shape: tuple[int, ...], rank: Rank, world: World, name: str
) -> Placement:
    """QKV rows of an old order, as [head, query or key or value, row]."""
    if not world.heads or world.heads % world.tp or shape[0] % (3 * (world.heads // world.tp)):
        raise MalformedCheckpoint(f"{name} {list(shape)}: {world.heads} heads on {world.tp} ranks")
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
            at = ((rank.tp * heads + head) * 3 + kind) * size
            parts.append(
                PartitionedBox(
                    Box(tuple(low), tuple(count)),
                    (order[2], *(2 + d for d in tail)),
                    (at, *(0 for _ in tail)),
                )
            )
    whole = (shape[0] * world.tp, *shape[1:])
    return _placement(local, local.rest, source, whole, tuple(parts), rank, world)


def _grouped(
    local: LocalName, lead: str, which: str, shape: tuple[int, ...], rank: Rank, world: World
) -> Placement:
    """GroupedMLP: all experts of a rank in one tensor, each as [in, out] (mcore up to 0.16).

    weight1 [H, E_local * rows] holds (E_local, H, rows); weight2 [E_local * F, H] holds (E_local, F, H).
    """
    name = f"{local.block}.layers.{local.layer}.{local.rest}"
    count = _experts_here(world, name)
    if len(shape) != 2 or shape[1 if which == "1" else 0] % count:
        raise MalformedCheckpoint(f"{name} {list(shape)} is not for {count} experts")
    tp, at = world.etp, rank.tp % world.etp
    first = rank.ep * count
    rest = f"{lead}mlp.experts.experts.linear_fc{which}.weight"
    if which == "1":
        hidden, rows = shape[0], shape[1] // count
        source = (count, hidden, rows)
        halves = 2 if world.gated else 1
        if rows % halves:
            raise MalformedCheckpoint(f"{name}: {rows} rows are no gate and up projection")
        n = rows // halves
        whole = (world.experts, rows * tp, hidden)
        parts = tuple(
            PartitionedBox(Box((0, 0, k * n), (count, hidden, n)), (0, 2, 1), (first, (k * tp + at) * n, 0))
            for k in range(halves)
        )
    else:
        inner, hidden = shape[0] // count, shape[1]
        source = (count, inner, hidden)
        whole = (world.experts, hidden, inner * tp)
        parts = (PartitionedBox(Box((0, 0, 0), source), (0, 2, 1), (first, 0, at * inner)),)
    return _placement(local, rest, source, whole, parts, rank, world)


def _experts_here(world: World, name: str) -> int:
    if world.experts <= 0 or world.experts % world.ep:
        raise MalformedCheckpoint(f"{name}: {world.experts} experts on {world.ep} expert-parallel ranks")
    return world.experts // world.ep


def _one_of_stack(
    whole: tuple[int, ...], parts: tuple[PartitionedBox, ...], count: int, index: int
) -> tuple[tuple[int, ...], tuple[PartitionedBox, ...]]:
    """One of ``count`` along a new first dim."""
    return (count, *whole), tuple(PartitionedBox(p.inner, (None, *p.dims), (index, *p.at)) for p in parts)


def _placement(
    local: LocalName,
    rest: str,
    source: tuple[int, ...],
    whole: tuple[int, ...],
    parts: tuple[PartitionedBox, ...],
    rank: Rank,
    world: World,
) -> Placement:
    fqn = _fqn(local, rest, rank, world)
    if local.block not in ("", "mtp") and world.stacked:
        whole, parts = _one_of_stack(whole, parts, world.layers, rank.first_layer + local.layer)
    return Placement(fqn, whole, source, parts)


def _fqn(local: LocalName, rest: str, rank: Rank, world: World) -> str:
    """The name in the whole model of what is called ``rest`` below its layer."""
    if not local.block:
        return rest
    rest = _fused(rest, world)
    if local.block == "mtp":
        return f"mtp.layers.{local.layer}.{rest}"
    layer = rank.first_layer + local.layer
    if layer >= world.layers:
        raise MalformedCheckpoint(
            f"{local.block}.layers.{local.layer}.{rest} is layer {layer} of {world.layers}"
        )
    return f"{local.block}.layers.{rest}" if world.stacked else f"{local.block}.layers.{layer}.{rest}"


def _fused(rest: str, world: World) -> str:
    if not world.norms_fused:
        return rest
    lead = "transformer_layer." if rest.startswith("transformer_layer.") else ""
    inside = rest.removeprefix(lead)
    return lead + next(
        (new + inside.removeprefix(old) for old, new in _FUSED if inside.startswith(old)), inside
    )
