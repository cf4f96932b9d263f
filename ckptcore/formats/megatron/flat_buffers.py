"""Map the flat state of Megatron's distributed optimizer to parameters: buffers, and flattened shards.

`DistributedOptimizer` keeps its state in one flat buffer per rank of the model-parallel groups, split
into buckets (megatron/core/optimizer/distrib_optimizer.py, distributed/param_and_grad_buffer.py).
Three layouts store such buffers: `dp_reshardable` and `fully_sharded_bucket_space` (a tensor per
bucket), and `dp_zero_gather_scatter` (a tensor per buffer, inside an object). Parameters are in reverse
registration order; each starts at a multiple of 64 elements. Gaps hold whatever was in memory, and are
left out. Where sizes do not add up exactly, the buffers stay as they are: nothing is guessed.

Until 0.15 `fully_sharded_model_space` stored each data-parallel rank's slice of a flattened local
shard. A tensor of global shape [X, Y], split into local shards [x, y], is stored as [X/x, Y/y, x*y],
and chunks split its last dim (megatron/core/dist_checkpointing/strategies/resharding.py). `.metadata`
records the shape under ``mcore_data``, which torch 2.9 dropped while it saved (Megatron-LM issue
2345). Without it, the shape is that of the weight which the state belongs to.

A job that saves buffers keeps the options of parameter groups, and the loss scale, in an object for each
model-parallel group, and notes in the common state how the optimizer's state is stored. A job that asks for
the state by parameter finds all of it in the common state (`DistributedOptimizer.sharded_state_dict`, and
`ChainedOptimizer.sharded_state_dict` for the prefix of its names). There are two forms by parameter:

- `fully_reshardable` (0.15 and later) calls a master ``param``.
- `fully_sharded_model_space` (0.11 to 0.15) calls it ``fp32_param``, and has a prefix for each of several
  optimizers, unless ``content_metadata`` says otherwise.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any

import numpy as np

from ckptcore.core.box import flat_start, from_flat_range
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Blob, Chunks, Manifest, TensorSpec, row_major
from ckptcore.core.object_tree import Named, decode, encode, references
from ckptcore.core.subset import select
from ckptcore.errors import CkptError, Finding, MalformedCheckpoint, UnsupportedFormat, finding
from ckptcore.formats.common.join import renamed_tree
from ckptcore.formats.dcp.metadata import dims
from ckptcore.formats.megatron.parameter_order import Parameter, ParameterOrder, Unregistered
from ckptcore.formats.megatron.partition_rules import Placement
from ckptcore.utils.text import count, short_repr

MODEL_SPACE = "fully_sharded_model_space"
RESHARDABLE = "fully_reshardable"
SHARDING_TYPE = "param_state_sharding_type"  # of the common state's ``optimizer``
_GATHERED = "dp_zero_gather_scatter"
_BY_PARAMETER = {"dp_reshardable": RESHARDABLE, "fully_sharded_bucket_space": MODEL_SPACE}
_OPTIMIZER, _ARGS, _CONTENT = "optimizer", "args", "content_metadata"
_GROUPS = "param_groups"
_ASKED = "distrib_optim_sharding_type"  # of ``content_metadata``: what a loader asks for
_UNPREFIXED = "chained_optim_avoid_prefix"
_BUCKETS = ("per_bucket_numel", "per_bucket_numel_unpadded")  # sizes of buckets, which are no longer there
_PART = re.compile(
    r"^(?:.*?\.)??(?:chained_(?P<chain>\d{1,9})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,9})\."
    r"(?P<what>\w+)/shard_0_1$"
)
ALIGN = 64  # elements (param_and_grad_buffer.py, _pad_start_of_param_if_needed)
_FLAT = re.compile(
    r"^(?P<lead>(?:.*?\.)??)(?:chained_(?P<chain>\d{1,9})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,9})\."
    r"(?:gbuf_idx_(?P<buffer>\d{1,9})\.dtype_\((?P<dtypes>[\w., ]+)\)\.bucket_idx_(?P<bucket>\d{1,9})"
    r"|param_state/shard_0_1\.(?P<zero>\d{1,9})\.\((?P<zero_dtypes>.+)\))\.(?P<kind>\w+)$"
)
_DTYPE = re.compile(r"(?:torch\.|value=')(\w+)")
# Of a chunk: its offset and shape, its item, the first byte, strides and flags there.
_Row = tuple[tuple[int, ...], tuple[int, ...], int, int, tuple[int, ...], int]
ORIGINAL = "nd_reformulated_orig_global_shape"
_OWNED_STATE = re.compile(r"(?:^|\.)state\.[^.]+\.(?P<key>.+)$")
_MODULE = "module."


@dataclass(frozen=True, slots=True)
class ParameterSpace:
    """A form that names the optimizer's state by parameter.

    Attributes:
        type: Its ``param_state_sharding_type``.
        prefixed: Whether names begin with the optimizer's number, where there are several.
    """

    type: str
    prefixed: bool

    def name(self, kind: str, parameter: str, chain: int | None) -> str:
        """Return the name of a parameter's state.

        Args:
            kind: Kind of state, as flat buffers call it.
            parameter: Name of the parameter.
            chain: Number of its optimizer; None for the only one.
        """
        lead = f"chained_{chain}." if self.prefixed and chain is not None else ""
        kind = "fp32_param" if self.type == MODEL_SPACE and kind == "param" else kind
        return f"{lead}optimizer.state.{kind}.{parameter}"


def space_of(manifest: Manifest, *, before_016: bool) -> ParameterSpace:
    """Return the form for the state of a manifest's flat buffers.

    Args:
        manifest: As it is stored.
        before_016: Whether Megatron-Core before 0.16 saved it.
    """
    values = {b.key: decode(b.tree) for b in manifest.blobs if b.known and b.key in (_OPTIMIZER, _CONTENT)}
    stored = set(sharding_types(values.get(_OPTIMIZER)).values())
    spaces = {
        (MODEL_SPACE if before_016 else RESHARDABLE) if name == _GATHERED else _BY_PARAMETER.get(name)
        for name in stored
    }
    kind = MODEL_SPACE if spaces == {MODEL_SPACE} else RESHARDABLE
    content = values.get(_CONTENT)
    avoided = content.get(_UNPREFIXED, False) if isinstance(content, dict) else kind == RESHARDABLE
    return ParameterSpace(kind, prefixed=not avoided)


def sharding_types(optimizer: Any) -> dict[int | None, str]:
    """Return the sharding type of each optimizer by its number in a chain; None: the only one."""
    if not isinstance(optimizer, Mapping):
        return {}
    chain = {k: v for k, v in optimizer.items() if isinstance(k, int) and isinstance(v, Mapping)}
    types = {k: v.get(SHARDING_TYPE) for k, v in [(None, optimizer), *chain.items()]}
    return {k: v for k, v in types.items() if isinstance(v, str)}


def restate(manifest: Manifest, space: ParameterSpace) -> Manifest:
    """Return the manifest with the common state of a job that saves in this form.

    A manifest whose common state names no sharding type is returned as it is. So is one whose groups of ranks
    contradict each other, with a finding: no job will find the options of its parameter groups.
    """
    blobs = {b.key: b for b in manifest.blobs}
    chains = sharding_types(decode(blobs[_OPTIMIZER].tree) if _OPTIMIZER in blobs else None)
    if not chains:
        return manifest
    parts: dict[tuple[int | None, str], list[Blob]] = {}
    for blob in manifest.blobs:
        m = _PART.match(blob.key)
        if m is not None:
            parts.setdefault((int(m["chain"]) if m["chain"] else None, m["what"]), []).append(blob)
    moved: dict[int | None, dict[str, Any]] = {chain: {} for chain in chains}
    names: dict[str, str] = {}
    try:
        for (chain, field), group_blobs in parts.items():
            if field not in _BUCKETS:
                place = ".".join(str(n) for n in (_OPTIMIZER, chain, field) if n is not None)
                merged_blob, value = _merge_groups(field, place, group_blobs)
                names |= {n: _moved_to(place, merged_blob.key)(n) for n in references(merged_blob.tree)}
                moved.setdefault(chain, {})[field] = value
        _require_groups(moved, chains)
    except _Contradiction as error:
        message = f"Megatron-Core will not find the parameter groups of flat optimizer buffers: {error}"
        return replace(manifest, findings=(*manifest.findings, finding("flat-buffers", "coverage", message)))
    gone = {b.key for of in parts.values() for b in of}
    manifest = _without(manifest, {n for key in gone for n in references(blobs[key].tree)}, names)
    stated_blobs = (_stated(b, moved, space.type) for b in manifest.blobs if b.key not in gone)
    return replace(manifest, blobs=tuple(stated_blobs))


class _Contradiction(Exception):
    """Groups of ranks have different values; the message says which."""


def _require_groups(moved: Mapping[int | None, Mapping[str, Any]], chains: Mapping[int | None, str]) -> None:
    if any(_OPTIMIZER not in of for of in moved.values()):
        raise _Contradiction(f"not every one of {count(len(moved), 'optimizer')} has them")
    if moved.keys() != chains.keys():
        raise _Contradiction(f"{count(len(moved), 'optimizer')} for {count(len(chains), 'sharding type')}")


def _moved_to(place: str, key: str) -> Callable[[str], str]:
    """Return what renames an object's tensors for its place in the common state."""
    return lambda name: place + name.removeprefix(key)


