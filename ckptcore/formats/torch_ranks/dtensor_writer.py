"""Writing DTensors: how does torch pickle a distributed tensor, and the mesh that it lies on?

A DTensor is ``_rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor, (DTensor, dtype, size, stride,
offset, layout, device, grad), (None, {_local_tensor, _spec}))``, as torch 2.13 has it (torch/_tensor.py;
torch/distributed/tensor/_api.py, _dtensor_spec.py; torch/distributed/device_mesh.py). Everything in it
is on the list of ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptcore.core.manifest import TensorSpec, row_major
from ckptcore.core.object_tree import Named, TensorRef
from ckptcore.encodings.pickle.writer import Pickled
from ckptcore.topology.layout import Mesh, TensorLayout

RANKS = "\0ranks"  # name of the tensor of a mesh's ranks: int32 [world size]
_SPEC = "torch.distributed.tensor._dtensor_spec"
_PLACEMENTS = "torch.distributed.tensor.placement_types"
_LAYOUT = "torch.distributed._mesh_layout"
# What a placement of each class is pickled with.
_FIELDS = {"Shard": ("dim",), "_StridedShard": ("dim", "split_factor"), "Replicate": ()}


@dataclass(frozen=True, slots=True)
class _Global:
    """A class or function by name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Made:
    """An object made by ``cls.__new__(cls, *args)``.

    state: its ``__dict__``, None for a named tuple. key: what it is known by when a pickle has it more
    than once, "" where it has not.
    """

    module: str
    name: str
    args: tuple[Any, ...] = ()
    state: dict[str, Any] | None = None
    key: str = ""


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis as one rank sees it. stride: from one rank along it to the next. group: of its neighbours."""

    name: str
    size: int
    stride: int
    at: int
    group: str


@dataclass(frozen=True, slots=True)
class _Own:
    """What only one rank has in its mesh of some axes: that attribute of it."""

    axes: tuple[str, ...]
    field: str


class Meshes:
    """The device meshes of one rank: all of the mesh, and slices of it.

    Process groups are called as in a job that makes this mesh first, which is what lets torch find them
    (torch/distributed/device_mesh.py, `_init_one_process_group`): by a count of all that were made.
    """

    def __init__(self, mesh: Mesh, rank: int, joined: Sequence[str] = ()) -> None:
        """joined: neighbouring axes that tensors lie on as one, as in ``fsdp+ep``, in the mesh's order."""
        self._rank, self._world, self._device = rank, mesh.size, mesh.device
        self._axes: dict[str, _Axis] = {}
        made = 1  # the group of the world
        for name in (*(a for a, _ in mesh.axes), *joined):
            self._axes[name] = axis = _axis(mesh, name, rank, made)
            made += 0 if axis.size == mesh.size else mesh.size // axis.size
        names = tuple(a for a, _ in mesh.axes)
        self._root = self._mesh(names, None)
        self._known: dict[tuple[str, ...], _Made] = {names: self._root}

    def of(self, axes: tuple[str, ...]) -> _Made:
        """The mesh of some axes, in mesh order."""
        if axes not in self._known:
            self._known[axes] = self._mesh(axes, self._root)
        return self._known[axes]

    def own(self, value: _Own) -> Any:
        """What this rank has in a place where others have something else."""
        axes = [self._axes[name] for name in value.axes]
        own = {
            "_dim_group_names": [a.group for a in axes],
            "_rank": self._rank,
            "_coordinate_on_dim": tuple(a.at for a in axes),
        }
        return own[value.field]

    def _mesh(self, names: tuple[str, ...], root: _Made | None) -> _Made:
        axes = [self._axes[name] for name in names]
        state = {
            "_device_type": self._device,  # where the tensors are is `torch.load`'s ``map_location``
            "_layout": _Made(_LAYOUT, "_MeshLayout", (), {"axes": tuple(_flat_layout(a) for a in axes)}),
            "_rank_map": TensorRef(RANKS),
            "_mesh_dim_names": tuple(a.name for a in axes),
            "_root_mesh": root,
            "_flatten_rank_map": tuple(range(self._world)),
            "_thread_id": None,
            "_flatten_mapping": {},
            "_dim_group_names": _Own(names, "_dim_group_names"),
            "_rank": _Own(names, "_rank"),
            "_coordinate_on_dim": _Own(names, "_coordinate_on_dim"),
            "_hash": None,  # each process hashes text differently
        }
        return _Made("torch.distributed.device_mesh", "DeviceMesh", (), state, f"mesh {names}")


