"""Describe what a checkpoint stores, and where every byte of it is.

A checkpoint is a manifest of boxes over byte ranges. *Chunks* tile a logical tensor (FQN, dtype, shape). A
chunk is a box of that tensor and the *item* that holds its bytes. An item is a range of a file, with an
envelope around the payload (a torch zip, a safetensors blob, or nothing) and perhaps a codec. Manifests are
columnar inside, so that 10^6 chunks are a few arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckptcore.core import columnar_file as frame
from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.errors import Finding
from ckptcore.utils.text import count

if TYPE_CHECKING:
    from ckptcore.core.byte_ledger import ByteLedger
    from ckptcore.core.file_sums import FileSums

Ints = npt.NDArray[np.int64]
SUM = "weighted_"  # what the names of functions of weighted sums begin with
ADAPTED = "adapted_"  # and those of weights with an adapter
_CHUNK_COLUMNS = ("first", "lo", "shape", "item")
ITEM_COLUMNS = ("file", "start", "length", "envelope", "codec", "crc32")
CONJ, NEG, SWAPPED = 1, 2, 4  # view flags: conjugated, negated, other byte order than little


class Envelope(IntEnum):
    """The container between an item's byte range and the payload bytes."""

    RAW = 0
    TORCHZIP = 1
    SAFETENSORS = 2
    ZARR = 3


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A logical tensor.

    Attributes:
        fqn: Dotted name, unique in its manifest.
        dtype: Canonical dtype name (see `ckptcore.core.dtype`).
        shape: Global shape, elements.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Count the elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Count the bytes of the elements."""
        return prod(self.shape) * BY_NAME[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the checkpoint: path relative to the root, size in bytes (None: the file is missing)."""

    path: str
    size: int | None


@dataclass(frozen=True, slots=True)
class Item:
    """The byte range of a file that holds a payload.

    Attributes:
        file: Index into `Manifest.files`.
        start: First byte in that file.
        length: Bytes.
        envelope: Container to unwrap.
        codec: Name of the stream codec around the complete item, or "".
        crc32: CRC-32 of the range, for raw items whose format stores one, else None.
        member: Name inside the envelope (safetensors), or "".
        holds: Shape of the stored tensor, where chunks are views into it without offsets of their own; else
            None.
    """

    file: int
    start: int
    length: int
    envelope: Envelope = Envelope.RAW
    codec: str = ""
    crc32: int | None = None
    member: str = ""
    holds: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class View:
    """A chunk's layout in its payload: first byte, element strides (None: row-major), flags."""

    start: int = 0
    strides: tuple[int, ...] | None = None
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor and the item that stores it; ``view`` is None until it is resolved."""

    tensor: int
    box: Box
    item: int
    view: View | None = None


@dataclass(frozen=True, slots=True)
class Unread:
    """Why a tensor cannot be read, and what is known about it.

    Attributes:
        reason: A clause.
        dtype: As its writer spells it, or "" if unknown.
        shape: Global shape, elements, or None.
        file: The file that stores it or refers to it, or None if unknown.
    """

    reason: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    file: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form; null for what is not known."""
        shape = None if self.shape is None else list(self.shape)
        return {"dtype": self.dtype or None, "shape": shape, "file": self.file, "reason": self.reason}

    def describe(self) -> str:
        """Return one line for people."""
        shape = "" if self.shape is None else str(list(self.shape))
        return ": ".join(p for p in (" ".join(p for p in (self.dtype, shape) if p), self.reason) if p)


@dataclass(frozen=True, slots=True)
class Blob:
    """A non-tensor object: plain values, references to tensors in it, refused globals.

    Attributes:
        key: Its name.
        item: Index into the items; -1 where the format keeps it elsewhere.
        tree: The value in `ckptcore.core.object_tree` JSON form.
        refused: Globals that are not on the allow-list.
        known: Whether the tree is the value; False when it was refused or could not be read.
        unread: Set for a tensor that cannot be read, which is no row of ``Manifest.tensors``.
    """

    key: str
    item: int
    tree: Any = None
    refused: tuple[str, ...] = ()
    known: bool = True
    unread: Unread | None = None


