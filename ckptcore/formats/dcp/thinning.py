"""Leave entries out of a DCP folder: its files keep the other items as they are, `.metadata` is written anew.

An item is moved as it is, with its checksums, so only its first byte changes. `.metadata` has what loaders
use of it: the chunks, their places and the paths of names (torch/distributed/checkpoint/metadata.py);
Megatron-Core's own ``mcore_data`` is staying, its plans of past saves are not
(megatron/core/dist_checkpointing/strategies/torch.py, which saves without them, too).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ckptcore.core.manifest import Envelope, Manifest
from ckptcore.encodings.pickle.unpickler import Record
from ckptcore.errors import UnsupportedFormat
from ckptcore.formats.base import FilePiece, Source, SourceRange
from ckptcore.formats.common.thinning import Ranges, thin_files
from ckptcore.formats.dcp.metadata_writer import ItemPlace, Path, StoredTensor, metadata_pickle
from ckptcore.formats.dcp.reader import parse_folder, read_folder
from ckptcore.naming.training_state import StoredKinds
from ckptcore.utils.text import some

METADATA = ".metadata"
_SHAPES, _PLANS = "mcore_data", "all_local_plans"
_Place = tuple[str, int, int]  # file, first byte, bytes


def cut_folder(source: Source, ranges: Ranges) -> dict[str, tuple[FilePiece, ...]]:
    """Return the files of a DCP folder that change when some of its items go.

    Args:
        source: The folder.
        ranges: What the ranges of its files hold.

    Raises:
        UnsupportedFormat: The folder is of a kind whose items cannot be moved.
    """
    metadata, *of_ranks = parse_folder(source)
    if of_ranks or metadata.name != METADATA:
        raise _refused(source, f"its metadata is that of each rank ({metadata.name})")
    names = list(metadata.tensors.items())
    paths, extra = metadata.paths, metadata.extra
    if unknown := sorted(set(extra) - {_SHAPES, _PLANS}):
        raise _refused(source, f"{METADATA} has attributes that torch does not write: {some(unknown)}")
    raw = read_folder(source, parsed=[metadata])
    _require_zips(source, raw)
    entries = dict(_entries(source, raw, names))
    uses = {name: _use(source, name, places.values(), ranges) for name, places in entries.items()}
    kinds = StoredKinds(raw)
    of_dropped = {kinds.kind_of(name) for name, goes in uses.items() if goes} - {None}
    # What the reader only interprets others by, such as the sizes of buckets, goes with its kind.
    unused = {name for name, goes in uses.items() if goes is None and kinds.kind_of(name) in of_dropped}
    staying = {name: places for name, places in entries.items() if not uses[name] and name not in unused}
    moved, files = _move_items(staying)
    tensors, objects = [], {}
    for name, entry in names:
        if name not in staying:
            continue
        if _is_object(entry):
            (place,) = staying[name].values()
            objects[name] = ItemPlace(*moved[place])
        else:
            tensors.append(_stored(raw, name, staying[name], moved))
    recorded: dict[str, Path] | None = None
    if type(paths) is dict:
        recorded = {name: tuple(paths[name]) for name in staying if name in paths}
    shapes = extra.get(_SHAPES)
    if shapes is not None:
        shapes = {name: row for name, row in shapes.items() if name in staying}
    data = metadata_pickle(tensors, objects, recorded, shapes)
    used = {place[0] for places in entries.values() for place in places.values()}
    return {METADATA: (data,), **{path: files.get(path, ()) for path in used}}


thin_folders = partial(thin_files, cuts={METADATA: cut_folder})


def _entries(
    source: Source, raw: Manifest, names: list[tuple[Any, Any]]
) -> Iterator[tuple[str, dict[int, _Place]]]:
    """Yield the name of each entry, with the places of its items by the rows of its chunks; -1: an object."""
    blobs = {blob.key: blob for blob in raw.blobs}
    for name, entry in names:
        if _is_object(entry):
            blob = blobs.get(name)
            if blob is None or blob.item < 0 or blob.unread is not None:
                raise _refused(source, f"{name} cannot be read")
            yield name, {-1: _place(raw, blob.item)}
            continue
        tensor = raw.index.get(name)
        if tensor is None or tensor in raw.derived:
            raise _refused(source, f"{name} cannot be read, or wraps other tensors")
        rows = range(int(raw.chunks.first[tensor]), int(raw.chunks.first[tensor + 1]))
        yield name, {row: _place(raw, int(raw.chunks.item[row])) for row in rows}


def _is_object(entry: Any) -> bool:
    return isinstance(entry, Record) and entry.kind == "BytesStorageMetadata"


def _place(raw: Manifest, item: int) -> _Place:
    items = raw.items
    return raw.files[int(items.file[item])].path, int(items.start[item]), int(items.length[item])


def _use(source: Source, name: str, places: Iterable[_Place], ranges: Ranges) -> bool | None:
    """Return whether an entry goes; None for one of which the reader makes nothing."""
    use = [ranges[path].within(start, start + length) for path, start, length in places if path in ranges]
    stays, goes = any(stays for stays, _ in use), any(goes for _, goes in use)
    if stays and goes:
        raise _refused(source, f"{name} holds what goes and what stays")
    return goes if stays or goes else None


def _move_items(
    staying: Mapping[str, Mapping[int, _Place]],
) -> tuple[dict[_Place, _Place], dict[str, tuple[FilePiece, ...]]]:
    """Return the new place of each item that stays, and the pieces of the files with them."""
    moved: dict[_Place, _Place] = {}
    pieces: dict[str, list[SourceRange]] = {}
    ends: dict[str, int] = {}
    for place in sorted({place for places in staying.values() for place in places.values()}):
        path, start, length = place
        moved[place] = path, ends.get(path, 0), length
        ends[path] = ends.get(path, 0) + length
        of_file = pieces.setdefault(path, [])
        last = of_file[-1] if of_file else None
        if last is not None and last.start + last.nbytes == start:
            of_file[-1] = SourceRange(path, last.start, last.nbytes + length)
        elif length:
            of_file.append(SourceRange(path, start, length))
    return moved, {path: tuple(of_file) for path, of_file in pieces.items()}


def _stored(
    raw: Manifest, name: str, places: Mapping[int, _Place], moved: Mapping[_Place, _Place]
) -> StoredTensor:
    spec = raw.tensors[raw.index[name]]
    boxes = tuple((chunk.box.offset, chunk.box.shape) for chunk in raw.chunks_of(raw.index[name]))
    now = [moved[place] for place in places.values()]
    table = np.array([place[1:] for place in now], np.int64).reshape(-1, 2)
    return StoredTensor(name, spec.dtype, spec.shape, boxes, tuple(path for path, *_ in now), table)


def _require_zips(source: Source, raw: Manifest) -> None:
    """Require that every item is a torch zip that nothing transforms: a blob of several cannot be moved."""
    if any(raw.items.codecs[n] for n in np.unique(raw.items.codec).tolist()):
        raise _refused(source, "its items are compressed")
    if (raw.items.envelope == Envelope.SAFETENSORS).any():
        raise _refused(source, "its items are members of safetensors blobs")


def _refused(source: Source, why: str) -> UnsupportedFormat:
    return UnsupportedFormat(
        f"cannot thin {source.store.url}: {why}",
        hint="`ckptcore reshard` with --exclude writes what stays to another place",
    )
