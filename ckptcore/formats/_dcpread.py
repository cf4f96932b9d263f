"""Reading a DCP folder, for every format that is one: from `.metadata` and items to a manifest.

`.metadata` pickles a `Metadata` (torch/distributed/checkpoint/metadata.py): per FQN the global
size and the chunks, and per chunk the file, offset and length of its item (filesystem.py,
`_StorageInfo`). An item is a torch zip; or, with `SerializationFormat.SAFETENSORS`, a member of a
safetensors blob at the end of the file; behind an optional stream codec. With
`use_collectives=False` each rank leaves its own `__R.metadata`, and the checkpoint is their union.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from ckptcore.builder import Builder
from ckptcore.dtype import BY_NAME
from ckptcore.errors import MalformedCheckpoint, NotComplete, UnsupportedFormat, finding
from ckptcore.formats._bounds import absent
from ckptcore.formats._dcpmetadata import Metadata, dims, row, state_of
from ckptcore.formats._dcpobjects import PLAIN, ObjectRules, add_blobs
from ckptcore.formats._pickle import Record
from ckptcore.formats.base import Source
from ckptcore.manifest import Envelope, Item, Manifest, TensorSpec
from ckptcore.objects import Named
from ckptcore.paths import Paths
from ckptcore.shown import shown
from ckptcore.store import inner_path

DATA = re.compile(r"__(\d+)_(\d+)\.distcp$")
RANK_METADATA = re.compile(r"^__(\d+)\.metadata$")
_MAX_TOLD = 100  # findings of one kind
_CODECS = {"stream.zstd": "zstd"}


def parse_folder(source: Source) -> list[Metadata]:
    """Every metadata file of a DCP folder; raises as `read_folder` does."""
    return [Metadata(source, path) for path in _metadata_files(source)]


def read_folder(source: Source, name: str = "dcp", rules: ObjectRules = PLAIN,
                parsed: Sequence[Metadata] | None = None) -> Manifest:  # fmt: skip
    """The manifest of a DCP folder, as format ``name``; its objects are read by ``rules``.

    parsed: what `parse_folder` gave, where the caller needs it, too.

    Raises `NotComplete` when the save did not finish, `MalformedCheckpoint`, `UnsafeContent`.
    """
    builder, origin = Builder(), dict[str, Any]()
    parsed = parse_folder(source) if parsed is None else parsed
    names = [metadata.name for metadata in parsed]
    blobs: dict[str, Item] = {}
    others: list[tuple[str, Item]] = []  # the same object as another rank saved it
    state = _Columns(builder, source.listing, {n for metadata in parsed for n in metadata.tensors})
    for metadata in parsed:
        origin |= metadata.origin()
        for key, item in state.add(metadata).items():
            if key in blobs:
                others.append((key, item))
            else:
                blobs[key] = item
    state.flush()
    if names[0] != ".metadata":
        origin["metadata"] = names
    _note_files(builder, source, names)
    add_blobs(builder, source.store, blobs, others, rules)
    paths = _paths(parsed).form([t.fqn for t in builder.tensors], [b.key for b in builder.blobs])
    return builder.build(name, source.store.url, origin | ({"paths": paths} if paths else {}))


def _paths(parsed: Iterable[Metadata]) -> Paths:
    """Where each name stood in the saved tree, as far as the planners recorded it."""
    found = Paths()
    for metadata in parsed:
        for name in metadata.tensors:
            if name not in found:
                found.add(name, metadata.path(name))
    return found


class _Columns:
    """Collects the tensors and chunks of one or several metadata files into one builder."""

    def __init__(self, builder: Builder, listing: Mapping[str, int], listed: Set[str]) -> None:
        """listed: names that any of the metadata files lists."""
        self._builder, self._listing, self._listed = builder, listing, listed
        self._specs: dict[str, tuple[int, tuple[str, tuple[int, ...]]]] = {}
        # rows: tensor, offset, shape, (file, start, length, codec) or None
        self._rows: list[tuple[int, tuple[int, ...], tuple[int, ...], Any]] = []
        self._seen_files: dict[str, int] = {}

    def add(self, metadata: Metadata) -> dict[str, Item]:
        """Adds one file's tensors; gives its byte items."""
        name = metadata.name
        blobs: dict[str, Item] = {}
        rows: dict[tuple[str, Any], int] = {}
        places: list[tuple[int, int, int, str]] = []
        for fqn, offset, fields in metadata.places():
            if type(fqn) is not str:
                raise MalformedCheckpoint(f"{name} stores an item without a name", file=name)
            rows[fqn, offset] = len(places)
            places.append(self._place(fields, name))
        listed = bytearray(len(places))

        def find(fqn: str, offset: tuple[int, ...] | None) -> tuple[int, int, int, str] | None:
            at = rows.get((fqn, offset))
            if at is None:
                return None
            listed[at] = 1
            return places[at]

        count = 0
        for fqn, entry in metadata.tensors.items():
            if type(fqn) is not str or not isinstance(entry, Record):
                raise MalformedCheckpoint(f"{name}: entry {shown(fqn)} is not tensor metadata", file=name)
            if entry.kind == "BytesStorageMetadata":
                place = find(fqn, None)
                if place is None:
                    self._builder.findings.append(
                        finding("no-place", "cover", f"object {fqn} has no place in any file", fqn=fqn)
                    )
                else:
                    blobs[fqn] = Item(*place[:3], Envelope.TORCHZIP, place[3])
                continue
            state = state_of(entry, "TensorStorageMetadata", name)
            tensor = self._tensor(fqn, state, metadata)
            chunks = state.get("chunks")
            if type(chunks) is not list:
                raise MalformedCheckpoint(f"{name}: {fqn} has no list of chunks", file=name)
            # Every chunk takes far more bytes of pickle than this; shared lists could claim more.
            count += len(chunks)
            if count * 8 > metadata.bound:
                raise MalformedCheckpoint(f"{name} claims more chunks than its size allows", file=name)
            for chunk in chunks:
                offsets, sizes = row(chunk, "ChunkStorageMetadata", name)
                offset, shape = dims(offsets, name), dims(sizes, name)
                if len(offset) != len(shape):
                    raise MalformedCheckpoint(f"{name}: a chunk of {fqn} mixes ranks", file=name)
                self._rows.append((tensor, offset, shape, find(fqn, offset)))
        self._unlisted(metadata, rows, listed)
        return blobs

    def _unlisted(self, metadata: Metadata, rows: dict[tuple[str, Any], int], listed: bytearray) -> None:
        """What is stored, or was saved by name, but not listed: something was taken out."""
        told = [(fqn, offset) for (fqn, offset), at in rows.items() if not listed[at]][:_MAX_TOLD]
        for fqn, offset in told:
            what = f"{fqn}, chunk at {list(offset)}" if offset is not None else fqn
            self._builder.findings.append(
                finding(
                    "unlisted-item", "cover", f"{metadata.name} stores {what}, but does not list it", fqn=fqn
                )
            )
        # A rank whose part of a tensor is empty names it, and another rank lists it.
        seen = {fqn for fqn, _ in told}
        lost = [n for n in metadata.names() if n not in self._listed and n not in seen]
        self._builder.findings += [
            finding("unlisted-item", "cover", f"{metadata.name} names {n}, but does not list it", fqn=n)
            for n in lost[:_MAX_TOLD]
        ]

    def _place(self, fields: tuple[Any, ...], name: str) -> tuple[int, int, int, str]:
        path, start, length, transforms = fields
        if type(path) is not str or type(start) is not int or type(length) is not int:
            raise MalformedCheckpoint(f"{name} has a storage entry without a place", file=name)
        if min(start, length) < 0 or start + length >= 1 << 62:
            raise MalformedCheckpoint(f"{name} places {length} bytes at {start} of {path!r}", file=name)
        file = self._seen_files.get(path)
        if file is None:
            file = self._builder.file(inner_path(path, what=name), self._listing.get(path))
            self._seen_files[path] = file
        return file, start, length, _codec(transforms, name)

    def _tensor(self, fqn: str, state: dict[str, Any], metadata: Metadata) -> int:
        name = metadata.name
        shape = dims(state.get("size"), name)
        dtype = _dtype(state.get("properties"), fqn, name)
        seen = self._specs.get(fqn)
        if seen is None:
            at = self._builder.tensor(TensorSpec(fqn, dtype, shape))
            self._specs[fqn] = at, (dtype, shape)
            return at
        if seen[1] != (dtype, shape):  # rank-local metadata of two different saves
            raise MalformedCheckpoint(
                f"{name} says {fqn} is {dtype} {list(shape)}, another rank says "
                f"{seen[1][0]} {list(seen[1][1])}", file=name,
            )  # fmt: skip
        return seen[0]

    def flush(self) -> None:
        """Adds the chunks, now that all items of every file are known."""
        members = self._safetensors_files()
        seen: dict[tuple[str, int], tuple[int, ...]] = {}
        for tensor, offset, shape, place in self._rows:
            spec = self._builder.tensors[tensor]
            if len(offset) != len(spec.shape):
                raise MalformedCheckpoint(
                    f"a chunk of {spec.fqn} has {len(offset)} dims, the tensor {len(spec.shape)}"
                )
            if place is None:
                self._builder.findings.append(
                    finding("no-place", "cover", f"{spec.fqn}: the chunk at {list(offset)} has no place "
                            "in any file", fqn=spec.fqn)
                )  # fmt: skip
                self._builder.chunk(tensor, offset, shape, -1)
                continue
            file, start, length, codec = place
            if file in members:
                other = seen.setdefault((spec.fqn, file), offset)
                if other != offset:
                    self._builder.findings.append(_lost(spec.fqn, other, offset))
                length = max(members[file] - start, 0)
                item = self._builder.item(
                    Item(file, start, length, Envelope.SAFETENSORS, codec, None, spec.fqn)
                )
            elif codec:
                item = self._builder.item(Item(file, start, length, Envelope.TORCHZIP, codec))
            else:
                item = self._builder.plain_item(file, start, length, Envelope.TORCHZIP)
            self._builder.chunk(tensor, offset, shape, item)

    def _safetensors_files(self) -> dict[int, int]:
        """Files whose tensors are members of a safetensors blob -> file size.

        There every item claims exactly its tensor's bytes; a torch zip is about 1 kB longer.
        """
        exact: dict[int, bool] = {}
        for tensor, _, shape, place in self._rows:
            if place is not None:
                nbytes = BY_NAME[self._builder.tensors[tensor].dtype].itemsize
                for n in shape:
                    nbytes *= n
                exact[place[0]] = exact.get(place[0], True) and place[2] == nbytes and not place[3]
        sizes = self._builder.file_sizes()
        return {file: sizes[file] or 0 for file, every in exact.items() if every}


