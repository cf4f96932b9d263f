"""Lay out Megatron-Core checkpoints, torch_dist and zarr, as a job of one rank saves them.

Names decide: a key ``<key>/shard_<offset>_<shape>`` is a sharded object, every other object is common
state, and a tensor that no object refers to is a sharded tensor of one chunk. Releases up to 0.18 need
``common.pt`` and the four fields of ``metadata.json``; 0.19 reads ``common.pt``, too, where it exists.
``metadata.json`` comes last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import Named, TensorRef, decode, tensors_in
from ckptcore.encodings import zarr_v2 as _zarr
from ckptcore.encodings.pickle.writer import Classes
from ckptcore.errors import NameMismatch, UnsupportedDtype
from ckptcore.formats.base import Arrangement, FileLayout, Literal, Slot, natural
from ckptcore.formats.common.write_assignment import Share
from ckptcore.formats.dcp.metadata_writer import metadata_pickle
from ckptcore.formats.dcp.writer import METADATA, Files
from ckptcore.formats.megatron.config import CONFIG
from ckptcore.formats.megatron.flattened_cells import Cells, flattened_tensors, mcore_data
from ckptcore.formats.megatron.sharded_objects import COMMON_FILE, COMMON_KEY, SHARD
from ckptcore.formats.torch_save.layout import Inline, torch_file
from ckptcore.utils.text import count, short_repr

_RANDOM = "rng_state"
_MAX_NAME = 255  # bytes of a file name, on every common file system
_MAX_PATH = 3500  # bytes of a name below the output: paths end at 4096
_ARRAY_FILES = re.compile(r"\.z\w+|\d+(\.\d+)*")  # files of a tensor's own folder: its metadata, its chunks


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