def _axis(mesh: Mesh, name: str, rank: int, made: int) -> _Axis:
    """made: how many process groups there are before those of this axis."""
    ((_, size),) = mesh.along([name]).axes
    number = [a for a, _ in mesh.axes].index(name.rpartition("+")[2])
    stride = row_major(tuple(n for _, n in mesh.axes))[number]
    # Groups are made for the coordinates on all other axes, row-major.
    index = rank // (stride * size) * stride + rank % stride
    group = "0" if size == mesh.size else str(made + index)
    return _Axis(name.replace("+", "_"), size, stride, rank // stride % size, group)


def _flat_layout(axis: _Axis) -> _Made:
    """torch leaves the size and stride of an axis of one rank out (_mesh_layout.py, `_FlatLayout`)."""
    one = axis.size == 1
    state = {"shape": () if one else (axis.size,), "stride": () if one else (axis.stride,)}
    return _Made(_LAYOUT, "_FlatLayout", (), state)


@dataclass(frozen=True, slots=True)
class RankPickle:
    """The pickle of a rank's file, for that rank and all others that have boxes of the same shapes.

    parts: bytes that their pickles have in common. own: what stands between the parts, one fewer.
    """

    parts: tuple[bytes, ...]
    own: tuple[_Own, ...]

    def of(self, meshes: Meshes) -> bytes:
        """The pickle of the rank of these meshes."""
        made = Pickled(_no_tensor)
        made.out = bytearray(self.parts[0])
        for own, part in zip(self.own, self.parts[1:], strict=True):
            made.value(meshes.own(own))
            made.out += part
        return bytes(made.out)


def _no_tensor(fqn: str) -> tuple[str, TensorSpec]:
    raise KeyError(fqn)


class RankPickled(Pickled):
    """Builds the pickle of one rank's file, and with it that of others."""

    def __init__(
        self,
        tensor: Callable[[str], tuple[str, TensorSpec]],
        distributed: Mapping[str, tuple[TensorSpec, TensorLayout]],
        meshes: Meshes,
    ) -> None:
        """tensor: FQN -> (storage key, spec of what this rank has).

        distributed: FQN -> (spec of the whole, how it lies) of those that are DTensors.
        """
        super().__init__(tensor)
        self._distributed, self._meshes = distributed, meshes
        self._alike: dict[Any, tuple[bytes, bytes]] = {}
        self._own: list[tuple[int, int, _Own]] = []  # where it stands: begin, end

    def shared(self) -> RankPickle:
        """The whole pickle, as far as other ranks have it too."""
        ends = [0, *(end for _, end, _ in self._own)]
        begins = [*(begin for begin, _, _ in self._own), len(self.out)]
        parts = [bytes(self.out[a:b]) for a, b in zip(ends, begins, strict=True)]
        return RankPickle((*parts[:-1], parts[-1] + b"."), tuple(own for *_, own in self._own))

    def value(self, value: Any) -> None:
        kind = type(value)
        if kind is _Made:
            self._once(value.key, lambda: self._make(value))
        elif kind is _Global:
            self.name(value.module, value.name)
        elif kind is _Own:
            begin = len(self.out)
            super().value(self._meshes.own(value))
            self._own.append((begin, len(self.out), value))
        elif kind is str and value in _REPEATED:
            self._once(f"text {value}", lambda: Pickled.value(self, value))
        elif kind is TensorRef and value.fqn in self._distributed:
            self._dtensor(value, *self._distributed[value.fqn])
        else:
            super().value(value)

    def _once(self, key: str, emit: Callable[[], None]) -> None:
        """Emits a value; a later one with this key refers back to it."""
        at = self._memo.get(key)
        if at is not None:
            self.out += b"h" + bytes([at]) if at < 256 else b"j" + at.to_bytes(4, "little")
            return
        emit()
        if key:
            at = self._memo[key] = len(self._memo)
            self.out += b"q" + bytes([at]) if at < 256 else b"r" + at.to_bytes(4, "little")

    def _make(self, value: _Made) -> None:
        self.name(value.module, value.name)
        self.all(value.args)
        self.out += b"\x81"  # NEWOBJ
        if value.state is not None:
            self.value(value.state)
            self.out += b"b"

    def _dtensor(self, ref: TensorRef, whole: TensorSpec, layout: TensorLayout) -> None:
        """Tensors that lie alike differ in the keys of their storages alone."""
        key, local = self.tensor(ref.fqn)
        alike = (layout.axes, layout.placements, whole.dtype, whole.shape, local.shape)
        known = self._alike.get(alike)
        if known is not None:
            self.out += known[0]
            super().value(key)
            self.out += known[1]
            return
        start, memo = len(self.out), len(self._memo)
        self._new_dtensor(ref, whole, layout)
        around = bytes(self.out[start:]).split(_pickled_text(key))
        # The first one may have put what the others refer back to.
        if len(self._memo) == memo and len(around) == 2:
            self._alike[alike] = around[0], around[1]

    def _new_dtensor(self, ref: TensorRef, whole: TensorSpec, layout: TensorLayout) -> None:
        strides, dtype = row_major(whole.shape), Named("dtype", whole.dtype)
        placements = tuple(_placement(p) for p in layout.placements)
        strided = any(p.name == "_StridedShard" for p in placements)
        spec = {
            "mesh": self._meshes.of(layout.axes),
            "placements": placements,
            "tensor_meta": _Made(_SPEC, "TensorMeta", (Named("size", whole.shape), strides, dtype)),
            "shard_order": None if strided else tuple(_shard_order(placements)),
            "use_strided_shard_as_shard_order": strided,
            "_hash": None,
        }
        self.name("torch._tensor", "_rebuild_from_type_v2")
        self.out += b"("
        self.value(_WRAPPER)
        self.value(_DTENSOR)
        self.value((_DTENSOR, dtype, whole.shape, strides, 0, _STRIDED, _CPU, False))
        self.out += b"(N}("  # the state: no ``__dict__``, and two slots
        self.value("_local_tensor")
        super().value(ref)
        self.value("_spec")
        self.value(_Made(_SPEC, "DTensorSpec", (), spec))
        self.out += b"uttR"


def _pickled_text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def _placement(placement: Any) -> _Made:
    kind = type(placement).__name__
    state = {name: getattr(placement, name) for name in _FIELDS[kind]}
    return _Made(_PLACEMENTS, kind, (), state, f"{kind} {state}")


def _shard_order(placements: Sequence[_Made]) -> Iterator[_Made]:
    """As _dtensor_spec.py, `compute_default_shard_order`: mesh axes from the left to the right."""
    cut: dict[int, tuple[int, ...]] = {}
    for axis, placement in enumerate(placements):
        if placement.state:
            dim = placement.state["dim"]
            cut[dim] = (*cut.get(dim, ()), axis)
    for dim in sorted(cut):
        yield _Made(_SPEC, "ShardOrderEntry", (dim, cut[dim]))


_WRAPPER = _Global("torch._utils", "_rebuild_wrapper_subclass")
_DTENSOR = _Global("torch.distributed.tensor", "DTensor")
_STRIDED, _CPU = Named("layout", "torch.strided"), Named("device", ["cpu"])
# Text that the pickle of every tensor has.
_REPEATED = frozenset(
    {
        "_local_tensor",
        "_spec",
        "mesh",
        "placements",
        "tensor_meta",
        "shard_order",
        "_hash",
        "storage",
        "cpu",
        "use_strided_shard_as_shard_order",
        "exp_avg",
        "exp_avg_sq",
        "step",
        "torch.strided",
    }
)
