"""Find the boxes of a distributed tensor in one rank's pickle, and the ranks that took part.

A DTensor's pickle has the local tensor, the placements, and the `DeviceMesh` with this rank's
coordinate on it (torch/distributed/tensor/_api.py, torch/distributed/device_mesh.py). A
ShardedTensor's has the local shards with their offsets, and the rank and world size of the job
(torch/distributed/_shard/sharded_tensor/api.py). The boxes follow without a process group.

Both are wrapper subclasses of torch.Tensor: ``_rebuild_from_type_v2(_rebuild_wrapper_subclass, type,
(type, dtype, size, stride, offset, layout, device, grad), state)`` (torch/_tensor.py). Classes moved between
releases: each row of `_CLASSES` names the module under which a release pickled them. No class is imported,
and no instance is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import row_major
from ckptcore.core.object_tree import Named, Refused, RefusedTensor
from ckptcore.encodings.pickle.torch_globals import (
    OBJECT_TABLE,
    REBUILDS,
    StoredView,
    of_class,
    with_attributes,
)
from ckptcore.encodings.pickle.unpickler import Call, Record, enum_record, member_of, record
from ckptcore.errors import MalformedCheckpoint, UnsafeContent, UnsupportedFormat
from ckptcore.topology import torch_chunk as cuts
from ckptcore.utils.text import short_repr

DTENSOR, SHARDED = "DTensor", "ShardedTensor"
_SHARD = "torch.distributed._shard"
# module -> class -> kind of its records.
_CLASSES: dict[str, dict[str, str]] = {
    # torch >= 2.5
    "torch.distributed.tensor": {"DTensor": DTENSOR},
    "torch.distributed.tensor._api": {"DTensor": DTENSOR},
    "torch.distributed.tensor._dtensor_spec": {
        "DTensorSpec": "DTensorSpec",
        "TensorMeta": "TensorMeta",
        "ShardOrderEntry": "ShardOrderEntry",  # torch >= 2.10
    },
    "torch.distributed.tensor.placement_types": {
        "Shard": "Shard",
        "_StridedShard": "_StridedShard",
        "Replicate": "Replicate",
        "Partial": "Partial",
        "MaskPartial": "Partial",
        "_MaskPartial": "Partial",
    },
    "torch.distributed.tensor._ops._embedding_ops": {"_MaskPartial": "Partial"},
    "torch.distributed.tensor._ops._math_ops": {"_NormPartial": "Partial"},
    # torch 2.0 to 2.4
    "torch.distributed._tensor": {"DTensor": DTENSOR},
    "torch.distributed._tensor.api": {"DTensor": DTENSOR},
    "torch.distributed._tensor.placement_types": {
        "DTensorSpec": "DTensorSpec",
        "TensorMeta": "TensorMeta",
        "Shard": "Shard",
        "_StridedShard": "_StridedShard",
        "Replicate": "Replicate",
        "Partial": "Partial",
        "_Partial": "Partial",
    },
    "torch.fx.passes.shape_prop": {"TensorMetadata": "TensorMeta"},
    # DeviceMesh: torch.distributed since 2.2, beside DTensor before.
    "torch.distributed._tensor.device_mesh": {"DeviceMesh": "DeviceMesh"},
    "torch.distributed.device_mesh": {"DeviceMesh": "DeviceMesh"},
    "torch.distributed._mesh_layout": {"_MeshLayout": "_MeshLayout", "_FlatLayout": "_FlatLayout"},
    # ShardedTensor
    f"{_SHARD}.sharded_tensor.api": {"ShardedTensor": SHARDED},
    f"{_SHARD}.sharded_tensor.shard": {"Shard": "LocalShard"},
    f"{_SHARD}.sharded_tensor.metadata": {
        "ShardedTensorMetadata": "ShardedTensorMetadata",
        "TensorProperties": "TensorProperties",
    },
    f"{_SHARD}.metadata": {"ShardMetadata": "ShardMetadata"},
    f"{_SHARD}.sharding_spec.chunk_sharding_spec": {"ChunkShardingSpec": "ShardingSpec"},
    f"{_SHARD}.sharding_spec.api": {
        "EnumerableShardingSpec": "ShardingSpec",
        "ChunkShardingSpec": "ShardingSpec",
    },
    "torch.distributed.remote_device": {"_remote_device": "_remote_device"},
}
# Subclasses with the same bytes as the tensor that they are made from.
_DTENSOR_FIELDS = frozenset({"_local_tensor", "_spec"})  # torch/distributed/tensor/_api.py
_PLAIN = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
_MAX_RANKS = 1 << 20
_MAX_FACTOR = 1 << 16
_MAX_LISTED = 1 << 22  # ranks of all meshes of one file together
_PIECE = 16  # bytes; a piece of a tensor takes far more of a file
ReadInts = Callable[[StoredView], tuple[int, ...]]  # the elements of a small integer tensor


def fields(value: Any, kind: str) -> dict[str, Any]:
    """Return the named fields of a record of this kind; raise ValueError for any other value.

    A class with ``__slots__`` pickles (dict or None, dict of slots), any other its ``__dict__``.
    """
    if type(value) is Record and value.kind == kind:
        parts = value.state if type(value.state) is tuple and len(value.state) == 2 else (value.state,)
        if all(p is None or type(p) is dict for p in parts):
            return {k: v for p in parts if p for k, v in p.items()}
    raise ValueError(f"expected a {kind} (got {short_repr(value)})")


def _wrapper(*args: Any) -> Any:
    raise ValueError("a wrapper subclass without its type")


def _typed(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Replace ``_rebuild_from_type_v2(function, type, args, state)``."""
    if isinstance(kind, Refused):
        return of_class(kind, function, args, state)
    if type(function) is not Call or type(kind) is not Call or type(args) is not tuple:
        raise ValueError(f"a tensor of {short_repr(kind)}")
    if function is _WRAPPER:
        if kind.name not in (DTENSOR, SHARDED) or len(args) < 3:
            raise ValueError(f"a wrapper subclass of type {kind.name}")
        tensor = Record(kind.name, args)
        tensor.state = _with_own_fields(state) if kind.name == DTENSOR else state
        return tensor
    if function.name not in _REBUILT or kind.name != "Tensor":
        raise ValueError(f"a {kind.name} that {function.name} makes")
    return with_attributes(function.build(*args), state)