def _metadata_files(source: Source) -> list[str]:
    listing = source.listing
    if ".metadata" in listing:
        return [".metadata"]
    ranks = sorted((int(m[1]), p) for p in listing if (m := RANK_METADATA.match(p)))
    if ranks:
        return [p for _, p in ranks]
    if ".metadata.tmp" in listing:
        if source.recover:
            return [".metadata.tmp"]
        raise NotComplete(
            f"{source.store.url} has .metadata.tmp but no .metadata: the save is running, or was "
            "aborted just before its last step",
            hint="wait if it is running; if it was aborted, take it as it is with --recover",
        )
    raise NotComplete(
        f"{source.store.url} has *.distcp files but no .metadata: the save is running, was aborted, "
        "or .metadata was left on another node",
        hint="wait if it is running; otherwise copy .metadata from the coordinator (rank 0)",
    )


def _note_files(builder: Builder, source: Source, metadata: list[str]) -> None:
    """Findings about files beside those that the metadata names."""
    named = set(builder.file_names())
    for path, size in source.listing.items():
        if path in named or path in metadata or "/" in path:
            continue
        if DATA.search(path):
            if size:
                builder.findings.append(
                    finding(
                        "stray-file",
                        "files",
                        f"{path} ({size} bytes) is not part of this save",
                        file=path,
                    )
                )
            else:
                builder.findings.append(
                    finding("empty-file", "files", f"{path} is empty and unused", file=path)
                )
        elif path.endswith(".metadata") or path == ".metadata.tmp":
            builder.findings.append(
                finding("stray-file", "files", f"{path} belongs to another save", file=path)
            )
    if metadata[0] not in (".metadata", ".metadata.tmp"):
        ranks = [int(m[1]) for p in metadata if (m := RANK_METADATA.match(p))]
        for rank in absent(ranks, max(ranks), _MAX_TOLD):
            builder.findings.append(
                finding(
                    "missing-rank",
                    "files",
                    f"rank {rank} left no __{rank}.metadata, rank {max(ranks)} did",
                    file=f"__{rank}.metadata",
                )
            )