def _merge_groups(field: str, place: str, blobs: Sequence[Blob]) -> tuple[Blob, Any]:
    """Return the object to use for those of all groups of ranks, and its value."""
    unread = [b.key for b in blobs if not b.known]
    if unread:
        raise _Contradiction(f"{unread[0]} cannot be read")
    values = [decode(renamed_tree(b.tree, _moved_to(place, b.key))) for b in blobs]
    differs = _Contradiction(f"{field} differs between groups of ranks")
    if field != _OPTIMIZER:
        if any(v != values[0] for v in values):
            raise differs
        return blobs[0], values[0]
    for blob, value in zip(blobs, values, strict=True):
        groups = value.get(_GROUPS) if isinstance(value, dict) else None
        if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
            raise _Contradiction(f"{blob.key} has none")
    steps = [g["step"] for v in values for g in v[_GROUPS] if "step" in g]
    if any(s != steps[0] for s in steps):
        raise _Contradiction(f"steps are {', '.join(dict.fromkeys(short_repr(s, 20) for s in steps))}")
    # A group without parameters of a rank has no step: since 0.15 all have that of the others.
    step = {"step": steps[0]} if steps else {}
    aligned = [{**v, _GROUPS: [{**g, **step} for g in v[_GROUPS]]} for v in values]
    # Ranks may have fewer groups: the object with the most must have all of them.
    best = max(range(len(aligned)), key=lambda n: len(aligned[n][_GROUPS]))
    for value in aligned:
        rest = {**value, _GROUPS: aligned[best][_GROUPS]}
        if rest != aligned[best] or any(g not in aligned[best][_GROUPS] for g in value[_GROUPS]):
            raise differs
    return blobs[best], aligned[best]


