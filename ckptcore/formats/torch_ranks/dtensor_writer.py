"""Pickle distributed tensors and their meshes as torch does.

A DTensor is ``_rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor, (DTensor, dtype, size, stride,
offset, layout, device, grad), (None, {_local_tensor, _spec}))``, as in torch 2.13 (torch/_tensor.py;
torch/distributed/tensor/_api.py, _dtensor_spec.py; torch/distributed/device_mesh.py).
``torch.load(weights_only=True)`` permits everything in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptcore.core.manifest import TensorSpec, row_major
from ckptcore.core.object_tree import Named, TensorRef
from ckptcore.encodings.pickle.writer import Classes, Pickled
from ckptcore.topology.layout import Mesh, TensorLayout

RANKS = "\0ranks"  # name of the tensor with a mesh's ranks: int32 [world size]
_SPEC = "torch.distributed.tensor._dtensor_spec"
_PLACEMENTS = "torch.distributed.tensor.placement_types"
_LAYOUT = "torch.distributed._mesh_layout"
# Class of a placement -> its pickled fields.
_FIELDS = {"Shard": ("dim",), "_StridedShard": ("dim", "split_factor"), "Replicate": ()}


@dataclass(frozen=True, slots=True)
class _Global:
    """A class or function by name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _NewObject:
    """An object made by ``cls.__new__(cls, *args)``.

    Attributes:
        module: Module of its class.
        name: Name of its class.
        args: Arguments.
        state: Its ``__dict__``, None for a named tuple.
        key: Identifies an object that a pickle contains more than once; "" for any other.
    """

    module: str
    name: str
    args: tuple[Any, ...] = ()
    state: dict[str, Any] | None = None
    key: str = ""


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis of a mesh as one rank sees it.

    Attributes:
        name: Its name.
        size: Number of ranks along it.
        stride: Distance of neighbouring ranks.
        coordinate: Coordinate of the rank.
        group: Name of the rank's process group.
    """

    name: str
    size: int
    stride: int
    coordinate: int
    group: str


@dataclass(frozen=True, slots=True)
class _RankAttribute:
    """An attribute of a mesh of some axes whose value differs between ranks."""

    axes: tuple[str, ...]
    field: str


class Meshes:
    """The device meshes of one rank: the full mesh, and slices of it.

    Process groups have the names of a job that makes this mesh first, so that torch finds them: a count of
    all groups made so far (torch/distributed/device_mesh.py, `_init_one_process_group`).
    """

    def __init__(self, mesh: Mesh, rank: int, joined: Sequence[str] = ()) -> None:
        """Name the process groups of a rank.

        Args:
            mesh: The full mesh.
            rank: The rank.
            joined: Neighbouring axes that shard tensors as one, as in ``fsdp+ep``, in the mesh's order.
        """
        self._rank, self._world, self._device = rank, mesh.size, mesh.device
        self._axes: dict[str, _Axis] = {}
        groups_before = 1  # the group of the world
        for name in (*(a for a, _ in mesh.axes), *joined):
            self._axes[name] = axis = _axis(mesh, name, rank, groups_before)
            groups_before += 0 if axis.size == mesh.size else mesh.size // axis.size
        names = tuple(a for a, _ in mesh.axes)
        self._root = self._mesh(names, None)
        self._meshes: dict[tuple[str, ...], _NewObject] = {names: self._root}

    def of(self, axes: tuple[str, ...]) -> _NewObject:
        """Return the mesh of some axes, in mesh order."""
        if axes not in self._meshes:
            self._meshes[axes] = self._mesh(axes, self._root)
        return self._meshes[axes]

    def rank_value(self, value: _RankAttribute) -> Any:
        """Return this rank's value of an attribute that differs between ranks."""
        axes = [self._axes[name] for name in value.axes]
        by_field = {
            "_dim_group_names": [a.group for a in axes],
            "_rank": self._rank,
            "_coordinate_on_dim": tuple(a.coordinate for a in axes),
        }
        return by_field[value.field]

    def _mesh(self, names: tuple[str, ...], root: _NewObject | None) -> _NewObject:
        axes = [self._axes[name] for name in names]
        state = {
            "_device_type": self._device,  # `torch.load` chooses the device by ``map_location``
            "_layout": _NewObject(_LAYOUT, "_MeshLayout", (), {"axes": tuple(_flat_layout(a) for a in axes)}),
            "_rank_map": TensorRef(RANKS),
            "_mesh_dim_names": tuple(a.name for a in axes),
            "_root_mesh": root,
            "_flatten_rank_map": tuple(range(self._world)),
            "_thread_id": None,
            "_flatten_mapping": {},
            "_dim_group_names": _RankAttribute(names, "_dim_group_names"),
            "_rank": _RankAttribute(names, "_rank"),
            "_coordinate_on_dim": _RankAttribute(names, "_coordinate_on_dim"),
            "_hash": None,  # each process hashes text differently
        }
        return _NewObject("torch.distributed.device_mesh", "DeviceMesh", (), state, f"mesh {names}")


