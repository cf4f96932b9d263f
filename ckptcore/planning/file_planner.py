"""Plan files: one `FilePlan` for each file layout of a writer, one at a time.

Data that files share are computed once: the files of the ranks of a mesh have the same tensors at the same
offsets, with the same bytes around them, and differ in their boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckptcore.core.box import Box
from ckptcore.core.coverage import equal_boxes
from ckptcore.core.file_layout import FileLayout, Literal, Slot
from ckptcore.core.manifest import Chunks, Derived, Ints, Items, Manifest, StoredFile, TensorSpec
from ckptcore.planning.file_forms import FileForm, Forms, SortOrder, Spread
from ckptcore.planning.file_plan import (
    COMPARE,
    ITEM_COLUMNS,
    FilePlan,
    Literals,
    Tensors,
    place_keys,
    stored_tensor,
)
from ckptcore.utils.row_wise import all_rows


def file_plans(
    layouts: Iterable[FileLayout],
    manifest: Manifest,
    written: Sequence[TensorSpec],
    twins: Manifest | None,
    followers: Mapping[int, Sequence[int]],
) -> Iterator[FilePlan]:
    """Yield the plan of each layout.

    Args:
        layouts: File layouts of a writer.
        manifest: The source, under the output's names.
        written: The manifest's tensors as they are written.
        twins: Tensors that are only compared, or None.
        followers: Position of a tensor -> positions of its twins.
    """
    planner = _Planner(manifest, written, twins, followers)
    for n, layout in enumerate(layouts):
        yield planner.plan(n, layout)


class _Planner:
    """Planner of the files of one source. Peak memory: a file's plan, and the data that files share."""

    def __init__(
        self,
        manifest: Manifest,
        written: Sequence[TensorSpec],
        twins: Manifest | None,
        followers: Mapping[int, Sequence[int]],
    ) -> None:
        self._manifest, self._twins, self._followers = manifest, twins, followers
        self._copies = _copies_in(manifest)
        self._repeats = bool(self._copies.any())
        # Inputs of derived tensors have copies of their own, which are compared as well.
        self._copied_inputs = None if manifest.inputs is None else _copies_in(manifest.inputs)
        self._input_followers = _input_followers_of(manifest, twins, followers)
        self._overlaps = _Overlaps(manifest.chunks)
        self._items = ItemSubsets(manifest.items)
        self._rank = max((len(t.shape) for t in written), default=0)
        self._fqns = [t.fqn for t in written]
        self._full = np.ones((len(written), self._rank), np.int64)
        self._ranks = np.array([len(t.shape) for t in written], np.int64)
        shapes: dict[tuple[int, ...], int] = {}
        self._shape = np.zeros(len(written), np.int64)  # equal for tensors of one shape
        for n, spec in enumerate(written):
            self._full[n, : len(spec.shape)] = spec.shape
            self._shape[n] = shapes.setdefault(spec.shape, len(shapes))
        self._shapes = len(shapes)
        self._forms = Forms(self._alike)
        chunks = manifest.chunks
        # Readers that add items as they add chunks: then a chunk has the number of its item.
        self._own_items = bool((chunks.item == np.arange(len(chunks.item))).all())
        spec_dtypes = [t.dtype for t in (*written, *manifest.tensors)]
        self._dtypes = tuple(sorted(set(spec_dtypes)))
        code = {d: n for n, d in enumerate(self._dtypes)}
        codes = np.array([code[d] for d in spec_dtypes], np.int8)
        self._dtype, self._source_dtype = codes[: len(written)], codes[len(written) :]
        # Names, literals and starts of the last few files are mostly those of the next one.
        # A few: files of a mesh come in the order of ranks, whose boxes recur.
        self._names: _Recent[int, tuple[str, ...]] = _Recent(self._names_of)
        self._literals: _Recent[Literal, Literals] = _Recent(Literals.of)
        self._starts: _Recent[Slot, Ints] = _Recent(_start)

    def plan(self, index: int, layout: FileLayout) -> FilePlan:
        """Return the plan of one file."""
        manifest, form = self._manifest, self._forms.of(layout)
        planned, boxes = self._tensors(layout, form)
        columns, spread, first, op = self._reads(form, boxes)
        # Derived tensors have no chunks: what they are computed from is read behind the tensors' own reads.
        nodes, used = _derived_in(layout.tensors, manifest)
        specs: list[TensorSpec] = []
        if manifest.inputs is not None and used:
            specs = [manifest.inputs.tensors[i] for i in used]
            input_columns, op_of_inputs, counts = self._reads_of_inputs(manifest.inputs, used)
            columns, op = _behind(columns, input_columns), np.concatenate([op, op_of_inputs])
            first = np.concatenate([first, first[-1] + np.cumsum(counts)]).astype(np.int64)
        lo, shape, item, view = columns
        # Items are numbered for each file, so that a worker needs nothing of the others.
        items, renumbered, number = self._items.of(item, spread.items)
        files, items = subset_files(manifest.files, items)
        keys = place_keys(items)
        inputs = tuple(stored_tensor(x.fqn, x.dtype, x.shape) for x in specs)
        return FilePlan(
            index,
            layout.path,
            layout.nbytes,
            layout.commit,
            manifest.root,
            planned,
            self._literals.get(layout.literals),
            Chunks(first, lo, shape, renumbered, view),
            op,
            items,
            number,
            files,
            nodes,
            inputs,
            None if keys is None else spread.places.sort(keys),
        )

    def _reads_of_inputs(
        self, inputs: Manifest, used: Sequence[int]
    ) -> tuple[tuple[Any, ...], npt.NDArray[np.int8], Ints]:
        """Return columns, use and count of the chunks of inputs; those of their twins are compared."""
        assert self._copied_inputs is not None  # a manifest with derived tensors has inputs
        twins = inputs if self._twins is None or self._twins.inputs is None else self._twins.inputs
        none = np.zeros(0, np.int64)
        rows = [_filled_rows(inputs.chunks, i) for i in used]
        twin_rows = [
            np.concatenate([none, *(_filled_rows(twins.chunks, f) for f in self._input_followers.get(i, ()))])
            for i in used
        ]
        ops = [
            op
            for tensor_rows, twin in zip(rows, twin_rows, strict=True)
            for op in (self._copied_inputs[tensor_rows].astype(np.int8), np.full(len(twin), COMPARE, np.int8))
        ]
        counts = np.array([len(a) + len(b) for a, b in zip(rows, twin_rows, strict=True)], np.int64)
        return _gather_rows(inputs.chunks, rows, twins.chunks, twin_rows), np.concatenate(ops), counts

    def _alike(self, tensors: Ints) -> Ints:
        """Return a number for each tensor, equal for those of one shape with equal chunks."""
        return self._overlaps.kinds(tensors) * self._shapes + self._shape[tensors]

    def _tensors(self, layout: FileLayout, form: FileForm) -> tuple[Tensors, list[Box | None]]:
        """Return the tensors' columns, and the box of each class: None for entire tensors."""
        tensors = form.tensors
        full = self._full.take(tensors[form.first_of_group], axis=0)
        offset, shape = np.zeros_like(full), full
        boxes: list[Box | None] = [None] * len(full)
        if layout.boxes:
            shape = np.ones_like(full)
            for n, position in enumerate(form.first_of_group.tolist()):
                boxes[n] = b = layout.boxes[position]
                offset[n, : len(b.offset)], shape[n, : len(b.shape)] = b.offset, b.shape
            # A box of the complete tensor is no box: its reads are those of the tensor.
            for n in np.flatnonzero(all_rows(shape == full)).tolist():
                boxes[n] = None
        planned = Tensors(
            self._names.get(layout.tensors),
            self._dtypes,
            self._dtype[tensors],
            self._source_dtype[tensors],
            self._starts.get(layout.slots),
            self._ranks[tensors],
            offset.take(form.group, axis=0),
            shape.take(form.group, axis=0),
            full.take(form.group, axis=0),
        )
        return planned, boxes

    def _names_of(self, tensors: tuple[int, ...]) -> tuple[str, ...]:
        return tuple([self._fqns[t] for t in tensors])

    def _reads(
        self, form: FileForm, boxes: Sequence[Box | None]
    ) -> tuple[tuple[Any, ...], Spread, Ints, npt.NDArray[np.int8]]:
        """Return the chunks that a file reads.

        Returns:
            (columns lo, shape, item, view; where each row comes from; the first row of each tensor; the use
            of each row).

        A chunk named twice in the metadata is read once.
        """
        chunks, tensors = self._manifest.chunks, form.tensors
        first_tensors = tensors[form.first_of_group].tolist()
        group_rows = [self._overlaps.rows(t, box) for t, box in zip(first_tensors, boxes, strict=True)]
        spread = form.spread(np.array([len(rows) for rows in group_rows], np.int64), chunks.first[tensors])
        none = np.zeros(0, np.int64)
        rows = spread.begin + np.concatenate([none, *group_rows])[spread.place]
        # Twins are read only to compare them, behind the tensor's own chunks.
        if self._twins is not None and any(t in self._followers for t in tensors.tolist()):
            tensor_rows = np.split(rows, spread.first[1:-1]) if len(tensors) else []
            cut = [boxes[n] for n in form.group.tolist()]
            columns, first, op = self._with_twins(tensors, cut, tensor_rows, self._twins)
            return columns, spread, first, op
        # The boxes of a class are those of its first tensor, which are few, and close together.
        alike = np.concatenate(
            [none, *(chunks.first[t] + rows for t, rows in zip(first_tensors, group_rows, strict=True))]
        )
        columns = (
            chunks.lo.take(alike, axis=0).take(spread.place, axis=0),
            chunks.shape.take(alike, axis=0).take(spread.place, axis=0),
            rows if self._own_items else chunks.item[rows],
            None if chunks.view is None else chunks.view[rows],
        )
        op = self._copies[rows].astype(np.int8) if self._repeats else np.zeros(len(rows), np.int8)
        return columns, spread, spread.first, op

    def _with_twins(
        self, tensors: Ints, boxes: Sequence[Box | None], rows: list[Ints], twins: Manifest
    ) -> tuple[tuple[Any, ...], Ints, npt.NDArray[np.int8]]:
        """Do as `_reads`, with the chunks of each tensor's twins behind its own."""
        twin_rows: list[Ints] = []
        ops: list[npt.NDArray[np.int8]] = []
        for t, box, span in zip(tensors.tolist(), boxes, rows, strict=True):
            extra = np.concatenate(
                [np.zeros(0, np.int64), *(_filled_rows(twins.chunks, f) for f in self._followers.get(t, ()))]
            )
            if box is not None:
                extra = _overlapping(twins.chunks, extra, box)
            twin_rows.append(extra)
            ops += [self._copies[span].astype(np.int8), np.full(len(extra), COMPARE, np.int8)]
        columns = _gather_rows(self._manifest.chunks, rows, twins.chunks, twin_rows)
        counts = np.array([len(a) + len(b) for a, b in zip(rows, twin_rows, strict=True)], np.int64)
        return columns, _starts_of(counts), np.concatenate(ops)


