"""Manifests: what is stored, and where is every byte of it?

A checkpoint is a manifest of boxes over byte ranges. A logical tensor (FQN, dtype, shape) is
tiled by *chunks*; a chunk is a box of that tensor and the *item* that holds its bytes: a range of
a file, with an envelope around the payload (a torch zip, a safetensors blob, or nothing) and
perhaps a codec. Manifests are columnar inside, so that 10^6 chunks are a few arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckptcore import frame
from ckptcore.box import Box
from ckptcore.dtype import BY_NAME
from ckptcore.errors import Finding

Ints = npt.NDArray[np.int64]
CONJ, NEG, SWAPPED = 1, 2, 4  # view flags: conjugated, negated, other byte order than little


class Envelope(IntEnum):
    """What stands between an item's range and the payload bytes."""

    RAW = 0
    TORCHZIP = 1
    SAFETENSORS = 2
    ZARR = 3


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A logical tensor.

    fqn: dotted name, unique in its manifest.
    dtype: canonical dtype name (see `ckptcore.dtype`).
    shape: global shape, elements.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        count = 1
        for n in self.shape:
            count *= n
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * BY_NAME[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the checkpoint: path relative to the root, size in bytes (None: not there)."""

    path: str
    size: int | None


@dataclass(frozen=True, slots=True)
class Item:
    """Where a payload lies.

    file: index into `Manifest.files`. start, length: the byte range in that file.
    envelope: what to unwrap. codec: name of the stream codec around the whole item, or "".
    crc32: CRC-32 of the range, for raw items whose format stores one, else None.
    member: name inside the envelope (safetensors), or "".
    """

    file: int
    start: int
    length: int
    envelope: Envelope = Envelope.RAW
    codec: str = ""
    crc32: int | None = None
    member: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """How a chunk lies in its payload: first byte, element strides (None: row-major), flags."""

    start: int = 0
    strides: tuple[int, ...] | None = None
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a tensor in storage. view None: not resolved yet."""

    tensor: int
    box: Box
    item: int
    view: View | None = None


@dataclass(frozen=True, slots=True)
class Blob:
    """A non-tensor object: plain values, references to tensors inside it, what was refused.

    key: its name. item: index into the items.
    tree: the value in `ckptcore.objects` JSON form, or None when it was refused or not read.
    refused: globals that are not on the allow-list.
    """

    key: str
    item: int
    tree: Any = None
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chunks:
    """All chunks, grouped by tensor; row c is chunk c.

    first: int64 [T + 1], chunks of tensor t are rows first[t]:first[t + 1].
    lo, shape: int64 [n, R] box offset and extent, elements; R is the highest rank, and dims behind
        a tensor's own rank are offset 0, extent 1.
    item: int64 [n].
    view: int64 [n, 2 + R] (start, flags, strides...), or None when no chunk is resolved; start -1
        marks a chunk that is not; flags -1 would never be valid.
    """

    first: Ints
    lo: Ints
    shape: Ints
    item: Ints
    view: Ints | None = None

    def __len__(self) -> int:
        return len(self.item)

    @cached_property
    def tensor(self) -> Ints:
        """int64 [n]: the tensor of each chunk."""
        return np.repeat(np.arange(len(self.first) - 1, dtype=np.int64), np.diff(self.first))


@dataclass(frozen=True)
class Items:
    """All items, columnar; row i is item i. crc32 -1: none. member: item -> name, where not ""."""

    file: Ints
    start: Ints
    length: Ints
    envelope: npt.NDArray[np.int8]
    codec: npt.NDArray[np.int8]
    crc32: Ints
    codecs: tuple[str, ...] = ("",)
    member: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, index: int) -> Item:
        crc = int(self.crc32[index])
        return Item(
            int(self.file[index]),
            int(self.start[index]),
            int(self.length[index]),
            Envelope(int(self.envelope[index])),
            self.codecs[int(self.codec[index])],
            None if crc < 0 else crc,
            self.member.get(index, ""),
        )