def _with_own_fields(state: Any) -> Any:
    """Return the state of a DTensor with other attributes on the tensor that it wraps."""
    parts = state if type(state) is tuple else (state,)
    if any(part is not None and type(part) is not dict for part in parts):
        return state  # its placement is reported
    attributes = {k: v for part in parts if part for k, v in part.items()}
    extra = {k: v for k, v in attributes.items() if k not in _DTENSOR_FIELDS}
    if not extra or "_local_tensor" not in attributes:
        return state
    dtensor_fields = {k: v for k, v in attributes.items() if k in _DTENSOR_FIELDS}
    return dtensor_fields | {"_local_tensor": with_attributes(attributes["_local_tensor"], extra)}


def _nested_class(owner: Any, name: Any) -> Any:
    """Resolve ``getattr(ShardedTensor, "ProcessGroupState")``, protocol 2's form of a nested class."""
    with suppress(LookupError):
        return member_of(owner, name)
    if owner is not _SHARDED_CLASS or name != "ProcessGroupState":
        owner_name = owner.name if type(owner) is Call else type(owner).__name__
        raise UnsafeContent(
            f"a pickle requests attribute {short_repr(name, 60)} of {owner_name:.60}", **{"global": "getattr"}
        )
    return _GROUP


_WRAPPER = Call("_rebuild_wrapper_subclass", _wrapper)
_REBUILT = frozenset(call.name for call in REBUILDS.values())
_GROUP = record("ProcessGroupState")
_TABLE: dict[str, Any] = {
    f"{module}.{name}": record(kind) for module, names in _CLASSES.items() for name, kind in names.items()
} | {f"{_SHARD}.sharded_tensor.metadata.MEM_FORMAT_ENCODING": enum_record("MEM_FORMAT_ENCODING")}
_SHARDED_CLASS = _TABLE[f"{_SHARD}.sharded_tensor.api.ShardedTensor"]
DIST_TABLE: dict[str, Any] = {
    **OBJECT_TABLE,
    **_TABLE,
    **{name: Call("Tensor", _wrapper) for name in _PLAIN},
    "torch._tensor._rebuild_from_type_v2": Call("_rebuild_from_type_v2", _typed),
    "torch._utils._rebuild_wrapper_subclass": _WRAPPER,
    "builtins.getattr": Call("getattr", _nested_class),
    "__builtin__.getattr": Call("getattr", _nested_class),
    # Python 3.11 pickles a nested class by its qualified name from protocol 4 on.
    f"{_SHARD}.sharded_tensor.api.ShardedTensor.ProcessGroupState": _GROUP,
}