Part = TypeVar("Part")
Product = TypeVar("Product")
_RECENT = 32  # files of a rank, and of the ranks of a tensor-parallel group: then all come once more


class _Recent(Generic[Part, Product]):
    """What was made of the last few tuples; equal tuples share it."""

    def __init__(self, make: Callable[[tuple[Part, ...]], Product]) -> None:
        self._make = make
        self._products: list[tuple[tuple[Part, ...], Product]] = []

    def get(self, parts: tuple[Part, ...]) -> Product:
        """Return what is made of a tuple."""
        for recent_parts, product in self._products:
            # The last parts of other tuples differ, and comparing all parts takes as long as making.
            if recent_parts is parts or (
                len(recent_parts) == len(parts) and recent_parts[-1:] == parts[-1:] and recent_parts == parts
            ):
                return product
        product = self._make(parts)
        self._products = [(parts, product), *self._products[: _RECENT - 1]]
        return product


def _start(slots: tuple[Slot, ...]) -> Ints:
    """Return the first byte of each tensor, int64 [n]."""
    start = np.zeros(len(slots), np.int64)
    start[[slot.tensor for slot in slots]] = [slot.start for slot in slots]
    return start


def _starts_of(counts: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).astype(np.int64)


def _copies_in(manifest: Manifest) -> npt.NDArray[np.bool_]:
    """Return, per chunk, whether an earlier one has the same elements."""
    copies = np.zeros(len(manifest.chunks), np.bool_)
    copies[[row for _, row in equal_boxes(manifest)]] = True
    return copies


