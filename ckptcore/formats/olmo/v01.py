"""Read and write OLMo-core 0.1 (and the revisions before it): safetensors a rank, and one `metadata.json`.

A single state dict is a folder with both. A model and its optimizer are two such folders, ``model/`` and
``optim/``; beside them OLMo saves ``train/rank{R}.pt`` and, last, ``config.yaml``
(olmo_core/distributed/checkpoint.py of 0.1.0, `save_model_and_optim_state`).

| stored in ``optim/`` | here |
|---|---|
| ``state.<fqn>.__<key>``, before 2024-03-25 ``state.<key>.<fqn>`` | ``optim.state.<fqn>.<key>`` |
| ``param_group<i>``, a pickle of plain values | object ``optim.param_groups.<i>`` |
| ``state_keys``, a pickle of names | object ``optim.state_keys`` |
| ``num_param_groups`` | object ``optim.num_param_groups`` |

Tensors of ``model/`` are ``model.<fqn>``; a folder with one state dict keeps its stored names.

``metadata.json`` is {"tensors": {name: {shape, dtype, is_sharded, shard_spec_per_file}}}; a file's
spec is either ``flattened_offsets``, half-open ranges of the row-major tensor, or ``local_shape``
and ``global_offset``, a box (olmo_core/distributed/checkpoint.py of 0.1.0, `TensorShardSpec`).
``rank_{R}.safetensors`` holds each shard as a 1-D tensor. Before 2024-05-13 the specs were
``flattened_offsets_per_file``, with one range a file or a list of them, and the first revision had
no dtype.

Written, a state dict with ``model.`` and ``optim.`` parts becomes ``model/`` and ``optim/`` (and
``train/rank{R}.pt``), any other a single folder under its own names. For a mesh of one, one rank file has
each complete tensor. For a larger mesh each rank's file has what that rank writes, every element once;
0.1.0's loader reads what a rank needs at any world size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from ckptcore.core.box import Box, flat_start, from_flat_range, is_run
from ckptcore.core.dtype import BY_NAME, BY_SAFETENSORS
from ckptcore.core.manifest import Blob, Envelope, Item, Manifest, TensorSpec, Unread
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import meter
from ckptcore.core.object_tree import decode
from ckptcore.encodings.json_text import parse
from ckptcore.encodings.pickle.writer import Classes
from ckptcore.encodings.safetensors_header import METADATA as TEXTS
from ckptcore.encodings.safetensors_header import HeaderText, is_free, read_header
from ckptcore.encodings.torchzip import writer as write
from ckptcore.encodings.torchzip.reader import refused_in
from ckptcore.errors import (
    MalformedCheckpoint,
    NameMismatch,
    NotComplete,
    UnsafeContent,
    UnsupportedDtype,
    UnsupportedFormat,
)
from ckptcore.formats.base import (
    Arrangement,
    Evidence,
    FileLayout,
    Format,
    Layout,
    Literal,
    Reader,
    Slot,
    Source,
    Writer,
    natural,
)
from ckptcore.formats.common.join import Part, join
from ckptcore.formats.olmo.common import (
    RANK_SAFETENSORS,
    groups_of,
    missing_part,
    model_origin,
    require_renamed,
    train_part,
    unpickled,
)
from ckptcore.formats.olmo.core import train_files
from ckptcore.formats.torch_save.tree import add_object
from ckptcore.store import inner_path
from ckptcore.utils.foreign_text import InvalidText, parsing
from ckptcore.utils.text import count, short_repr

METADATA = "metadata.json"
_FIELDS = frozenset({"dtype", "flattened_offsets_per_file", "is_sharded", "shape", "shard_spec_per_file"})
_SPECS = "shard_spec_per_file"
_SPEC_FIELDS = frozenset({"flattened_offsets", "global_offset", "local_shape"})
_MAX_METADATA = 1 << 30
_MAX_DIM = 1 << 50
_MAX_FINDINGS = 100
_RANKS = re.compile(r"^(model/|optim/|)rank_(\d+)\.safetensors$")
_SPEC = re.compile(rb'^\s*\{\s*"tensors"\s*:\s*\{')
_COUNT = "num_param_groups"
_PICKLED = re.compile(r"^(param_group\d+|state_keys)$")
_STATE = re.compile(r"^state\.(?P<fqn>.+)\.__(?P<key>.+)$")
_MAX_PICKLE = 64 << 20
# olmo_core/utils.py of 0.1.0, `TORCH_DTYPES`.
_DTYPES = frozenset(
    {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"}
)
_OPTIM_STATE = "optim.state."
_MAX_RANGES = 1 << 16  # of one part of a tensor, in JSON


@dataclass(frozen=True, slots=True)
class FlatShard:
    """A file's part of a tensor."""

    file: str
    boxes: tuple[tuple[Box, int], ...]  # (box, its first element in the file's 1-D tensor)
    numel: int  # elements that the file must have, at least one


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of the metadata."""

    name: str
    dtype: str | None  # canonical name; the first revision has none
    shape: tuple[int, ...]
    shards: tuple[FlatShard, ...]  # without empty ones, which most are: every rank lists every tensor


Header = tuple[dict[str, tuple[str, tuple[int, ...], int, int]], int]  # tensors, first data byte


class RankFolder:
    """One folder: its metadata and the headers of its files.

    Raises:
        MalformedCheckpoint: The metadata or a header is not what OLMo-core writes.
        UnsafeContent: The metadata names a file outside the folder.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        listed: set[str] = set()
        self.tensors = tuple(_parse(source, listed))
        present = {p for p in source.listing if RANK_SAFETENSORS.match(p)}
        self.listed = tuple(sorted(listed, key=natural))
        self.strays = tuple(sorted(present - listed, key=natural))
        self.headers: dict[str, Header] = {}
        for path in (*self.listed, *self.strays):
            size = source.listing.get(path)
            if size is not None:
                tensors, _, begin = read_header(source.store, path, size)
                self.headers[path] = tensors, begin

    def add_to(self, builder: Builder, leave: frozenset[str] = frozenset()) -> None:
        """Add every tensor except those in ``leave``, every file, and findings about them."""
        for path in self.listed:
            size = self.source.listing.get(path)
            builder.file(path, size)
            if size is None:
                builder.report("missing-file", "files", f"{path} is missing", file=path)
        for stored in self.tensors:
            if stored.name not in leave:
                self._add(builder, stored)
        self._unlisted(builder)

    def _add(self, builder: Builder, stored: Stored) -> None:
        dtype = stored.dtype or self._dtype_of(builder, stored)
        if dtype is None:
            return
        tensor = builder.tensor(TensorSpec(stored.name, dtype, stored.shape), METADATA)
        if tensor < 0:
            return
        itemsize = BY_NAME[dtype].itemsize
        for shard in stored.shards:
            file = builder.file(shard.file, self.source.listing.get(shard.file))
            shard_start = self._start(builder, stored.name, dtype, shard)
            for box, first in shard.boxes:
                if shard_start is None:
                    builder.chunk(tensor, box.offset, box.shape, -1)
                    continue
                start = shard_start + first * itemsize
                item = builder.plain_item(file, start, box.numel * itemsize, Envelope.RAW)
                builder.chunk(tensor, box.offset, box.shape, item)

    def _start(self, builder: Builder, name: str, dtype: str, shard: FlatShard) -> int | None:
        """Return the shard's first byte, or None when the file contradicts the metadata."""
        header = self.headers.get(shard.file)
        if header is None:  # the file is missing: any range will do
            return 0
        entry = header[0].get(name)
        if entry is None:
            message = f"{shard.file} lacks its {count(shard.numel, 'element')} of {name}"
            builder.report("hole", "coverage", message, fqn=name, file=shard.file)
            return None
        stored_dtype, shape, start, _ = entry
        if stored_dtype != dtype or len(shape) > 1 or prod(shape) != shard.numel:
            message = (
                f"{shard.file} must have {shard.numel} {dtype} elements of {name} by {METADATA} (got "
                f"{stored_dtype} {list(shape)})"
            )
            builder.report("item-mismatch", "coverage", message, fqn=name, file=shard.file)
            return None
        return header[1] + start

    def _dtype_of(self, builder: Builder, stored: Stored) -> str | None:
        """Return the dtype in the files; where there is not one, add an unreadable part and return None."""
        files = [s.file for s in stored.shards] or self.listed  # of an empty tensor every shard is empty
        dtypes = {
            entry[0]: file
            for file in files
            if file in self.headers and (entry := self.headers[file][0].get(stored.name))
        }
        if len(dtypes) == 1:
            return next(iter(dtypes))
        reason = f"it is {' and '.join(sorted(dtypes))} in different files"
        if not dtypes:
            reason = "its dtype is unknown: none of its files has it"
            message = f"the dtype of {stored.name} is unknown: none of its files has it"
            builder.report("hole", "coverage", message, fqn=stored.name)
        builder.unread(stored.name, Unread(reason, shape=stored.shape))
        return None

    def _unlisted(self, builder: Builder) -> None:
        """Add findings for bytes that the metadata does not list. A rank without shards saves no tensors."""
        listed = {(s.file, t.name) for t in self.tensors for s in t.shards}
        for path in self.strays:
            if self.headers[path][0]:
                message = f"{path} is not part of this save: {METADATA} does not list it"
                builder.report("stray-file", "files", message, file=path)
        unlisted = 0
        for path in self.listed:
            for name, entry in self.headers[path][0].items() if path in self.headers else ():
                # A model stores empty shards as tensors of shape [0], an optimizer does not store them.
                if 0 not in entry[1] and (path, name) not in listed and unlisted < _MAX_FINDINGS:
                    unlisted += 1
                    message = f"{path} has {name}, which {METADATA} does not list there"
                    builder.report("unlisted-item", "coverage", message, fqn=name, file=path)


