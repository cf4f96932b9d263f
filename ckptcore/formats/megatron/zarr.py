"""Read Megatron-Core `zarr` checkpoints (0.5 to 0.15): one uncompressed zarr array per tensor.

Beside the arrays are ``metadata.json``, written last, ``common.pt``, an object per
``<key>/shard_<offset>_<shape>.pt``, and the zero-length locks of ``<key>.sync/``
(megatron/core/dist_checkpointing/strategies/zarr.py). Flattened shards are stored in place.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ckptcore.core.manifest import Envelope, Manifest, TensorSpec, Unread
from ckptcore.core.manifest_builder import Builder
from ckptcore.encodings import zarr_v2 as _zarr
from ckptcore.errors import Finding, UnreadablePart, finding
from ckptcore.formats.base import Arrangement, Evidence, FileLayout, Format, Layout, Reader, Source, Writer
from ckptcore.formats.megatron.config import CONFIG, finished_config, read_config
from ckptcore.formats.megatron.sharded_objects import COMMON_FILE, add_file, grids
from ckptcore.utils.text import count

NAME = "zarr"
_LOCKS = ".sync"
# Until 0.5 the last number of a shape of two or more dims was dropped like a suffix.
_OBJECT = re.compile(r"/shard_\d+(?:\.\d+)*_\d+(?:\.\d+)*\.pt$")
_CHUNK = re.compile(r"/\d+(?:\.\d+)*$")
_PADDED = re.compile(r"embedding|output_layer|lm_head|bucket_idx|gbuf_idx")
_MAX_FINDINGS = 100


def detect(source: Source) -> Evidence | None:
    """Recognise by `metadata.json`; without it, by arrays beside Megatron's `common.pt`."""
    if source.name is not None:
        return None
    config = read_config(source)
    arrays = len(_arrays(source))
    if config is not None and config.backend != NAME:
        because = (count(arrays, "zarr array"), f"although {CONFIG} says {config.backend}")
        return Evidence(NAME, because) if arrays else None
    if config is not None:
        because = (f"{CONFIG} says sharded_backend zarr, version {config.version}", count(arrays, "array"))
    elif arrays and COMMON_FILE in source.listing:
        because = (f"{count(arrays, 'zarr array')} beside {COMMON_FILE}", f"but no {CONFIG}")
    else:
        return None
    return Evidence(NAME, because, refines=("torch_save",))  # which sees common.pt


def read(source: Source) -> Manifest:
    """Read the manifest of a zarr checkpoint, names as stored.

    Raises:
        NotComplete: `metadata.json` is missing.
        UnsupportedFormat: An array is compressed.
    """
    from ckptcore.formats.megatron.flat_buffers import map_buckets, stored_args

    config = finished_config(source)
    builder = Builder()
    inside = _by_folder(source)
    arrays = _arrays(source)
    readable = {path: array for path in arrays if (array := _add_array(builder, source, path, inside))}
    builder.findings += [*_of_another_writer(readable), *_uneven(readable)]
    builder.findings += _headless(source, {p.removesuffix("/" + _zarr.ARRAY) for p in arrays})
    for path in sorted(p for p in source.listing if _OBJECT.search(p)):
        add_file(builder, source, path, path.removesuffix(".pt"))
    if COMMON_FILE in source.listing:
        add_file(builder, source, COMMON_FILE, None)
    elif config is not None and config.has_common_file:
        message = f"{COMMON_FILE} is missing, and {CONFIG} says that the common state was saved in it"
        builder.report("missing-file", "files", message, file=COMMON_FILE)
    origin = {} if config is None else {"backend": config.backend, "backend_version": config.version}
    manifest = builder.build(NAME, source.store.url, origin)
    manifest = replace(manifest, findings=(*manifest.findings, *grids(manifest.blobs)))
    return map_buckets(manifest, stored_args(manifest), before_016=True)


def _arrays(source: Source) -> list[str]:
    """Return every array's `.zarray`, without the empty ones of lock folders."""
    paths_by_key = {
        p.removesuffix("/" + _zarr.ARRAY): p for p in source.listing if p.endswith("/" + _zarr.ARRAY)
    }
    locks = {
        k
        for k, p in paths_by_key.items()
        if k.endswith(_LOCKS) and (not source.listing[p] or k.removesuffix(_LOCKS) in paths_by_key)
    }
    return [p for k, p in paths_by_key.items() if k not in locks]


def _headless(source: Source, arrays: set[str]) -> Iterator[Finding]:
    """Yield findings for chunks, and locks, without the `.zarray` of their array."""
    folders = {p.rpartition("/")[0] for p in source.listing if _CHUNK.search(p)}
    names = {k.removesuffix(_LOCKS) for k in folders}
    lost = sorted(k for k in names - arrays if not any(above in arrays for above in _above(k)))
    for key in lost[:_MAX_FINDINGS]:
        message = f"{key}/{_zarr.ARRAY} is missing, but there are chunks or locks of {key}"
        yield finding("missing-file", "files", message, file=f"{key}/{_zarr.ARRAY}")


def _above(key: str) -> Iterator[str]:
    """Yield the folders above a folder; chunks may be in subfolders."""
    while "/" in key:
        key = key.rpartition("/")[0]
        yield key


