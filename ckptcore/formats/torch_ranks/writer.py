"""Writing rank files: what does each rank's file hold, and what are the files called?

As verl names them (verl/utils/checkpoint/fsdp_checkpoint_manager.py, `save_checkpoint`):
``model_world_size_N_rank_R.pt``, ``optim_world_size_N_rank_R.pt``, ``extra_state_world_size_N_rank_R.pt``
and ``fsdp_config.json``. A checkpoint with a model and something beside it is written as one kind of file
per top-level key, any other as one kind; either is read back under the same names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckptcore.core.box import Box
from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import TensorRef, decode, tensors_in
from ckptcore.core.tree_paths import Path
from ckptcore.errors import UnsafeContent, UnsupportedFormat
from ckptcore.formats.base import Arrangement, FileLayout, Literal, natural
from ckptcore.formats.common.rank_file_names import RankFiles, is_rank_file
from ckptcore.formats.common.trees import built
from ckptcore.formats.torch_ranks.dtensor_writer import RANKS, Meshes, RankPickle, RankPickled
from ckptcore.formats.torch_ranks.optimizer import numbers_for
from ckptcore.formats.torch_save.layout import Around, Inline, arrays_as_tensors, data_of, lookup
from ckptcore.store import inner_path
from ckptcore.topology.layout import MESH_OF_ONE, TensorLayout, Topology

_MODEL, _OPTIMIZERS, _EXTRA = "model", ("optim", "optimizer"), "extra_state"
_CONFIG = "fsdp_config.json"
_LONGEST_STEM = 160  # bytes: a file name has 255 at most, and staging adds to it
_KEPT = 16  # files that others may be like
Row = tuple[str, Path, Any]  # name, where it stands in its file, value


@dataclass(frozen=True, slots=True)
class _Kind:
    """Files of one kind. stem: what their names begin with. rows: what they hold, in order."""

    stem: str
    rows: tuple[Row, ...]


def arrange(request: Arrangement) -> Iterator[FileLayout]:
    """The files of all ranks, kind by kind, and verl's small file about them, which comes last.

    One at a time: the pickles and directories of hundreds of ranks are hundreds of megabytes.

    A rank's file holds all that the rank has: replicas too. Raises `NameMismatch` for names that do
    not nest, and `UnsupportedFormat` for a list of which a rank has only a part.
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
        if kind.stem == _MODEL or kind.stem in _OPTIMIZERS:  # what `weights_only=True` must take
            tree = arrays_as_tensors(tree, inline)
        files = _Files(topology, specs, tree, inline)
        for rank in range(world):
            path = f"{kind.stem}_world_size_{world}_rank_{rank}.pt"
            yield files.of(rank, path, meshes[rank])
    config = json.dumps({"FSDP_version": 2, "world_size": world}, indent=4).encode()
    yield FileLayout(_CONFIG, len(config), (), (), (Literal(0, config),), commit=True)


@dataclass(frozen=True, slots=True)
class _Alike:
    """What the files of ranks have in common that hold boxes of the same shapes.

    tensors: their positions. kinds: which of a rank's boxes each has. sizes: bytes of each. inline: bytes of
    further storages. pickle: the tree.
    """

    tensors: tuple[int, ...]
    kinds: tuple[int, ...]
    sizes: tuple[int, ...]
    inline: tuple[bytes, ...]
    pickle: RankPickle


class _Files:
    """The files of one kind: all hold one tree, and of its tensors what each rank has.

    Tensors of one shape and layout are of one kind; a rank has one box of them all. Ranks with boxes of the
    same shapes have files that differ in what meshes tell of their own rank.
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
        self._held: list[tuple[Box | None, ...]] = []  # of each kind, the boxes of all ranks
        for name in self._names:
            layout, spec = topology.layout(name), specs[name][1]
            if layout.axes:
                self._distributed[name] = spec, layout
            self._kind[name] = number.setdefault((spec.shape, layout), len(number))
            if len(number) > len(self._held):
                self._held.append(topology.boxes(name, spec.shape))
        # Only where a tensor lies on some of the ranks does the tree differ between them.
        self._staged = any(topology.layout(n).at for n in self._names)
        ranks = np.arange(topology.mesh.size, dtype="<i4").tobytes()
        self._ranks = TensorSpec(RANKS, "int32", (topology.mesh.size,)), ranks
        self._known: dict[tuple[Any, ...], _Alike] = {}
        self._around = Around()

    def of(self, rank: int, path: str, meshes: Meshes) -> FileLayout:
        """The file of one rank."""
        boxes = [held[rank] for held in self._held]
        key = tuple(None if box is None else box.shape for box in boxes)
        if key not in self._known:
            while len(self._known) >= _KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = self._alike(key, meshes)
        alike = self._known[key]
        made = self._around.of(path, alike.pickle.of(meshes), alike.tensors, alike.sizes, alike.inline)
        return replace(made, boxes=tuple([box for n in alike.kinds if (box := boxes[n]) is not None]))

    def _alike(self, shapes: tuple[tuple[int, ...] | None, ...], meshes: Meshes) -> _Alike:
        """shapes: of a rank's box of each kind, None where it has none. meshes: of any such rank."""
        held: dict[str, TensorSpec] = {}
        for name in self._names:
            shape = shapes[self._kind[name]]
            if shape is not None:
                held[name] = replace(self._specs[name][1], shape=shape)
        tree = _without_missing(self._tree, self._kind.keys() - held.keys()) if self._staged else self._tree
        inline = dict(self._inline)
        if held.keys() & self._distributed.keys():
            inline[RANKS] = self._ranks
        made = RankPickled(lookup(list(held.values()), inline).__getitem__, self._distributed, meshes)
        made.value(tree)
        return _Alike(
            tuple(self._specs[name][0] for name in held),
            tuple(self._kind[name] for name in held),
            tuple(spec.nbytes for spec in held.values()),
            data_of(inline),
            made.shared(),
        )


