"""Build manifests row by row, at a small cost per row."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import (
    Blob,
    Chunks,
    Envelope,
    Ints,
    Item,
    Items,
    Manifest,
    StoredFile,
    TensorSpec,
    Unread,
    View,
    dims_table,
    items_table,
    joined_items,
)
from ckptcore.core.metadata_budget import CHUNK, FINDING, TENSOR, Meter, meter
from ckptcore.errors import Finding, MalformedCheckpoint, finding

_FILE, _ITEM, _VIEW, _CHAR = 400, 100, 200, 4  # bytes of each collected value, with its later forms


class _Findings(list[Finding]):
    """Findings that count against the metadata budget: there may be as many as damaged chunks."""

    def __init__(self, count: Meter) -> None:
        super().__init__()
        self._count = count

    def append(self, new_finding: Finding) -> None:
        self._count.keep(FINDING + _CHAR * len(new_finding.message), "what is wrong with the checkpoint")
        super().append(new_finding)

    # `list` extends itself without calling `append`, so the count would be passed by.
    def extend(self, findings: Iterable[Finding]) -> None:
        for new_finding in findings:
            self.append(new_finding)

    def __iadd__(self, findings: Iterable[Finding]) -> Self:  # type: ignore[misc, override]
        self.extend(findings)
        return self


class Builder:
    """Collects tensors, chunks and items row by row, and returns the columnar manifest."""

    def __init__(self) -> None:
        self._count = meter()
        self.tensors: list[TensorSpec] = []
        self._unread: set[str] = set()
        self._withdrawn: dict[str, Unread | None] = {}
        self.blobs: list[Blob] = []
        self.findings: list[Finding] = _Findings(self._count)
        # Flat columns from the start: a row of Python objects each would take gigabytes at 10^6 rows.
        self._owner, self._item, self._rank = array("q"), array("q"), array("b")
        self._dims = array("q")  # offset then shape of each chunk, back to back
        self._view_at = array("q")  # row, first byte and flags of each chunk with a view, back to back
        self._strides: dict[int, tuple[int, ...]] = {}  # row -> element strides, where not row-major
        self._begin = array("q", [0])  # where the dims of the first rows begin; extended when asked for
        self._items = array("q")  # six fields per item, behind those of the parts
        self._item_parts: list[Items] = []  # of items that were added many at a time
        self._behind = 0  # number of items in the parts
        # Owner, offset, shape, rank and item of chunks that were added at once, and no others: most readers
        # that have columns add one table, which then takes no memory twice.
        self._table: tuple[Ints, Ints, Ints, npt.NDArray[np.int8], Ints] | None = None
        self._member: dict[int, str] = {}
        self._codecs: list[str] = [""]
        self._files: dict[str, int] = {}
        self._sizes: list[int | None] = []

    def report(
        self,
        code: str,
        level: str,
        message: str,
        *,
        fqn: str | None = None,
        file: str | None = None,
        hint: str | None = None,
    ) -> None:
        """Add a finding; see `ckptcore.errors.finding`."""
        self.findings.append(finding(code, level, message, fqn=fqn, file=file, hint=hint))

    def file(self, path: str, size: int | None) -> int:
        """Return the index of a file, which is added the first time.

        Args:
            path: Relative to the checkpoint's root.
            size: Bytes, or None if the file is missing.
        """
        index = self._files.get(path)
        if index is None:
            self._count.keep(_FILE + _CHAR * len(path), path)
            index = self._files[path] = len(self._sizes)
            self._sizes.append(size)
        return index

    def file_names(self) -> list[str]:
        """Return the paths of the files added so far, by index."""
        return list(self._files)

    def file_sizes(self) -> list[int | None]:
        """Return the sizes of the files added so far, by index."""
        return list(self._sizes)

    @property
    def item_bytes(self) -> int:
        """Count the bytes of all items added so far."""
        return sum(sum(part.length.tolist()) for part in self._item_parts) + sum(self._items[2::6])

    def item(self, item: Item) -> int:
        """Add an item and return its index."""
        # Behind items that were added as columns: those have the first numbers.
        row = self._behind + len(self._items) // 6
        if item.codec not in self._codecs:
            self._codecs.append(item.codec)
        self._count.keep(_ITEM, "a checkpoint's items")
        if item.member:
            self._member[row] = item.member
        crc = -1 if item.crc32 is None else item.crc32
        codec = self._codecs.index(item.codec)
        try:
            self._items.extend((item.file, item.start, item.length, int(item.envelope), codec, crc))
        # An array of int64 refuses what no file offset can be: the
        # range is damage, no case for a larger type.
        except OverflowError as error:
            raise _too_large(item.length) from error
        return row

    def item_crc32(self, item: int) -> int | None:
        """Return the stored CRC-32 of an item added before; None without one."""
        for part in self._item_parts:
            if item < len(part):
                crc = int(part.crc32[item])
                break
            item -= len(part)
        else:
            crc = self._items[6 * item + 5]
        return None if crc < 0 else crc

    def plain_item(self, file: int, start: int, length: int, envelope: Envelope) -> int:
        """Add an item without codec, checksum and member; the fast way for millions.

        Raises:
            MalformedCheckpoint: No file has such a range.
        """
        try:
            self._items.extend((file, start, length, envelope, 0, -1))
        except OverflowError as error:
            raise _too_large(length) from error
        return self._behind + len(self._items) // 6 - 1

    def items(
        self,
        places: Ints,
        envelope: Ints,
        codec: Ints,
        codecs: Sequence[str],
        member: Mapping[int, str],
        mask: npt.NDArray[np.bool_],
    ) -> Ints:
        """Add an item per row that is kept.

        Args:
            places: int64 [n, 3]: file, start, length.
            envelope: int64 [n], `Envelope`.
            codec: int64 [n], index into ``codecs``.
            codecs: Names of stream codecs.
            member: Row -> name inside the envelope, where it has one.
            mask: bool [n], the rows to add.

        Returns:
            int64 [n], the index of each item, -1 for rows that are not kept.
        """
        if self._items:
            # Items have numbers in the order in which they were added: single ones come before these.
            self._add_items(items_table(np.array(self._items, np.int64)))
            self._items = array("q")
        first = self._behind
        if mask.all():
            number = np.arange(first, first + len(places), dtype=np.int64)
        # Rows that are not kept get no item, and later ones take their numbers.
        else:
            number = np.where(mask, first + np.cumsum(mask) - 1, -1)
            places, envelope, codec = places[mask], envelope[mask], codec[mask]
        codec_numbers = []
        # Codecs of a file may be many and unused: they are listed only where a row has one.
        for name in codecs if (codec > 0).any() else codecs[:1]:
            if name not in self._codecs:
                self._codecs.append(name)
            codec_numbers.append(self._codecs.index(name))
        file, start, length = (np.ascontiguousarray(column) for column in places.T)
        crc = np.full(len(places), -1, np.int64)
        kinds, codec_column = envelope.astype(np.int8), np.array(codec_numbers, np.int8)[codec]
        self._add_items(Items(file, start, length, kinds, codec_column, crc))
        self._member |= {int(number[row]): name for row, name in member.items()}
        return number

    def _add_items(self, part: Items) -> None:
        self._item_parts.append(part)
        self._behind += len(part)

    def tensor(self, spec: TensorSpec, file: str | None = None) -> int:
        """Add a tensor and return its index, or -1 for an unsupported dtype.

        A tensor of an unsupported dtype cannot be read, and its chunks are skipped.

        Args:
            spec: The tensor.
            file: Where it is stored, for messages.
        """
        self._count.keep(TENSOR + _CHAR * len(spec.fqn), "a checkpoint's tensors")
        if spec.dtype not in BY_NAME:
            self.unread(
                spec.fqn, Unread(f"dtype {spec.dtype} is not supported", spec.dtype, spec.shape, file)
            )
            return -1
        self.tensors.append(spec)
        return len(self.tensors) - 1

    def raw_tensors(self, specs: Sequence[TensorSpec], path: str, places: Ints) -> None:
        """Add tensors that are one row-major chunk each, in an item of raw bytes of one file.

        Args:
            specs: The tensors; of one of an unsupported dtype, only the item is added.
            path: The file, which was added before.
            places: int64 [n, 2], first byte and bytes of each.
        """
        self._count.keep(_ITEM * len(specs), "a checkpoint's items")
        # Zero is both the raw envelope and the codec "": the column serves as either.
        file, raw = np.full(len(specs), self._files[path]), np.zeros(len(specs), np.int64)
        item = self.items(
            np.column_stack([file, places]), raw, raw, self._codecs[:1], {}, np.ones(len(specs), np.bool_)
        )
        tensor = np.array([self.tensor(spec, path) for spec in specs], np.int64)
        shapes = [spec.shape for spec in specs]
        rank = np.fromiter(map(len, shapes), np.int64, len(shapes))
        shape = dims_table(shapes, int(rank.max(initial=0)), 0)
        added = int((tensor >= 0).sum())
        self._count.keep(_VIEW * added, "a checkpoint's chunks")
        self.chunks(tensor, np.zeros_like(shape), shape, rank, item)
        # Raw bytes of one file are resolved from the start: first byte 0, no flags, row-major.
        views = np.zeros((added, 3), np.int64)
        views[:, 0] = np.arange(self.chunk_count - added, self.chunk_count)
        _append(self._view_at, views)

    def unread(self, name: str, why: Unread, refused: tuple[str, ...] = ()) -> None:
        """Add a tensor that cannot be read; a name that was added before stays as it is.

        Args:
            name: FQN of the tensor.
            why: The reason.
            refused: The globals that it needs, if they are the reason.
        """
        if name not in self._unread:
            self._unread.add(name)
            self.blobs.append(Blob(name, -1, None, refused, known=False, unread=why))

    def unread_instead(self, why: Mapping[str, Unread]) -> None:
        """Mark objects that were added before as tensors that cannot be read."""
        self.blobs = [replace(b, unread=why[b.key]) if b.key in why else b for b in self.blobs]

    def withdraw(self, name: str, why: Unread | None) -> None:
        """Mark a tensor, added before or later, as one that cannot be read because a part of it cannot.

        The first reason counts, and none of its chunks is kept. Without a reason, others are in its place.
        """
        self._count.keep(TENSOR + _CHAR * len(name), "a checkpoint's tensors")
        self._withdrawn.setdefault(name, why)

    def chunk(
        self,
        tensor: int,
        offset: tuple[int, ...],
        shape: tuple[int, ...],
        item: int,
        view: View | None = None,
    ) -> None:
        """Add a chunk of a tensor added before.

        Args:
            tensor: Index of the tensor, from `tensor`; the chunk is skipped for -1.
            offset: First index per dim, elements.
            shape: Extent per dim, elements.
            item: Index of the item, from `item`; -1 if no file stores the chunk.
            view: The chunk's layout in its item, or None to resolve it when it is read.
        """
        if tensor < 0:
            return
        self._count.keep(CHUNK if view is None else CHUNK + _VIEW, "a checkpoint's chunks")
        # Columns that were added at once are no rows that can be appended to.
        if self._table is not None:
            self._unpack()
        if view is not None:
            self._view_at.extend((len(self._owner), view.start, view.flags))
            if view.strides is not None:
                # Few chunks have strides of their own, so they are no column.
                self._strides[len(self._owner)] = view.strides
        self._owner.append(tensor)
        self._item.append(item)
        self._rank.append(len(offset))
        self._dims.extend(offset)
        self._dims.extend(shape)

    @property
    def chunk_count(self) -> int:
        """Count the chunks added so far: the row of the next one."""
        self._unpack()
        return len(self._owner)

    def chunk_boxes(self, rows: Iterable[int]) -> Iterator[Box]:
        """Yield the boxes of chunks that were added, by their rows."""
        self._unpack()
        # Boundaries are computed only up to the last row, once; rows that came later extend them.
        begin, ranks = self._begin, self._rank
        for row in range(len(begin) - 1, len(ranks)):
            begin.append(begin[row] + 2 * ranks[row])
        for row in rows:
            start, end = begin[row], begin[row + 1]
            middle = (start + end) // 2
            yield Box(tuple(self._dims[start:middle]), tuple(self._dims[middle:end]))

    def chunk_item(self, row: int) -> int:
        """Return the item of a chunk that was added, by its row."""
        self._unpack()
        return self._item[row]

    def chunk_view(self, row: int) -> View | None:
        """Return the view of a chunk that was added, by its row."""
        # Three numbers a chunk, ascending by row: bisection instead of a dict of millions of rows.
        position = 3 * bisect_left(_Rows(self._view_at), row)
        if position >= len(self._view_at) or self._view_at[position] != row:
            return None
        return View(self._view_at[position + 1], self._strides.get(row), self._view_at[position + 2])

    def chunks(
        self, tensor: Ints, offset: Ints, shape: Ints, rank: Ints | npt.NDArray[np.int8], item: Ints
    ) -> None:
        """Add a chunk per row; rows of tensor -1 are skipped. The builder keeps the columns.

        Args:
            tensor: int64 [n], index of each chunk's tensor.
            offset: int64 [n, r], of which the first ``rank`` columns count.
            shape: int64 [n, r], of which the first ``rank`` columns count.
            rank: [n].
            item: int64 [n], index of each chunk's item.
        """
        if (tensor < 0).any():
            added = tensor >= 0
            tensor, offset, shape = tensor[added], offset[added], shape[added]
            rank, item = rank[added], item[added]
        # After rows of -1 are left out: they take no memory.
        self._count.keep(CHUNK * len(tensor), "a checkpoint's chunks")
        rank = rank.astype(np.int8)
        if self._table is None and not self._owner:
            self._table = tensor, offset, shape, rank, item
        else:
            self._unpack()
            self._append_chunks(tensor, offset, shape, rank, item)

    def _unpack(self) -> None:
        """Keep chunks that were added at once as rows, which more may follow."""
        if self._table is not None:
            table, self._table = self._table, None
            self._append_chunks(*table)

    def _append_chunks(
        self, tensor: Ints, offset: Ints, shape: Ints, rank: npt.NDArray[np.int8], item: Ints
    ) -> None:
        # One rank for all: the table is already in the order of the column, and no mask is needed.
        if (rank == offset.shape[1]).all():
            self._dims, end = _longer(self._dims, 2 * offset.size)
            dims_rows = end.reshape(len(offset), 2 * offset.shape[1])
            dims_rows[:, : offset.shape[1]], dims_rows[:, offset.shape[1] :] = offset, shape
            del dims_rows, end  # a column with views cannot grow
        else:
            real = np.arange(offset.shape[1]) < rank[:, None]
            dims = np.concatenate([offset, shape], axis=1)
            _append(self._dims, dims[np.concatenate([real, real], axis=1)])
        _append(self._owner, tensor)
        _append(self._item, item)
        _append(self._rank, rank)

    def build(self, format: str, root: str, origin: Mapping[str, Any]) -> Manifest:
        """Return the manifest; chunks are grouped by tensor and keep their order in it.

        Args:
            format: Name of the format.
            root: URL of the checkpoint's folder.
            origin: What the writer recorded about itself: versions, step, mesh.
        """
        rank = max((len(t.shape) for t in self.tensors), default=0)
        owner, lo, shape, item = self._chunk_columns(rank)
        view = self._view_columns(rank, shape)
        tensors = self.tensors
        if self._withdrawn:
            readable = np.array([t.fqn not in self._withdrawn for t in tensors], np.bool_)
            tensors = [t for t, keep in zip(tensors, readable, strict=True) if keep]
            # Chunks of a withdrawn tensor go with it, and the numbers of later tensors move up.
            rows = readable[owner]
            owner, item, lo, shape = (np.cumsum(readable) - 1)[owner[rows]], item[rows], lo[rows], shape[rows]
            view = None if view is None else view[rows]
            for name, why in self._withdrawn.items():
                if why is not None:
                    self.unread(name, why)
        # Most readers add tensor by tensor: then nothing moves and nothing is copied.
        order = slice(None) if bool((np.diff(owner) >= 0).all()) else np.argsort(owner, kind="stable")
        # Also for tensors without a chunk, which must have an empty range.
        counts = np.bincount(owner, minlength=len(tensors)).astype(np.int64)
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).astype(np.int64)
        chunks = Chunks(first, lo[order], shape[order], item[order], None if view is None else view[order])
        files = tuple(StoredFile(p, self._sizes[i]) for p, i in self._files.items())
        return Manifest(
            format,
            root,
            tuple(tensors),
            chunks,
            self._item_columns(),
            files,
            tuple(self.blobs),
            dict(origin),
            tuple(self.findings),
        )

    def _chunk_columns(self, rank: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Return owner, offset, shape and item of the chunks, in tables of ``rank`` columns."""
        if self._table is not None:
            owner, lo, shape, ranks, item = self._table
            return owner, _fill_columns(lo, ranks, rank, 0), _fill_columns(shape, ranks, rank, 1), item
        owner = np.frombuffer(self._owner, np.int64) if self._owner else np.zeros(0, np.int64)
        item = np.array(self._item, np.int64)  # a copy: the rows may still grow
        return owner, *self._boxes(rank), item

    def _boxes(self, rank: int) -> tuple[Ints, Ints]:
        n = len(self._owner)
        lo, shape = np.zeros((n, rank), np.int64), np.ones((n, rank), np.int64)
        ranks = np.frombuffer(self._rank, np.int8).astype(np.int64) if n else np.zeros(0, np.int64)
        flat = np.frombuffer(self._dims, np.int64) if self._dims else np.zeros(0, np.int64)
        if n and (ranks == rank).all():
            dims_rows = flat.reshape(n, 2 * rank)
            return np.array(dims_rows[:, :rank]), np.array(dims_rows[:, rank:])
        begin = np.concatenate([np.zeros(1, np.int64), np.cumsum(2 * ranks)])[:-1]
        # Rank by rank: rows of one rank have their dims at equal distances, so each dim is one gather.
        for r in range(1, int(ranks.max(initial=0)) + 1):
            rows = np.flatnonzero(ranks == r)
            first_dim = begin[rows]
            for d in range(r):
                lo[rows, d], shape[rows, d] = flat[first_dim + d], flat[first_dim + r + d]
        return lo, shape

    def _view_columns(self, rank: int, shape: Ints) -> Ints | None:
        if not self._view_at:
            return None
        view = np.full((len(self._owner), 2 + rank), -1, np.int64)
        views = np.frombuffer(self._view_at, np.int64).reshape(-1, 3)
        rows, ranks = views[:, 0], np.frombuffer(self._rank, np.int8)
        view[rows, :2] = views[:, 1:]
        # `row_major` of each box, whose dims behind its rank have extent 1 and stride 0.
        step = np.ones(len(rows), np.int64)
        for dim in range(rank - 1, -1, -1):
            view[rows, 2 + dim] = np.where(dim < ranks[rows], step, 0)
            step *= np.maximum(shape[rows, dim], 1)
        for row, strides in self._strides.items():
            view[row, 2:] = (*strides, *(0,) * (rank - len(strides)))
        return view

    def _item_columns(self) -> Items:
        table = np.frombuffer(self._items, np.int64) if self._items else np.zeros(0, np.int64)
        # Without any item one empty part is needed, for `concatenate` has no dtype otherwise.
        parts = [*self._item_parts, *([items_table(table)] if len(table) or not self._item_parts else [])]
        return Items(**joined_items(parts), codecs=tuple(self._codecs), member=self._member)