def _axis(mesh: Mesh, name: str, rank: int, groups_before: int) -> _Axis:
    """Return an axis as a rank sees it; ``groups_before`` process groups exist before those of the axis."""
    ((_, size),) = mesh.along([name]).axes
    number = [a for a, _ in mesh.axes].index(name.rpartition("+")[2])
    stride = row_major(tuple(n for _, n in mesh.axes))[number]
    # Groups are made for the coordinates on all other axes, row-major.
    index = rank // (stride * size) * stride + rank % stride
    group = "0" if size == mesh.size else str(groups_before + index)
    return _Axis(mesh.name_in_job(name), size, stride, rank // stride % size, group)


def _flat_layout(axis: _Axis) -> _NewObject:
    """Return the layout of an axis; torch omits size and stride for one rank (_mesh_layout.py)."""
    is_single = axis.size == 1
    state = {"shape": () if is_single else (axis.size,), "stride": () if is_single else (axis.stride,)}
    return _NewObject(_LAYOUT, "_FlatLayout", (), state)


@dataclass(frozen=True, slots=True)
class RankPickle:
    """The pickle of a rank's file, for all ranks with boxes of the same shapes.

    Attributes:
        parts: Bytes that their pickles have in common.
        rank_attributes: The values between the parts, one fewer, which differ between the ranks.
    """

    parts: tuple[bytes, ...]
    rank_attributes: tuple[_RankAttribute, ...]

    def of(self, meshes: Meshes) -> bytes:
        """Return the pickle of the rank of these meshes."""
        pickled = Pickled(_no_tensor)
        pickled.out = bytearray(self.parts[0])
        for attribute, part in zip(self.rank_attributes, self.parts[1:], strict=True):
            pickled.value(meshes.rank_value(attribute))
            pickled.out += part
        return bytes(pickled.out)


def _no_tensor(fqn: str) -> tuple[str, TensorSpec]:
    raise KeyError(fqn)


class RankPickled(Pickled):
    """Build the pickle of one rank's file, and with it those of similar ranks."""

    def __init__(
        self,
        tensor: Callable[[str], tuple[str, TensorSpec]],
        distributed: Mapping[str, tuple[TensorSpec, TensorLayout]],
        meshes: Meshes,
    ) -> None:
        """Start an empty pickle.

        Args:
            tensor: FQN -> (storage key, spec of this rank's part).
            distributed: FQN -> (spec of the full tensor, its layout), for DTensors.
            meshes: Meshes of the rank.
        """
        super().__init__(tensor, classes=Classes.LIBRARIES)
        self._distributed, self._meshes = distributed, meshes
        self._templates: dict[Any, tuple[bytes, bytes]] = {}
        self._rank_attributes: list[tuple[int, int, _RankAttribute]] = []  # (begin, end, value) in the pickle

    def shared(self) -> RankPickle:
        """Return the complete pickle, split at the values that differ between ranks."""
        ends = [0, *(end for _, end, _ in self._rank_attributes)]
        begins = [*(begin for begin, _, _ in self._rank_attributes), len(self.out)]
        parts = [bytes(self.out[a:b]) for a, b in zip(ends, begins, strict=True)]
        # The full stop is the opcode STOP, which ends a pickle.
        return RankPickle(
            (*parts[:-1], parts[-1] + b"."), tuple(attribute for *_, attribute in self._rank_attributes)
        )

    def value(self, value: Any) -> None:
        """Write a value of the tree, or an object of this module."""
        kind = type(value)
        if kind is _NewObject:
            self._once(value.key, lambda: self._make(value))
        elif kind is _Global:
            self.name(value.module, value.name)
        elif kind is _RankAttribute:
            begin = len(self.out)
            super().value(self._meshes.rank_value(value))
            self._rank_attributes.append((begin, len(self.out), value))
        elif kind is str and value in _REPEATED:
            self._once(f"text {value}", lambda: Pickled.value(self, value))
        elif kind is TensorRef and value.fqn in self._distributed:
            self._dtensor(value, *self._distributed[value.fqn])
        else:
            super().value(value)

    def _once(self, key: str, emit: Callable[[], None]) -> None:
        """Emit a value; a later one with this key refers back to it."""
        # BINGET (h) and BINPUT (q) have an index of one byte, LONG_BINGET (j) and LONG_BINPUT (r) of four.
        memo_index = self._memo.get(key)
        if memo_index is not None:
            self.out += (
                b"h" + bytes([memo_index]) if memo_index < 256 else b"j" + memo_index.to_bytes(4, "little")
            )
            return
        emit()
        if key:
            memo_index = self._memo[key] = len(self._memo)
            self.out += (
                b"q" + bytes([memo_index]) if memo_index < 256 else b"r" + memo_index.to_bytes(4, "little")
            )

    def _make(self, value: _NewObject) -> None:
        self.name(value.module, value.name)
        self.all(value.args)
        self.out += b"\x81"  # NEWOBJ
        if value.state is not None:
            self.value(value.state)
            self.out += b"b"

    def _dtensor(self, ref: TensorRef, full: TensorSpec, layout: TensorLayout) -> None:
        """Write a DTensor; those of one layout differ only in the keys of their storages."""
        key, local = self.tensor(ref.fqn)
        layout_key = (layout.axes, layout.placements, full.dtype, full.shape, local.shape)
        template = self._templates.get(layout_key)
        if template is not None:
            self.out += template[0]
            super().value(key)
            self.out += template[1]
            return
        start, memo = len(self.out), len(self._memo)
        self._new_dtensor(ref, full, layout)
        around = bytes(self.out[start:]).split(_pickled_text(key))
        # The first one may have memoised values that the others refer to.
        if len(self._memo) == memo and len(around) == 2:
            self._templates[layout_key] = around[0], around[1]

    def _new_dtensor(self, ref: TensorRef, full: TensorSpec, layout: TensorLayout) -> None:
        strides, dtype = row_major(full.shape), Named("dtype", full.dtype)
        placements = tuple(_placement(p) for p in layout.placements)
        strided = any(p.name == "_StridedShard" for p in placements)
        spec = {
            "mesh": self._meshes.of(layout.axes),
            "placements": placements,
            "tensor_meta": _NewObject(_SPEC, "TensorMeta", (Named("size", full.shape), strides, dtype)),
            "shard_order": None if strided else tuple(_shard_order(placements)),
            "use_strided_shard_as_shard_order": strided,
            "_hash": None,
        }
        self.name("torch._tensor", "_rebuild_from_type_v2")
        self.out += b"("
        self.value(_WRAPPER)
        self.value(_DTENSOR)
        self.value((_DTENSOR, dtype, full.shape, strides, 0, _STRIDED, _CPU, False))
        self.out += b"(N}("  # the state: no ``__dict__``, and two slots
        self.value("_local_tensor")
        super().value(ref)
        self.value("_spec")
        self.value(_NewObject(_SPEC, "DTensorSpec", (), spec))
        self.out += b"uttR"


def _pickled_text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def _placement(placement: Any) -> _NewObject:
    kind = type(placement).__name__
    state = {name: getattr(placement, name) for name in _FIELDS[kind]}
    return _NewObject(_PLACEMENTS, kind, (), state, f"{kind} {state}")


def _shard_order(placements: Sequence[_NewObject]) -> Iterator[_NewObject]:
    """Yield mesh axes from left to right, as `compute_default_shard_order` in _dtensor_spec.py does."""
    cut: dict[int, tuple[int, ...]] = {}
    for axis, placement in enumerate(placements):
        if placement.state:
            dim = placement.state["dim"]
            cut[dim] = (*cut.get(dim, ()), axis)
    for dim in sorted(cut):
        yield _NewObject(_SPEC, "ShardOrderEntry", (dim, cut[dim]))


_WRAPPER = _Global("torch._utils", "_rebuild_wrapper_subclass")
_DTENSOR = _Global("torch.distributed.tensor", "DTensor")
_STRIDED, _CPU = Named("layout", "torch.strided"), Named("device", ["cpu"])
# Texts in the pickle of every tensor.
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
