"""Lay out rank files: their names, and the tree of each rank.

Names are those of verl (verl/utils/checkpoint/fsdp_checkpoint_manager.py, `save_checkpoint`):
``model_world_size_N_rank_R.pt``, ``optim_world_size_N_rank_R.pt``, ``extra_state_world_size_N_rank_R.pt``
and ``fsdp_config.json``. A checkpoint with a model and other parts is written as one kind of file per
top-level key, any other as one kind. A reader finds the same names in either.

A DTensor is ``_rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor, (DTensor, dtype, size, stride,
offset, layout, device, grad), (None, {_local_tensor, _spec}))``, as in torch 2.13 (torch/_tensor.py;
torch/distributed/tensor/_api.py, _dtensor_spec.py; torch/distributed/device_mesh.py).
``torch.load(weights_only=True)`` permits everything in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckptcore.core.box import Box
from ckptcore.core.manifest import TensorSpec, row_major
from ckptcore.core.object_tree import Named, TensorRef, decode, tensors_in
from ckptcore.core.tree_paths import Path
from ckptcore.encodings.pickle.writer import Classes, Pickled
from ckptcore.errors import AmbiguousModel, UnsafeContent, UnsupportedFormat
from ckptcore.formats.base import Arrangement, FileLayout, Literal, natural
from ckptcore.formats.common.rank_file_names import RankFiles, is_rank_file, rank_files
from ckptcore.formats.common.torch_file import Around, Inline, arrays_as_tensors, data_of, lookup
from ckptcore.formats.common.trees import built
from ckptcore.formats.torch_ranks.optimizer import numbers_for
from ckptcore.store import inner_path
from ckptcore.topology.layout import MESH_OF_ONE, Mesh, TensorLayout, Topology

RANKS = "\0ranks"  # name of the tensor with a mesh's ranks: int32 [world size]
_SPEC = "torch.distributed.tensor._dtensor_spec"
_PLACEMENTS = "torch.distributed.tensor.placement_types"
_LAYOUT = "torch.distributed._mesh_layout"
# Class of a placement -> its pickled fields.
_FIELDS = {"Shard": ("dim",), "_StridedShard": ("dim", "split_factor"), "Replicate": ()}
_MODEL, _OPTIMIZERS, _EXTRA = "model", ("optim", "optimizer"), "extra_state"
_CONFIG = "fsdp_config.json"
_LONGEST_STEM = 160  # bytes: a file name has at most 255, and staging adds to it
_MAX_TEMPLATES = 16  # layouts that other files may share
Row = tuple[str, Path, Any]  # name, path in its file, value


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
        """Name the process groups of a rank; ``joined`` axes shard tensors as one, as in ``fsdp+ep``."""
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


@dataclass(frozen=True, slots=True)
class _Kind:
    """Files of one kind.

    Attributes:
        stem: First part of their names.
        rows: Their content, in order.
    """

    stem: str
    rows: tuple[Row, ...]


def arrange(request: Arrangement) -> Iterator[FileLayout]:
    """Yield the files of all ranks, kind by kind, then verl's small file about them.

    The files come one at a time, because the pickles and directories of hundreds of ranks take hundreds of
    MiB. A rank's file has everything that the rank has, including replicas.

    Raises:
        NameMismatch: The names do not nest.
        UnsupportedFormat: A rank has only a part of a list.
    """
    topology = request.topology or Topology(MESH_OF_ONE, {})
    world = topology.mesh.size
    specs = {t.fqn: (i, t) for i, t in enumerate(request.tensors)}
    params: tuple[tuple[str, tuple[int, ...]], ...] = ()
    order: list[str] = []  # of the model's names
    kinds = _kinds(_in_saved_order(request), topology)
    joined = _joint_axes(topology)
    meshes = [Meshes(topology.mesh, rank, joined) for rank in range(world)]
    for kind in kinds:
        tree = _tree(kind.rows, len(kinds) > 1)
        if kind.stem == _MODEL:
            params = _params(tree, specs, topology)
            order = list(tree) if len(kinds) > 1 and isinstance(tree, dict) else []
        elif kind.stem in _OPTIMIZERS and isinstance(tree, dict) and not _staged(topology, specs):
            tree = numbers_for(
                tree, params, lambda v: specs[v.fqn][1].shape if type(v) is TensorRef else None, order
            )
        inline: dict[str, Inline] = {}
        if kind.stem == _MODEL or kind.stem in _OPTIMIZERS:  # must load with `weights_only=True`
            tree = arrays_as_tensors(tree, inline)
        files = _Files(topology, specs, tree, inline)
        for rank in range(world):
            path = f"{kind.stem}_world_size_{world}_rank_{rank}.pt"
            yield files.of(rank, path, meshes[rank])
    config = json.dumps({"FSDP_version": 2, "world_size": world}, indent=4).encode()
    yield FileLayout(_CONFIG, len(config), (), (), (Literal(0, config),), commit=True)


@dataclass(frozen=True, slots=True)
class _FileTemplate:
    """What the files of ranks with boxes of the same shapes have in common.

    Attributes:
        tensors: Positions of the tensors.
        kinds: Per tensor, which of a rank's boxes it has.
        sizes: Bytes of each tensor.
        inline: Bytes of further storages.
        pickle: The tree.
    """

    tensors: tuple[int, ...]
    kinds: tuple[int, ...]
    sizes: tuple[int, ...]
    inline: tuple[bytes, ...]
    pickle: RankPickle


class _Files:
    """The files of one kind: one tree for all, and each rank's boxes of its tensors.

    Tensors of one shape and layout are of one kind: a rank has the same box of all of them. The files of
    ranks with boxes of the same shapes differ only in the meshes' values for their own rank.
    """

    def __init__(
        self,
        topology: Topology,
        specs: Mapping[str, tuple[int, TensorSpec]],
        tree: Any,
        inline: Mapping[str, Inline],
    ) -> None:
        self._specs, self._tree, self._inline = specs, tree, inline
        self._names = [n for n in tensors_in(tree) if n in specs]
        self._distributed: dict[str, tuple[TensorSpec, TensorLayout]] = {}
        number: dict[tuple[tuple[int, ...], TensorLayout], int] = {}
        self._kind: dict[str, int] = {}
        self._boxes: list[tuple[Box | None, ...]] = []  # per kind, the boxes of all ranks
        for name in self._names:
            layout, spec = topology.layout(name), specs[name][1]
            if layout.axes:
                self._distributed[name] = spec, layout
            self._kind[name] = number.setdefault((spec.shape, layout), len(number))
            if len(number) > len(self._boxes):
                self._boxes.append(topology.boxes(name, spec.shape))
        # The tree differs between ranks only if some ranks lack a tensor.
        self._staged = any(topology.layout(n).coordinates for n in self._names)
        ranks = np.arange(topology.mesh.size, dtype="<i4").tobytes()
        self._ranks = TensorSpec(RANKS, "int32", (topology.mesh.size,)), ranks
        self._templates: dict[tuple[Any, ...], _FileTemplate] = {}
        self._around = Around()

    def of(self, rank: int, path: str, meshes: Meshes) -> FileLayout:
        """Return the file of one rank."""
        boxes = [of_rank[rank] for of_rank in self._boxes]
        key = tuple(None if box is None else box.shape for box in boxes)
        if key not in self._templates:
            # The oldest goes first: memory stays bounded for meshes whose ranks all differ.
            while len(self._templates) >= _MAX_TEMPLATES:
                del self._templates[next(iter(self._templates))]
            self._templates[key] = self._template(key, meshes)
        template = self._templates[key]
        file = self._around.of(
            path, template.pickle.of(meshes), template.tensors, template.sizes, template.inline
        )
        return replace(file, boxes=tuple([box for n in template.kinds if (box := boxes[n]) is not None]))

    def _template(self, shapes: tuple[tuple[int, ...] | None, ...], meshes: Meshes) -> _FileTemplate:
        """Lay out the common parts of files by the shape of each kind's box; meshes are of any such rank."""
        specs: dict[str, TensorSpec] = {}
        for name in self._names:
            shape = shapes[self._kind[name]]
            if shape is not None:
                specs[name] = replace(self._specs[name][1], shape=shape)
        tree = _without_missing(self._tree, self._kind.keys() - specs.keys()) if self._staged else self._tree
        inline = dict(self._inline)
        if specs.keys() & self._distributed.keys():
            inline[RANKS] = self._ranks
        pickled = RankPickled(lookup(list(specs.values()), inline).__getitem__, self._distributed, meshes)
        pickled.value(tree)
        return _FileTemplate(
            tuple(self._specs[name][0] for name in specs),
            tuple(self._kind[name] for name in specs),
            tuple(spec.nbytes for spec in specs.values()),
            data_of(inline),
            pickled.shared(),
        )