@dataclass(frozen=True, slots=True)
class Placed:
    """A distributed tensor as one rank saved it.

    Attributes:
        dtype: dtype of the tensor.
        shape: Global shape.
        pieces: (view into a storage, its box); empty for a rank without elements.
        rank: The writer's global rank, or None if not recorded.
        ranks: Global ranks that took part.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[StoredView, Box], ...]
    rank: int | None
    ranks: tuple[int, ...] | range


@dataclass(frozen=True, slots=True)
class _Mesh:
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    rank: int | None
    ranks: tuple[int, ...]


class Placer:
    """Find the boxes of the distributed tensors of one file of ``size`` bytes; a shared mesh is read once.

    The work is bounded by the size of the file, even if the pickle's memo repeats values or a few bytes
    encode large factors.
    """

    def __init__(self, read_ints: ReadInts, path: str, size: int) -> None:
        self._path, self._size = path, size
        self._lists = _RankLists(read_ints)
        self._pieces = self._steps = 0
        # Values are kept beside what was parsed: the id of a value that is gone may be another's.
        self._parsed_meshes: dict[int, tuple[Any, _Mesh]] = {}
        self.meshes: set[str] = set()  # keys of their storages
        self.storages: set[str] = set()  # of tensors without elements

    def place(self, value: Record, name: str) -> Placed | Refused:
        """Return the boxes of a DTensor or ShardedTensor, or the refused value inside it.

        Raises:
            MalformedCheckpoint: The pickle contradicts itself.
            UnsupportedFormat: A placement is Partial, or releases of torch cut it differently.
        """
        try:
            return self._dtensor(value, name) if value.kind == DTENSOR else self._sharded(value)
        # Arguments and states are the file's: any of them may be missing, or of another type.
        except (ValueError, TypeError, IndexError) as error:
            raise MalformedCheckpoint(f"{self._path}: {name}: {error}") from error

    def _dtensor(self, value: Record, name: str) -> Placed | Refused:
        """Place the local tensor of a DTensor by its mesh and placements."""
        state = fields(value, DTENSOR)
        local, shape = state.get("_local_tensor"), _dims(value.args[2])
        if isinstance(local, Refused):
            return _refused_tensor(local, shape)
        dtype = _dtype(value.args[1])
        if type(local) is not StoredView or local.dtype != dtype:
            raise ValueError(f"a DTensor of {dtype} whose local tensor is {short_repr(local)}")
        spec = fields(state.get("_spec"), "DTensorSpec")
        mesh = self._mesh(spec.get("mesh"))
        placements: Any = spec.get("placements")
        if type(placements) not in (tuple, list) or len(placements) != len(mesh.sizes):
            raise ValueError(f"placements {short_repr(placements)} on a mesh of {len(mesh.sizes)} axes")
        if mesh.coordinate is None:  # a rank outside the mesh has no elements
            self.storages.add(local.key)
            return Placed(dtype, shape, (), mesh.rank, mesh.ranks)
        by_dim: dict[int, list[cuts.Cut]] = {}
        for axis, placement in enumerate(placements):
            cut = self._cut(placement, axis, mesh, len(shape), name)
            if cut is not None:
                by_dim.setdefault(cut[0], []).append(cut[1])
        orders = dict(_orders(spec.get("shard_order")))
        if len(local.shape) != len(shape):
            raise ValueError(f"{list(shape)} whose local tensor is {list(local.shape)}")
        runs = [
            self._runs(n, by_dim.get(d, []), orders.get(d), local.shape[d], name) for d, n in enumerate(shape)
        ]
        if 0 in local.shape:
            self.storages.add(local.key)
            return Placed(dtype, shape, (), mesh.rank, mesh.ranks)
        self._count(prod(map(len, runs)))
        pieces = tuple(
            (_narrow(local, local_offset, box.shape), box) for box, local_offset in cuts.boxes(runs)
        )
        return Placed(dtype, shape, pieces, mesh.rank, mesh.ranks)

    def _sharded(self, value: Record) -> Placed | Refused:
        """Place the local shards of a ShardedTensor by their metadata."""
        state = value.state
        if type(state) is not tuple or len(state) < 3 or type(state[0]) is not list:
            raise ValueError(f"a ShardedTensor with the state {short_repr(state)}")
        metadata = fields(state[1], "ShardedTensorMetadata")
        shape = _dims(metadata.get("size"))
        properties = metadata.get("tensor_properties")
        first = properties.state if type(properties) is Record else None
        tensors = [fields(shard, "LocalShard").get("tensor") for shard in state[0]]
        refused = next((tensor for tensor in tensors if isinstance(tensor, Refused)), None)
        if refused is not None:
            keys = tuple(sorted({k for t in tensors if isinstance(t, RefusedTensor) for k in t.storages}))
            return _refused_tensor(refused, shape, keys)
        dtype = _dtype(
            first.get("dtype") if type(first) is dict else first[0] if type(first) is tuple else None
        )
        group = fields(state[2], "ProcessGroupState")
        rank, world = group.get("global_rank"), group.get("global_world_size")
        if type(rank) is not int or type(world) is not int or not 0 <= rank < world <= _MAX_RANKS:
            raise ValueError(f"a ShardedTensor of rank {short_repr(rank, 20)} of {short_repr(world, 20)}")
        pieces = []
        self._count(len(state[0]))
        for shard in state[0]:
            local = fields(shard, "LocalShard")
            where = fields(local.get("metadata"), "ShardMetadata")
            offset, extent = _dims(where.get("shard_offsets")), _dims(where.get("shard_sizes"))
            tensor = local.get("tensor")
            if type(tensor) is not StoredView or tensor.shape != extent or tensor.dtype != dtype:
                raise ValueError(f"a shard of {dtype} {list(extent)} that contains {short_repr(tensor, 120)}")
            if len(offset) != len(shape) or len(extent) != len(shape):
                raise ValueError(f"a shard at {list(offset)} of a tensor of {list(shape)}")
            if 0 in extent:
                self.storages.add(tensor.key)
            else:
                pieces.append((tensor, Box(offset, extent)))
        return Placed(dtype, shape, tuple(pieces), rank, range(world))

    def _cut(
        self, placement: Any, axis: int, mesh: _Mesh, rank: int, name: str
    ) -> tuple[int, cuts.Cut] | None:
        assert mesh.coordinate is not None
        kind = placement.kind if type(placement) is Record else ""
        if kind == "Replicate":
            return None
        if kind == "Partial":
            raise UnsupportedFormat(
                f"{self._path}: {name} has a Partial placement: each rank has a summand, not the values",
                hint="reduce it before saving: DTensor.redistribute, or full_tensor",
            )
        shard = fields(placement, "_StridedShard" if kind == "_StridedShard" else "Shard")
        dim, factor = shard.get("dim"), shard.get("split_factor", 1)
        if type(dim) is not int or not -rank <= dim < rank:
            raise ValueError(f"a shard of dim {short_repr(dim, 20)} of {rank}")
        if type(factor) is not int or not 0 < factor <= _MAX_FACTOR:
            raise ValueError(f"a split factor of {short_repr(factor, 20)}")
        # torch accepts dims counted from the end.
        return dim % rank, cuts.Cut(axis, mesh.sizes[axis], mesh.coordinate[axis], factor)

    def _runs(
        self, n: int, cut: list[cuts.Cut], order: Sequence[int] | None, extent: int, name: str
    ) -> tuple[cuts.Run, ...]:
        """Return the rank's runs of one dim, by the only rule that gives the extent of its local tensor."""
        self._steps += prod(c.factor for c in cut)
        if self._steps > self._size + (1 << 20):
            raise ValueError(f"strided shards that take {self._steps} steps in {self._size} bytes")
        candidates = cuts.local_runs(n, cut, order)
        fits = [runs for runs in candidates if sum(b - a for a, b in runs) == extent]
        if not fits:
            expected = sum(b - a for a, b in candidates[0])
            raise ValueError(
                f"this rank must have {expected} of {n} elements of a dim by its placements (got {extent})"
            )
        if len(fits) > 1:
            raise UnsupportedFormat(
                f"{self._path}: {name} has an uneven strided shard, which releases of torch cut differently",
                hint="save it through torch.distributed.checkpoint, or redistribute it first",
            )
        return fits[0]

    def _count(self, pieces: int) -> None:
        self._pieces += pieces
        if self._pieces > self._size // _PIECE + 4096:
            raise ValueError(f"{self._pieces} pieces of tensors in {self._size} bytes")

    def _mesh(self, value: Any) -> _Mesh:
        _, mesh = self._parsed_meshes.get(id(value), (None, None))
        if mesh is None:
            mesh = _mesh(fields(value, "DeviceMesh"), self._lists)
            self._parsed_meshes[id(value)] = value, mesh
            self.meshes |= _mesh_storages(value)
        return mesh


