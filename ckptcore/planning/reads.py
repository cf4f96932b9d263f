"""Select the chunk rows that an output file reads, with the items and files of the source behind them.

Functions over chunk columns, for `ckptcore.planning.file_plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckptcore.core.box import Box
from ckptcore.core.coverage import equal_boxes
from ckptcore.core.manifest import Chunks, Derived, Ints, Items, Manifest, StoredFile
from ckptcore.planning.file_forms import SortOrder
from ckptcore.utils.row_wise import all_rows


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
        # Number of each tensor's chunk layout, -1 where unknown.
        self._kind = np.full(len(chunks.first) - 1, -1, np.int64)
        self._rows: dict[tuple[int, Box | None], Ints] = {}

    def rows(self, tensor: int, box: Box | None) -> Ints:
        """Return the rows that a box needs, counted from the tensor's first; None for an entire tensor."""
        key = int(self.kinds(np.array([tensor], np.int64))[0]), box
        if key not in self._rows:
            rows = filled_rows(self._chunks, tensor)
            if box is not None:
                rows = overlapping(self._chunks, rows, box)
            self._rows[key] = rows - self._chunks.first[tensor]
        return self._rows[key]

    def kinds(self, tensor: Ints) -> Ints:
        """Return a number for each tensor, which those with equal chunks share."""
        c = self._chunks
        for t in tensor[self._kind[tensor] < 0].tolist():
            a, b = int(c.first[t]), int(c.first[t + 1])
            cut = blake3((b - a).to_bytes(8, "little"))  # scalars alone have columns without a byte
            cut.update(c.lo[a:b].tobytes())
            cut.update(c.shape[a:b].tobytes())
            self._kind[t] = self._alike.setdefault(cut.digest(), len(self._alike))
        return self._kind[tensor]


def derived_in(tensors: Sequence[int], manifest: Manifest) -> tuple[dict[int, Derived], list[int]]:
    """Return a file's derived tensors by position, and their inputs by their positions in the manifest's."""
    if not manifest.derived or manifest.inputs is None:
        return {}, []
    derived = {n: manifest.derived[t] for n, t in enumerate(tensors) if t in manifest.derived}
    # Each input once, though several tensors may be computed from it.
    used = list(dict.fromkeys(i for node in derived.values() for i in node.inputs))
    place = {i: n for n, i in enumerate(used)}
    return {n: replace(d, inputs=tuple(place[i] for i in d.inputs)) for n, d in derived.items()}, used


def filled_rows(chunks: Chunks, tensor: int) -> Ints:
    """Return the rows of a tensor's chunks that are not empty."""
    span = np.arange(chunks.first[tensor], chunks.first[tensor + 1])
    return span[all_rows(chunks.shape.take(span, axis=0) > 0)]


def overlapping(chunks: Chunks, rows: Ints, box: Box) -> Ints:
    """Return the rows whose chunks share elements with a box of their tensor."""
    rank = len(box.shape)
    lo = chunks.lo.take(rows, axis=0)[:, :rank]
    common = (lo < np.array(box.end)) & (
        lo + chunks.shape.take(rows, axis=0)[:, :rank] > np.array(box.offset)
    )
    return rows[all_rows(common)]


def behind(columns: tuple[Any, ...], appended: tuple[Any, ...]) -> tuple[Any, ...]:
    """Append other columns (lo, shape, item, view) of the same source."""
    return tuple(
        None if a is None else np.concatenate([a, b]) for a, b in zip(columns, appended, strict=True)
    )


def gather_rows(chunks: Chunks, rows: list[Ints], twins: Chunks, twin_rows: list[Ints]) -> tuple[Any, ...]:
    """Return (lo, shape, item, view) of the rows of each tensor, its twin's rows behind its own."""
    parts: list[tuple[Chunks, Ints]] = [(chunks, np.zeros(0, np.int64))]
    for tensor_rows, twin in zip(rows, twin_rows, strict=True):
        parts += [(chunks, tensor_rows), (twins, twin)]
    rank = chunks.lo.shape[1]
    lo = np.concatenate([c.lo[r, :rank] for c, r in parts])
    shape = np.concatenate([c.shape[r, :rank] for c, r in parts])
    item = np.concatenate([c.item[r] for c, r in parts])
    view = None
    if chunks.view is not None and twins.view is not None:
        view = np.concatenate([c.view[r] for c, r in parts if c.view is not None])
    return lo, shape, item, view


class ItemSubsets:
    """Selects the items that an output file uses."""

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

    def of(self, used: Ints, order: SortOrder) -> tuple[Items, Ints, Ints]:
        """Return the used items, each use in their numbering, and their numbers in the source.

        order: What sorts the uses of files alike, if there are any.
        """
        items = self._items
        numbers, renumbered = order.number(used)
        member = (
            {n: items.member[int(i)] for n, i in enumerate(numbers.tolist()) if int(i) in items.member}
            if items.member
            else {}
        )
        picked = Items(
            _picked(items.file, numbers),
            _picked(items.start, numbers),
            _picked(items.length, numbers),
            _picked(items.envelope, numbers),
            _picked(items.codec, numbers),
            _picked(items.crc32, numbers),
            items.codecs,
            member,
            None if items.holds is None else items.holds[numbers],
        )
        return picked, renumbered, numbers


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
    file_numbers = np.flatnonzero(used)
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
    return tuple(files[i] for i in file_numbers.tolist()), moved


def followers_of(
    manifest: Manifest, twins: Manifest | None, ties: Sequence[tuple[str, str]]
) -> dict[int, list[int]]:
    """Return position of a kept tensor -> positions of its twins."""
    followers: dict[int, list[int]] = {}
    if twins is not None:
        for n, (_, stays) in enumerate(ties):
            followers.setdefault(manifest.index[stays], []).append(n)
    return followers


def input_followers_of(
    manifest: Manifest, twins: Manifest | None, followers: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """Return position of an input of a kept computed tensor -> positions of the inputs of its twins."""
    input_followers: dict[int, list[int]] = {}
    for tensor, gone in followers.items() if twins is not None else ():
        for twin in gone:
            if tensor in manifest.derived and twins is not None and twin in twins.derived:
                pairs = zip(manifest.derived[tensor].inputs, twins.derived[twin].inputs, strict=True)
                for tensor_input, twin_input in pairs:
                    input_followers.setdefault(tensor_input, []).append(twin_input)
    return input_followers
