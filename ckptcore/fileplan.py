"""File plans: what does a worker need to write one output file, and nothing else?

A `FilePlan` names the tensors of its file, whole or the boxes of them that one rank's file holds; the
chunks that overlap those (*reads*), in the coordinates of the whole tensor; and the items and files
of the source that lie under them. It is one frame, readable alone on any worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore import frame
from ckptcore.box import Box
from ckptcore.dtype import BY_NAME
from ckptcore.formats.base import FileLayout, Literal
from ckptcore.manifest import (
    Chunks,
    Derived,
    Ints,
    Items,
    Manifest,
    StoredFile,
    TensorSpec,
    dump_derived,
    load_derived,
)
from ckptcore.planrows import (
    behind,
    copies_in,
    derived_in,
    gather_rows,
    held,
    overlapping,
    subset,
    subset_files,
)

PLACE, COMPARE = 0, 1


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of an output file, or the box of it that the file holds.

    name, dtype: as written. shape: of what the file holds. start: first byte in the file.
    source_dtype: as stored, or as computed; a cast is needed where it differs. offset: where the box
    begins in the tensor. full: the tensor's shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    source_dtype: str
    offset: tuple[int, ...]
    full: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return TensorSpec(self.name, self.dtype, self.shape).nbytes

    @property
    def box(self) -> Box:
        """What the file holds of the tensor."""
        return Box(self.offset, self.shape)


@dataclass(frozen=True)
class FilePlan:
    """Everything a worker needs to write one file.

    index, path, nbytes, commit: see `FileLayout`. tensors: in file order. literals: known bytes.
    reads: chunk columns grouped by tensor; ``reads.item`` points into items. op: int8 per read,
    PLACE or COMPARE. items, files: the parts of the source this file needs; number: what the items are
    called in the source's manifest. source: its root URL.
    derived: tensor -> how it is computed. inputs: what from, as stored; their reads are grouped
    behind those of the tensors.
    """

    index: int
    path: str
    nbytes: int
    commit: bool
    source: str
    tensors: tuple[PlannedTensor, ...]
    literals: tuple[Literal, ...]
    reads: Chunks
    op: npt.NDArray[np.int8]
    items: Items
    number: Ints
    files: tuple[StoredFile, ...]
    derived: Mapping[int, Derived] = field(default_factory=dict)
    inputs: tuple[PlannedTensor, ...] = ()

    @cached_property
    def bytes_in(self) -> int:
        """Source bytes of the elements it reads."""
        if not len(self.reads):
            return 0
        stored = (*self.tensors, *self.inputs)
        of, rank = self.reads.tensor, self.reads.lo.shape[1]
        lo, hi = np.zeros((len(stored), rank), np.int64), np.ones((len(stored), rank), np.int64)
        for n, t in enumerate(stored):
            lo[n, : len(t.shape)], hi[n, : len(t.shape)] = t.offset, t.box.end
        begin = np.maximum(self.reads.lo, lo[of])
        end = np.minimum(self.reads.lo + self.reads.shape, hi[of])
        width = np.array([BY_NAME[t.source_dtype].itemsize for t in stored], np.int64)
        return int((width[of] * np.prod(end - begin, axis=1)).sum())

    @cached_property
    def dumped(self) -> bytes:
        """The frame of this file's plan: what is saved, and what the plan's digest covers."""
        r, i = self.reads, self.items
        head = {
            "index": self.index, "path": self.path, "nbytes": self.nbytes, "commit": self.commit,
            "source": self.source,
            "tensors": [_tensor_row(t) for t in self.tensors],
            "literals": [[x.start, len(x.data), [list(c) for c in x.crc_at]] for x in self.literals],
            "files": [[f.path, f.size] for f in self.files],
            "codecs": list(i.codecs), "member": [[k, v] for k, v in sorted(i.member.items())],
        }  # fmt: skip
        if self.derived:
            head["derived"] = dump_derived(self.derived)
            head["inputs"] = [_tensor_row(t) for t in self.inputs]
        data = np.frombuffer(b"".join(x.data for x in self.literals), np.uint8)
        arrays: dict[str, frame.Array] = {
            "first": r.first, "lo": r.lo, "shape": r.shape, "item": r.item, "op": self.op,
            "i.file": i.file, "i.start": i.start, "i.length": i.length, "i.envelope": i.envelope,
            "i.codec": i.codec, "i.crc32": i.crc32, "number": self.number, "literals": data,
        }  # fmt: skip
        if r.view is not None:
            arrays["view"] = r.view
        return frame.dump(head, arrays)

    @classmethod
    def load(cls, data: bytes) -> FilePlan:
        """The plan of a frame; raises `MalformedCheckpoint`."""
        h, a = frame.load(data)
        raw, at, literals = a["literals"].tobytes(), 0, []
        for start, length, patches in h["literals"]:
            literals.append(Literal(start, raw[at : at + length], tuple((p, t) for p, t in patches)))
            at += length
        return cls(
            h["index"], h["path"], h["nbytes"], h["commit"], h["source"],
            tuple(_tensor_of(row) for row in h["tensors"]), tuple(literals),
            Chunks(a["first"], a["lo"], a["shape"], a["item"], a.get("view")), a["op"],
            Items(a["i.file"], a["i.start"], a["i.length"], a["i.envelope"], a["i.codec"],
                  a["i.crc32"], tuple(h["codecs"]), dict(h["member"])), a["number"],
            tuple(StoredFile(p, s) for p, s in h["files"]), load_derived(h.get("derived", [])),
            tuple(_tensor_of(row) for row in h.get("inputs", [])),
        )  # fmt: skip


def file_plans(
    layouts: Sequence[FileLayout],
    manifest: Manifest,
    wanted: Sequence[TensorSpec],
    twins: Manifest | None,
    followers: Mapping[int, Sequence[int]],
) -> Iterator[FilePlan]:
    """The plan of each layout.

    wanted: the manifest's tensors as they are written. twins: tensors that are only compared.
    followers: position of a tensor -> positions of its twins.
    """
    copies = copies_in(manifest)
    inputs = None if manifest.inputs is None else copies_in(manifest.inputs)
    for n, layout in enumerate(layouts):
        yield _file_plan(n, layout, manifest, wanted, (copies, inputs), twins, followers)


def _file_plan(index: int, layout: FileLayout, manifest: Manifest, wanted: Sequence[TensorSpec],
               copies: Any, twins: Manifest | None, followers: Mapping[int, Sequence[int]]
               ) -> FilePlan:  # fmt: skip
    tensors = tuple(_planned(layout, manifest, wanted))
    chunks = manifest.chunks
    rows: list[Ints] = []
    ops: list[npt.NDArray[np.int8]] = []
    twin_rows: list[Ints] = []
    first = [0]
    for t, planned in zip(layout.tensors, tensors, strict=True):
        span = held(chunks, t)  # a chunk named twice in the metadata is read once
        if planned.shape != planned.full:
            span = overlapping(chunks, span, planned.box)
        ops.append(copies[0][span].astype(np.int8))
        rows.append(span)
        extra = np.zeros(0, np.int64)
        if twins is not None and t in followers:
            extra = np.concatenate([held(twins.chunks, f) for f in followers[t]])
            extra = overlapping(twins.chunks, extra, planned.box)
        twin_rows.append(extra)
        ops.append(np.full(len(extra), COMPARE, np.int8))
        first.append(first[-1] + len(span) + len(extra))
    nodes, specs, spans = derived_in(layout.tensors, manifest)
    columns = gather_rows(chunks, rows, twins.chunks if twins is not None else None, twin_rows)
    if manifest.inputs is not None and nodes:
        columns = behind(columns, manifest.inputs.chunks, spans)
        ops += [copies[1][span].astype(np.int8) for span in spans]
        first += (first[-1] + np.cumsum([len(span) for span in spans])).tolist()
    op = np.concatenate(ops).astype(np.int8) if ops else np.zeros(0, np.int8)
    reads = Chunks(np.array(first, np.int64), *columns)
    inputs = tuple(_whole(x, x.dtype, 0, x.dtype) for x in specs)
    items, renumbered, number = subset(manifest.items, reads.item)
    files, items = subset_files(manifest.files, items)
    reads = Chunks(reads.first, reads.lo, reads.shape, renumbered, reads.view)
    return FilePlan(index, layout.path, layout.nbytes, layout.commit, manifest.root, tensors,
                    layout.literals, reads, op, items, number, files, nodes, inputs)  # fmt: skip


def _planned(layout: FileLayout, manifest: Manifest, wanted: Sequence[TensorSpec]) -> Iterator[PlannedTensor]:
    starts = {slot.tensor: slot.start for slot in layout.slots}
    for n, t in enumerate(layout.tensors):
        spec, stored = wanted[t], manifest.tensors[t].dtype
        box = layout.boxes[n] if layout.boxes else Box.whole(spec.shape)
        yield PlannedTensor(spec.fqn, spec.dtype, box.shape, starts[n], stored, box.offset, spec.shape)


def _whole(spec: TensorSpec, dtype: str, start: int, source_dtype: str) -> PlannedTensor:
    offset = (0,) * len(spec.shape)
    return PlannedTensor(spec.fqn, dtype, spec.shape, start, source_dtype, offset, spec.shape)


def _tensor_row(t: PlannedTensor) -> list[Any]:
    row = [t.name, t.dtype, list(t.shape), t.start, t.source_dtype]
    return row if t.shape == t.full else [*row, list(t.offset), list(t.full)]


def _tensor_of(row: Sequence[Any]) -> PlannedTensor:
    name, dtype, shape, start, source_dtype, *box = row
    offset, full = box or ([0] * len(shape), shape)
    return PlannedTensor(name, dtype, tuple(shape), start, source_dtype, tuple(offset), tuple(full))