class _RankLists:
    """Lists of ranks, each parsed once."""

    def __init__(self, read_ints: ReadInts) -> None:
        self._read_ints, self._total = read_ints, 0
        self._ranks: dict[Any, tuple[Any, tuple[int, ...]]] = {}  # beside each, its list: as `Placer` does

    def of(self, value: Any) -> tuple[int, ...]:
        """Return the ranks in a tensor or list."""
        key = value if type(value) is StoredView else id(value)
        _, ranks = self._ranks.get(key, (None, None))
        if ranks is None:
            self._total += prod(value.shape) if type(value) is StoredView else len(value)
            if self._total > _MAX_LISTED:
                raise ValueError(f"meshes of {self._total} ranks")
            ranks = self._read_ints(value) if type(value) is StoredView else tuple(value)
            if len(ranks) > _MAX_RANKS or any(type(r) is not int or not 0 <= r < _MAX_RANKS for r in ranks):
                raise ValueError(f"a mesh of ranks {short_repr(ranks)}")
            self._ranks[key] = value, ranks
        return ranks


def _mesh(state: dict[str, Any], lists: _RankLists, depth: int = 4) -> _Mesh:
    """Parse a mesh: a tensor ``mesh`` of ranks (torch <= 2.9), or a layout of ``_rank_map``."""
    tensor = state.get("mesh", state.get("_mesh"))
    if type(tensor) is StoredView:
        sizes = tensor.shape
    else:
        layout = fields(state.get("_layout"), "_MeshLayout")
        axes = layout.get("axes")
        shapes: Any = layout.get("shape")  # torch 2.10 to 2.12; nested for joined axes
        if axes is not None:
            shapes = [fields(a, "_FlatLayout").get("shape") for a in axes]
        shapes = (shapes,) if type(shapes) is int else shapes
        if type(shapes) not in (list, tuple):
            raise ValueError(f"a mesh layout of {short_repr(shapes)}")
        sizes = tuple(prod(_flat_numbers(s)) for s in shapes)
    if not 0 < prod(sizes) <= _MAX_RANKS or len(sizes) > 16:
        raise ValueError(f"a mesh of {short_repr(sizes)}")
    raw_coordinate = state.get("_coordinate_on_dim", ())
    coordinate = None if raw_coordinate is None else tuple(raw_coordinate)
    if coordinate is not None and (
        len(coordinate) != len(sizes)
        or any(type(c) is not int or not 0 <= c < n for c, n in zip(coordinate, sizes, strict=True))
    ):
        raise ValueError(f"coordinate {short_repr(coordinate)} on a mesh of {sizes}")
    stored = tensor if type(tensor) is StoredView else state.get("_rank_map")
    if type(stored) is StoredView and prod(stored.shape) > _MAX_RANKS:
        raise ValueError(f"a mesh of {prod(stored.shape)} ranks")
    listed = state.get("_flatten_rank_map", state.get("_flatten_mesh_list"))
    # The tensor and the tuple of its elements (device_mesh.py): releases have one of them, or both.
    forms = [lists.of(form) for form in (listed, stored) if form is not None]
    if not forms:
        raise ValueError("a mesh without ranks")
    if len(set(forms)) > 1:
        first_text, second_text = (short_repr(form, 60) for form in forms)
        raise ValueError(f"a mesh that lists its ranks as {first_text}, and as {second_text}")
    ranks = forms[0]
    rank, root = state.get("_rank"), state.get("_root_mesh")
    if type(rank) is not int:  # torch <= 2.10 does not record it; the root mesh lists its ranks in order
        rank = None
        # A crafted pickle can make a mesh its own root, so the depth is bounded.
        if root is not None and depth:
            rank = _mesh(fields(root, "DeviceMesh"), lists, depth - 1).rank
        elif coordinate is not None and len(ranks) == prod(sizes):
            rank = ranks[sum(c * s for c, s in zip(coordinate, row_major(sizes), strict=True))]
    return _Mesh(sizes, coordinate, rank, ranks)