def _lost(fqn: str, first: tuple[int, ...], second: tuple[int, ...]) -> Any:
    return finding(
        "lost-at-save", "cover",
        f"{fqn}: the chunks at {list(first)} and {list(second)} share one name in one safetensors "
        "blob, so the writer kept only the last of them", fqn=fqn,
    )  # fmt: skip


def _dtype(properties: Any, fqn: str, name: str) -> str:
    state = properties.state if isinstance(properties, Record) else None
    # TensorProperties.__getstate__ gives a tuple whose length grew over time; the dtype is first.
    first = state[0] if type(state) is tuple and state else None
    if type(state) is dict:
        first = state.get("dtype")
    if type(first) is Named and first.kind == "dtype":
        return str(first.value)
    raise MalformedCheckpoint(f"{name} does not tell the dtype of {fqn}", file=name)


def _codec(descriptors: Any, name: str) -> str:
    if descriptors in (None, [], ()):
        return ""
    if type(descriptors) in (list, tuple) and len(descriptors) == 1 and type(descriptors[0]) is str:
        # form: name[@domain][/version]
        known = _CODECS.get(descriptors[0].split("/")[0].split("@")[0])
        if known:
            return known
    raise UnsupportedFormat(f"{name}: items are transformed by {shown(descriptors, 120)}",
                            hint="known stream extensions: stream.zstd")  # fmt: skip


def ranges(numbers: Iterable[int]) -> str:
    """
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