def _parse(source: Source, listed: set[str]) -> Iterator[Stored]:
    """Yield every tensor; add each file of the metadata to ``listed``."""
    size = source.listing[METADATA]
    if not 0 < size <= _MAX_METADATA:
        raise MalformedCheckpoint(
            f"{METADATA} must have 1 to {_MAX_METADATA} bytes (got {size})", file=METADATA
        )
    try:
        meter().require(size, METADATA)
        with parsing("a table"):
            top = parse(source.store.read(METADATA, 0, size), METADATA)
            tensors = top["tensors"].items()
        source.explain(METADATA)
        source.carry(METADATA, METADATA, {k: v for k, v in top.items() if k != "tensors"})
    except InvalidText as error:
        raise MalformedCheckpoint(f"{METADATA} has no table of tensors: {error}", file=METADATA) from error
    for name, entry in tensors:
        try:
            yield _stored_tensor(name, entry, listed)
            if other_fields := _other_fields(entry):
                source.carry(METADATA, METADATA, {name: other_fields})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MalformedCheckpoint(
                f"cannot read the entry {short_repr(name)} of {METADATA}: {error}", file=METADATA
            ) from error


def _other_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a tensor's entry that OLMo-core does not write, and those of its specs by file."""
    fields = {k: v for k, v in entry.items() if k not in _FIELDS}
    for file, spec in entry.get(_SPECS, {}).items():
        if not spec.keys() <= _SPEC_FIELDS:
            fields[file] = {k: v for k, v in spec.items() if k not in _SPEC_FIELDS}
    return fields


