"""Merge the models of a legacy checkpoint's ranks: place each rank's tensor in its box of the global one.

No byte is read: a rank's tensor is a raw range of its file, and a box of the global tensor is a view into it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec, View, row_major
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import Refused, RefusedTensor
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.errors import Finding, MalformedCheckpoint, UnsupportedFormat, finding
from ckptcore.formats.megatron.legacy_names import current_names
from ckptcore.formats.megatron.legacy_ranks import RankFile, Ranks
from ckptcore.formats.megatron.partition_rules import (
    Counts,
    Placement,
    Rank,
    World,
    first_layers,
    global_name,
    known_rows,
    layers_per_chunk,
    parse_name,
    place,
)
from ckptcore.formats.torch_save.tree import TorchTree, add_odd_piece
from ckptcore.utils.text import short_repr

EXTRA_STATE = "_extra_state"
_MAX_FINDINGS = 20
EMBEDDING = "embedding.word_embeddings.weight"
_CHUNK = re.compile(r"^model(\d{0,6})$")
_EXPERT = re.compile(r"local_experts\.\d+\.|(?<=linear_fc[12]\.weight)\d+$|(?<=linear_fc[12]\.bias)\d+$")
# Arguments that make layers differ from each other; distributed checkpoints then store them one by one.
_BY_LAYER = (
    "moe_layer_freq",
    "linear_attention_freq",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "hetereogenous_dist_checkpoint",
)


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """The part of the model that one rank holds as one module.

    Attributes:
        file: The rank's file.
        number: Number of the chunk in the rank.
        state: Its state dict.
        old: Whether its names were those from before Megatron-Core.
    """

    file: RankFile
    number: int
    state: Mapping[str, Any]
    old: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """Facts about the full model.

    Attributes:
        world: Parallel sizes, and what the partition rules need.
        chunks: Every rank's chunks.
        first: [chunk of a stage][stage] -> number of its first layer.
        tied: Whether the last stage keeps a copy of the embeddings.
        bucket_size: Elements of a full gradient bucket, or None.
    """

    world: World
    chunks: tuple[ModelChunk, ...]
    first: Counts
    tied: bool
    bucket_size: int | None

    def rank(self, chunk: ModelChunk) -> Rank:
        """Return the rank of a chunk, with the chunk's first layer."""
        return Rank(chunk.file.tp, chunk.file.ep, self.first[chunk.number][chunk.file.pp])


def model_of(ranks: Ranks) -> Model:
    """Derive the full model from the ranks' arguments and tensors.

    Raises:
        MalformedCheckpoint: Arguments and tensors contradict each other.
        UnsupportedFormat: The rules here do not cover the model's partitioning.
    """
    chunks = tuple(c for file in ranks.files for c in _model_chunks(file))
    numbers = {c.number for c in chunks}
    if numbers != set(range(len(numbers))):
        raise MalformedCheckpoint(
            f"model chunks must be numbered from 0 without gaps (got {sorted(numbers)})"
        )
    args = ranks.args
    names = {(parse_name(n).block) for c in chunks for n in c.state}
    if {"encoder", "decoder"} <= names:
        raise UnsupportedFormat(
            "cannot merge an encoder-decoder model: its stages are numbered by other rules",
            hint="save it as torch_dist with Megatron-LM",
        )
    layers, first = _layers(ranks, chunks, len(numbers))
    world = World(
        ranks.tp,
        ranks.pp,
        ranks.ep,
        ranks.etp,
        layers,
        _experts(args),
        _gated(args, chunks),
        _layers_are_alike(args, chunks),
        _own_norms(chunks),
        known_rows(args),
        _heads(args),
        _qkv_order(ranks, chunks),
    )
    if args.get("moe_mlp_glu_interleave_size") is not None and world.experts:
        raise UnsupportedFormat(
            "cannot merge experts: their gate and up rows are interleaved (moe_mlp_glu_interleave_size)"
        )
    # Models from before the argument had one matrix for both.
    tied = args.get("untie_embeddings_and_output_weights", not any(c.old for c in chunks)) is False
    return Model(world, chunks, first, tied, _bucket_size(args))