def _without(manifest: Manifest, inside: set[str], names: Mapping[str, str]) -> Manifest:
    """Return the manifest without the tensors of the objects that are gone; those moved have new names."""
    if not inside:
        return manifest
    rows = [n for n, t in enumerate(manifest.tensors) if t.fqn not in inside or t.fqn in names]
    return select(manifest, rows, [names.get(t.fqn, t.fqn) for t in (manifest.tensors[n] for n in rows)])


def _stated(blob: Blob, moved: Mapping[int | None, Mapping[str, Any]], kind: str) -> Blob:
    """Return an object of the common state as a job that saves by parameter has it."""
    value = decode(blob.tree) if blob.known and blob.key in (_OPTIMIZER, _CONTENT, _ARGS) else None
    if blob.key == _OPTIMIZER and isinstance(value, dict):
        for chain, of in moved.items():
            entry = value if chain is None else value.setdefault(chain, {})
            entry |= {**of, SHARDING_TYPE: kind}
    elif blob.key == _CONTENT and isinstance(value, dict):
        value = {**value, _ASKED: kind}
    elif blob.key == _ARGS and kind == MODEL_SPACE and isinstance(value, Named) and value.kind == "namespace":
        # Before 0.13 this argument of the job that saved says what its loader asks for.
        value = Named(value.kind, {**value.value, "ckpt_fully_parallel_save": True})
    else:
        return blob
    return replace(blob, tree=encode(value))


@dataclass(frozen=True, slots=True)
class Segment:
    """The place of a parameter in a bucket; ``start`` is its first element there."""

    parameter: Parameter
    bucket: int
    start: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One stored bucket of a buffer."""

    tensors: Mapping[str, int]  # kind of state -> position in the manifest
    numel: int  # as stored
    starts: tuple[int, ...]  # first elements of its chunks, ascending


def map_buckets(manifest: Manifest, args: Mapping[str, Any], *, before_016: bool = False) -> Manifest:
    """Return the manifest with flat optimizer buffers split into ``optimizer.state.<kind>.<parameter>``.

    Args:
        manifest: The manifest to change; one without such buffers is returned as it is.
        args: The training arguments stored in the checkpoint.
        before_016: Whether Megatron-Core before 0.16 saved it.
    """
    buffers, zero = _buffers(manifest)
    if not buffers:
        return manifest
    flat = {n for buckets in buffers.values() for b in buckets.values() for n in b.tensors.values()}
    try:
        weights = {t.fqn: t for n, t in enumerate(manifest.tensors) if n not in flat and _is_weight(t.fqn)}
        registration = ParameterOrder(args, weights)
        space = space_of(manifest, before_016=before_016)
        chains = max(key[1] for key in buffers) + 1
        pieces = [
            FlatRange(
                n,
                space.name(kind, s.parameter.placement.fqn, int(s.parameter.expert) if chains else None),
                s.start,
                s.parameter.numel,
                s.parameter.placement,
            )
            for bucket, s in _laid_out(manifest, registration, buffers, zero)
            for kind, n in bucket.tensors.items()
        ]
        return restate(recut(manifest, flat, pieces), space)
    except (Unregistered, CkptError) as error:
        reason = getattr(error, "message", None) or str(error)
        message = f"cannot split {count(len(flat), 'flat optimizer buffer')} by parameter: {reason}"
        return replace(manifest, findings=(*manifest.findings, finding("flat-buffers", "coverage", message)))


def stored_args(manifest: Manifest) -> Mapping[str, Any]:
    """Return the training arguments in a checkpoint's object ``args``; {} when there are none."""
    tree = next((b.tree for b in manifest.blobs if b.key == "args" and b.known), None)
    value = decode(tree) if tree is not None else None
    value = value.value if isinstance(value, Named) and value.kind == "namespace" else value
    return value if isinstance(value, dict) else {}