@dataclass(frozen=True, slots=True)
class Derived:
    """How to compute a tensor from stored ones, with a function of `ckptcore.core.dequantize`.

    Attributes:
        fn: Name in `ckptcore.core.dequantize.FUNCTIONS`.
        inputs: Its inputs, as positions in ``Manifest.inputs`` (or ``FilePlan.inputs``).
        params: Integers, as the function defines them.
    """

    fn: str
    inputs: tuple[int, ...]
    params: tuple[int, ...] = ()

    @property
    def is_sum(self) -> bool:
        """Whether it is a weighted sum of several checkpoints (`ckptcore.core.weighted_sums`)."""
        return self.fn.startswith(SUM)

    @property
    def is_of_checkpoints(self) -> bool:
        """Whether it is computed of several checkpoints; otherwise it is of quantised values."""
        return self.fn.startswith((SUM, ADAPTED))


@dataclass(frozen=True)
class Chunks:
    """All chunks, grouped by tensor; row c is chunk c.

    Attributes:
        first: int64 [T + 1]; the chunks of tensor t are rows first[t]:first[t + 1].
        lo: int64 [n, R], box offsets, elements. R is the highest rank; dims behind a tensor's own rank have
            offset 0.
        shape: int64 [n, R], box extents, elements. Dims behind a tensor's own rank have extent 1.
        item: int64 [n].
        view: int64 [n, 2 + R] (start, flags, strides...), or None when no chunk is resolved. Start -1
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
        """Return the tensor of each chunk, int64 [n]."""
        return np.repeat(np.arange(len(self.first) - 1, dtype=np.int64), np.diff(self.first))

    @property
    def views(self) -> Ints:
        """Return a view of each chunk, int64 [n, 2 + R]."""
        return np.full((len(self), 2 + self.lo.shape[1]), -1, np.int64) if self.view is None else self.view

    def where(self, mask: npt.NDArray[np.bool_]) -> Chunks:
        """Return the chunks of a mask, bool [n], of the same tensors."""
        # Chunks before each old boundary that are kept: that is the new boundary.
        count = np.concatenate([np.zeros(1, np.int64), np.cumsum(mask)])
        view = None if self.view is None else self.view[mask]
        return Chunks(count[self.first], self.lo[mask], self.shape[mask], self.item[mask], view)


@dataclass(frozen=True)
class Items:
    """All items, columnar; row i is item i.

    Attributes:
        file: int64 [n], index into `Manifest.files`.
        start: int64 [n], first byte.
        length: int64 [n], bytes.
        envelope: int8 [n], `Envelope`.
        codec: int8 [n], index into ``codecs``.
        crc32: int64 [n], or -1 for none.
        codecs: Names of stream codecs.
        member: Item -> name, where not "".
        holds: int64 [n, 1 + R] (rank, shape...), see `Item`; rank -1: None.
    """

    file: Ints
    start: Ints
    length: Ints
    envelope: npt.NDArray[np.int8]
    codec: npt.NDArray[np.int8]
    crc32: Ints
    codecs: tuple[str, ...] = ("",)
    member: Mapping[int, str] = field(default_factory=dict)
    holds: Ints | None = None

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
            self._holds(index),
        )

    def _holds(self, index: int) -> tuple[int, ...] | None:
        if self.holds is None or self.holds[index, 0] < 0:
            return None
        rank, *shape = self.holds[index].tolist()
        return tuple(shape[:rank])


@dataclass(frozen=True)
class Manifest:
    """Everything that is known about a checkpoint without reading tensor bytes.

    ``stamps``, ``described``, ``beside``, ``ledger`` and ``sums`` describe the place, not the checkpoint.
    They are not saved, nor part of the digest.

    Attributes:
        format: Name in `ckptcore.formats.FORMATS`.
        root: URL of the folder, or of the file's folder.
        tensors: In stored order.
        chunks: Boxes of tensors, and the item that holds each.
        items: Byte ranges of files.
        files: Every file that the metadata names, and every other file there.
        blobs: Objects that are not tensors.
        origin: What the writer recorded about itself: versions, step, mesh.
        findings: What the reader saw that a check must report.
        derived: Tensor -> how to compute it; such a tensor has no chunks.
        inputs: The stored tensors that derived ones are computed from, over the same items and files, or
            None.
        stamps: Path -> stamp and settled ctime (`ckptcore.store.file_status.FileStatus`) of files, and of
            those that describe them, before the first byte was read, where known.
        described: Files of the place that the format's reader read, and that hold nothing of the checkpoint:
            metadata, an index.
        beside: Other files of the place, which hold nothing of the checkpoint and do not describe it.
        ledger: What the format's reader took from its files (`ckptcore.core.byte_ledger`); None where it is
            not known.
        sums: What was read of its files so far (`ckptcore.core.file_sums`); None where nobody asked.
        order: Names of tensors in the order of the saved state dict, where ``tensors`` has another order.
            Neither a digest nor a dump includes it.
        own: (items, files) of the checkpoint itself, where later ones are second copies
            (`ckptcore.core.redundant_copies`); None without such copies.
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
    derived: Mapping[int, Derived] = field(default_factory=dict)
    inputs: Manifest | None = None
    stamps: Mapping[str, tuple[str, int | None]] = field(default_factory=dict, compare=False, repr=False)
    described: tuple[StoredFile, ...] = field(default=(), compare=False, repr=False)
    beside: tuple[StoredFile, ...] = field(default=(), compare=False, repr=False)
    ledger: ByteLedger | None = field(default=None, compare=False, repr=False)
    sums: FileSums | None = field(default=None, compare=False, repr=False)
    order: tuple[str, ...] = field(default=(), compare=False)
    own: tuple[int, int] | None = None

    def __repr__(self) -> str:
        """Return a summary: a complete one would have a line for each of millions of chunks."""
        parts = ((self.tensors, "tensor"), (self.chunks, "chunk"), (self.files, "file"))
        sizes = ", ".join(count(len(part), noun) for part, noun in parts)
        return f"<Manifest {self.format} {self.root}: {sizes}>"

    @property
    def read(self) -> frozenset[str]:
        """Return the paths of the files that the format's reader read.

        Files opened only to recognise a format are not among them (`ckptcore.core.used_files`).
        """
        return frozenset(self.ledger.read) if self.ledger is not None else frozenset()

    @property
    def versions(self) -> dict[str, str | None]:
        """Return the stamp of each file when it was listed, for `ckptcore.store.open_source_store`."""
        return {path: stamp for path, (stamp, _) in self.stamps.items()}

    @property
    def num_tensors(self) -> int:
        """Count the logical tensors."""
        return len(self.tensors)

    @cached_property
    def nbytes(self) -> int:
        """Count the bytes of all logical tensors."""
        return sum(t.nbytes for t in self.tensors)

    @cached_property
    def unread(self) -> dict[str, Unread]:
        """Map the name of each tensor that cannot be read to the reason."""
        return {b.key: b.unread for b in self.blobs if b.unread is not None}

    @property
    def dequantized(self) -> frozenset[int]:
        """Return the tensors whose values are computed of quantised ones."""
        return frozenset(tensor for tensor, node in self.derived.items() if not node.is_of_checkpoints)

    @cached_property
    def index(self) -> dict[str, int]:
        """Map each FQN to its position in `tensors`."""
        return {t.fqn: i for i, t in enumerate(self.tensors)}

    def chunks_of(self, tensor: int) -> Iterator[Chunk]:
        """Yield the chunks of one tensor, in stored order."""
        rank = len(self.tensors[tensor].shape)
        # Columns behind a tensor's own rank are filling, and no part of its boxes.
        c = self.chunks
        for row in range(int(c.first[tensor]), int(c.first[tensor + 1])):
            box = Box(tuple(c.lo[row, :rank].tolist()), tuple(c.shape[row, :rank].tolist()))
            yield Chunk(tensor, box, int(c.item[row]), view_of(c, row, rank))

    def dump(self) -> bytes:
        """Return the compact file form; equal manifests give equal bytes."""
        i = self.items
        arrays: dict[str, frame.Array] = {
            **_dump_chunks("chunk", self.chunks),
            **{f"item.{column}": getattr(i, column) for column in ITEM_COLUMNS},
        }
        head = {
            "format": self.format,
            "root": self.root,
            "tensors": [[t.fqn, t.dtype, list(t.shape)] for t in self.tensors],
            "files": [[f.path, f.size] for f in self.files],
            "blobs": [[b.key, b.item, b.tree, list(b.refused), b.known] for b in self.blobs],
            "origin": dict(self.origin),
            "findings": [f.as_dict() for f in self.findings],
            "codecs": list(i.codecs),
            "member": [[k, v] for k, v in sorted(i.member.items())],
        }
        # Optional keys are omitted when empty, which keeps the digests of other manifests unchanged.
        if unread := [[n, *astuple(b.unread)] for n, b in enumerate(self.blobs) if b.unread is not None]:
            head["unread"] = unread
        if i.holds is not None:
            arrays["item.holds"] = i.holds
        if self.own is not None:
            head["own"] = list[Any](self.own)
        if self.inputs is not None:
            head["derived"] = dump_derived(self.derived)
            head["inputs"] = [[t.fqn, t.dtype, list(t.shape)] for t in self.inputs.tensors]
            # The inputs share items and files with the tensors, so only their chunks are stored.
            arrays |= _dump_chunks("input", self.inputs.chunks)
        return frame.dump(head, arrays)

    @classmethod
    def load(cls, data: bytes) -> Manifest:
        """Return the manifest of `dump`'s bytes; raises `MalformedCheckpoint`."""
        h, a = frame.load(data)
        manifest = cls(
            h["format"],
            h["root"],
            tuple(TensorSpec(f, d, tuple(s)) for f, d, s in h["tensors"]),
            _load_chunks("chunk", a),
            Items(
                **{column: a[f"item.{column}"] for column in ITEM_COLUMNS},
                codecs=tuple(h["codecs"]),
                member=dict(h["member"]),
                holds=a.get("item.holds"),
            ),
            tuple(StoredFile(p, s) for p, s in h["files"]),
            _load_blobs(h["blobs"], h.get("unread", [])),
            h["origin"],
            tuple(Finding(**f) for f in h["findings"]),
            own=(h["own"][0], h["own"][1]) if "own" in h else None,
        )
        if "inputs" not in h:
            return manifest
        tensors = tuple(TensorSpec(f, d, tuple(s)) for f, d, s in h["inputs"])
        return manifest.deriving(load_derived(h["derived"]), tensors, _load_chunks("input", a))

    def deriving(
        self, derived: Mapping[int, Derived], inputs: tuple[TensorSpec, ...], chunks: Chunks
    ) -> Manifest:
        """Return this manifest with tensors computed from ``inputs``, which are stored in its items."""
        # Blobs and findings stay with the outer manifest: they would be reported twice.
        stored = replace(self, tensors=inputs, chunks=chunks, blobs=(), findings=(), derived={}, inputs=None)
        return replace(self, derived=dict(derived), inputs=stored)

    def without_copies(self) -> Manifest:
        """Return this manifest without second copies: the checkpoint alone."""
        # Copies are behind the checkpoint's own items and files (`redundant_copies`), so cutting off the end
        # removes all of them and leaves every index valid.
        if self.own is None:
            return self
        items, files = self.own
        below = None if self.inputs is None else self.inputs.without_copies()
        return replace(
            self,
            chunks=_chunks_of_first(self.chunks, items),
            items=_first_items(self.items, items),
            files=self.files[:files],
            own=None,
            inputs=below,
        )

    @cached_property
    def digest(self) -> str:
        """Return the BLAKE3 digest, in hex, of everything but the root, second copies and findings.

        Findings follow from the rest, and their wording may change: claims, saved plans and catalogs name a
        checkpoint by this digest.
        """
        return blake3(replace(self.without_copies(), root="", findings=()).dump()).hexdigest()