def _mesh_storages(mesh: Any) -> set[str]:
    """Return the keys of the storages in the pickle of a mesh and the meshes that it refers to."""
    keys: set[str] = set()
    # A pickle's memo permits cycles.
    visited: set[int] = set()
    queue = [mesh]
    while queue:
        value = queue.pop()
        if isinstance(value, StoredView):
            keys.add(value.key)
        elif isinstance(value, (Record, dict, tuple, list)) and id(value) not in visited:
            visited.add(id(value))
            if isinstance(value, Record):
                queue += [value.state, value.args]
            else:
                queue += value.values() if isinstance(value, dict) else value
    return keys


def _refused_tensor(local: Refused, shape: tuple[int, ...], storages: tuple[str, ...] = ()) -> Refused:
    """Return a refused local tensor as the global tensor."""
    if not isinstance(local, RefusedTensor):
        return local
    return replace(local, shape=shape, storages=storages or local.storages)


def _narrow(view: StoredView, local_offset: tuple[int, ...], extent: tuple[int, ...]) -> StoredView:
    if extent == view.shape:
        return view
    offset = view.offset + sum(a * s for a, s in zip(local_offset, view.strides, strict=True))
    return StoredView(view.key, view.storage_bytes, view.dtype, extent, offset, view.strides, view.flags)


