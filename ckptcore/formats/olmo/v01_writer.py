"""Lay out OLMo-core 0.1 folders: rank files, `metadata.json`, and the pickles of an optimizer.

A state dict with ``model.`` and ``optim.`` parts becomes ``model/`` and ``optim/`` (and
``train/rank{R}.pt``), any other a single folder under its own names. For a mesh of one, one rank file has
each complete tensor. For a larger mesh each rank's file has what that rank writes, every element once;
0.1.0's loader reads what a rank needs at any world size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from ckptcore.core.box import Box, flat_start, is_run
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import decode
from ckptcore.encodings.pickle.writer import Classes
from ckptcore.encodings.safetensors_header import METADATA, HeaderText, is_free
from ckptcore.encodings.torchzip import writer as write
from ckptcore.errors import NameMismatch, UnsupportedDtype, UnsupportedFormat
from ckptcore.formats.base import Arrangement, FileLayout, Literal, Slot, natural
from ckptcore.formats.common.write_assignment import by_rank
from ckptcore.formats.olmo.common import groups_of
from ckptcore.formats.olmo.core import train_files

# olmo_core/utils.py of 0.1.0, `TORCH_DTYPES`.
_DTYPES = frozenset(
    {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"}
)
_STATE = "optim.state."
_MAX_RANGES = 1 << 16  # of one part of a tensor, in JSON


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of a folder. position: in the request's list, or None for the literal bytes in ``data``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    position: int | None
    data: bytes = b""

    @property
    def nbytes(self) -> int:
        return TensorSpec(self.name, self.dtype, self.shape).nbytes

    @property
    def full(self) -> _EntryBox:
        return _EntryBox(self, Box.full(self.shape))


@dataclass(frozen=True, slots=True)
class _EntryBox:
    """A box of a tensor, in a rank file."""

    entry: _Entry
    box: Box


def arrange(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out the files of a step folder, or of a single state dict.

    Raises:
        UnsupportedFormat: The format has no place for a tensor or object.
        UnsupportedDtype: The format has no name for a dtype.
        NameMismatch: A name is not valid text.
    """
    request, texts = _with_texts(request)
    names = [t.fqn for t in request.tensors]
    parts = {n.split(".", 1)[0] for n in (*names, *request.objects)}
    if not ("model" in parts and parts & {"optim", "train"}):
        for key in request.objects:
            raise _no_place(key, "a folder of one state dict")
        return tuple(
            _folder_files(
                request, "", [_tensor_entry(t, i, t.fqn) for i, t in enumerate(request.tensors)], texts
            )
        )
    for name in (*names, *request.objects):
        if name.split(".", 1)[0] not in {"model", "optim", "train"}:
            raise _no_place(name, "the parts model, optim and train")
    layouts = train_files(request, Classes.PLAIN)
    model = [
        _tensor_entry(t, i, t.fqn[6:]) for i, t in enumerate(request.tensors) if t.fqn.startswith("model.")
    ]
    optim = [
        _tensor_entry(t, i, _state_name(t.fqn))
        for i, t in enumerate(request.tensors)
        if t.fqn.startswith("optim.")
    ]
    objects = {k: decode(v) for k, v in request.objects.items() if not k.startswith("train.")}
    for key in objects:
        if key.startswith("model."):
            raise _no_place(key, "model/, which holds tensors only")
    layouts += _folder_files(request, "model/", model, texts)
    if optim or objects:
        layouts += _folder_files(request, "optim/", optim + _pickles(optim, objects, request.paths), {})
    return tuple(layouts)


def _with_texts(request: Arrangement) -> tuple[Arrangement, dict[str, str]]:
    """Return the request without what is written into `__metadata__`, and that: texts of no reader's own."""
    texts = request.objects.get(METADATA)
    if type(texts) is not dict or not all(is_free(key, value) for key, value in texts.items()):
        return request, {}
    objects = {key: value for key, value in request.objects.items() if key != METADATA}
    return replace(request, objects=objects), {key: texts[key] for key in sorted(texts)}


def _state_name(fqn: str) -> str:
    if not fqn.startswith(_STATE) or "." not in fqn[len(_STATE) :]:
        raise _no_place(fqn, "optim/, which holds state by parameter only")
    param, key = fqn[len(_STATE) :].rsplit(".", 1)
    return f"state.{param}.__{key}"


def _pickles(optim: Sequence[_Entry], objects: Mapping[str, Any], paths: Iterable[str]) -> list[_Entry]:
    """Return the tensors that record parameter groups: a count, a pickle a group, and the state's keys."""
    place = {name: n for n, name in enumerate(paths)}  # in saving order, where that is known
    groups = groups_of(dict(sorted(objects.items(), key=lambda row: place.get(row[0], len(place)))))
    keys = sorted({e.name.rsplit(".__", 1)[1] for e in optim})
    count = len(groups).to_bytes(8, "little")
    entries = [_Entry("num_param_groups", "int64", (), None, count)]
    values = {f"param_group{i}": g for i, g in enumerate(groups)} | {"state_keys": keys}
    for name, value in values.items():
        pickled = write.Pickled(_no_tensor)
        try:
            pickled.value(value)
        except TypeError as error:
            raise _no_place(f"optim.{name}", f"a pickle of plain values: {error}") from error
        data = pickled.finish()
        entries.append(_Entry(name, "uint8", (len(data),), None, data))
    return entries