def _by_folder(source: Source) -> dict[str, list[str]]:
    """Return top folder -> relative paths below it; an array's chunks may be in subfolders."""
    names_by_folder: dict[str, list[str]] = {}
    for path in source.listing:
        folder, slash, name = path.partition("/")
        if slash:
            names_by_folder.setdefault(folder, []).append(name)
    return names_by_folder


def _of_another_writer(arrays: dict[str, _zarr.Array]) -> Iterator[Finding]:
    """Yield findings for arrays with another element order than most: a save has one order."""
    kinds = {
        p: (f"order {a.order}", "big-endian" if a.swapped else "little-endian")
        for p, a in arrays.items()
        if a.shape and a.dtype.itemsize > 1
    }
    counts = Counter(kinds.values()).most_common()
    for path, kind in kinds.items() if counts[1:] else ():
        if kind != counts[0][0]:
            most = f"{count(counts[0][1], 'other array')} {', '.join(counts[0][0])}"
            message = f"{path} has {', '.join(kind)}, and {most}"
            yield finding("unusual-layout", "files", message, file=path)


def _uneven(arrays: dict[str, _zarr.Array]) -> Iterator[Finding]:
    """Yield findings for shapes that end inside a chunk: a save makes equal chunks, or fails.

    megatron/core/dist_checkpointing/mapping.py, ShardedTensor.max_allowed_chunks: only where
    ``allow_shape_mismatch`` is set, which padded vocabularies and buckets have.
    """
    for path, array in arrays.items():
        if any(n % c for n, c in zip(array.shape, array.chunks, strict=True)) and not _PADDED.search(path):
            message = (
                f"{path} says shape {list(array.shape)} and chunks of {list(array.chunks)}: "
                "Megatron-Core makes equal chunks, so the shape may have been changed"
            )
            yield finding("unusual-layout", "files", message, file=path)


def _add_array(
    builder: Builder, source: Source, path: str, inside: dict[str, list[str]]
) -> _zarr.Array | None:
    """Add an array with its chunks; return None for one that cannot be read."""
    key = path.removesuffix("/" + _zarr.ARRAY)
    try:
        array = _zarr.parse(source.store.read(path, 0, min(source.listing[path], _zarr.MAX_ARRAY)), path)
    except UnreadablePart as error:
        shape, dtype = error.values["shape"], error.values["dtype"]
        builder.unread(key, Unread(error.message, dtype, shape, path))
        return None
    source.explain(path, 0, min(source.listing[path], _zarr.MAX_ARRAY))
    if array.extra_fields:
        source.carry(path, _zarr.ARRAY, {key: dict(array.extra_fields)})
    tensor = builder.tensor(TensorSpec(key, array.dtype.name, array.shape))
    top, _, below = key.partition("/")
    prefix = f"{below}/" if below else ""
    chunk_paths: dict[tuple[int, ...], str] = {}
    for name in inside.get(top, ()):
        if not name.startswith(prefix) or name == prefix + _zarr.ARRAY or _OBJECT.search(f"/{name}"):
            continue
        index = array.index(name.removeprefix(prefix))
        if index is None and array.outside(name.removeprefix(prefix)):
            # Left by a larger save, or the shape was reduced: nothing else says which.
            message = f"{top}/{name} is a chunk beyond the end of {key} {list(array.shape)}"
            builder.report("out-of-bounds", "files", message, fqn=key, file=f"{top}/{name}")
        elif index is None:
            builder.report(
                "stray-file", "files", f"{top}/{name} is not a chunk of {key}", file=f"{top}/{name}"
            )
        else:
            chunk_paths[index] = f"{top}/{name}"
    for index in sorted(chunk_paths):
        _add_chunk(builder, source, tensor, array, index, chunk_paths[index])
    # A missing file is a hole in the tensor: its chunk is in a file of no known size.
    for index in array.missing(chunk_paths, _MAX_FINDINGS):
        box, view = array.place(index)
        file = builder.file(f"{key}/{array.name(index)}", None)
        item = builder.plain_item(file, 0, array.chunk_bytes, Envelope.RAW)
        builder.chunk(tensor, box.offset, box.shape, item, view)
    return array


def _add_chunk(
    builder: Builder, source: Source, tensor: int, array: _zarr.Array, index: tuple[int, ...], path: str
) -> None:
    size = source.listing[path]
    if size > array.chunk_bytes:
        message = f"{path} must have {array.chunk_bytes} bytes, like every chunk (got {size})"
        builder.report("oversized-file", "files", message, file=path)
    box, view = array.place(index)
    item = builder.plain_item(builder.file(path, size), 0, array.chunk_bytes, Envelope.RAW)
    builder.chunk(tensor, box.offset, box.shape, item, view)


def arrange(request: Arrangement) -> Iterable[FileLayout]:
    """Lay out the folder as the ranks of a mesh save it; raise the errors of `arrange_zarr`."""
    from ckptcore.formats.megatron.writer import arrange_zarr

    return arrange_zarr(request)


FORMAT = Format(
    name=NAME,
    title="Megatron-Core distributed checkpoint, zarr (0.5 to 0.15)",
    recognised_by="`metadata.json` with `sharded_backend` zarr, beside folders with `.zarray`",
    detect=detect,
    suffixes=frozenset({"json", "zarray"}),
    reader=Reader(read, objects=True),
    writer=Writer(Layout(arrange, values="trainers"), world="megatron"),
    thin="Megatron-Core reads the format no more",
)
