"""Plan files: one `FilePlan` for each file layout of a writer, one at a time.

Data that files share are computed once: the files of the ranks of a mesh have the same tensors at the same
offsets, with the same bytes around them, and differ in their boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.manifest import Chunks, Ints, Manifest, TensorSpec
from ckptcore.formats.base import FileLayout, Literal, Slot
from ckptcore.planning.file_plan import COMPARE, FilePlan, Literals, Tensors, stored_tensor
from ckptcore.planning.reads import (
    ItemSubsets,
    Overlaps,
    behind,
    copies_in,
    derived_in,
    filled_rows,
    gather_rows,
    overlapping,
    picked_rows,
    subset_files,
)
from ckptcore.utils.row_wise import every


def file_plans(
    layouts: Iterable[FileLayout],
    manifest: Manifest,
    wanted: Sequence[TensorSpec],
    twins: Manifest | None,
    followers: Mapping[int, Sequence[int]],
) -> Iterator[FilePlan]:
    """Yield the plan of each layout.

    Args:
        layouts: File layouts of a writer.
        manifest: The source, under the output's names.
        wanted: The manifest's tensors as they are written.
        twins: Tensors that are only compared, or None.
        followers: Position of a tensor -> positions of its twins.
    """
    planner = _Planner(manifest, wanted, twins, followers)
    for n, layout in enumerate(layouts):
        yield planner.plan(n, layout)


class _Planner:
    """Planner of the files of one source. Peak memory: a file's plan, and the data that files share."""

    def __init__(
        self,
        manifest: Manifest,
        wanted: Sequence[TensorSpec],
        twins: Manifest | None,
        followers: Mapping[int, Sequence[int]],
    ) -> None:
        self._manifest, self._twins, self._followers = manifest, twins, followers
        self._copies = copies_in(manifest)
        self._repeats = bool(self._copies.any())
        self._copied_inputs = None if manifest.inputs is None else copies_in(manifest.inputs)
        self._overlaps = Overlaps(manifest.chunks)
        self._items = ItemSubsets(manifest.items)
        self._rank = max((len(t.shape) for t in wanted), default=0)
        self._fqns = [t.fqn for t in wanted]
        self._full = np.ones((len(wanted), self._rank), np.int64)
        self._ranks = np.array([len(t.shape) for t in wanted], np.int64)
        for n, spec in enumerate(wanted):
            self._full[n, : len(spec.shape)] = spec.shape
        both = [t.dtype for t in (*wanted, *manifest.tensors)]
        self._dtypes = tuple(sorted(set(both)))
        code = {d: n for n, d in enumerate(self._dtypes)}
        codes = np.array([code[d] for d in both], np.int8)
        self._dtype, self._source_dtype = codes[: len(wanted)], codes[len(wanted) :]
        # Names, literals and starts of the last few files are mostly those of the next one.
        self._names: _Recent[int, tuple[str, ...]] = _Recent(self._names_of)
        self._known: _Recent[Literal, Literals] = _Recent(Literals.of)
        self._starts: _Recent[Slot, Ints] = _Recent(_start)

    def plan(self, index: int, layout: FileLayout) -> FilePlan:
        """Return the plan of one file."""
        manifest, tensors = self._manifest, np.array(layout.tensors, np.int64)
        boxes, box = _distinct_boxes(layout)
        planned, box = self._tensors(layout, tensors, boxes, box)
        columns, first, op = self._reads(tensors, [*boxes, None], box)
        nodes, specs, spans = derived_in(layout.tensors, manifest)
        if manifest.inputs is not None and self._copied_inputs is not None and nodes:
            columns = behind(columns, manifest.inputs.chunks, spans)
            op = np.concatenate([op, *(self._copied_inputs[span].astype(np.int8) for span in spans)])
            ends = first[-1] + np.cumsum([len(span) for span in spans])
            first = np.concatenate([first, ends]).astype(np.int64)
        lo, shape, item, view = columns
        items, renumbered, number = self._items.of(item)
        files, items = subset_files(manifest.files, items)
        inputs = tuple(stored_tensor(x.fqn, x.dtype, x.shape) for x in specs)
        return FilePlan(
            index,
            layout.path,
            layout.nbytes,
            layout.commit,
            manifest.root,
            planned,
            self._known.get(layout.literals),
            Chunks(first, lo, shape, renumbered, view),
            op,
            items,
            number,
            files,
            nodes,
            inputs,
        )

    def _tensors(
        self, layout: FileLayout, tensors: Ints, boxes: Sequence[Box], box: Ints
    ) -> tuple[Tensors, Ints]:
        """Return the tensors' columns, and the box number of each: ``len(boxes)`` for entire tensors."""
        full = self._full.take(tensors, axis=0)
        offset = np.zeros((len(boxes) + 1, self._rank), np.int64)
        shape = np.ones((len(boxes) + 1, self._rank), np.int64)
        for n, b in enumerate(boxes):
            offset[n, : len(b.offset)], shape[n, : len(b.shape)] = b.offset, b.shape
        shape = np.where((box < len(boxes))[:, None], shape.take(box, axis=0), full)
        planned = Tensors(
            self._names.get(layout.tensors),
            self._dtypes,
            self._dtype[tensors],
            self._source_dtype[tensors],
            self._starts.get(layout.slots),
            self._ranks[tensors],
            offset.take(box, axis=0),
            shape,
            full,
        )
        return planned, np.where(every(shape == full), len(boxes), box)

    def _names_of(self, tensors: tuple[int, ...]) -> tuple[str, ...]:
        return tuple([self._fqns[t] for t in tensors])

    def _reads(
        self, tensors: Ints, boxes: Sequence[Box | None], box: Ints
    ) -> tuple[tuple[Any, ...], Ints, npt.NDArray[np.int8]]:
        """Return chunk columns (lo, shape, item, view), the first row of each tensor, and each row's use.

        A chunk named twice in the metadata is read once.
        """
        rows, alike, counts = self._overlaps.rows(tensors, boxes, box)
        if self._twins is not None and any(t in self._followers for t in tensors.tolist()):
            each = np.split(rows, np.cumsum(counts)[:-1]) if len(counts) else []
            return self._with_twins(tensors, [boxes[n] for n in box.tolist()], each, self._twins)
        op = self._copies[rows].astype(np.int8) if self._repeats else np.zeros(len(rows), np.int8)
        return picked_rows(self._manifest.chunks, rows, alike), _starts_of(counts), op

    def _with_twins(
        self, tensors: Ints, boxes: Sequence[Box | None], rows: list[Ints], twins: Manifest
    ) -> tuple[tuple[Any, ...], Ints, npt.NDArray[np.int8]]:
        """Do as `_reads`, with the chunks of each tensor's twins behind its own."""
        twin_rows: list[Ints] = []
        ops: list[npt.NDArray[np.int8]] = []
        for t, box, span in zip(tensors.tolist(), boxes, rows, strict=True):
            extra = np.concatenate(
                [np.zeros(0, np.int64), *(filled_rows(twins.chunks, f) for f in self._followers.get(t, ()))]
            )
            if box is not None:
                extra = overlapping(twins.chunks, extra, box)
            twin_rows.append(extra)
            ops += [self._copies[span].astype(np.int8), np.full(len(extra), COMPARE, np.int8)]
        columns = gather_rows(self._manifest.chunks, rows, twins.chunks, twin_rows)
        counts = np.array([len(a) + len(b) for a, b in zip(rows, twin_rows, strict=True)], np.int64)
        return columns, _starts_of(counts), np.concatenate(ops)


