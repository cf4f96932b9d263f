"""Lay out Megatron-Core checkpoints, torch_dist and zarr, as a job of one rank saves them.

Names decide: a key ``<key>/shard_<offset>_<shape>`` is a sharded object, every other object is common
state, and a tensor that no object refers to is a sharded tensor of one chunk. Releases up to 0.18 need
``common.pt`` and the four fields of ``metadata.json``; 0.19 reads ``common.pt``, too, where it exists.
``metadata.json`` comes last.

Optimizer state may be stored in Megatron-Core's `fully_sharded_model_space` (0.11 to 0.15). A job whose
common state names that sharding type asks for slices of flattened local shards. Its loader finds them only in
a tensor of shape ``(cells of each dim..., elements of a cell)``, whose original shape is under ``mcore_data``
of `.metadata` (megatron/core/dist_checkpointing/strategies/resharding.py). The bytes of a cell are those of
its box. `flat_buffers` reads the same form. Layers, and experts, that share one tensor are a cell each, as
the loader requires. The cells of the other dims are the cuts of the mesh where they are even. An uneven cut
of the outermost dim is a range of the flattened cell; an uneven cut of a further dim takes cells of the
greatest common divisor. The two halves of a gated ``linear_fc1`` are never in one cell: a rank asks for a
shard of each, and torch refuses one cell twice.

A folder that a job begins from is a release and its tracker: ``--load`` names the folder, and the tracker in
it the release. Of a release the loader reads neither optimizer nor random states, and begins at iteration 0
(megatron/training/checkpointing.py, read_metadata, load_checkpoint).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, prod
from typing import Any

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import Named, TensorRef, decode, tensors_in
from ckptcore.encodings import zarr_v2 as _zarr
from ckptcore.encodings.pickle.writer import Classes
from ckptcore.errors import NameMismatch, UnsupportedDtype
from ckptcore.formats.base import Arrangement, FileLayout, Literal, Slot, natural
from ckptcore.formats.common.torch_file import Inline, torch_file
from ckptcore.formats.common.write_assignment import Share, WriteItem
from ckptcore.formats.dcp.metadata_writer import metadata_pickle
from ckptcore.formats.dcp.writer import METADATA, Files
from ckptcore.formats.megatron.config import CONFIG, TRACKER
from ckptcore.formats.megatron.flat_buffers import MODEL_SPACE, ORIGINAL, sharding_types
from ckptcore.formats.megatron.sharded_objects import COMMON_FILE, COMMON_KEY, EXTRA_STATE, SHARD
from ckptcore.topology.layout import Topology
from ckptcore.utils.text import count, short_repr

_RANDOM = "rng_state"
_MAX_NAME = 255  # bytes of a file name, on every common file system
_MAX_PATH = 3500  # bytes of a name below the output: paths end at 4096
_ARRAY_FILES = re.compile(r"\.z\w+|\d+(\.\d+)*")  # files of a tensor's own folder: its metadata, its chunks
_STATE = re.compile(r"(?:chained_(?P<chained>\d+)\.)?optimizer\.state\.[^.]+\.(?P<key>.+)")
_GATED = re.compile(r"\.linear_fc1\.(?:weight|bias)\d*$")
_STACKED_DIMS = (re.compile(r"(?:^|\.)layers\.(?!\d)"), re.compile(r"\.experts\.experts\.(?!\d)"))
_RUN_CONFIG = "run_config"  # the object that becomes Megatron-Bridge's run_config.yaml
RELEASE = "release"  # the folder, and the word for it in the tracker
_PARAMETER = re.compile(r"^(?P<module>.+)\.(?:layer_norm_)?(?:weight|bias)$")
_STACKED_LAYERS = re.compile(r"(?:^|\.)decoder\.layers\.(?!\d+\.)")
_EXPERTS = ".experts.experts."
_STATEFUL = re.compile(r"(?:^|\.)(?:decoder|mtp)\.(?!.*\.router$)")  # modules that have such a state
_MAMBA, _HEAD = ".mixer.", "output_layer"
_PROJECTION, _ATTENTION = ".self_attention.linear_proj", ".self_attention.core_attention"


@dataclass(frozen=True, slots=True)
class Parts:
    """The output, split by kind.

    Attributes:
        weights: Positions of the sharded tensors, in natural name order.
        shards: Key -> value of each sharded object.
        common: The common state.
        position: Name -> position of every tensor.
    """

    weights: tuple[int, ...]
    shards: dict[str, Any]
    common: dict[str, Any]
    position: dict[str, int]


def arrange_torch_dist(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out ``common.pt``, the ``__R_I.distcp`` of every rank, ``.metadata``, ``metadata.json``."""
    parts = _common_and_shards(request)
    files = Files(request, "")
    for key, value in parts.shards.items():
        # megatron/core/dist_checkpointing/strategies/torch.py stores a list around every object
        files.embed(key, _torch_file(key, [value], request, parts))
    cells = flattened_tensors(request.tensors, parts.common, request.topology)
    layouts = tuple(files.ranks(parts.weights, lambda share: _in_cells(share, cells)))
    stored = [
        replace(t, shape=cells[i].stored) if i in cells else t
        for i, t in zip(parts.weights, files.stored(parts.weights), strict=True)
    ]
    shapes = mcore_data(request.tensors, cells) if cells else None
    metadata = metadata_pickle(stored, files.objects, None, shapes)
    return (
        _torch_file(COMMON_FILE, _for_ranks(request, parts), request, parts),
        *layouts,
        _literal(METADATA, metadata),
        # Last, as Megatron-Core does: a folder without it is an unfinished save.
        _config_layout("torch_dist"),
    )