def unequal(chunks: Sequence[ModelChunk]) -> Iterator[Finding]:
    """Yield a finding for each parameter that some but not all ranks of a stage have."""
    stages: dict[tuple[int, int], list[ModelChunk]] = {}
    for c in chunks:
        stages.setdefault((c.file.pp, c.number), []).append(c)
    for members in stages.values():
        names = [
            {
                name
                for name, value in c.state.items()
                if isinstance(value, (StoredView, Refused)) and not name.endswith(EXTRA_STATE)
            }
            for c in members
        ]
        everywhere = set[str]().union(*names)
        for c, mine in zip(members, names, strict=True):
            for name in sorted(everywhere - mine)[:_MAX_FINDINGS]:
                other_path = next(
                    o.file.path for o, theirs in zip(members, names, strict=True) if name in theirs
                )
                yield finding(
                    "hole",
                    "coverage",
                    f"{c.file.path} lacks {name}, which {other_path} has",
                    fqn=name,
                    file=c.file.path,
                )


class Merger:
    """Add rank tensors to a builder, each in its box of the global tensor."""

    def __init__(self, builder: Builder, model: Model) -> None:
        self._builder, self.model = builder, model
        self._tensors: dict[str, int] = {}
        self.dropped = 0  # empty `_extra_state` entries
        self.lost: set[str] = set()  # files with refused classes in place of tensors

    def add(self, chunk: ModelChunk, tree: TorchTree) -> None:
        """Add every tensor of a rank's state dict."""
        for name, value in chunk.state.items():
            if name.endswith(EXTRA_STATE):
                self._add_extra_state(chunk, tree, name, value)
            elif isinstance(value, StoredView):
                self._add_parameter(chunk, tree, name, value)
            elif isinstance(value, Refused) and (fqn := self.global_name(chunk, name)) is not None:
                self.lose(fqn, value, chunk.file.path)
            else:
                tree.add(f"{name}/{chunk.file.folder}", value)

    def global_name(self, chunk: ModelChunk, name: str) -> str | None:
        """Return the global name of a rank's ``name``; None where no rule knows it."""
        return global_name(self._untied_name(name), self.model.rank(chunk), self.model.world)

    def lose(self, fqn: str, value: Refused, path: str) -> None:
        """Record that a part of a tensor cannot be read, and so neither can the tensor."""
        add_odd_piece(self._builder, fqn, value, path)
        if not isinstance(value, RefusedTensor):  # its storages are unknown
            self.lost.add(path)

    def put(self, placement: Placement, value: StoredView, tree: TorchTree, prefix: str = "") -> None:
        """Add one tensor where it belongs, under ``prefix`` and its global name.

        Args:
            placement: Where the tensor belongs.
            value: The rank's tensor.
            tree: The file that it is in.
            prefix: Put before the global name.

        Raises:
            UnsupportedFormat: The tensor must be split, and is not contiguous.
        """
        fqn = prefix + placement.fqn
        item, view = tree.place(value, fqn)
        strides = view.strides or row_major(value.shape)
        if placement.source != value.shape:
            if view.strides is not None:
                raise UnsupportedFormat(f"cannot split {fqn}: the tensor is not contiguous")
            strides = row_major(placement.source)
        for offset, shape, start, steps in boxes(placement, strides):
            start_byte = view.start + start * BY_NAME[value.dtype].itemsize
            self.chunk(
                fqn, value.dtype, placement.shape, offset, shape, item, View(start_byte, steps, view.flags)
            )

    def chunk(
        self,
        fqn: str,
        dtype: str,
        global_shape: tuple[int, ...],
        offset: tuple[int, ...],
        shape: tuple[int, ...],
        item: int,
        view: View,
    ) -> None:
        """Add one box of a tensor; add a finding where another rank gives another shape or dtype.

        Args:
            fqn: Global name of the tensor.
            dtype: Its dtype.
            global_shape: Its shape.
            offset: Where the box begins in it.
            shape: Extents of the box.
            item: The item with the box's bytes.
            view: Where in the item the box's elements are.
        """
        index = self._tensors.get(fqn)
        if index is None:
            index = self._tensors[fqn] = self._builder.tensor(TensorSpec(fqn, dtype, global_shape))
        spec = self._builder.tensors[index]
        if (spec.dtype, spec.shape) == (dtype, global_shape):
            self._builder.chunk(index, offset, shape, item, view)
            return
        path = self._builder.file_names()[-1]
        self._builder.report(
            "item-mismatch",
            "coverage",
            f"{fqn} is {dtype} {list(global_shape)} by {path}, and "
            f"{spec.dtype} {list(spec.shape)} by another rank",
            fqn=fqn,
            file=path,
        )

    def _add_parameter(self, chunk: ModelChunk, tree: TorchTree, name: str, value: StoredView) -> None:
        """Put a rank's tensor into the global one; report a tensor that no rule splits, and keep it apart."""
        model = self.model
        placement = place(self._untied_name(name), value.shape, model.rank(chunk), model.world)
        if placement is not None:
            self.put(placement, value, tree)
            return
        fqn = f"{name}/{chunk.file.folder}"
        self._builder.report(
            "unmerged-tensor",
            "coverage",
            f"cannot merge {fqn} {list(value.shape)}: no rule for how {name} is split "
            f"over {model.world.tp} tensor ranks",
            fqn=fqn,
            file=chunk.file.path,
            hint="save the model as a distributed checkpoint with the program that wrote it; or exclude "
            "the tensor by name with --exclude",
        )
        tree.add(fqn, value)

    def _untied_name(self, name: str) -> str:
        # The last stage keeps a copy of tied embeddings for the loss: the same rows.
        return EMBEDDING if self.model.tied and name == "output_layer.weight" else name

    def _add_extra_state(self, chunk: ModelChunk, tree: TorchTree, name: str, value: Any) -> None:
        """Add the state of fp8 layers (Transformer Engine), which differs by rank and is never merged."""
        if value is None or value == b"" or (isinstance(value, StoredView) and 0 in value.shape):
            self.dropped += 1
            return
        local = parse_name(name)
        if local.block and local.block != "mtp":
            layer = self.model.rank(chunk).first_layer + local.layer
            name = f"{local.block}.layers.{layer}.{local.rest}"
        tree.add(f"{name}/{chunk.file.folder}", value)


