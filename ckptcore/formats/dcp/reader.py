"""Read a DCP folder, for every format that contains one: from `.metadata` and items to a manifest.

`.metadata` pickles a `Metadata` (torch/distributed/checkpoint/metadata.py): per FQN the global
size and the chunks, and per chunk the file, offset and length of its item (filesystem.py,
`_StorageInfo`). An item is a torch zip or, with `SerializationFormat.SAFETENSORS`, a member of a
safetensors blob at the end of the file. A stream codec may wrap it. With `use_collectives=False` each rank
writes its own `__R.metadata`, and the checkpoint is their union.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Envelope, Item, Manifest, TensorSpec, Unread, dims_table
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import Named
from ckptcore.core.tree_paths import Paths
from ckptcore.encodings.limits import absent
from ckptcore.encodings.pickle.unpickler import Record
from ckptcore.errors import MalformedCheckpoint, NotComplete, UnsupportedFormat, finding
from ckptcore.formats.base import Source
from ckptcore.formats.dcp.metadata import (
    ChunkRows,
    Ints,
    Join,
    Metadata,
    MetadataChunks,
    Places,
    StringIds,
    dims,
    places,
    state_of,
)
from ckptcore.formats.dcp.objects import PLAIN, ObjectRules, add_blobs
from ckptcore.store import Readable, inner_path
from ckptcore.utils.distinct_values import isin
from ckptcore.utils.text import short_repr

if TYPE_CHECKING:
    from ckptcore.formats.dcp.wrapped_tensors import WrappedTensors

DATA = re.compile(r"__(\d+)_(\d+)\.distcp$")
RANK_METADATA = re.compile(r"^__(\d+)\.metadata$")
_METADATA = (".metadata", ".metadata.tmp")
_MAX_LISTED = 100  # findings of one kind
_SMALL = 32 << 10  # bytes of a tensor whose wrapped form may be longer than itself
_STRIDED = "torch.strided"  # DCP stores elements one after another
_CODEC_NAMES = ("", "zstd")
_CODEC_VERSION = "1"  # torch/distributed/checkpoint/_extension.py
_CODECS = {"stream.zstd": _CODEC_NAMES.index("zstd")}


def dcp_folders(source: Source) -> list[str]:
    """Return the folders directly below a source that have a DCP folder's own files."""
    parts = (path.split("/") for path in source.listing)
    return sorted({p[0] for p in parts if len(p) == 2 and (p[1] in _METADATA or DATA.match(p[1]))})


def parse_folder(source: Source) -> list[Metadata]:
    """Parse every metadata file of a DCP folder; raise the errors of `read_folder`."""
    return [Metadata(source, path) for path in _metadata_files(source)]


def read_folder(
    source: Source, name: str = "dcp", rules: ObjectRules = PLAIN, parsed: Sequence[Metadata] | None = None
) -> Manifest:
    """Read the manifest of a DCP folder.

    Args:
        source: The folder.
        name: Name of the format.
        rules: How to read its objects.
        parsed: Result of `parse_folder`, when the caller needs it, too.

    Raises:
        NotComplete: The save did not finish.
        MalformedCheckpoint: The metadata is not valid.
        UnsafeContent: The metadata names globals or paths that are not permitted.
    """
    builder, origin = Builder(), dict[str, Any]()
    parsed = parse_folder(source) if parsed is None else parsed
    names = [metadata.name for metadata in parsed]
    blobs: dict[str, Item] = {}
    rank_copies: list[tuple[str, Item]] = []  # the same object as saved by another rank
    state = _Columns(
        builder, source.store, source.listing, {n for metadata in parsed for n in metadata.tensors}
    )
    for metadata in parsed:
        origin |= metadata.origin()
        # The union of the ranks' files: an object that several of them saved is listed once, and the copies
        # are compared, since a rank's generator, say, may differ from another's.
        for key, item in state.add(metadata).items():
            if key in blobs:
                rank_copies.append((key, item))
            else:
                blobs[key] = item
    state.flush()
    # A single coordinator wrote the usual file; only names that say something are recorded, so that
    # the origin of most manifests stays as it was.
    if names[0] != ".metadata":
        origin["metadata"] = names
    _note_files(builder, source, names)
    add_blobs(builder, source.store, blobs, rank_copies, rules)
    manifest = builder.build(name, source.store.url, origin)  # without what cannot be read
    paths = _paths(parsed, state.inner)
    form = paths.form([t.fqn for t in manifest.tensors], [b.key for b in manifest.blobs])
    manifest = replace(manifest, origin=origin | {"paths": form}) if form else manifest
    return replace(manifest, order=_saved_order(parsed, manifest, state.inner))