def _fill_columns(table: Ints, ranks: npt.NDArray[np.int8], rank: int, fill: int) -> Ints:
    """Return the first ``rank`` columns, with ``fill`` behind each row's own rank."""
    # A table that is filled already is returned as it is: with 10^7 chunks a copy takes gigabytes.
    if table.shape[1] == rank and not any((table[ranks <= d, d] != fill).any() for d in range(rank)):
        return table
    padded = np.full((len(table), rank), fill, np.int64)
    for d in range(min(rank, table.shape[1])):
        has_dim = ranks > d
        padded[has_dim, d] = table[has_dim, d]
    return padded


class _Rows(Sequence[int]):
    """The rows, in ascending order, of a flat column of (row, first byte, flags)."""

    def __init__(self, flat: array[int]) -> None:
        self._flat = flat

    def __len__(self) -> int:
        return len(self._flat) // 3

    def __getitem__(self, index: Any) -> Any:
        return self._flat[3 * index]


def _longer(column: array[int], count: int) -> tuple[array[int], Ints]:
    """Return a column of int64 with so many more elements, and a view of these, to be filled.

    The first elements of a column, which are most, take no memory twice.
    """
    begin = len(column)
    # An array that has elements is lengthened in its place, which may move them;
    # an empty one is allocated at its final size.
    if begin:
        column.frombytes(np.zeros(count, np.int64).view(np.uint8).data)
    else:
        column = array("q", [0]) * count
    return column, np.frombuffer(column, np.int64)[begin:] if count else np.zeros(0, np.int64)


def _append(column: array[int], elements: npt.NDArray[Any]) -> None:
    """Append all elements of an array, which has the width of the column's."""
    column.frombytes(np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data)


def _too_large(length: int) -> MalformedCheckpoint:
    return MalformedCheckpoint(f"metadata claims a range that no file has (got {length} bytes)")