Part = TypeVar("Part")
Made = TypeVar("Made")
_RECENT = 32  # files of a rank, and of the ranks of a tensor-parallel group: then all come once more


class _Recent(Generic[Part, Made]):
    """What was made of the last few tuples; equal tuples share it."""

    def __init__(self, make: Callable[[tuple[Part, ...]], Made]) -> None:
        self._make = make
        self._kept: list[tuple[tuple[Part, ...], Made]] = []

    def get(self, parts: tuple[Part, ...]) -> Made:
        """Return what is made of a tuple."""
        for known, made in self._kept:
            # The last parts of other tuples differ, and comparing all parts takes as long as making.
            if known is parts or (len(known) == len(parts) and known[-1:] == parts[-1:] and known == parts):
                return made
        made = self._make(parts)
        self._kept = [(parts, made), *self._kept[: _RECENT - 1]]
        return made


def _start(slots: tuple[Slot, ...]) -> Ints:
    """Return the first byte of each tensor, int64 [n]."""
    start = np.zeros(len(slots), np.int64)
    start[[slot.tensor for slot in slots]] = [slot.start for slot in slots]
    return start


def _distinct_boxes(layout: FileLayout) -> tuple[list[Box], Ints]:
    """Return the distinct boxes of a file, and the box number of each tensor.

    Boxes are shared between tensors of one shape, and distinguished as objects.
    """
    if not layout.boxes:
        return [], np.zeros(len(layout.tensors), np.int64)
    ids = np.array(list(map(id, layout.boxes)), np.uint64)
    _, first, box = np.unique(ids, return_index=True, return_inverse=True)
    return [layout.boxes[n] for n in first.tolist()], box.reshape(-1).astype(np.int64)


def _starts_of(counts: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).astype(np.int64)