def boxes(
    placement: Placement, strides: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]]:
    """Yield the boxes that a rank's tensor fills.

    Args:
        placement: Where the rank's tensor belongs.
        strides: Element strides of the tensor with shape ``placement.source``.

    Yields:
        (offset and shape in the global tensor, first element, element strides) of each part.
    """
    for part in placement.parts:
        shape = tuple(1 if d is None else part.inner.shape[d] for d in part.dims)
        steps = tuple(0 if d is None else strides[d] for d in part.dims)
        start = sum(o * s for o, s in zip(part.inner.offset, strides, strict=True))
        yield part.offset, shape, start, steps


# --- facts from arguments and tensors together ----------------------------------------------------


def _model_chunks(file: RankFile) -> Iterator[ModelChunk]:
    numbered_keys = sorted((int(m[1] or 0), k) for k in file.tree if (m := _CHUNK.match(k)))
    if not numbered_keys:
        raise MalformedCheckpoint(f"{file.path} has no model", file=file.path)
    for number, key in numbered_keys:
        state = file.tree[key]
        if not isinstance(state, dict) or any(type(k) is not str for k in state):
            raise MalformedCheckpoint(f"{key} of {file.path} must be a state dict", file=file.path)
        named, old = current_names(state, f"{key} of {file.path}")
        yield ModelChunk(file, number, named, old)


def _layers(ranks: Ranks, chunks: Sequence[ModelChunk], vpp: int) -> tuple[int, Counts]:
    """Return the number of layers of the model, and the first layer of each chunk.

    The ranks' tensors decide when they add up to the arguments' count; with ranks missing, the arguments do.
    """
    layers_by_chunk: dict[tuple[int, int], int] = {}
    for c in chunks:
        numbers = [p.layer + 1 for n in c.state if (p := parse_name(n)).block in ("decoder", "encoder")]
        key = c.number, c.file.pp
        layers_by_chunk[key] = max([layers_by_chunk.get(key, 0), *numbers])
    want = ranks.args.get("num_layers")
    counts = None
    if len(layers_by_chunk) == vpp * ranks.pp:
        counts = [[layers_by_chunk[v, p] for p in range(ranks.pp)] for v in range(vpp)]
        if want is None or sum(map(sum, counts)) == want:
            return sum(map(sum, counts)), first_layers(counts)
    counts = layers_per_chunk(ranks.args, ranks.pp, vpp)
    if counts is None or sum(map(sum, counts)) != want:
        raise MalformedCheckpoint(
            f"cannot number the layers: the arguments give {short_repr(want, 20)} layers on {ranks.pp} "
            f"stages of {vpp} chunks, the ranks present have {sum(layers_by_chunk.values())}",
            hint="copy the files of every rank of the save",
        )
    return sum(map(sum, counts)), first_layers(counts)