def _in_saved_order(request: Arrangement) -> list[Row]:
    """Return (name, path, value) of every tensor and object, in saved order where known."""
    trees = {key: decode(form) for key, form in request.objects.items()}
    inside = {name for t in trees.values() for name in tensors_in(t)}
    names = [t.fqn for t in request.tensors if t.fqn not in inside]
    place = {name: n for n, name in enumerate(request.paths)}
    if request.order:  # known better than from the order of tensors
        names = [n for n in request.order if n in place]
        place |= dict(zip(names, sorted(place[n] for n in names), strict=True))
    if not place:
        names.sort(key=natural)
    order = sorted([*names, *trees], key=lambda n: place.get(n, len(place)))
    return [(n, request.paths.get(n) or (n,), trees.get(n, TensorRef(n))) for n in order]


def _kinds(rows: Sequence[Row], topology: Topology) -> list[_Kind]:
    """Return one kind per top-level key if one of several is a model, else one kind for all."""
    nested = [(name, path if len(path) > 1 else _guessed(name), value) for name, path, value in rows]
    tops = list(dict.fromkeys(str(path[0]) for _, path, _ in nested))
    apart = (
        all(_is_stem(t) for t in tops)
        and _are_one_save(tops)
        and all(_has_file(p, v, topology) for _, p, v in nested)
    )
    if _MODEL in tops and {*_OPTIMIZERS, _EXTRA} & set(tops) and apart:
        below = {top: tuple(r for r in nested if r[1][0] == top) for top in tops}
        tops.sort(key=lambda t: (t != _MODEL, t not in _OPTIMIZERS))
        return [_Kind(top, tuple((n, p[1:], v) for n, p, v in below[top])) for top in tops]
    return [_Kind(_MODEL, tuple(rows))]