def _stored_tensor(name: str, entry: Mapping[str, Any], listed: set[str]) -> Stored:
    shape = _dims(entry["shape"])
    spelled = entry.get("dtype")
    if spelled is not None and (type(spelled) is not str or not 0 < len(spelled) <= 40 or spelled in BY_NAME):
        raise MalformedCheckpoint(
            f"{METADATA}: dtype of {name} must be a safetensors dtype (got {short_repr(spelled, 40)})",
            fqn=name,
        )
    canonical = BY_SAFETENSORS.get(spelled) if spelled is not None else None
    dtype = canonical.name if canonical is not None else spelled
    if "shard_spec_per_file" in entry:
        specs = entry["shard_spec_per_file"].items()
    else:
        specs = [
            (f, {"flattened_offsets": _ranges(o)}) for f, o in entry["flattened_offsets_per_file"].items()
        ]
    shards = []
    for file, spec in specs:
        if file not in listed:
            # Once for each file, not for each tensor: every rank lists every tensor.
            inner_path(file, origin=METADATA)
            listed.add(file)
        shard = _shard(file, spec, shape)
        if shard.numel:
            shards.append(shard)
    return Stored(name, dtype, shape, tuple(shards))


def _shard(file: str, spec: Mapping[str, Any], shape: tuple[int, ...]) -> FlatShard:
    flat, local, offset = (spec.get(k) for k in ("flattened_offsets", "local_shape", "global_offset"))
    if (flat is None) == (local is None or offset is None):
        raise ValueError(f"{file} must have either flat ranges or a box (got {short_repr(dict(spec), 120)})")
    if flat is None:
        box = Box(_dims(offset), _dims(local))
        if len(box.shape) != len(shape):
            raise ValueError(f"the box of {file} must have {len(shape)} dims (got {len(box.shape)})")
        return FlatShard(file, ((box, 0),) if box.numel else (), box.numel)
    boxes: list[tuple[Box, int]] = []
    numel = 0
    for start, stop in flat:
        if type(start) is not int or type(stop) is not int:
            raise TypeError(f"the range of {file} must be two integers (got {short_repr([start, stop])})")
        boxes += [
            (b, numel + flat_start(shape, b.offset) - start) for b in from_flat_range(shape, start, stop)
        ]
        numel += stop - start
    return FlatShard(file, tuple(boxes), numel)