def _orders(value: Any) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (tensor dim, mesh axes in the order of cuts) of a spec's ``shard_order`` (torch >= 2.10)."""
    if value is None:
        return
    if type(value) not in (tuple, list) or len(value) > 64:
        raise ValueError(f"a shard order of {short_repr(value)}")
    for entry in value:
        if type(entry) is not Record or entry.kind != "ShardOrderEntry":
            raise ValueError(f"a shard order with {short_repr(entry)}")
        dim, axes = entry.args if len(entry.args) == 2 else _order_fields(entry)
        if type(dim) is not int or type(axes) not in (tuple, list) or any(type(a) is not int for a in axes):
            raise ValueError(f"a shard order of dim {short_repr(dim, 20)} by {short_repr(axes)}")
        yield dim, tuple(axes)


def _order_fields(entry: Record) -> tuple[Any, Any]:
    named = fields(entry, "ShardOrderEntry")
    return named.get("tensor_dim"), named.get("mesh_dims")


def _dtype(value: Any) -> str:
    if type(value) is Named and value.kind == "dtype" and value.value in BY_NAME:
        return str(value.value)
    raise ValueError(f"dtype {short_repr(value)}")


def _dims(value: Any) -> tuple[int, ...]:
    plain = value.value if type(value) is Named and value.kind == "size" else value
    if (
        type(plain) not in (tuple, list)
        or len(plain) > 64
        or any(type(n) is not int or not 0 <= n < 1 << 50 for n in plain)
    ):
        raise ValueError(f"size {short_repr(value)}")
    return tuple(plain)


def _flat_numbers(value: Any, depth: int = 4) -> Iterator[int]:
    if type(value) is int:
        yield value
    elif type(value) in (tuple, list) and depth and len(value) <= 64:
        for part in value:
            yield from _flat_numbers(part, depth - 1)
    else:
        raise ValueError(f"a mesh axis of {short_repr(value)}")