def _guessed(name: str) -> Path:
    """Guess the path of a name: state by parameter in an optimizer, else below its top-level key."""
    top, _, rest = name.partition(".")
    if top in _OPTIMIZERS and rest.startswith("state.") and rest.count(".") > 1:
        param, _, key = rest[6:].rpartition(".")
        return (top, "state", param, key)
    if top in _OPTIMIZERS and rest.startswith("param_groups.") and rest[13:].isdecimal():
        return (top, "param_groups", int(rest[13:]))
    return (top, rest) if rest else (name,)


def _has_file(path: Path, value: Any, topology: Topology) -> bool:
    """Return whether a value fits the files of its top-level key.

    A list does not, and neither does a single tensor that some ranks lack.
    """
    if len(path) > 1:
        return type(path[1]) is str
    return type(value) is not TensorRef or not topology.layout(value.fqn).coordinates


def _is_stem(top: str) -> bool:
    """Return whether every disk accepts files with this stem, and a reader finds the same name in them."""
    try:
        inner_path(top, origin="a key of the checkpoint")
        short = len(top.encode()) <= _LONGEST_STEM
    except (UnsafeContent, UnicodeEncodeError):
        return False
    return short and RankFiles(top, None).role == top and is_rank_file(f"{top}_world_size_1_rank_0.pt")


def _are_one_save(tops: Sequence[str]) -> bool:
    """Return whether a reader takes files with these stems for one save, not for several steps."""
    try:
        rank_files(f"{top}_world_size_1_rank_0.pt" for top in tops)
    except AmbiguousModel:
        return False
    return True


def _tree(rows: Sequence[Row], several: bool) -> Any:
    if several and len(rows) == 1 and not rows[0][1]:  # the only value of its kind
        return rows[0][2]
    return built(rows)


def _params(tree: Any, specs: Mapping[str, tuple[int, TensorSpec]], topology: Topology) -> Any:
    """Return the model's parameters as a reader finds them: distributed tensors, or all if there are none."""
    tensors = [(k, v.fqn) for k, v in tree.items() if type(v) is TensorRef] if isinstance(tree, dict) else []
    some = any(topology.layout(fqn).axes for _, fqn in tensors)
    return tuple((k, specs[fqn][1].shape) for k, fqn in tensors if not some or topology.layout(fqn).axes)


def _joint_axes(topology: Topology) -> list[str]:
    """Return neighbouring axes that shard tensors as one, in the order of the mesh."""
    place = {name: n for n, (name, _) in enumerate(topology.mesh.axes)}
    joint_axes = {a for layout in topology.layouts.values() for a in layout.axes if "+" in a}
    return sorted(joint_axes, key=lambda a: [place[part] for part in a.split("+")])


def _staged(topology: Topology, specs: Mapping[str, Any]) -> bool:
    """Return whether ranks have different tensors, so that numbers would mean different parameters."""
    return any(topology.layout(name).coordinates for name in specs)


def _without_missing(value: Any, missing: set[str]) -> Any:
    """Return the tree without the tensors that a rank lacks, and without dicts of only such tensors."""
    if isinstance(value, dict):
        remaining = (
            (k, _without_missing(v, missing))
            for k, v in value.items()
            if not (type(v) is TensorRef and v.fqn in missing)
        )
        return type(value)((k, v) for k, v in remaining if v != {} or value[k] == {})
    lost = [name for name in tensors_in(value) if name in missing] if isinstance(value, (list, tuple)) else []
    if lost:
        raise UnsupportedFormat(
            f"cannot write {lost[0]}: it is in a list, and not every rank has it",
            hint="leave it out (--exclude), or use a mesh without pp and ep",
        )
    return value
