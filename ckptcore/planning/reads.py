"""Select the chunk rows that an output file reads, with the items and files of the source behind them.

Functions over chunk columns, for `ckptcore.planning.file_plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckptcore.core.box import Box
from ckptcore.core.coverage import equal_boxes
from ckptcore.core.manifest import Chunks, Derived, Ints, Items, Manifest, StoredFile, TensorSpec
from ckptcore.utils.row_wise import every

_ORDERS = 32  # numbers of uses whose order is remembered


def copies_in(manifest: Manifest) -> npt.NDArray[np.bool_]:
    """Return, per chunk, whether an earlier one has the same elements."""
    copies = np.zeros(len(manifest.chunks), np.bool_)
    copies[[row for _, row in equal_boxes(manifest)]] = True
    return copies


class Overlaps:
    """Finder of the chunks of a tensor that share elements with a box.

    Tensors with equal chunks, as nearly all of a model's tensors, share the answer.
    """

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._alike: dict[bytes, int] = {}
        self._kind = np.full(
            len(chunks.first) - 1, -1, np.int64
        )  # number of each tensor's chunk layout, -1 where unknown
        self._rows: dict[tuple[int, Box | None], Ints] = {}
        self._first: list[int] = []  # of each kind, the first row of a tensor

    def rows(self, tensor: Ints, boxes: Sequence[Box | None], box: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the chunk rows that overlap the boxes, tensor by tensor.

        Args:
            tensor: int64 [n], rows of tensors.
            boxes: Distinct boxes; None for an entire tensor.
            box: int64 [n], number of each tensor's box.

        Returns:
            (the rows, int64 [m]; rows with the same boxes, int64 [m], which are those of one tensor for all
            with equal chunks, and so close together; the count for each tensor, int64 [n]).
        """
        kinds = self._kinds(tensor)
        pairs, first, pair = np.unique(kinds * len(boxes) + box, return_index=True, return_inverse=True)
        found = [self._needed(int(tensor[n]), boxes[int(box[n])]) for n in first.tolist()]
        count = np.array([len(f) for f in found], np.int64)
        begin = np.cumsum(count) - count
        counts = count[pair]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        flat = np.concatenate(found) if len(pairs) else np.zeros(0, np.int64)
        inside = flat[np.repeat(begin[pair], counts) + within]
        rows = np.repeat(self._chunks.first[tensor], counts) + inside
        alike = np.repeat(np.array(self._first, np.int64)[kinds], counts) + inside
        return rows, alike, counts

    def _needed(self, tensor: int, box: Box | None) -> Ints:
        """Return the rows that a box needs, counted from the tensor's first."""
        key = int(self._kind[tensor]), box
        if key not in self._rows:
            rows = filled_rows(self._chunks, tensor)
            if box is not None:
                rows = overlapping(self._chunks, rows, box)
            self._rows[key] = rows - self._chunks.first[tensor]
        return self._rows[key]

    def _kinds(self, tensor: Ints) -> Ints:
        c = self._chunks
        for t in tensor[self._kind[tensor] < 0].tolist():
            a, b = int(c.first[t]), int(c.first[t + 1])
            cut = blake3(c.lo[a:b].tobytes())
            cut.update(c.shape[a:b].tobytes())
            self._kind[t] = kind = self._alike.setdefault(cut.digest(), len(self._alike))
            if kind == len(self._first):
                self._first.append(a)
        return self._kind[tensor]


def derived_in(
    tensors: Sequence[int], manifest: Manifest
) -> tuple[dict[int, Derived], list[TensorSpec], list[Ints]]:
    """Return a file's derived tensors by position, their inputs, and the chunk rows of these."""
    if not manifest.derived or manifest.inputs is None:
        return {}, [], []
    here = {n: manifest.derived[t] for n, t in enumerate(tensors) if t in manifest.derived}
    if not here:
        return {}, [], []
    used = list(dict.fromkeys(i for node in here.values() for i in node.inputs))
    place = {i: n for n, i in enumerate(used)}
    nodes = {n: replace(d, inputs=tuple(place[i] for i in d.inputs)) for n, d in here.items()}
    chunks = manifest.inputs.chunks
    return nodes, [manifest.inputs.tensors[i] for i in used], [filled_rows(chunks, i) for i in used]


def filled_rows(chunks: Chunks, tensor: int) -> Ints:
    """Return the rows of a tensor's chunks that are not empty."""
    span = np.arange(chunks.first[tensor], chunks.first[tensor + 1])
    return span[every(chunks.shape.take(span, axis=0) > 0)]


def overlapping(chunks: Chunks, rows: Ints, box: Box) -> Ints:
    """Return the rows whose chunks share elements with a box of their tensor."""
    rank = len(box.shape)
    at = chunks.lo.take(rows, axis=0)[:, :rank]
    common = (at < np.array(box.end)) & (
        at + chunks.shape.take(rows, axis=0)[:, :rank] > np.array(box.offset)
    )
    return rows[every(common)]


