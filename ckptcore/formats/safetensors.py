"""safetensors: one file, or files with a Hugging Face index.

A file is: u64 little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
and the tensors' bytes without holes (https://github.com/huggingface/safetensors). A folder has
``model.safetensors``, or ``*-0000i-of-0000n.safetensors`` and ``model.safetensors.index.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ckptcore.builder import Builder
from ckptcore.dtype import BY_NAME
from ckptcore.errors import (
    MalformedCheckpoint,
    NameMismatch,
    UnsafeContent,
    UnsupportedDtype,
    finding,
)
from ckptcore.formats._stheader import MAX_HEADER, no_duplicates, pack_header, read_header
from ckptcore.formats.base import (
    Abilities,
    Arrangement,
    Evidence,
    FileLayout,
    Format,
    Literal,
    Slot,
    Source,
    natural,
)
from ckptcore.frame import canonical_json
from ckptcore.manifest import Blob, Item, Manifest, TensorSpec, View
from ckptcore.objects import decode
from ckptcore.store import inner_path

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
OBJECTS = "ckptcore.objects"  # `__metadata__` key that carries non-tensor values, as JSON


def detect(source: Source) -> Evidence | None:
    """A .safetensors file, a folder with an index, or one with a lone safetensors file."""
    if source.name is not None:
        if not source.name.endswith(".safetensors"):
            return None
        return Evidence("safetensors", (f"{source.name} is named .safetensors",))
    if INDEX in source.listing:
        return Evidence("safetensors", (f"found {INDEX}",))
    files = [p for p in source.listing if p.endswith(".safetensors") and "/" not in p]
    if SINGLE in files or len(files) == 1:
        return Evidence("safetensors", (f"found {SINGLE if SINGLE in files else files[0]}",))
    return None


def read(source: Source) -> Manifest:
    """The manifest of a safetensors file or folder; raises `MalformedCheckpoint`."""
    builder, origin = Builder(), dict[str, Any]()
    if source.name is not None:
        files: dict[str, set[str] | None] = {source.name: None}
    elif INDEX in source.listing:
        files = _indexed(source, builder)
    else:
        lone = [p for p in source.listing if p.endswith(".safetensors") and "/" not in p]
        files = {SINGLE if SINGLE in lone else lone[0]: None}
    seen: dict[str, str] = {}
    for path in sorted(files, key=natural):
        wanted = files[path]
        if source.listing.get(path) is None:
            builder.file(path, None)
            builder.findings.append(finding("missing-file", "files", f"{path} is not there", file=path))
            continue
        names, metadata = _add_file(builder, source, path, seen)
        for name in sorted((wanted or set()) - names):
            builder.findings.append(
                finding("hole", "cover", f"{INDEX} places {name} in {path}, which lacks it",
                        fqn=name, file=path)
            )  # fmt: skip
        builder.findings += [
            finding("unlisted-tensor", "cover", f"{path} holds {name}, which {INDEX} does not list",
                    fqn=name, file=path)
            for name in sorted(names - wanted if wanted is not None else ())
        ]  # fmt: skip
        _add_objects(builder, metadata, path)
        if "format" in metadata:
            origin["written_for"] = str(metadata["format"])[:64]
    return builder.build("safetensors", source.store.url, origin)


def arrange(request: Arrangement) -> tuple[FileLayout, ...]:
    """Files in the hub's packing: names in natural order, a new file when the next does not fit.

    Raises `UnsupportedDtype` for a dtype that safetensors cannot hold.
    """
    for spec in request.tensors:
        if not spec.fqn.isprintable() and _not_text(spec.fqn):
            raise NameMismatch(
                f"{spec.fqn!r} is no text that a file can hold", hint="rename it with --rename"
            )
        if BY_NAME[spec.dtype].safetensors is None:
            raise UnsupportedDtype(
                f"safetensors cannot hold {spec.dtype} ({spec.fqn})", fqn=spec.fqn, dtype=spec.dtype
            )
    limit = request.max_file_bytes if request.single is None else None
    groups = pack(request.tensors, limit)
    single = request.single or SINGLE
    count = len(groups)
    layouts = []
    for number, group in enumerate(groups):
        path = single if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        metadata = {"format": "pt"}
        if number == 0 and request.objects:
            metadata[OBJECTS] = canonical_json(dict(request.objects)).decode()
        layouts.append(_layout(path, group, request.tensors, metadata, commit=count == 1))
    if count > 1:
        layouts.append(_index(layouts, request.tensors))
    return tuple(layouts)


def pack(tensors: Sequence[TensorSpec], max_file_bytes: int | None) -> list[list[int]]:
    """Positions of ``tensors`` by output file, as huggingface_hub packs them.

    A tensor larger than the limit gets a file of its own (huggingface_hub
    serialization/_base.py, `split_state_dict_into_shards_factory`).
    """
    order = sorted(range(len(tensors)), key=lambda i: natural(tensors[i].fqn))
    if max_file_bytes is None:
        return [order]
    groups: list[list[int]] = []
    current: list[int] = []
    size = 0
    for i in order:
        nbytes = tensors[i].nbytes
        if nbytes > max_file_bytes:
            groups.append([i])
            continue
        if current and size + nbytes > max_file_bytes:
            groups.append(current)
            current, size = [], 0
        current.append(i)
        size += nbytes
    if current or not groups:
        groups.append(current)
    return groups


def _layout(path: str, group: Sequence[int], tensors: Sequence[TensorSpec],
            metadata: Mapping[str, str], *, commit: bool) -> FileLayout:  # fmt: skip
    # Wide elements first: every tensor then starts at a multiple of its element's width.
    order = sorted(group, key=lambda i: -BY_NAME[tensors[i].dtype].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    starts = []
    for i in order:
        spec = tensors[i]
        starts.append(at)
        header[spec.fqn] = {
            "dtype": BY_NAME[spec.dtype].safetensors,
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    prefix = pack_header(header, 64)
    if len(prefix) - 8 > MAX_HEADER:
        raise NameMismatch(
            f"{path} needs a header of {len(prefix) - 8} bytes, the format allows {MAX_HEADER}",
            hint="lower --max-file-size",
        )
    slots = tuple(Slot(n, len(prefix) + start) for n, start in enumerate(starts))
    return FileLayout(path, len(prefix) + at, tuple(order), slots, (Literal(0, prefix),), commit)


def _index(layouts: Sequence[FileLayout], tensors: Sequence[TensorSpec]) -> FileLayout:
    places = {tensors[i].fqn: layout.path for layout in layouts for i in layout.tensors}
    total = sum(t.nbytes for t in tensors)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: places[name] for name in sorted(places, key=natural)},
    }
    data = (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
    return FileLayout(INDEX, len(data), (), (), (Literal(0, data),), commit=True)


def _indexed(source: Source, builder: Builder) -> dict[str, set[str] | None]:
    raw = source.store.read(INDEX, 0, source.listing[INDEX])
    try:
        top = json.loads(raw, object_pairs_hook=no_duplicates)
        weight_map = top["weight_map"]
        rows = [(str(name), inner_path(path, what=INDEX)) for name, path in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedCheckpoint(f"{INDEX} is not an index: {error}", file=INDEX) from error
    except UnsafeContent:
        raise
    files: dict[str, set[str] | None] = {}
    for name, path in rows:
        names = files.setdefault(path, set())
        assert names is not None
        names.add(name)
    if SINGLE in source.listing and SINGLE not in files:
        builder.findings.append(
            finding("stale-file", "files", f"{SINGLE} lies beside {INDEX} and is not part of it: "
                    "transformers would load it instead", file=SINGLE)
        )  # fmt: skip
    for path in source.listing:
        if path.endswith(".safetensors") and "/" not in path and path not in files and path != SINGLE:
            builder.findings.append(finding("stray-file", "files", f"{path} is not in {INDEX}", file=path))
    return files


def _add_file(builder: Builder, source: Source, path: str,
              seen: dict[str, str]) -> tuple[set[str], dict[str, Any]]:  # fmt: skip
    size = source.listing[path]
    tensors, metadata, begin = read_header(source.store, path, size)
    file = builder.file(path, size)
    for name, (dtype, shape, start, stop) in tensors.items():
        if name in seen:
            raise MalformedCheckpoint(f"{name} is in {seen[name]} and in {path}", file=path)
        seen[name] = path
        at = builder.tensor(TensorSpec(name, dtype, shape))
        item = builder.item(Item(file, begin + start, stop - start))
        builder.chunk(at, (0,) * len(shape), shape, item, View())
    return set(tensors), metadata


def _add_objects(builder: Builder, metadata: Mapping[str, Any], path: str) -> None:
    raw = metadata.get(OBJECTS)
    if raw is None:
        return
    try:
        objects = json.loads(raw)
        items = sorted(objects.items())
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedCheckpoint(f"{path}: {OBJECTS} is not JSON: {error}", file=path) from error
    try:
        for _, tree in items:
            decode(tree)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise MalformedCheckpoint(f"{path}: {OBJECTS} holds no object tree: {error}", file=path) from error
    builder.blobs += [Blob(key, -1, tree) for key, tree in items]


def _not_text(name: str) -> bool:
    """Whether the name has no UTF-8 form: JSON and pickle may smuggle lone surrogates in."""
    return any("\ud800" <= c <= "\udfff" for c in name)


FORMAT = Format(
    name="safetensors",
    title="safetensors file or Hugging Face folder",
    recognised_by="`model.safetensors.index.json`, or one `*.safetensors` file",
    abilities=Abilities(reads=True, writes=True, checksums="none", objects=True),
    detect=detect,
    read=read,
    arrange=arrange,
)
