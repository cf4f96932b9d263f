"""Laying out OLMo-core 0.1 folders: rank files, `metadata.json`, and the pickles of an optimizer.

A state dict with ``model.`` and ``optim.`` parts becomes ``model/`` and ``optim/`` (and
``train/rank{R}.pt``), any other a single folder under its own names. Each tensor lies whole in one
rank file: 0.1.0's loader cuts out what a rank needs at any world size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptcore.dtype import BY_NAME
from ckptcore.errors import NameMismatch, UnsupportedDtype, UnsupportedFormat
from ckptcore.formats import _torchwrite as write
from ckptcore.formats._olmogroups import groups_of
from ckptcore.formats._olmotrain import train_files
from ckptcore.formats._stheader import pack_header
from ckptcore.formats.base import Arrangement, FileLayout, Literal, Slot, natural
from ckptcore.manifest import TensorSpec
from ckptcore.objects import decode

# olmo_core/utils.py of 0.1.0, `TORCH_DTYPES`.
_DTYPES = frozenset(
    {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"}
)
_STATE = "optim.state."


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of a rank file. position: in the request's list, None for known bytes in ``data``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    position: int | None
    data: bytes = b""

    @property
    def nbytes(self) -> int:
        return TensorSpec(self.name, self.dtype, self.shape).nbytes


def arrange(request: Arrangement) -> tuple[FileLayout, ...]:
    """The files of a step folder, or of a single state dict.

    Raises `UnsupportedFormat` for what the format has no place for, `UnsupportedDtype`, and
    `NameMismatch` for a name that is no text.
    """
    names = [t.fqn for t in request.tensors]
    parts = {n.split(".", 1)[0] for n in (*names, *request.objects)}
    if not ("model" in parts and parts & {"optim", "train"}):
        for key in request.objects:
            raise _no_place(key, "a folder of one state dict")
        return tuple(_folder(request, "", [_entry(t, i, t.fqn) for i, t in enumerate(request.tensors)]))
    for name in (*names, *request.objects):
        if name.split(".", 1)[0] not in {"model", "optim", "train"}:
            raise _no_place(name, "the parts model, optim and train")
    layouts = train_files(request)
    model = [_entry(t, i, t.fqn[6:]) for i, t in enumerate(request.tensors) if t.fqn.startswith("model.")]
    optim = [_entry(t, i, _state_name(t.fqn)) for i, t in enumerate(request.tensors)
             if t.fqn.startswith("optim.")]  # fmt: skip
    objects = {k: decode(v) for k, v in request.objects.items() if not k.startswith("train.")}
    for key in objects:
        if key.startswith("model."):
            raise _no_place(key, "model/, which holds tensors only")
    layouts += _folder(request, "model/", model)
    if optim or objects:
        layouts += _folder(request, "optim/", optim + _pickles(optim, objects, request.paths))
    return tuple(layouts)


def _state_name(fqn: str) -> str:
    if not fqn.startswith(_STATE) or "." not in fqn[len(_STATE) :]:
        raise _no_place(fqn, "optim/, which holds state by parameter only")
    param, key = fqn[len(_STATE) :].rsplit(".", 1)
    return f"state.{param}.__{key}"


def _pickles(optim: Sequence[_Entry], objects: Mapping[str, Any], paths: Iterable[str]) -> list[_Entry]:
    """The tensors that tell of parameter groups: a count, a pickle a group, and the state's keys."""
    place = {name: n for n, name in enumerate(paths)}  # in the order they were saved, where that is known
    groups = groups_of(dict(sorted(objects.items(), key=lambda row: place.get(row[0], len(place)))))
    keys = sorted({e.name.rsplit(".__", 1)[1] for e in optim})
    count = len(groups).to_bytes(8, "little")
    found = [_Entry("num_param_groups", "int64", (), None, count)]
    values = {f"param_group{i}": g for i, g in enumerate(groups)} | {"state_keys": keys}
    for name, value in values.items():
        pickled = write.Pickled(_no_tensor)
        try:
            pickled.value(value)
        except TypeError as error:
            raise _no_place(f"optim.{name}", f"a pickle of plain values: {error}") from error
        data = pickled.finish()
        found.append(_Entry(name, "uint8", (len(data),), None, data))
    return found


def _folder(request: Arrangement, prefix: str, entries: Sequence[_Entry]) -> list[FileLayout]:
    entries = sorted(entries, key=lambda e: natural(e.name))
    files: list[list[_Entry]] = [[]]
    held = 0
    for entry in entries:
        if files[-1] and held + entry.nbytes > request.max_file_bytes:
            files.append([])
            held = 0
        files[-1].append(entry)
        held += entry.nbytes
    layouts = [_rank_file(f"{prefix}rank_{rank}.safetensors", group) for rank, group in enumerate(files)]
    told = {e.name: _told(e, f"rank_{rank}.safetensors") for rank, group in enumerate(files) for e in group}
    raw = json.dumps({"tensors": told}).encode()
    return [*layouts, FileLayout(f"{prefix}metadata.json", len(raw), (), (), (Literal(0, raw),), commit=True)]


def _told(entry: _Entry, file: str) -> dict[str, Any]:
    numel = TensorSpec(entry.name, entry.dtype, entry.shape).numel
    return {
        "shape": list(entry.shape),
        "is_sharded": False,
        "dtype": BY_NAME[entry.dtype].safetensors,
        "shard_spec_per_file": {
            file: {"flattened_offsets": [[0, numel]], "local_shape": None, "global_offset": None}
        },
    }


def _rank_file(path: str, group: Sequence[_Entry]) -> FileLayout:
    # Wide elements first: every tensor then starts at a multiple of its element's width.
    order = sorted(group, key=lambda e: -BY_NAME[e.dtype].itemsize)
    header: dict[str, Any] = {}
    at = 0
    for e in order:
        numel = TensorSpec(e.name, e.dtype, e.shape).numel  # the loader takes 1-D tensors only
        header[e.name] = {"dtype": BY_NAME[e.dtype].safetensors, "shape": [numel],
                          "data_offsets": [at, at + e.nbytes]}  # fmt: skip
        at += e.nbytes
    prefix = pack_header(header, 8)
    literals = [Literal(0, prefix)]
    slots: list[Slot] = []
    tensors: list[int] = []
    for e in order:
        start = len(prefix) + header[e.name]["data_offsets"][0]
        if e.position is None:
            literals.append(Literal(start, e.data))
        else:
            slots.append(Slot(len(tensors), start))
            tensors.append(e.position)
    return FileLayout(path, len(prefix) + at, tuple(tensors), tuple(slots), tuple(literals))


def _entry(spec: TensorSpec, position: int, name: str) -> _Entry:
    if BY_NAME[spec.dtype].safetensors not in _DTYPES:
        raise UnsupportedDtype(
            f"OLMo-core 0.1 has no name for {spec.dtype} ({spec.fqn})", fqn=spec.fqn, dtype=spec.dtype
        )
    if any("\ud800" <= c <= "\udfff" for c in name):
        raise NameMismatch(f"{spec.fqn!r} is no text that a file can hold", hint="rename it with --rename")
    return _Entry(name, spec.dtype, spec.shape, position)


def _no_place(name: str, where: str) -> UnsupportedFormat:
    return UnsupportedFormat(
        f"olmo_v01 has no place for {name}: it does not fit {where}",
        hint=f"leave it out (--exclude '{name}'), rename it, or choose another target format",
        name=name,
    )


def _no_tensor(fqn: str) -> tuple[str, TensorSpec]:
    raise TypeError(f"it refers to the tensor {fqn}")