def _experts(args: Mapping[str, Any]) -> int:
    count = args.get("num_experts", args.get("num_moe_experts"))
    if count is not None and (type(count) is not int or count < 0):
        raise MalformedCheckpoint(f"num_experts must be a count (got {short_repr(count, 40)})")
    return count or 0


def _gated(args: Mapping[str, Any], chunks: Sequence[ModelChunk]) -> bool:
    """Return whether fc1 is gate and up projection: twice as many rows as fc2 has columns."""
    gated: set[bool] = set()
    for chunk in chunks:
        for name, value in chunk.state.items():
            second = name.replace("linear_fc1", "linear_fc2").replace("experts.weight1", "experts.weight2")
            fc2 = chunk.state.get(second)
            if second == name or "bias" in name or ".adapter." in name or not isinstance(value, StoredView):
                continue
            if not isinstance(fc2, StoredView) or len(value.shape) != 2 or len(fc2.shape) != 2:
                continue
            grouped = name.endswith("experts.weight1")
            rows, columns = prod(value.shape), prod(fc2.shape)
            joined = value.shape[0 if grouped else 1] == fc2.shape[1 if grouped else 0]
            if not joined or rows not in (columns, 2 * columns):
                raise MalformedCheckpoint(
                    f"{name} {list(value.shape)} does not fit {second} {list(fc2.shape)}"
                )
            gated.add(rows == 2 * columns)
    if len(gated) > 1:
        raise UnsupportedFormat("cannot merge the ranks: only some layers have gated projections")
    return gated.pop() if gated else bool(args.get("swiglu"))


def _layers_are_alike(args: Mapping[str, Any], chunks: Sequence[ModelChunk]) -> bool:
    """Return whether all layers have the same parameters, which are then stacked into one tensor each."""
    for key in _BY_LAYER:
        if args.get(key) not in (None, False, 1, ""):
            return False
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    per_layer: dict[tuple[int, int, int], set[str]] = {}
    for c in chunks:
        for name, value in c.state.items():
            local = parse_name(name)
            if local.block not in ("decoder", "encoder") or not isinstance(value, (StoredView, Refused)):
                continue
            rest = _EXPERT.sub("", local.rest)
            if isinstance(value, StoredView):  # of a refused value only the name counts
                form = value.dtype, value.shape
                if kinds.setdefault(rest, form) != form:
                    return False
            per_layer.setdefault((c.number, c.file.pp, local.layer), set()).add(rest)
    sets = [set(s) for s in {frozenset(s) for s in per_layer.values()}]
    # A layer that only lacks parameters is damaged; two that each have some the other lacks are of two kinds.
    return not any(a - b and b - a for a in sets for b in sets)


def _bucket_size(args: Mapping[str, Any]) -> int | None:
    """Return the elements of a full bucket when gradients are reduced while they are computed.

    The rule is that of megatron/core/distributed/distributed_data_parallel.py.
    """
    if not args.get("overlap_grad_reduce"):
        return None
    size, ranks = args.get("ddp_bucket_size"), args.get("data_parallel_size")
    if type(size) is int:
        return size
    return max(40_000_000, 1_000_000 * ranks) if type(ranks) is int else None


def _heads(args: Mapping[str, Any]) -> int:
    value = args.get("num_attention_heads")
    return value if type(value) is int and value > 0 else 0


def _qkv_order(ranks: Ranks, chunks: Sequence[ModelChunk]) -> str:
    """Return the order of QKV rows. Megatron-LM reads the version where modules have their old names."""
    if not any(c.old for c in chunks):
        return "by group"
    version = ranks.files[0].tree.get("checkpoint_version", 0)
    if version in (0, 1.0):
        return "version 0" if version == 0 else "version 1.0"
    if not isinstance(version, (int, float)) or version < 2:
        raise UnsupportedFormat(f"checkpoint_version must be 0, 1.0, 2.0 or 3.0 (got {version!r:.20})")
    return "by group"


def _own_norms(chunks: Sequence[ModelChunk]) -> bool:
    """Return whether norms are separate modules before a joint QKV projection, as in Megatron's layers."""
    names = {parse_name(n).rest for c in chunks for n in c.state}
    return "input_layernorm.weight" in names and "self_attention.linear_qkv.weight" in names