def lay_out(
    parameters: Sequence[Parameter],
    sizes: Sequence[int],
    *,
    padded: bool = False,
    own_bucket: Sequence[bool] = (),
) -> list[Segment]:
    """Place parameters in buckets of given sizes.

    Args:
        parameters: In registration order.
        sizes: Elements per bucket.
        padded: Whether sizes include the padding for the data-parallel ranks.
        own_bucket: For each parameter, whether it has its own bucket.

    Returns:
        The segments, bucket by bucket.

    Raises:
        Unregistered: Sizes and parameters do not add up.
    """
    # A list in registration order, taken from its end: buffers have the reverse order.
    queue = list(zip(parameters, own_bucket or [False] * len(parameters), strict=True))
    out: list[Segment] = []
    for bucket, size in enumerate(sizes):
        start = end = 0
        while queue and end < size:
            parameter, alone = queue[-1]
            start = -(-end // ALIGN) * ALIGN
            if alone and end:
                break
            if start + parameter.numel > size:
                break
            queue.pop()
            out.append(Segment(parameter, bucket, start))
            end = start + parameter.numel
            if alone:
                break
        # A bucket before a parameter with its own bucket ends where that parameter would have started.
        ends = {end, -(-end // ALIGN) * ALIGN} if queue and queue[-1][1] else {end}
        if size not in ends and not (padded and end <= size and not queue):
            raise Unregistered(f"a bucket of {size} elements does not end where a parameter does ({end})")
    if queue:
        raise Unregistered(
            f"the buckets have no room for {count(len(queue), 'parameter')}, {queue[-1][0].name} is the first"
        )
    return out


def lay_out_buffer(
    parameters: Sequence[Parameter], size: int, own_bucket: Sequence[bool] = (), bucket: int | None = None
) -> list[Segment]:
    """Place parameters in a buffer whose buckets are back to back, without their padding.

    Gaps are those inside buckets, so a buffer of the right size has the right borders.

    Args:
        parameters: In registration order.
        size: Elements of the buffer.
        own_bucket: For each parameter, whether it has its own bucket.
        bucket: Elements of a full bucket, when gradients were reduced bucket by bucket.

    Returns:
        The segments, counted from the start of the buffer.

    Raises:
        Unregistered: Size and parameters do not add up.
    """
    alone = own_bucket or [False] * len(parameters)
    for limit in dict.fromkeys((None, bucket)):
        out: list[Segment] = []
        base = end = 0  # of this bucket; elements
        for parameter, single in zip(reversed(parameters), reversed(alone), strict=True):
            start = -(-end // ALIGN) * ALIGN
            if single and end:  # the previous bucket ends where this one would have started
                base, start = base + start, 0
            out.append(Segment(parameter, 0, base + start))
            end = start + parameter.numel
            if single or (limit is not None and end >= limit):
                base, end = base + end, 0
        if base + end == size:
            return out
    raise Unregistered(f"a buffer has {size} elements, its parameters need {base + end}")


# --- what is stored -------------------------------------------------------------------------------

_Key = tuple[str, int, int, int]  # name before the buffer's, chain (-1: none), group, buffer


def _buffers(manifest: Manifest) -> tuple[dict[_Key, dict[int, Bucket]], bool]:
    """Return buffer -> bucket number -> bucket, and whether each buffer is one tensor (dp_zero)."""
    kinds_by_buffer: dict[_Key, dict[int, dict[str, int]]] = {}
    zero = False
    for n, spec in enumerate(manifest.tensors):
        m = _FLAT.match(spec.fqn) if ".dp_group_idx_" in spec.fqn else None
        if m is None or len(spec.shape) != 1:
            continue
        zero |= m["zero"] is not None
        key = (
            m["lead"],
            int(m["chain"]) if m["chain"] else -1,
            int(m["group"]),
            int(m["buffer"] or m["zero"] or 0),
        )
        kinds_by_buffer.setdefault(key, {}).setdefault(int(m["bucket"] or 0), {})[m["kind"]] = n
    return {
        k: {j: _bucket(manifest, kinds) for j, kinds in b.items()} for k, b in kinds_by_buffer.items()
    }, zero


def _bucket(manifest: Manifest, kinds: Mapping[str, int]) -> Bucket:
    first = min(kinds.values())
    c = manifest.chunks
    rows = slice(int(c.first[first]), int(c.first[first + 1]))
    starts = tuple(sorted(c.lo[rows, 0].tolist()))
    return Bucket(kinds, manifest.tensors[first].shape[0], starts)


def _is_weight(fqn: str) -> bool:
    return not fqn.startswith(("optimizer.", "chained_", "rng_state")) and "/shard_" not in fqn


def _laid_out(
    manifest: Manifest, order: ParameterOrder, buffers: Mapping[_Key, Mapping[int, Bucket]], zero: bool
) -> Iterator[tuple[Bucket, Segment]]:
    """Yield every parameter's bucket and segment."""
    world = order.world
    chains = {key[1] for key in buffers}
    # Experts have their own optimizer as soon as they are spread over ranks.
    if (
        len(chains) > 2
        or (len(chains) == 2 and not world.experts)
        or (len(chains) == 1 and world.experts and world.ep > 1)
    ):
        raise Unregistered(f"{len(chains)} optimizers for {world.ep} expert-parallel ranks")
    expert = max(chains) if len(chains) == 2 else None
    chunks = len(order.counts)
    mapped_buffers: set[tuple[bool, tuple[int, int, int], int]] = set()
    for (_, chain, group, number), buckets in sorted(buffers.items()):
        if number >= chunks:
            raise Unregistered(
                f"buffer {number} of {count(chunks, 'model chunk')}: parameters of several dtypes"
            )
        rank = _rank_of(group, order, chain == expert)
        registered = order.of(rank, number)
        parameters = (
            registered if expert is None else [p for p in registered if p.expert == (chain == expert)]
        )
        if sorted(buckets) != list(range(len(buckets))):
            raise Unregistered(f"buffer {number} of group {group} has only buckets {sorted(buckets)}")
        _one_dtype(manifest, parameters, buckets)
        ordered = [buckets[j] for j in range(len(buckets))]
        yield from ((ordered[s.bucket], s) for s in _segments(order, parameters, ordered, zero))
        mapped_buffers.add((chain == expert, rank, number))
    missing = world.tp * world.pp * chunks + (
        world.etp * world.ep * world.pp * chunks if expert is not None else 0
    )
    if len(mapped_buffers) != missing:
        raise Unregistered(f"found {len(mapped_buffers)} of {missing} buffers")


def _rank_of(group: int, order: ParameterOrder, expert: bool) -> tuple[int, int, int]:
    """Return tensor, pipeline and expert-parallel rank; tensor ranks count fastest, stages slowest."""
    world = order.world
    tp, group = group % (world.etp if expert else world.tp), group // (world.etp if expert else world.tp)
    ep, pp = (group % world.ep, group // world.ep) if expert else (0, group)
    if pp >= world.pp:
        raise Unregistered(f"a model-parallel group after the last stage, {world.pp - 1}")
    return tp, pp, ep


def _one_dtype(manifest: Manifest, parameters: Sequence[Parameter], buckets: Mapping[int, Bucket]) -> None:
    """Require one dtype: of several, nothing records which buffer has which parameters."""
    dtypes = {p.dtype for p in parameters}
    for bucket in buckets.values():
        for n in bucket.tensors.values():
            m = _FLAT.match(manifest.tensors[n].fqn)
            stored = _DTYPE.findall(m["dtypes"] or m["zero_dtypes"])[:1] if m else []
            if dtypes != set(stored):
                raise Unregistered(
                    f"a buffer of {' '.join(stored)} for parameters of {', '.join(sorted(dtypes))}"
                )


def _segments(
    order: ParameterOrder, parameters: Sequence[Parameter], buckets: Sequence[Bucket], zero: bool
) -> list[Segment]:
    own_bucket = [order.shares_embedding(p) for p in parameters]
    sizes = [b.numel for b in buckets]
    if zero:
        if len(sizes) != 1:
            raise Unregistered(f"{len(sizes)} buckets in one buffer")
        return lay_out_buffer(parameters, sizes[0], own_bucket)
    ranks = max(len(b.starts) for b in buckets)
    try:
        segments = lay_out(parameters, sizes, own_bucket=own_bucket)
    except Unregistered:
        # Bucket space: padded to a multiple that suits the data-parallel ranks.
        if any(n % lcm(ranks, 128) for n in sizes) or len(sizes) != 1:
            raise
        segments = lay_out(parameters, sizes, padded=True, own_bucket=own_bucket)
        end = segments[-1].start + segments[-1].parameter.numel
        if sizes[0] - end >= lcm(ranks, 128, 1 << 16):
            raise
        return segments
    # Each parameter was written on its own, so a chunk begins where it begins.
    for s in segments:
        if s.start not in buckets[s.bucket].starts:
            raise Unregistered(f"{s.parameter.name} would begin at {s.start}, where no chunk begins")
    return segments


@dataclass(frozen=True, slots=True)
class FlatRange:
    """A parameter's elements in a flat tensor of a manifest.

    Attributes:
        tensor: Position of the flat tensor in the manifest.
        fqn: Name for the tensor that the elements become.
        start: First element.
        count: Number of elements.
        placement: Where the parameter, in row-major order, belongs in the global tensor.
    """

    tensor: int
    fqn: str
    start: int
    count: int
    placement: Placement


def recut(manifest: Manifest, flat: set[int], pieces: Sequence[FlatRange]) -> Manifest:
    """Return the manifest with the flat tensors replaced by the parameters in them.

    Elements outside all pieces are left out, and counted in a finding. Objects that refer to flat
    tensors are left out, too.

    Args:
        manifest: The manifest to change.
        flat: Positions of the flat tensors.
        pieces: Every parameter's range of a flat tensor.

    Raises:
        UnsupportedFormat: A flat tensor is stored with strides.
    """
    specs: dict[str, TensorSpec] = {}
    rows: dict[str, list[_Row]] = {}
    used: dict[int, int] = {}
    for p in pieces:
        dtype = manifest.tensors[p.tensor].dtype
        itemsize = BY_NAME[dtype].itemsize
        specs.setdefault(p.fqn, TensorSpec(p.fqn, dtype, p.placement.shape))
        into = rows.setdefault(p.fqn, [])
        for low, high, item, start, flags in _stored_runs(manifest, p.tensor, p.start, p.count):
            for offset, shape, begin, steps in flat_boxes(p.placement, low, high):
                into.append((offset, shape, item, start + begin * itemsize, steps, flags))
        used[p.tensor] = used.get(p.tensor, 0) + p.count
    gaps = sum(manifest.tensors[n].shape[0] - used.get(n, 0) for n in flat)
    findings = list(manifest.findings)
    if gaps:
        message = (
            f"left out {count(gaps, 'element')} between the parameters of "
            f"{count(len(flat), 'flat optimizer buffer')}"
        )
        findings.append(finding("alignment-gap", "coverage", message))
    unchanged = [n for n in range(manifest.num_tensors) if n not in flat]
    tensors = tuple(manifest.tensors[n] for n in unchanged) + tuple(specs.values())
    gone = {manifest.tensors[n].fqn for n in flat}
    origin = {k: v for k, v in manifest.origin.items() if k != "paths"}
    return replace(
        manifest,
        tensors=tensors,
        chunks=_chunk_table(manifest, [*unchanged, *rows.values()], tensors),
        blobs=tuple(b for b in manifest.blobs if gone.isdisjoint(references(b.tree))),
        findings=tuple(findings),
        origin={**origin, "flat_buffers": len(flat), "alignment_gaps": gaps},
    )


def flat_boxes(
    placement: Placement, low: int, high: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]]:
    """Yield the boxes of the global tensor that a range of a rank's flattened tensor covers.

    Args:
        placement: Where the rank's tensor belongs.
        low: First element of the range.
        high: Last element of the range + 1.

    Yields:
        (offset and shape in the global tensor, first element counted from ``low``, element strides).
    """
    steps = row_major(placement.source)
    for run in from_flat_range(placement.source, low, high):
        for part in placement.parts:
            box = run.intersect(part.inner)
            if box is None:
                continue
            offset = tuple(
                a if d is None else a + box.offset[d] - part.inner.offset[d]
                for a, d in zip(part.offset, part.dims, strict=True)
            )
            shape = tuple(1 if d is None else box.shape[d] for d in part.dims)
            strides = tuple(0 if d is None else steps[d] for d in part.dims)
            yield offset, shape, flat_start(placement.source, box.offset) - low, strides


def _stored_runs(
    manifest: Manifest, tensor: int, start: int, count: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the stored runs of a flat range of a tensor.

    Yields:
        (first element and last + 1 counted from ``start``, item, first byte in the item, flags).
    """
    c = manifest.chunks
    first, last = int(c.first[tensor]), int(c.first[tensor + 1])
    # Sorted, so that the first chunk of a range is found by bisection: a buffer may have one per parameter.
    order = first + np.argsort(c.lo[first:last, 0], kind="stable")
    starts = c.lo[order, 0].tolist()
    itemsize = BY_NAME[manifest.tensors[tensor].dtype].itemsize
    for k in range(max(bisect_right(starts, start) - 1, 0), len(starts)):
        row = int(order[k])
        begin, end = starts[k], starts[k] + int(c.shape[row, 0])
        if begin >= start + count:
            return
        low, high = max(begin, start), min(end, start + count)
        if low >= high:
            continue
        byte, flags = (low - begin) * itemsize, 0
        if c.view is not None and c.view[row, 0] >= 0:
            if end - begin > 1 and c.view[row, 2] != 1:
                raise UnsupportedFormat(
                    f"cannot split flat buffer {manifest.tensors[tensor].fqn}: it is stored with strides"
                )
            byte, flags = byte + int(c.view[row, 0]), int(c.view[row, 1])
        yield low - start, high - start, int(c.item[row]), byte, flags


def _chunk_table(
    manifest: Manifest, rows: Sequence[int | list[_Row]], tensors: Sequence[TensorSpec]
) -> Chunks:
    """Return the chunks of tensors: those of a tensor of the manifest, by its position, or new ones."""
    c, old = manifest.chunks, np.diff(manifest.chunks.first)
    counts = [int(old[of]) if isinstance(of, int) else len(of) for of in rows]
    first = np.concatenate([[0], np.cumsum(np.array(counts, np.int64))]).astype(np.int64)
    rank = max((len(t.shape) for t in tensors), default=0)
    lo, shape = np.zeros((int(first[-1]), rank), np.int64), np.ones((int(first[-1]), rank), np.int64)
    view, item = np.full((len(lo), 2 + rank), -1, np.int64), np.zeros(len(lo), np.int64)
    width = min(rank, c.lo.shape[1])
    for begin, of in zip(first.tolist(), rows, strict=False):
        if isinstance(of, int):
            copied, stored = slice(begin, begin + int(old[of])), slice(int(c.first[of]), int(c.first[of + 1]))
            lo[copied, :width], shape[copied, :width] = c.lo[stored, :width], c.shape[stored, :width]
            item[copied] = c.item[stored]
            if c.view is not None:
                view[copied, 2 + width :] = np.where(c.view[stored, :1] < 0, -1, 0)
                view[copied, : 2 + width] = c.view[stored, : 2 + width]
            continue
        for index, (offset, extent, number, start, steps, flags) in enumerate(of, begin):
            lo[index, : len(offset)], shape[index, : len(extent)], item[index] = offset, extent, number
            view[index, :2], view[index, 2:] = (start, flags), 0
            view[index, 2 : 2 + len(steps)] = steps
    return Chunks(first, lo, shape, item, view)


def restore_shapes(manifest: Manifest, mcore_data: Any) -> Manifest:
    """Return the manifest with every flattened tensor in its parameter's shape.

    Args:
        manifest: The manifest to change.
        mcore_data: Key -> Megatron-Core's entry in `.metadata`, or None.

    Raises:
        MalformedCheckpoint: ``mcore_data`` contradicts the stored shapes.
    """
    original = _original_shapes(mcore_data)
    specs = {t.fqn: t for t in manifest.tensors}
    target_shapes: dict[int, tuple[int, ...]] = {}
    for n, spec in enumerate(manifest.tensors):
        shape = original.get(spec.fqn)
        if shape is not None:
            if _local_shape(spec.shape, shape) is None:
                raise MalformedCheckpoint(
                    f"{spec.fqn} must be {list(shape)} with flattened shards (got {list(spec.shape)})",
                    file=".metadata",
                )
            target_shapes[n] = shape
        elif spec.fqn not in original:
            owner = _owner(spec.fqn, specs)
            if owner is not None and spec.shape != owner.shape and _local_shape(spec.shape, owner.shape):
                target_shapes[n] = owner.shape
    return _reshaped(manifest, target_shapes) if target_shapes else manifest


def shape_findings(manifest: Manifest, mcore_data: Any) -> Iterator[Finding]:
    """Yield a finding when optimizer state is flattened and the parameters' shapes are unknown."""
    if isinstance(mcore_data, dict):
        return
    specs = {t.fqn: t for t in manifest.tensors}
    states = [t for t in manifest.tensors if _OWNED_STATE.search(t.fqn) and _owner(t.fqn, specs) is None]
    # State of a weight that is missing: [1, ..., n] with several chunks along the last dim only.
    odd = [t for t in states if len(t.shape) > 1 and _cut_in_cells(manifest, manifest.index[t.fqn])]
    if odd and len(odd) == len(states):
        names = ", ".join(t.fqn for t in odd[:4])
        yield finding(
            "shape-lost",
            "coverage",
            f"cannot reshape {count(len(odd), 'flattened optimizer tensor')}: "
            f"neither mcore_data nor the weights give the shapes: {names}",
        )


def _original_shapes(mcore_data: Any) -> dict[str, tuple[int, ...] | None]:
    """Return key -> original shape, or None where the tensor is stored in its own shape."""
    if not isinstance(mcore_data, Mapping):
        return {}
    shapes: dict[str, tuple[int, ...] | None] = {}
    for key, entry in mcore_data.items():
        shape = entry.get(ORIGINAL) if isinstance(entry, Mapping) else None
        shapes[key] = None if shape is None else dims(shape, ".metadata")
    return shapes


def _owner(fqn: str, specs: Mapping[str, TensorSpec]) -> TensorSpec | None:
    """Return the weight that an optimizer state belongs to."""
    m = _OWNED_STATE.search(fqn)
    if m is None:
        return None
    key = m["key"]
    for name in (key, _MODULE + key, key.removeprefix(_MODULE)):
        if name in specs and name != fqn:
            return specs[name]
    return None


def _local_shape(stored: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the local shard's shape when ``stored`` is ``shape`` with flattened shards, else None."""
    grid = stored[:-1]
    if len(grid) != len(shape) or any(g < 1 or n % g for g, n in zip(grid, shape, strict=True)):
        return None
    local = tuple(n // g for g, n in zip(grid, shape, strict=True))
    return local if prod(local) == stored[-1] else None


def _cut_in_cells(manifest: Manifest, tensor: int) -> bool:
    """Return whether every chunk is one cell in all dims but the last, and several share that dim."""
    c = manifest.chunks
    a, b = int(c.first[tensor]), int(c.first[tensor + 1])
    rank = len(manifest.tensors[tensor].shape)
    cells = bool((c.shape[a:b, : rank - 1] == 1).all())
    return cells and bool((c.shape[a:b, rank - 1] < manifest.tensors[tensor].shape[-1]).any())


def _reshaped(manifest: Manifest, target_shapes: Mapping[int, tuple[int, ...]]) -> Manifest:
    chunks, tensors = manifest.chunks, list(manifest.tensors)
    rows: list[int | list[_Row]] = list(range(len(tensors)))
    for n, shape in target_shapes.items():
        a, b = int(chunks.first[n]), int(chunks.first[n + 1])
        if chunks.view is not None and bool((chunks.view[a:b, 0] >= 0).any()):
            raise MalformedCheckpoint(f"cannot reshape {tensors[n].fqn}: a flattened tensor is itself a view")
        rows[n] = [row for c in range(a, b) for row in _boxes(manifest, n, c, shape)]
        tensors[n] = replace(tensors[n], shape=shape)
    return replace(manifest, tensors=tuple(tensors), chunks=_chunk_table(manifest, rows, tensors))


def _boxes(manifest: Manifest, tensor: int, row: int, shape: tuple[int, ...]) -> Iterator[_Row]:
    """Yield the boxes of one stored chunk, which is a slice of one flattened local shard."""
    stored, c = manifest.tensors[tensor], manifest.chunks
    rank = len(stored.shape)
    cell, extent = c.lo[row, :rank].tolist(), c.shape[row, :rank].tolist()
    local = _local_shape(stored.shape, shape)
    assert local is not None  # `restore_shapes` checked it
    if 0 in extent:
        return
    start, stop = cell[-1], cell[-1] + extent[-1]
    inside = all(i < g for i, g in zip(cell[:-1], stored.shape[:-1], strict=True))
    if any(n != 1 for n in extent[:-1]) or stop > stored.shape[-1] or not inside:
        raise MalformedCheckpoint(
            f"the chunk of {stored.fqn} at {cell} must be a slice of one local shard (got shape {extent})",
            file=".metadata",
        )
    base = tuple(i * n for i, n in zip(cell[:-1], local, strict=True))
    first_element = 0
    for box in from_flat_range(local, start, stop):
        moved = box.translate(base)
        start = first_element * BY_NAME[stored.dtype].itemsize
        yield moved.offset, moved.shape, int(c.item[row]), start, row_major(moved.shape), 0
        first_element += box.numel