def _ranges(offsets: Any) -> Any:
    """Return a list of ranges; before 2024-05-07 a file had a single range."""
    return [offsets] if offsets and type(offsets[0]) is int else offsets


def _dims(values: Any) -> tuple[int, ...]:
    if type(values) is not list or len(values) > 64:
        raise TypeError(f"{short_repr(values)} is not a shape")
    if any(type(n) is not int or not 0 <= n < _MAX_DIM for n in values):
        raise ValueError(f"{short_repr(values)} is not a shape")
    return tuple(values)


def detect(source: Source) -> Evidence | None:
    """Recognise `rank_R.safetensors` in the folder itself, or in its model/ and optim/."""
    if source.name is not None:
        return None
    counts: dict[str, int] = {}
    for path in source.listing:
        if m := _RANKS.match(path):
            counts[m[1]] = counts.get(m[1], 0) + 1
    if not counts and METADATA in source.listing:  # every data file may be missing
        head = source.store.read(METADATA, 0, min(64, source.listing[METADATA]))
        return Evidence("olmo_v01", (f"{METADATA} lists shards per file",)) if _SPEC.match(head) else None
    if "" in counts and len(counts) > 1:
        counts = {k: n for k, n in counts.items() if k}  # loose files beside model/ and optim/ are strays
    because = [f"{n} {f}rank_R.safetensors" for f, n in sorted(counts.items())]
    because += [f"found {f}{METADATA}" for f in sorted(counts) if f + METADATA in source.listing]
    # The only file of one rank looks like a safetensors folder's.
    refines = ("safetensors",) if counts == {"": 1} and "model.safetensors" not in source.listing else ()
    return Evidence("olmo_v01", tuple(because), refines) if because else None


def read(source: Source) -> Manifest:
    """Read the manifest of a state dict's folder, or of a step folder with its parts.

    Raises:
        NotComplete: A folder has no `metadata.json`.
        MalformedCheckpoint: A file is not what OLMo-core writes.
    """
    require_renamed(source)
    folders = [f for f in ("model", "optim") if any(p.startswith(f + "/") for p in source.listing)]
    if METADATA in source.listing or not folders:
        return _folder_manifest(source)[0]
    parts = []
    for folder in folders:
        manifest, rename = _folder_manifest(source.below(folder))
        parts.append(Part(manifest, folder, _RENAMES[folder](rename)))
    findings = [missing_part(f, f"{f}/ beside {folders[0]}/") for f in ("model", "optim") if f not in folders]
    origin: dict[str, Any] = model_origin(["model."] if "model" in folders else [])
    train = train_part(source)
    if train is not None:
        parts.append(train)
        origin |= train.manifest.origin
    return join("olmo_v01", source.store.url, parts, origin, findings)


def _folder_manifest(source: Source) -> tuple[Manifest, Callable[[str], str]]:
    """Read a folder under stored names; also return the function that makes an optimizer's names plain."""
    if METADATA not in source.listing:
        raise NotComplete(
            f"{source.store.url} has rank_R.safetensors but no {METADATA}: rank 0 writes it last",
            hint="wait if the save is running; otherwise copy it from the node of rank 0",
        )
    folder, builder = RankFolder(source), Builder()
    plain: dict[str, Stored] = {}
    if any(t.name == _COUNT for t in folder.tensors):  # an optimizer; names like _PICKLED alone are not one
        plain = {t.name: t for t in folder.tensors if t.name == _COUNT or _PICKLED.match(t.name)}
    folder.add_to(builder, frozenset(plain))
    values = {name: _add_value(builder, folder, stored) for name, stored in plain.items()}
    keys = values.get("state_keys")
    names = [t.name for t in folder.tensors]
    return builder.build("olmo_v01", source.store.url, {}), _plain_names(names, keys)