def _saved_order(
    parsed: Sequence[Metadata], manifest: Manifest, wrapped: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the names in the order of the first planner's state dict; () if the tensors have that order.

    Planners assign replicated tensors to any of the ranks, which changes their position among the others.
    Tensors that another one wraps have its position.
    """
    paths = parsed[0].paths
    if type(paths) is not dict:
        return ()
    saved = iter(paths)
    # `in` consumes the iterator up to its hit: all names are found
    # only if they follow the order of the paths.
    if all(spec.fqn in saved for spec in manifest.tensors):  # reads the paths once
        return ()
    names = {spec.fqn for spec in manifest.tensors}
    inner: dict[str, list[str]] = {}
    for name, outer in wrapped.items():
        inner.setdefault(outer, []).append(name)
    saved = (n for name in paths if type(name) is str for n in inner.get(name, [name]))
    return tuple(n for n in saved if n in names)


def _paths(parsed: Iterable[Metadata], wrapped: Mapping[str, str]) -> Paths:
    """Return the path of each name in the saved tree, as far as the planners recorded it."""
    paths = Paths()
    for metadata in parsed:
        recorded_paths = metadata.paths if type(metadata.paths) is dict else {}
        for name in metadata.tensors:
            # The first rank's path counts. Ranks agree on them where they agree on
            # the name, since one comes from the other.
            if name in recorded_paths and name not in paths:
                paths.add(name, recorded_paths[name])
    for name, outer in wrapped.items():
        if outer in paths:
            paths.add(name, (*paths[outer], name.removeprefix(f"{outer}.")))
    return paths


class _Columns:
    """Collect the tensors and chunks of one or several metadata files in one builder.

    Attributes:
        inner: Name of a tensor or object -> that of the tensor that wraps it, after `flush`.
    """

    def __init__(
        self, builder: Builder, store: Readable, listing: Mapping[str, int], listed: Set[str]
    ) -> None:
        """Start without tensors; ``listed`` are the names that any of the metadata files lists."""
        self._builder, self._listing, self._listed = builder, listing, listed
        self._store = store
        self._specs: dict[str, tuple[int, tuple[str, tuple[int, ...]]]] = {}
        self._files = StringIds(self._file)
        self._naming = ""  # the current metadata file
        # Per metadata file: tensors, chunks, and places.
        self._rows: list[tuple[Ints, MetadataChunks, Ints]] = []
        self._wrapped: WrappedTensors | None = None
        self.inner: dict[str, str] = {}

    def add(self, metadata: Metadata) -> dict[str, Item]:
        """Add the tensors of one metadata file; return its byte items."""
        name = self._naming = metadata.name
        fqns: list[str] = []
        numbers = StringIds(lambda fqn: fqns.append(fqn) or len(fqns) - 1)  # type: ignore[func-returns-value]
        stored = places(metadata, numbers, self._files, self._place, _codec)
        objects: list[str] = []
        tensors: dict[int, tuple[int, tuple[int, ...]]] = {}  # number of the name -> tensor number, shape
        chunks = ChunkRows(metadata)
        for fqn, entry in metadata.tensors.items():
            if type(fqn) is not str or not isinstance(entry, Record):
                # Names were chosen by the pickle: a message has an excerpt, not megabytes of it.
                raise MalformedCheckpoint(
                    f"{name}: entry {short_repr(fqn)} is not tensor metadata", file=name
                )
            if entry.kind == "BytesStorageMetadata":
                objects.append(fqn)
                continue
            state = state_of(entry, "TensorStorageMetadata", name)
            number = numbers.of(fqn)
            tensors[number] = self._tensor(fqn, state, metadata)
            entries = state.get("chunks")
            if type(entries) is not list:
                raise MalformedCheckpoint(f"{name}: {fqn} has no list of chunks", file=name)
            chunks.add(number, entries)
        # Objects without a place have no number yet, and the columns below have a row for each number.
        for fqn in objects:
            numbers.of(fqn)
        listed = chunks.done(fqns)
        shapes, ranks, owner = self._shapes(tensors, len(fqns))
        self._require_ranks(listed, ranks, fqns)
        join = Join(stored, listed, shapes, ranks)
        blobs = self._objects(objects, numbers, join, stored)
        self._unlisted(metadata, fqns, join)
        if len(stored.where):
            # With "wrap", -1 (no place) takes the last row, which the next line overwrites.
            item_places = stored.where.take(join.place, axis=0, mode="wrap")
            item_places[join.place < 0] = -1
        else:
            item_places = np.full((len(join.place), 4), -1, np.int64)
        self._rows.append((owner[listed.name], listed, item_places))
        return blobs

    @staticmethod
    def _shapes(tensors: Mapping[int, tuple[int, tuple[int, ...]]], names: int) -> tuple[Ints, Ints, Ints]:
        """Return by number of a name: shapes, numbers of dims (-2: no tensor), and tensors (-1: not read)."""
        tensor_shapes, rows = (
            [shape for _, shape in tensors.values()],
            np.fromiter(tensors, np.int64, len(tensors)),
        )
        rank = np.fromiter(map(len, tensor_shapes), np.int64, len(tensor_shapes))
        shapes = np.zeros((names, int(rank.max(initial=0))), np.int64)
        shapes[rows] = dims_table(tensor_shapes, shapes.shape[1], 0)
        ranks, owner = np.full(names, -2, np.int64), np.zeros(names, np.int64)
        ranks[rows], owner[rows] = rank, [number for number, _ in tensors.values()]
        return shapes, ranks, owner

    @staticmethod
    def _require_ranks(chunks: MetadataChunks, ranks: Ints, fqns: list[str]) -> None:
        # Caught here, while the name is at hand: columns of another
        # width would be read as a box of other dims.
        wrong = chunks.rank != ranks[chunks.name]
        if wrong.any():
            n = int(wrong.argmax())
            fqn = fqns[int(chunks.name[n])]
            raise MalformedCheckpoint(
                f"a chunk of {fqn} must have {ranks[chunks.name[n]]} dims like the tensor "
                f"(got {chunks.rank[n]})"
            )

    def _objects(self, keys: list[str], numbers: StringIds, join: Join, stored: Places) -> dict[str, Item]:
        byte_items: dict[str, Item] = {}
        for key in keys:
            place = join.object(numbers.of(key))
            if place < 0:
                self._builder.report(
                    "no-place", "coverage", f"object {key} has no place in any file", fqn=key
                )
            else:
                file, start, length, codec = stored.where[place].tolist()
                byte_items[key] = Item(file, start, length, Envelope.TORCHZIP, _CODEC_NAMES[codec])
        return byte_items

    def _unlisted(self, metadata: Metadata, fqns: list[str], join: Join) -> None:
        """Add findings for what is stored, or was saved by name, but is not listed: entries were removed."""
        # Bounded: a metadata file whose entries were removed altogether may store millions of items.
        stored = [(fqns[n], offset) for n, offset in islice(join.unlisted(), _MAX_LISTED)]
        for fqn, offset in stored:
            chunk_name = f"{fqn}, chunk at {list(offset)}" if offset is not None else fqn
            self._builder.report(
                "unlisted-item",
                "coverage",
                f"{metadata.name} stores {chunk_name}, but does not list it",
                fqn=fqn,
            )
        # A rank whose part of a tensor is empty names the tensor, and another rank lists it.
        stored_fqns = {fqn for fqn, _ in stored}
        lost = [n for n in metadata.names() if n not in self._listed and n not in stored_fqns]
        self._builder.findings += [
            finding("unlisted-item", "coverage", f"{metadata.name} names {n}, but does not list it", fqn=n)
            for n in lost[:_MAX_LISTED]
        ]

    def _place(self, fields: tuple[Any, ...], name: str) -> tuple[int, int, int, int]:
        path, start, length, transforms = fields
        if type(path) is not str or type(start) is not int or type(length) is not int:
            raise MalformedCheckpoint(f"{name} has a storage entry without a place", file=name)
        # 2**62 leaves room for the sum of two of these in int64, in
        # which all places are computed from here on.
        if min(start, length) < 0 or start + length >= 1 << 62:
            raise MalformedCheckpoint(f"{name} places {length} bytes at {start} of {path!r}", file=name)
        return self._files.of(path), start, length, _codec(transforms, name)

    def _file(self, path: str) -> int:
        return self._builder.file(inner_path(path, origin=self._naming), self._listing.get(path))

    def _tensor(self, fqn: str, state: dict[str, Any], metadata: Metadata) -> tuple[int, tuple[int, ...]]:
        name = metadata.name
        shape = dims(state.get("size"), name)
        dtype = _dtype(state.get("properties"), fqn, name)
        earlier = self._specs.get(fqn)
        if earlier is None:
            # Strided is what nearly all have; a sparse or a quantized layout
            # has no elements one after another to read.
            layout = _layout(state.get("properties"))
            if layout == _STRIDED:
                number = self._builder.tensor(TensorSpec(fqn, dtype, shape), name)
            else:
                why = Unread(f"layout {layout} is not supported", dtype, shape, name)
                self._builder.unread(fqn, why)
                number = -1
            self._specs[fqn] = number, (dtype, shape)
            return number, shape
        if earlier[1] != (dtype, shape):  # rank-local metadata of two different saves
            raise MalformedCheckpoint(
                f"{fqn} is {dtype} {list(shape)} in {name}, but {earlier[1][0]} {list(earlier[1][1])} on "
                "another rank",
                file=name,
            )
        return earlier[0], shape

    def flush(self) -> None:
        """Add the chunks, once all items of every file are known."""
        # Only with all files' items at hand: one item that is a zip
        # decides the form of the whole of its file.
        sizes = self._safetensors_files()
        first_offsets: dict[tuple[int, int], tuple[int, ...]] = {}
        specs = self._builder.tensors
        for tensor_of_chunk, chunks, item_places in self._rows:
            file, start, length, codec = item_places.T
            placed, member = file >= 0, isin(file, list(sizes))
            # Items of unreadable tensors only count as bytes of their files.
            for n in np.flatnonzero((~placed | member) & (tensor_of_chunk >= 0)).tolist():
                offset = tuple(chunks.offset[n, : int(chunks.rank[n])].tolist())
                fqn = specs[int(tensor_of_chunk[n])].fqn
                if not placed[n]:
                    self._builder.report(
                        "no-place",
                        "coverage",
                        f"{fqn}: the chunk at {list(offset)} has no place in any file",
                        fqn=fqn,
                    )
                    continue
                first_offset = first_offsets.setdefault((int(tensor_of_chunk[n]), int(file[n])), offset)
                if first_offset != offset:
                    message = (
                        f"{fqn}: the chunks at {list(first_offset)} and {list(offset)} share one name in "
                    )
                    message += "one safetensors blob, so the writer kept only the last of them"
                    self._builder.report("lost-at-save", "coverage", message, fqn=fqn)
                # Each item points to the first byte of the blob, which reaches to the end of the file.
                length[n] = max(sizes[int(file[n])] - int(start[n]), 0)
            envelope = np.where(member, int(Envelope.SAFETENSORS), int(Envelope.TORCHZIP))
            names = {
                n: specs[int(tensor_of_chunk[n])].fqn
                for n in np.flatnonzero(member & (tensor_of_chunk >= 0)).tolist()
            }
            self._read_wrapped(
                tensor_of_chunk, chunks, item_places, placed & ~member & (tensor_of_chunk >= 0)
            )
            item = self._builder.items(item_places[:, :3], envelope, codec, _CODEC_NAMES, names, placed)
            self._builder.chunks(tensor_of_chunk, chunks.offset, chunks.shape, chunks.rank, item)
        if self._wrapped is not None:
            self._wrapped.finish()
            self.inner = self._wrapped.inner
        self._rows = []
        # It refers to this object, and the builder's columns would stay until garbage is collected.
        del self._files

    def _read_wrapped(
        self, tensor_of_chunk: Ints, chunks: MetadataChunks, item_places: Ints, is_zip: npt.NDArray[np.bool_]
    ) -> None:
        """Read tensors of which an item holds a tensor of a class, such as torchao's: those that it wraps.

        The metadata has the dtype and shape that such a tensor shows, and its item has other tensors: most
        are shorter than what is listed, and where one is, small items may be, too. Any other short item is
        damage, which `check` reports.
        """
        builder = self._builder
        if not is_zip.any():
            return
        width = np.array([BY_NAME[t.dtype].itemsize for t in builder.tensors], np.float64)
        # float64 is exact enough for a comparison with a length, and cannot
        # overflow for sizes that a damaged file claims.
        extent = np.where(np.arange(chunks.shape.shape[1]) < chunks.rank[:, None], chunks.shape, 1)
        nbytes = width[np.where(is_zip, tensor_of_chunk, 0)] * extent.astype(np.float64).prod(axis=1)
        is_plain_zip = is_zip & (item_places[:, 3] == 0)
        is_short = is_plain_zip & (item_places[:, 2] < nbytes)
        if self._wrapped is None:
            # The ordinary case ends here: no item is opened, and the
            # module of wrapped tensors is not imported.
            if not is_short.any():
                return
            from ckptcore.formats.dcp.wrapped_tensors import WrappedTensors

            self._wrapped = WrappedTensors(builder, self._store)
        wrapped = self._wrapped
        to_open = is_short | np.isin(tensor_of_chunk, wrapped.tensors)
        self._open_wrapped(
            wrapped, np.unique(tensor_of_chunk[to_open]), tensor_of_chunk, chunks, item_places, is_plain_zip
        )
        # Small items are opened only now: without a wrapped tensor in this
        # checkpoint, one request for each is waste.
        if wrapped.tensors:
            small = np.unique(tensor_of_chunk[is_plain_zip & (nbytes < _SMALL)])
            small = small[~np.isin(small, tensor_of_chunk[to_open])]
            self._open_wrapped(wrapped, small, tensor_of_chunk, chunks, item_places, is_plain_zip)

    @staticmethod
    def _open_wrapped(
        wrapped: WrappedTensors,
        tensor_numbers: Ints,
        tensor_of_chunk: Ints,
        chunks: MetadataChunks,
        item_places: Ints,
        is_plain_zip: npt.NDArray[np.bool_],
    ) -> None:
        """Open the items of these tensors, of each until one holds no instance of a tensor class."""
        if not len(tensor_numbers):
            return
        order = np.argsort(tensor_of_chunk, kind="stable")
        first, end = (
            np.searchsorted(tensor_of_chunk[order], tensor_numbers, side) for side in ("left", "right")
        )
        for number, first_chunk, end_chunk in zip(
            tensor_numbers.tolist(), first.tolist(), end.tolist(), strict=True
        ):
            for n in order[first_chunk:end_chunk].tolist():
                rank, (file, start, length, _) = int(chunks.rank[n]), item_places[n].tolist()
                box = Box(tuple(chunks.offset[n, :rank].tolist()), tuple(chunks.shape[n, :rank].tolist()))
                # One part that is not wrapped makes the tensor an ordinary one,
                # and what was collected of it is dropped.
                if not is_plain_zip[n] or not wrapped.add(number, box, (file, start, length)):
                    wrapped.keep_as_described(number)
                    break

    def _safetensors_files(self) -> dict[int, int]:
        """Return file -> size, for the files whose tensors are members of a safetensors blob.

        In such a file every item claims exactly its tensor's bytes; a torch zip is about 1 KiB longer.
        """
        sizes = self._builder.file_sizes()
        width = np.array([BY_NAME[t.dtype].itemsize for t in self._builder.tensors], np.int64)
        used, has_zips = np.zeros(len(sizes), np.bool_), np.zeros(len(sizes), np.bool_)
        for tensor_of_chunk, chunks, item_places in self._rows:
            shape, rank = chunks.shape, chunks.rank
            readable = (item_places[:, 0] >= 0) & (tensor_of_chunk >= 0)
            if not readable.all():
                tensor_of_chunk, item_places, shape, rank = (
                    tensor_of_chunk[readable],
                    item_places[readable],
                    shape[readable],
                    rank[readable],
                )
            file, length = item_places[:, 0], item_places[:, 2]
            nbytes = width[tensor_of_chunk]
            # Columns beyond a size's own rank are zeros. Lengths are below 2**62; false sizes may be larger.
            fits = prod(max(n, 1) for n in shape.max(axis=0, initial=1).tolist()) * 32 < 1 << 62
            real = nbytes.astype(np.float64)
            for d in range(shape.shape[1]):
                extent = np.where(rank > d, shape[:, d], 1)
                nbytes *= extent
                if not fits:
                    real *= extent
            nbytes[real >= 2.0**62] = -1
            used[file] = True
            has_zips[file[(length != nbytes) | (item_places[:, 3] != 0)]] = True
        return {n: sizes[n] or 0 for n in np.flatnonzero(used & ~has_zips).tolist()}


def _metadata_files(source: Source) -> list[str]:
    listing = source.listing
    if ".metadata" in listing:
        return [".metadata"]
    ranks = sorted((int(m[1]), p) for p in listing if (m := RANK_METADATA.match(p)))
    if ranks:
        return [p for _, p in ranks]
    if ".metadata.tmp" in listing:
        # The writer renames it as its last step: with it alone, files of data may be incomplete, too.
        if source.recover:
            return [".metadata.tmp"]
        raise NotComplete(
            f"{source.store.url} has .metadata.tmp but no .metadata: the save is running, or was "
            "aborted just before its last step",
            hint="wait if it is running; if it was aborted, read it as it is with --allow-incomplete",
        )
    raise NotComplete(
        f"{source.store.url} has *.distcp files but no .metadata: the save is running, was aborted, "
        "or .metadata was left on another node",
        hint="wait if it is running; otherwise copy .metadata from the coordinator (rank 0)",
    )


def _note_files(builder: Builder, source: Source, metadata: list[str]) -> None:
    """Add findings about files that the metadata does not name."""
    named = set(builder.file_names())
    for path, size in source.listing.items():
        # Files in folders below belong to whoever wrote those: formats that contain a DCP folder note them.
        if path in named or path in metadata or "/" in path:
            continue
        if DATA.search(path):
            # An empty file comes from a rank that had nothing to write, which is
            # usual; bytes that nothing names are not.
            if size:
                builder.report(
                    "stray-file", "files", f"{path} ({size} bytes) is not part of this save", file=path
                )
            else:
                builder.report("empty-file", "files", f"{path} is empty and unused", file=path)
        elif path.endswith(".metadata") or path == ".metadata.tmp":
            builder.report("stray-file", "files", f"{path} belongs to another save", file=path)
    if metadata[0] not in (".metadata", ".metadata.tmp"):
        ranks = [int(m[1]) for p in metadata if (m := RANK_METADATA.match(p))]
        # Only ranks up to the highest that wrote are known; whether more
        # ran is not recorded in any of the files.
        for rank in absent(ranks, max(ranks), _MAX_LISTED):
            builder.report(
                "missing-rank",
                "files",
                f"rank {rank} wrote no __{rank}.metadata, but rank {max(ranks)} wrote one",
                file=f"__{rank}.metadata",
            )


def _dtype(properties: Any, fqn: str, name: str) -> str:
    state = properties.state if isinstance(properties, Record) else None
    # TensorProperties.__getstate__ returns a tuple whose length grew over time; the dtype is first.
    first = state[0] if type(state) is tuple and state else None
    if type(state) is dict:
        first = state.get("dtype")
    if type(first) is Named and first.kind == "dtype":
        return str(first.value)
    raise MalformedCheckpoint(f"{name} does not record the dtype of {fqn}", file=name)


def _layout(properties: Any) -> str:
    """Return the layout of a tensor's elements; old versions record none."""
    state = properties.state if isinstance(properties, Record) else None
    values = state if type(state) is tuple else state.values() if type(state) is dict else ()
    return next((f"{v.value:.40}" for v in values if type(v) is Named and v.kind == "layout"), _STRIDED)


def _codec(descriptors: Any, name: str) -> int:
    """Return the position of an item's codec in `_CODEC_NAMES`."""
    if descriptors in (None, [], ()):
        # Versions of torch before extensions have no field, and later ones an empty list.
        return 0
    if type(descriptors) in (list, tuple) and len(descriptors) == 1 and type(descriptors[0]) is str:
        # form: name[@domain][/version]
        name_of, _, version = descriptors[0].partition("/")
        codec = _CODECS.get(name_of.split("@")[0])
        # A later version of the codec might frame its stream differently: refused, not tried.
        if codec is not None and version in ("", _CODEC_VERSION):
            return codec
    raise UnsupportedFormat(
        f"{name}: cannot read items transformed by {short_repr(descriptors, 120)}",
        hint="supported stream extension: stream.zstd",
    )


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as text, with consecutive ones as a range.

    >>> ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    out: list[list[int]] = []
    for n in numbers:
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)