@dataclass(frozen=True)
class Manifest:
    """Everything that is known about a checkpoint without reading tensor bytes.

    format: name in `ckptcore.formats.FORMATS`. root: URL of the folder (or of the file's folder).
    tensors: in stored order. files: every file the metadata names, and every other file there.
    blobs: non-tensor objects. origin: what the writer told of itself (versions, step, mesh).
    findings: what the reader saw that a check must report.
    """

    format: str
    root: str
    tensors: tuple[TensorSpec, ...]
    chunks: Chunks
    items: Items
    files: tuple[StoredFile, ...]
    blobs: tuple[Blob, ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def num_tensors(self) -> int:
        return len(self.tensors)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all logical tensors."""
        return sum(t.nbytes for t in self.tensors)

    @cached_property
    def index(self) -> dict[str, int]:
        """FQN -> position in `tensors`."""
        return {t.fqn: i for i, t in enumerate(self.tensors)}

    def chunks_of(self, tensor: int) -> Iterator[Chunk]:
        """The chunks of one tensor, in stored order."""
        rank = len(self.tensors[tensor].shape)
        c = self.chunks
        for row in range(int(c.first[tensor]), int(c.first[tensor + 1])):
            box = Box(tuple(c.lo[row, :rank].tolist()), tuple(c.shape[row, :rank].tolist()))
            yield Chunk(tensor, box, int(c.item[row]), view_of(c, row, rank))

    def dump(self) -> bytes:
        """The compact file form; equal manifests give equal bytes."""
        c, i = self.chunks, self.items
        arrays: dict[str, frame.Array] = {
            "chunk.first": c.first, "chunk.lo": c.lo, "chunk.shape": c.shape, "chunk.item": c.item,
            "item.file": i.file, "item.start": i.start, "item.length": i.length,
            "item.envelope": i.envelope, "item.codec": i.codec, "item.crc32": i.crc32,
        }  # fmt: skip
        if c.view is not None:
            arrays["chunk.view"] = c.view
        head = {
            "format": self.format, "root": self.root,
            "tensors": [[t.fqn, t.dtype, list(t.shape)] for t in self.tensors],
            "files": [[f.path, f.size] for f in self.files],
            "blobs": [[b.key, b.item, b.tree, list(b.refused)] for b in self.blobs],
            "origin": dict(self.origin), "findings": [f.as_dict() for f in self.findings],
            "codecs": list(i.codecs), "member": [[k, v] for k, v in sorted(i.member.items())],
        }  # fmt: skip
        return frame.dump(head, arrays)

    @classmethod
    def load(cls, data: bytes) -> Manifest:
        """The manifest of `dump`'s bytes; raises `MalformedCheckpoint`."""
        h, a = frame.load(data)
        return cls(
            h["format"], h["root"],
            tuple(TensorSpec(f, d, tuple(s)) for f, d, s in h["tensors"]),
            Chunks(a["chunk.first"], a["chunk.lo"], a["chunk.shape"], a["chunk.item"],
                   a.get("chunk.view")),
            Items(a["item.file"], a["item.start"], a["item.length"], a["item.envelope"],
                  a["item.codec"], a["item.crc32"], tuple(h["codecs"]), {k: v for k, v in h["member"]}),
            tuple(StoredFile(p, s) for p, s in h["files"]),
            tuple(Blob(k, i, t, tuple(r)) for k, i, t, r in h["blobs"]),
            h["origin"], tuple(Finding(**f) for f in h["findings"]),
        )  # fmt: skip

    @cached_property
    def digest(self) -> str:
        """BLAKE3 of everything but the place (root) the checkpoint lies in, hex."""
        return blake3(replace(self, root="").dump()).hexdigest()


class Builder:
    """Collects tensors, chunks and items row by row, and gives the columnar manifest."""

    def __init__(self) -> None:
        self.tensors: list[TensorSpec] = []
        self.blobs: list[Blob] = []
        self.findings: list[Finding] = []
        # Flat columns from the start: a row of Python objects each would cost gigabytes at 10^6.
        self._owner, self._item, self._rank = array("q"), array("q"), array("b")
        self._dims = array("q")  # offset then shape of each chunk, back to back
        self._views: dict[int, View] = {}
        self._items = array("q")  # six fields an item
        self._member: dict[int, str] = {}
        self._codecs: list[str] = [""]
        self._files: dict[str, int] = {}
        self._sizes: list[int | None] = []

    def file(self, path: str, size: int | None) -> int:
        """The index of a file, added on first sight."""
        at = self._files.get(path)
        if at is None:
            at = self._files[path] = len(self._sizes)
            self._sizes.append(size)
        return at

    def file_names(self) -> list[str]:
        """Paths of the files added so far, by index."""
        return list(self._files)

    def file_sizes(self) -> list[int | None]:
        """Sizes of the files added so far, by index."""
        return list(self._sizes)

    def item(self, item: Item) -> int:
        """Adds an item; gives its index."""
        row = len(self._items) // 6
        if item.codec not in self._codecs:
            self._codecs.append(item.codec)
        if item.member:
            self._member[row] = item.member
        crc = -1 if item.crc32 is None else item.crc32
        codec = self._codecs.index(item.codec)
        self._items.extend((item.file, item.start, item.length, int(item.envelope), codec, crc))
        return row

    def plain_item(self, file: int, start: int, length: int, envelope: Envelope) -> int:
        """Adds an item without codec, checksum and member; the quick way for millions."""
        self._items.extend((file, start, length, envelope, 0, -1))
        return len(self._items) // 6 - 1

    def tensor(self, spec: TensorSpec) -> int:
        """Adds a tensor; gives its index."""
        self.tensors.append(spec)
        return len(self.tensors) - 1

    def chunk(
        self,
        tensor: int,
        offset: tuple[int, ...],
        shape: tuple[int, ...],
        item: int,
        view: View | None = None,
    ) -> None:
        """Adds a chunk of a tensor added before; item -1: it has no place."""
        if view is not None:
            self._views[len(self._owner)] = view
        self._owner.append(tensor)
        self._item.append(item)
        self._rank.append(len(offset))
        self._dims.extend(offset)
        self._dims.extend(shape)

    def build(self, format: str, root: str, origin: Mapping[str, Any]) -> Manifest:
        """The manifest; chunks are grouped by tensor, keeping their order inside one."""
        rank = max((len(t.shape) for t in self.tensors), default=0)
        owner = np.frombuffer(self._owner, np.int64) if self._owner else np.zeros(0, np.int64)
        item = np.frombuffer(self._item, np.int64) if self._item else np.zeros(0, np.int64)
        lo, shape = self._boxes(rank)
        view = self._view_columns(rank, shape)
        order = np.argsort(owner, kind="stable")
        counts = np.bincount(owner, minlength=len(self.tensors)).astype(np.int64)
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).astype(np.int64)
        chunks = Chunks(
            first, lo[order], shape[order], item[order], None if view is None else view[order]
        )
        files = tuple(StoredFile(p, self._sizes[i]) for p, i in self._files.items())
        return Manifest(
            format, root, tuple(self.tensors), chunks, self._item_columns(), files,
            tuple(self.blobs), dict(origin), tuple(self.findings),
        )  # fmt: skip

    def _boxes(self, rank: int) -> tuple[Ints, Ints]:
        n = len(self._owner)
        lo, shape = np.zeros((n, rank), np.int64), np.ones((n, rank), np.int64)
        ranks = np.frombuffer(self._rank, np.int8).astype(np.int64) if n else np.zeros(0, np.int64)
        flat = np.frombuffer(self._dims, np.int64) if self._dims else np.zeros(0, np.int64)
        begin = np.concatenate([np.zeros(1, np.int64), np.cumsum(2 * ranks)])[:-1]
        for r in range(1, int(ranks.max(initial=0)) + 1):
            rows = np.flatnonzero(ranks == r)
            both = flat[begin[rows, None] + np.arange(2 * r)]
            lo[rows, :r], shape[rows, :r] = both[:, :r], both[:, r:]
        return lo, shape

    def _view_columns(self, rank: int, shape: Ints) -> Ints | None:
        if not self._views:
            return None
        view = np.full((len(self._owner), 2 + rank), -1, np.int64)
        for row, seen in self._views.items():
            extent = tuple(shape[row, : self._rank[row]].tolist())
            strides = seen.strides if seen.strides is not None else row_major(extent)
            view[row] = (seen.start, seen.flags, *strides, *(0,) * (rank - len(strides)))
        return view

    def _item_columns(self) -> Items:
        table = np.frombuffer(self._items, np.int64) if self._items else np.zeros(0, np.int64)
        return items_table(table, self._codecs, self._member)


def items_table(rows: Sequence[tuple[int, ...]], codecs: Sequence[str] = ("",),
                member: Mapping[int, str] | None = None) -> Items:  # fmt: skip
    """The columnar form of rows (file, start, length, envelope, codec, crc32)."""
    table = np.asarray(rows, np.int64).reshape(-1, 6)
    f, s, n, e, c, crc = (np.ascontiguousarray(table[:, k]) for k in range(6))
    return Items(f, s, n, e.astype(np.int8), c.astype(np.int8), crc, tuple(codecs), member or {})


def view_of(chunks: Chunks, row: int, rank: int) -> View | None:
    """The view of a chunk row, or None when it is not resolved."""
    if chunks.view is None or chunks.view[row, 0] < 0:
        return None
    start, flags, *strides = chunks.view[row].tolist()
    return View(start, tuple(strides[:rank]), flags)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of a contiguous tensor.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def is_row_major(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
    """Whether the strides are those of a contiguous tensor; dims of extent 1 do not matter."""
    if strides is None or 0 in shape:
        return True
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, row_major(shape), strict=True))