def _add_value(builder: Builder, folder: RankFolder, stored: Stored) -> Any:
    """Add a count, or the value pickled in a U8 tensor, as an object; return it, or None if unreadable."""
    shard = next((s for s in stored.shards if s.numel), None)
    header = folder.headers.get(shard.file) if shard else None
    entry = header[0].get(stored.name) if header else None
    if shard is None or header is None or entry is None or not _is_plain(stored, entry):
        message = f"object {stored.name} is not where {METADATA} records it"
        builder.report("no-place", "coverage", message, fqn=stored.name)
        builder.blobs.append(Blob(stored.name, -1, known=False))
        return None
    start, length = header[1] + entry[2], entry[3] - entry[2]
    item_number = builder.item(
        Item(builder.file(shard.file, folder.source.listing[shard.file]), start, length, Envelope.RAW)
    )
    label = f"{stored.name} in {shard.file}"
    try:
        raw = folder.source.store.read(shard.file, start, length)
        value = int.from_bytes(raw, "little", signed=True) if stored.name == _COUNT else unpickled(raw, label)
    except (MalformedCheckpoint, UnsafeContent) as error:
        builder.report("malformed-item", "coverage", error.message, fqn=stored.name, file=shard.file)
        builder.blobs.append(Blob(stored.name, item_number, known=False))
        return None
    add_object(builder, stored.name, value, label)
    if any(name.startswith("torch.") for name in refused_in(value)):  # e.g. a learning rate as a tensor
        message = f"cannot read the tensors inside object {stored.name}"
        builder.report("refused-tensors", "coverage", message, fqn=stored.name)
    return value


def _is_plain(stored: Stored, entry: tuple[str, tuple[int, ...], int, int]) -> bool:
    """Return whether a file holds a complete count or pickle, as the metadata says."""
    expected_dtype = "int64" if stored.name == _COUNT else "uint8"
    numel = 1 if stored.name == _COUNT else prod(stored.shape)
    stored_dtype, shape, start, stop = entry
    recorded = (stored.dtype or stored_dtype, prod(stored.shape), stored_dtype, prod(shape))
    return recorded == (expected_dtype, numel, expected_dtype, numel) and stop - start <= _MAX_PICKLE


def _plain_names(names: list[str], keys: Any) -> Callable[[str], str]:
    """Return the function that gives names in an optimizer's folder their spelling in other generations."""
    current = any(_STATE.match(n) for n in names)
    state_keys = (
        sorted((k for k in keys if type(k) is str), key=len, reverse=True) if type(keys) is list else []
    )

    def rename(name: str) -> str:
        if m := _STATE.match(name):
            return f"state.{m['fqn']}.{m['key']}"
        if not current and name.startswith("state."):
            key = next((k for k in state_keys if name.startswith(f"state.{k}.")), None)
            return f"state.{name[len(key) + 7 :]}.{key}" if key else name
        if name.startswith("param_group") and name[11:].isdigit():
            return f"param_groups.{name[11:]}"
        return name

    return rename


_RENAMES: dict[str, Callable[[Callable[[str], str]], Callable[[str], str]]] = {
    "model": lambda rename: lambda name: f"model.{name}",
    "optim": lambda rename: lambda name: f"optim.{rename(name)}",
}


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
    texts = request.objects.get(TEXTS)
    if type(texts) is not dict or not all(is_free(key, value) for key, value in texts.items()):
        return request, {}
    objects = {key: value for key, value in request.objects.items() if key != TEXTS}
    return replace(request, objects=objects), {key: texts[key] for key in sorted(texts)}


def _state_name(fqn: str) -> str:
    if not fqn.startswith(_OPTIM_STATE) or "." not in fqn[len(_OPTIM_STATE) :]:
        raise _no_place(fqn, "optim/, which holds state by parameter only")
    param, key = fqn[len(_OPTIM_STATE) :].rsplit(".", 1)
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
    from ckptcore.formats.common.write_assignment import by_rank

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


# It nests because the saving order is needed to rebuild groups from flattened parameter groups.
_LAYOUT = Layout(arrange, nests=True, values="plain")
FORMAT = Format(
    name="olmo_v01",
    title="OLMo-core 0.1 checkpoint (safetensors a rank)",
    recognised_by="`metadata.json` beside `rank_R.safetensors`, also in `model/` and `optim/`",
    detect=detect,
    suffixes=frozenset({"safetensors", "json"}),
    reader=Reader(read, objects=True),
    writer=Writer(_LAYOUT, for_mesh=_LAYOUT),
    thin="its metadata lists every file",
)