class _Overlaps:
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
            rows = _filled_rows(self._chunks, tensor)
            if box is not None:
                rows = _overlapping(self._chunks, rows, box)
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


def _derived_in(tensors: Sequence[int], manifest: Manifest) -> tuple[dict[int, Derived], list[int]]:
    """Return a file's derived tensors by position, and their inputs by their positions in the manifest's."""
    if not manifest.derived or manifest.inputs is None:
        return {}, []
    derived = {n: manifest.derived[t] for n, t in enumerate(tensors) if t in manifest.derived}
    # Each input once, though several tensors may be computed from it.
    used = list(dict.fromkeys(i for node in derived.values() for i in node.inputs))
    place = {i: n for n, i in enumerate(used)}
    return {n: replace(d, inputs=tuple(place[i] for i in d.inputs)) for n, d in derived.items()}, used


def _filled_rows(chunks: Chunks, tensor: int) -> Ints:
    """Return the rows of a tensor's chunks that are not empty."""
    span = np.arange(chunks.first[tensor], chunks.first[tensor + 1])
    return span[all_rows(chunks.shape.take(span, axis=0) > 0)]


def _overlapping(chunks: Chunks, rows: Ints, box: Box) -> Ints:
    """Return the rows whose chunks share elements with a box of their tensor."""
    rank = len(box.shape)
    lo = chunks.lo.take(rows, axis=0)[:, :rank]
    common = (lo < np.array(box.end)) & (
        lo + chunks.shape.take(rows, axis=0)[:, :rank] > np.array(box.offset)
    )
    return rows[all_rows(common)]


def _behind(columns: tuple[Any, ...], appended: tuple[Any, ...]) -> tuple[Any, ...]:
    """Append other columns (lo, shape, item, view) of the same source."""
    return tuple(
        None if a is None else np.concatenate([a, b]) for a, b in zip(columns, appended, strict=True)
    )


def _gather_rows(chunks: Chunks, rows: list[Ints], twins: Chunks, twin_rows: list[Ints]) -> tuple[Any, ...]:
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
        columns: dict[str, Any] = {name: _constant(getattr(items, name)) for name in ITEM_COLUMNS}
        self._items = replace(items, **columns)

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
        columns: dict[str, Any] = {name: _picked(getattr(items, name), numbers) for name in ITEM_COLUMNS}
        holds = None if items.holds is None else items.holds[numbers]
        return replace(items, **columns, member=member, holds=holds), renumbered, numbers


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
    moved = replace(items, file=(np.cumsum(used) - 1)[items.file])
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


def _input_followers_of(
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