def behind(columns: tuple[Any, ...], chunks: Chunks, spans: Sequence[Ints]) -> tuple[Any, ...]:
    """Append rows of other chunks of the same source to columns (lo, shape, item, view)."""
    picked = np.concatenate(spans)
    more = (
        chunks.lo.take(picked, axis=0),
        chunks.shape.take(picked, axis=0),
        chunks.item[picked],
        None if chunks.view is None else chunks.view[picked],
    )
    return tuple(None if a is None else np.concatenate([a, b]) for a, b in zip(columns, more, strict=True))


def picked_rows(chunks: Chunks, rows: Ints, alike: Ints) -> tuple[Any, ...]:
    """Return (lo, shape, item, view) of rows; ``alike`` are rows with the same boxes."""
    view = None if chunks.view is None else chunks.view[rows]
    return chunks.lo.take(alike, axis=0), chunks.shape.take(alike, axis=0), chunks.item[rows], view


def gather_rows(chunks: Chunks, rows: list[Ints], twins: Chunks, twin_rows: list[Ints]) -> tuple[Any, ...]:
    """Return (lo, shape, item, view) of the rows of each tensor, its twin's rows behind its own."""
    parts: list[tuple[Chunks, Ints]] = [(chunks, np.zeros(0, np.int64))]
    for own, twin in zip(rows, twin_rows, strict=True):
        parts += [(chunks, own), (twins, twin)]
    rank = chunks.lo.shape[1]
    lo = np.concatenate([c.lo[r, :rank] for c, r in parts])
    shape = np.concatenate([c.shape[r, :rank] for c, r in parts])
    item = np.concatenate([c.item[r] for c, r in parts])
    view = None
    if chunks.view is not None and twins.view is not None:
        view = np.concatenate([c.view[r] for c, r in parts if c.view is not None])
    return lo, shape, item, view


class ItemSubsets:
    """Selects the items that an output file uses.

    The files of most ranks use as many items, in the same order: it is sorted once, and checked.
    """

    def __init__(self, items: Items) -> None:
        self._items = replace(
            items,
            file=_constant(items.file),
            start=_constant(items.start),
            length=_constant(items.length),
            envelope=_constant(items.envelope),
            codec=_constant(items.codec),
            crc32=_constant(items.crc32),
        )
        self._orders: dict[int, tuple[Ints, Ints]] = {}  # by number of uses: what sorts them, and its inverse

    def of(self, used: Ints) -> tuple[Items, Ints, Ints]:
        """Return the used items, each use in their numbering, and their numbers in the source."""
        items = self._items
        kept, renumbered = self._numbered(used)
        member = (
            {n: items.member[int(i)] for n, i in enumerate(kept.tolist()) if int(i) in items.member}
            if items.member
            else {}
        )
        picked = Items(
            _picked(items.file, kept),
            _picked(items.start, kept),
            _picked(items.length, kept),
            _picked(items.envelope, kept),
            _picked(items.codec, kept),
            _picked(items.crc32, kept),
            items.codecs,
            member,
            None if items.holds is None else items.holds[kept],
        )
        return picked, renumbered, kept

    def _numbered(self, used: Ints) -> tuple[Ints, Ints]:
        """Return the numbers in use, ascending, and for each use the position of its number."""
        order, inverse = self._orders.get(len(used), (None, used))
        if order is not None:
            kept = used[order]
            if (kept[1:] > kept[:-1]).all():
                return kept, inverse
        order = np.argsort(used, kind="stable")
        kept = used[order]
        if not (kept[1:] > kept[:-1]).all():
            kept, renumbered = np.unique(used, return_inverse=True)
            return kept.astype(np.int64), renumbered.reshape(-1).astype(np.int64)
        inverse = np.empty(len(order), np.int64)
        inverse[order] = np.arange(len(order))
        if len(self._orders) >= _ORDERS and len(used) not in self._orders:
            del self._orders[next(iter(self._orders))]
        self._orders[len(used)] = order, inverse
        return kept, inverse


def _constant(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a column, as a view of one element if all are equal: others are far apart in memory."""
    if len(column) and (column == column[0]).all():
        return np.broadcast_to(column[:1], column.shape)
    return column


def _picked(column: npt.NDArray[Any], rows: Ints) -> npt.NDArray[Any]:
    """Return rows of a column; one element, repeated, is not looked up row by row."""
    return column.take(rows) if column.strides[0] else column[: len(rows)].copy()


def subset_files(files: Sequence[StoredFile], items: Items) -> tuple[tuple[StoredFile, ...], Items]:
    """Return the files that items use, and the items with the new numbers of these files."""
    used = np.zeros(len(files), np.bool_)
    used[items.file] = True
    kept = np.flatnonzero(used)
    moved = Items(
        (np.cumsum(used) - 1)[items.file],
        items.start,
        items.length,
        items.envelope,
        items.codec,
        items.crc32,
        items.codecs,
        items.member,
        items.holds,
    )
    return tuple(files[i] for i in kept.tolist()), moved


def followers_of(
    manifest: Manifest, twins: Manifest | None, ties: Sequence[tuple[str, str]]
) -> dict[int, list[int]]:
    """Return position of a kept tensor -> positions of its twins."""
    found: dict[int, list[int]] = {}
    if twins is not None:
        for n, (_, stays) in enumerate(ties):
            found.setdefault(manifest.index[stays], []).append(n)
    return found