def _in_cells(share: Share, cells: Mapping[int, Cells]) -> Share:
    if not any(i in cells for i in share.tensors):
        return share
    cut_share = Share()
    for i, piece in zip(share.tensors, share.pieces, strict=True):
        pieces = cells[i].cut(piece.box, piece.kind[0]) if i in cells else (piece,)
        for cell_piece in pieces:
            cut_share.tensors.append(i)
            cut_share.pieces.append(cell_piece)
    return cut_share


def _for_ranks(request: Arrangement, parts: Parts) -> dict[str, Any]:
    """Return the common state; for a mesh without random states, that of a job with ``--no-save-rng``.

    Megatron-LM loads random states where TP and PP are those of ``args``
    (megatron/training/checkpointing.py, load_checkpoint), and fails where they are missing.
    """
    args = parts.common.get("args")
    if request.topology is None or not isinstance(args, Named) or args.kind != "namespace":
        return parts.common
    if any(key.startswith(f"{_RANDOM}/") for key in parts.shards):
        return parts.common
    return {**parts.common, "args": Named(args.kind, {**args.value, "no_save_rng": True})}


def arrange_zarr(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out ``common.pt``, an array of one chunk per tensor, a file per sharded object, ``metadata.json``.

    Raises:
        UnsupportedDtype: zarr has no dtype for a tensor.
        NameMismatch: A name cannot be a folder.
    """
    parts = _common_and_shards(request)
    names = [request.tensors[i].fqn for i in parts.weights]
    _require_folders([*names, *(f"{key}.pt" for key in parts.shards)])
    odd = {t.fqn: t.dtype for i in parts.weights if not BY_NAME[(t := request.tensors[i]).dtype].zarr}
    if odd:
        first = ", ".join(f"{n} ({d})" for n, d in list(odd.items())[:4])
        raise UnsupportedDtype(
            f"cannot write {count(len(odd), 'tensor')}: zarr has no such dtype: {first}", tensors=sorted(odd)
        )
    arrays = (layout for i in parts.weights for layout in _array_files(request, i))
    objects = (_torch_file(f"{k}.pt", v, request, parts) for k, v in parts.shards.items())
    common = _torch_file(COMMON_FILE, parts.common, request, parts)
    return (common, *arrays, *objects, _config_layout("zarr"))


def _array_files(request: Arrangement, index: int) -> Iterator[FileLayout]:
    spec = request.tensors[index]
    chunks = tuple(max(n, 1) for n in spec.shape)
    header = _zarr.dump(BY_NAME[spec.dtype], spec.shape, chunks)
    head = Literal(0, header)
    path = f"{spec.fqn}/{_zarr.ARRAY}"
    if spec.numel == 0:  # an empty array has no chunk, so its header's file has the slot
        yield FileLayout(path, len(header), (index,), (Slot(0, len(header)),), (head,))
        return
    chunk = ".".join("0" for _ in spec.shape) or "0"
    yield FileLayout(path, len(header), (), (), (head,))
    yield FileLayout(f"{spec.fqn}/{chunk}", spec.nbytes, (index,), (Slot(0, 0),), ())


def _common_and_shards(request: Arrangement) -> Parts:
    position = {t.fqn: i for i, t in enumerate(request.tensors)}
    shards: dict[str, Any] = {}
    common: dict[str, Any] = {}
    inside: set[str] = set()
    for key in sorted(request.objects, key=natural):
        value = decode(request.objects[key])
        if key == COMMON_KEY or (key in position and value != TensorRef(key)):
            raise NameMismatch(
                f"cannot write object {key}: Megatron-Core reserves the name, or a tensor has it"
            )
        (shards if SHARD.match(key) else common)[key] = value
        inside |= {*tensors_in(value)}
    free = sorted(position.keys() - inside, key=natural)
    return Parts(tuple(position[n] for n in free), shards, common, position)


def _torch_file(path: str, value: Any, request: Arrangement, parts: Parts) -> FileLayout:
    """Lay out a torch file with the tensors and byte tensors that its value refers to."""
    inline: dict[str, Inline] = {}
    tree = _with_bytes(value, inline)
    order = [parts.position[n] for n in sorted(tensors_in(value), key=natural)]
    return torch_file(path, tree, request.tensors, order, classes=Classes.TRAINERS, inline=inline)


def _with_bytes(value: Any, inline: dict[str, Inline]) -> Any:
    """Return the tree with a reference in place of every byte tensor; add their bytes to ``inline``."""
    if isinstance(value, Named):
        if value.kind == "bytetensor":
            name = f"\0{len(inline)}"  # no tensor has such a name
            inline[name] = TensorSpec(name, "uint8", (len(value.value),)), value.value
            return TensorRef(name)
        return Named(value.kind, _with_bytes(value.value, inline))
    if isinstance(value, dict):
        return type(value)((k, _with_bytes(v, inline)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)([_with_bytes(v, inline) for v in value])
    return value


def _require_folders(names: Sequence[str]) -> None:
    """Require that every name can be a path below the output, and none is another's file."""
    taken, folders = {COMMON_FILE, CONFIG}, frozenset(names)
    for name in names:
        steps = name.split("/")
        if (
            name in taken
            or not all(map(_can_be_folder, steps))
            or len(name) > _MAX_PATH
            or any(
                _ARRAY_FILES.fullmatch(s) and "/".join(steps[:n]) in folders for n, s in enumerate(steps) if n
            )
        ):
            raise NameMismatch(
                f"cannot write {short_repr(name, 120)} to a zarr checkpoint: the name cannot be a folder",
                hint="rename it with --rename, or leave it out with --exclude",
            )
        taken.add(name)


def _can_be_folder(step: str) -> bool:
    if step in ("", ".", "..") or "\0" in step or "\\" in step:
        return False
    try:
        return len(step.encode()) <= _MAX_NAME
    except UnicodeEncodeError:  # lone surrogates
        return False


def _config_layout(backend: str) -> FileLayout:
    form = {
        "sharded_backend": backend,
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    return _literal(CONFIG, json.dumps(form).encode(), commit=True)


def _literal(path: str, data: bytes, *, commit: bool = False) -> FileLayout:
    return FileLayout(path, len(data), (), (), (Literal(0, data),), commit)


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of one tensor.

    Attributes:
        shape: The tensor's own shape, elements.
        grid: Number of cells along each dim.
    """

    shape: tuple[int, ...]
    grid: tuple[int, ...]

    @property
    def cell(self) -> tuple[int, ...]:
        """Return the shape of one cell."""
        return tuple(n // g for n, g in zip(self.shape, self.grid, strict=True))

    @property
    def stored(self) -> tuple[int, ...]:
        """Return the shape of the tensor as it is stored."""
        return (*self.grid, prod(self.cell))

    def cut(self, box: Box, dtype: str) -> Iterator[WriteItem]:
        """Yield the items that store a box of the tensor, each a range of one cell."""
        # A box may touch several cells, and each is an item of its own: no item spans cells.
        cell = self.cell
        first = [o // c for o, c in zip(box.offset, cell, strict=True)]
        last = [(o + n - 1) // c for o, n, c in zip(box.offset, box.shape, cell, strict=True)]
        for index in product(*(range(a, b + 1) for a, b in zip(first, last, strict=True))):
            start = tuple(max(o, k * c) for o, k, c in zip(box.offset, index, cell, strict=True))
            stop = tuple(
                min(o + n, (k + 1) * c) for o, n, k, c in zip(box.offset, box.shape, index, cell, strict=True)
            )
            part = Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))
            inside = 0  # row-major place of the part's first element in the cell
            for a, k, c in zip(start, index, cell, strict=True):
                inside = inside * c + a - k * c
            shape = (*(1 for _ in index), part.numel)
            nbytes = part.numel * BY_NAME[dtype].itemsize
            yield WriteItem(part, (dtype, shape), nbytes, ((*index, inside), shape))


def flattened_tensors(
    tensors: Sequence[TensorSpec], common: Mapping[str, Any], topology: Topology | None
) -> dict[int, Cells]:
    """Return the cells of the tensors that the job of this common state asks for flattened.

    Args:
        tensors: All tensors of the output.
        common: The common state, by key.
        topology: Which rank has which box; None for a mesh of one.

    Returns:
        Position of a tensor -> its cells. Empty unless the common state names `fully_sharded_model_space`.
    """
    types = sharding_types(common.get("optimizer"))
    if MODEL_SPACE not in types.values():
        return {}
    shapes = {t.fqn: t.shape for t in tensors}
    cells = {}
    for i, spec in enumerate(tensors):
        match = _STATE.fullmatch(spec.fqn)
        if match is None or not spec.shape or 0 in spec.shape:
            continue
        chained = match["chained"]
        number = None if chained is None else int(chained)
        if types.get(number, MODEL_SPACE) != MODEL_SPACE:
            continue
        boxes = [Box.full(spec.shape)] if topology is None else topology.boxes(spec.fqn, spec.shape)
        stacked = min(sum(bool(p.search(match["key"])) for p in _STACKED_DIMS), len(spec.shape))
        halves: tuple[int, ...] = ()
        if _GATED.search(match["key"]):
            # GroupedMLP keeps its state as [in, out], and its weight as [out, in].
            turned = shapes.get(match["key"], spec.shape) != spec.shape
            halves = (len(spec.shape) - 1,) if turned else (stacked,)
        grid = cell_grid(spec.shape, stacked, halves, [b for b in boxes if b is not None])
        cells[i] = Cells(spec.shape, grid)
    return cells


def mcore_data(tensors: Sequence[TensorSpec], cells: Mapping[int, Cells]) -> dict[str, Any]:
    """Return the entry ``mcore_data`` of `.metadata`: key -> original shape of a flattened tensor."""
    return {tensors[i].fqn: {ORIGINAL: c.shape} for i, c in cells.items()}


def cell_grid(
    shape: tuple[int, ...], stacked: int, halves: Sequence[int], boxes: Iterable[Box]
) -> tuple[int, ...]:
    """Return the number of cells along each dim.

    Args:
        shape: Shape of the tensor.
        stacked: How many leading dims count layers and experts.
        halves: Dims of a gate and an up projection.
        boxes: The boxes of the ranks.
    """
    non_empty = [b for b in boxes if b.numel]
    grid = []
    for dim, n in enumerate(shape):
        edges = {edge for b in non_empty for edge in (b.offset[dim], b.offset[dim] + b.shape[dim])} | {n}
        parts = 2 if dim in halves and n % 2 == 0 else 1
        even = len({b.shape[dim] for b in non_empty}) == 1
        if dim < stacked:
            grid.append(n)
        elif dim == stacked and not even:
            grid.append(parts)
        else:
            uncut = parts == 1 or any(edge % 2 for edge in edges)
            grid.append(n // gcd(*edges, *({n // parts} if uncut else {edge // 2 for edge in edges})))
    return tuple(grid)


def arrange_release(request: Arrangement) -> Iterable[FileLayout]:
    """Lay out the release, and last the tracker; raise the errors of `arrange_torch_dist`."""
    states = dict.fromkeys(extra_states(request.tensors))
    objects = {k: v for k, v in request.objects.items() if k != _RUN_CONFIG}
    if _RUN_CONFIG in request.objects:
        import yaml

        data = yaml.safe_dump(decode(request.objects[_RUN_CONFIG])).encode()
        path = f"{RELEASE}/{_RUN_CONFIG}.yaml"
        yield FileLayout(path, len(data), (), (), (Literal(0, data),))
    for layout in arrange_torch_dist(replace(request, objects={**objects, **states})):
        yield replace(layout, path=f"{RELEASE}/{layout.path}")
    yield FileLayout(TRACKER, len(RELEASE), (), (), (Literal(0, RELEASE.encode()),), commit=True)


def extra_states(tensors: Sequence[TensorSpec]) -> Iterator[str]:
    """Yield the keys of the objects that modules of these tensors load as their extra state: None in each.

    A strict load fails where one is missing, and ignores those of modules that a job does not have: they are
    of linear layers, and with Transformer Engine of norms and attention, too. It has its own state of float8
    there, and takes None for the state of a model that has none (extensions/transformer_engine.py).
    """
    grids: dict[str, tuple[int, ...]] = {}
    hybrid = any(_MAMBA in spec.fqn for spec in tensors)  # GPTModel removes the state of its head from a load
    for spec in tensors:
        match = _PARAMETER.match(spec.fqn)
        if match is None:
            continue
        module = match["module"]
        if not (_STATEFUL.search(module) or (hybrid and module == _HEAD)):
            continue
        dims = bool(_STACKED_LAYERS.search(module)) + (_EXPERTS in f"{module}.")
        grids[module] = spec.shape[:dims] or (1,)
        if module.endswith(_PROJECTION):
            grids[module.removesuffix(_PROJECTION) + _ATTENTION] = grids[module]
    for module, grid in grids.items():
        shape = ".".join(map(str, grid))
        for cell in product(*map(range, grid)):
            yield f"{module}.{EXTRA_STATE}/shard_{'.'.join(map(str, cell))}_{shape}"