def _chunks_of_first(chunks: Chunks, items: int) -> Chunks:
    """Return the chunks that are stored in the first ``items`` items, or in none."""
    # A chunk in no item (-1) is a hole of the checkpoint, not a copy, and stays.
    in_first = chunks.where(chunks.item < items)
    # A table in which no chunk is resolved is not stored: a manifest that never had
    # copies has none, and must have the same digest.
    if in_first.view is not None and not (in_first.view[:, 0] >= 0).any():
        return replace(in_first, view=None)  # only the copies had one
    return in_first


def _first_items(items: Items, count: int) -> Items:
    columns = {column: getattr(items, column)[:count] for column in ITEM_COLUMNS}
    member = {k: v for k, v in items.member.items() if k < count}
    holds = None if items.holds is None else items.holds[:count]
    return replace(items, **columns, member=member, holds=holds)


def joined_items(parts: Sequence[Items]) -> dict[str, Any]:
    """Return the columns of all items of several tables, which have the same codecs."""
    if len(parts) == 1:
        return {column: getattr(parts[0], column) for column in ITEM_COLUMNS}
    return {column: np.concatenate([getattr(part, column) for part in parts]) for column in ITEM_COLUMNS}


def _dump_chunks(kind: str, chunks: Chunks) -> dict[str, frame.Array]:
    columns = {f"{kind}.{column}": getattr(chunks, column) for column in _CHUNK_COLUMNS}
    return columns if chunks.view is None else columns | {f"{kind}.view": chunks.view}