def _folder_files(
    request: Arrangement, prefix: str, entries: Sequence[_Entry], texts: Mapping[str, str]
) -> list[FileLayout]:
    """Lay out a folder; its first file gets the texts of `__metadata__`."""
    entries = sorted(entries, key=lambda e: natural(e.name))
    files = _pack_into_files(request, entries) if request.topology is None else _by_rank(request, entries)
    layouts = [
        _rank_file(f"{prefix}rank_{rank}.safetensors", group, {} if rank else texts)
        for rank, group in enumerate(files)
    ]
    parts: dict[str, list[tuple[str, Box]]] = {e.name: [] for e in entries}
    for rank, group in enumerate(files):
        for part in group:
            parts[part.entry.name].append((f"rank_{rank}.safetensors", part.box))
    raw = json.dumps({"tensors": {e.name: _tensor_metadata(e, parts[e.name]) for e in entries}}).encode()
    return [*layouts, FileLayout(f"{prefix}metadata.json", len(raw), (), (), (Literal(0, raw),), commit=True)]


def _pack_into_files(request: Arrangement, entries: Sequence[_Entry]) -> list[list[_EntryBox]]:
    """Distribute complete tensors over files of a size."""
    files: list[list[_EntryBox]] = [[]]
    size = 0
    for entry in entries:
        if files[-1] and size + entry.nbytes > request.max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(entry.full)
        size += entry.nbytes
    return files


def _by_rank(request: Arrangement, entries: Sequence[_Entry]) -> list[list[_EntryBox]]:
    """Return what each rank writes, as the format's own writer does: the first rank writes literal bytes."""
    entry_of = {e.position: e for e in entries if e.position is not None}
    ranks = by_rank(request.tensors, entry_of, request.topology)
    files = [[_EntryBox(entry_of[position], box) for position, box in parts] for parts in ranks]
    files[0] += [e.full for e in entries if e.position is None]
    return files


def _tensor_metadata(entry: _Entry, parts: Sequence[tuple[str, Box]]) -> dict[str, Any]:
    """Return a tensor's metadata. parts: (file, its box)."""
    return {
        "shape": list(entry.shape),
        "is_sharded": [box.shape for _, box in parts] != [entry.shape],
        "dtype": BY_NAME[entry.dtype].safetensors,
        "shard_spec_per_file": {file: _spec(entry, box) for file, box in parts},
    }


def _spec(entry: _Entry, box: Box) -> dict[str, Any]:
    """Return a `TensorShardSpec`: ranges where the rows of a box are one run, a box for any other of 2 dims.

    The loader does not support boxes of more dims: their ranges are listed.
    """
    shape = entry.shape
    outer = next(d for d in range(len(shape) + 1) if is_run(shape[d:], box.shape[d:]))
    if outer and len(shape) == 2:
        return {"flattened_offsets": None, "local_shape": list(box.shape), "global_offset": list(box.offset)}
    if prod(box.shape[:outer]) > _MAX_RANGES:
        raise UnsupportedFormat(
            f"cannot write {entry.name} {list(shape)} as olmo_v01: a shard {list(box.shape)} would need "
            f"{prod(box.shape[:outer])} ranges",
            hint="shard it along its first dim, or choose another target format",
        )
    length = prod(box.shape[outer:])
    starts = (
        flat_start(shape, (*outer_index, *box.offset[outer:])) for outer_index in product(*_outer(box, outer))
    )
    ranges = [[start, start + length] for start in starts]
    return {"flattened_offsets": ranges, "local_shape": None, "global_offset": None}


def _outer(box: Box, dims: int) -> list[range]:
    return [range(a, b) for a, b in zip(box.offset[:dims], box.end[:dims], strict=True)]


def _rank_file(path: str, group: Sequence[_EntryBox], texts: Mapping[str, str]) -> FileLayout:
    # Wide elements first, so every tensor starts at a multiple of its element's width.
    order = sorted(group, key=lambda h: -BY_NAME[h.entry.dtype].itemsize)
    header = HeaderText(texts or None)
    starts = [header.add(h.entry.name, h.entry.dtype, (h.box.numel,)) for h in order]  # the loader's are 1-D
    prefix = header.packed(8)
    literals = [Literal(0, prefix)]
    slots: list[Slot] = []
    tensors: list[int] = []
    boxes: list[Box] = []
    for h, begin in zip(order, starts, strict=True):
        start = len(prefix) + begin
        if h.entry.position is None:
            literals.append(Literal(start, h.entry.data))
        else:
            slots.append(Slot(len(tensors), start))
            tensors.append(h.entry.position)
            boxes.append(h.box)
    return FileLayout(
        path, len(prefix) + header.end, tuple(tensors), tuple(slots), tuple(literals), boxes=tuple(boxes)
    )


def _tensor_entry(spec: TensorSpec, position: int, name: str) -> _Entry:
    if BY_NAME[spec.dtype].safetensors not in _DTYPES:
        raise UnsupportedDtype(
            f"cannot write {spec.fqn}: OLMo-core 0.1 has no name for {spec.dtype}",
            fqn=spec.fqn,
            dtype=spec.dtype,
        )
    if any("\ud800" <= c <= "\udfff" for c in name):
        raise NameMismatch(
            f"cannot write {spec.fqn!r}: the name is not valid text", hint="rename it with --rename"
        )
    return _Entry(name, spec.dtype, spec.shape, position)


def _no_place(name: str, where: str) -> UnsupportedFormat:
    return UnsupportedFormat(
        f"cannot write {name} as olmo_v01: it does not fit {where}",
        hint=f"leave it out (--exclude '{name}'), rename it, or choose another target format",
        name=name,
    )


def _no_tensor(fqn: str) -> tuple[str, TensorSpec]:
    raise TypeError(f"it refers to the tensor {fqn}")