def _in_saved_order(request: Arrangement) -> list[Row]:
    """(name, path, value) of every tensor and object, in saved order where that is known."""
    trees = {key: decode(form) for key, form in request.objects.items()}
    held = {name for t in trees.values() for name in tensors_in(t)}
    names = [t.fqn for t in request.tensors if t.fqn not in held]
    place = {name: n for n, name in enumerate(request.paths)}
    if request.order:  # where it is known better than by the order of tensors
        names = [n for n in request.order if n in place]
        place |= dict(zip(names, sorted(place[n] for n in names), strict=True))
    if not place:
        names.sort(key=natural)
    order = sorted([*names, *trees], key=lambda n: place.get(n, len(place)))
    return [(n, request.paths.get(n) or (n,), trees.get(n, TensorRef(n))) for n in order]


def _kinds(rows: Sequence[Row], topology: Topology) -> list[_Kind]:
    """One kind per top-level key where that is a model among others, and all in one otherwise."""
    told = [(name, path if len(path) > 1 else _guessed(name), value) for name, path, value in rows]
    tops = list(dict.fromkeys(str(path[0]) for _, path, _ in told))
    apart = all(_is_stem(t) for t in tops) and all(_has_file(p, v, topology) for _, p, v in told)
    if _MODEL in tops and {*_OPTIMIZERS, _EXTRA} & set(tops) and apart:
        below = {top: tuple(r for r in told if r[1][0] == top) for top in tops}
        tops.sort(key=lambda t: (t != _MODEL, t not in _OPTIMIZERS))
        return [_Kind(top, tuple((n, p[1:], v) for n, p, v in below[top])) for top in tops]
    return [_Kind(_MODEL, tuple(rows))]


def _guessed(name: str) -> Path:
    """Where a name stands when nothing tells: state by parameter in an optimizer, else below its top."""
    top, _, rest = name.partition(".")
    if top in _OPTIMIZERS and rest.startswith("state.") and rest.count(".") > 1:
        param, _, key = rest[6:].rpartition(".")
        return (top, "state", param, key)
    if top in _OPTIMIZERS and rest.startswith("param_groups.") and rest[13:].isdecimal():
        return (top, "param_groups", int(rest[13:]))
    return (top, rest) if rest else (name,)


def _has_file(path: Path, value: Any, topology: Topology) -> bool:
    """Whether it can stand in files of its top-level key: not in a list, and not as a tensor by itself that
    some ranks do not have."""
    if len(path) > 1:
        return type(path[1]) is str
    return type(value) is not TensorRef or not topology.layout(value.fqn).at


def _is_stem(top: str) -> bool:
    """Whether files that begin so can be on every disk, and are read back under this name."""
    try:
        inner_path(top, what="a key of the checkpoint")
        short = len(top.encode()) <= _LONGEST_STEM
    except (UnsafeContent, UnicodeEncodeError):
        return False
    return short and RankFiles(top, None).role == top and is_rank_file(f"{top}_world_size_1_rank_0.pt")


def _tree(rows: Sequence[Row], several: bool) -> Any:
    if several and len(rows) == 1 and not rows[0][1]:  # a value that is all of its kind
        return rows[0][2]
    return built(rows)


def _params(tree: Any, specs: Mapping[str, tuple[int, TensorSpec]], topology: Topology) -> Any:
    """The model's parameters as a reader finds them: distributed tensors, or all where none is."""
    found = [(k, v.fqn) for k, v in tree.items() if type(v) is TensorRef] if isinstance(tree, dict) else []
    some = any(topology.layout(fqn).axes for _, fqn in found)
    return tuple((k, specs[fqn][1].shape) for k, fqn in found if not some or topology.layout(fqn).axes)


def _joint_axes(topology: Topology) -> list[str]:
    """Neighbouring axes that tensors lie on as one, in the order of the mesh."""
    place = {name: n for n, (name, _) in enumerate(topology.mesh.axes)}
    found = {a for layout in topology.layouts.values() for a in layout.axes if "+" in a}
    return sorted(found, key=lambda a: [place[part] for part in a.split("+")])


def _staged(topology: Topology, specs: Mapping[str, Any]) -> bool:
    """Whether ranks have different tensors: then numbers would mean different parameters."""
    return any(topology.layout(name).at for name in specs)


def _without_missing(value: Any, gone: set[str]) -> Any:
    """The tree without dict entries that are tensors a rank does not have, and dicts of such alone.

    Raises `UnsupportedFormat` for a list with such a tensor: positions have a meaning.
    """
    if isinstance(value, dict):
        kept = (
            (k, _without_missing(v, gone))
            for k, v in value.items()
            if not (type(v) is TensorRef and v.fqn in gone)
        )
        return type(value)((k, v) for k, v in kept if v != {} or value[k] == {})
    lost = [name for name in tensors_in(value) if name in gone] if isinstance(value, (list, tuple)) else []
    if lost:
        raise UnsupportedFormat(
            f"{lost[0]} stands in a list, and not every rank has it",
            hint="leave it out (--exclude), or use a mesh without pp and ep",
        )
    return value