def _load_chunks(kind: str, arrays: Mapping[str, frame.Array]) -> Chunks:
    columns = {column: arrays[f"{kind}.{column}"] for column in _CHUNK_COLUMNS}
    return Chunks(**columns, view=arrays.get(f"{kind}.view"))


def _load_blobs(rows: list[Any], unread: list[Any]) -> tuple[Blob, ...]:
    why = {
        n: Unread(reason, dtype, None if shape is None else tuple(shape), file)
        for n, reason, dtype, shape, file in unread
    }
    return tuple(Blob(k, i, t, tuple(r), is_read, why.get(n)) for n, (k, i, t, r, is_read) in enumerate(rows))


def items_table(rows: Ints | Sequence[tuple[int, ...]]) -> Items:
    """Return the columnar form of rows (file, start, length, envelope, codec, crc32), int64 [n, 6].

    The codec is the number of its name, crc32 is -1 for none.
    """
    table = np.asarray(rows, np.int64).reshape(-1, 6)
    f, s, n, e, c, crc = (np.ascontiguousarray(table[:, k]) for k in range(6))
    return Items(f, s, n, e.astype(np.int8), c.astype(np.int8), crc)


def dump_derived(derived: Mapping[int, Derived]) -> list[Any]:
    """Return the JSON form of a table of derived tensors."""
    return [[t, d.fn, list(d.inputs), list(d.params)] for t, d in sorted(derived.items())]


def load_derived(rows: list[Any]) -> dict[int, Derived]:
    """Return the table of `dump_derived`'s form."""
    return {t: Derived(fn, tuple(inputs), tuple(params)) for t, fn, inputs, params in rows}


def view_of(chunks: Chunks, row: int, rank: int) -> View | None:
    """Return the view of a chunk row, or None when it is not resolved."""
    if chunks.view is None or chunks.view[row, 0] < 0:
        return None
    start, flags, *strides = chunks.view[row].tolist()
    return View(start, tuple(strides[:rank]), flags)


def dims_table(shapes: Sequence[tuple[int, ...]], rank: int, fill: int) -> Ints:
    """Return shapes as rows, padded to ``rank`` columns.

    >>> dims_table([(2, 3), (), (4,)], 2, 1).tolist()
    [[2, 3], [1, 1], [4, 1]]
    """
    out = np.full((len(shapes), rank), fill, np.int64)
    ranks = np.fromiter(map(len, shapes), np.int64, len(shapes))
    # All at once, through a mask of the filled cells in row order:
    # millions of tensors in a loop take seconds.
    out[np.arange(rank) < ranks[:, None]] = np.fromiter(chain.from_iterable(shapes), np.int64)
    return out


def with_dims(table: Ints, rank: int, fill: int) -> Ints:
    """Pad a table of one column per dim to ``rank`` columns.

    >>> with_dims(np.array([[2, 3]]), 4, 1).tolist()
    [[2, 3, 1, 1]]
    """
    if table.shape[1] == rank:
        return table
    return np.pad(table, ((0, 0), (0, rank - table.shape[1])), constant_values=fill)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the element strides of a contiguous tensor.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        # Extents of 0 count as 1: an empty tensor has strides in torch, too, and none of them is used.
        step *= max(n, 1)
    return tuple(reversed(out))


def is_row_major(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
    """Report whether the strides are those of a contiguous tensor; dims of extent 1 do not matter."""
    # An empty tensor has no element that strides could place elsewhere.
    if strides is None or 0 in shape:
        return True
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, row_major(shape), strict=True))
