"""Planning: given what is stored and what is wanted, which bytes go where, in which file?

1. The target format arranges the wanted tensors into file layouts (names, offsets, literal bytes).
2. Per output file, the chunks that overlap its tensors become *reads*: a box, the item that holds
   it, and whether it is placed or only compared (replicas, tied tensors).
3. A plan is a folder: ``head.json`` and one frame per file, each readable alone on any worker.

Plans are pure values: equal manifests and targets give equal bytes and one digest. A plan holds
overlapping boxes, never byte runs, so its size is that of the manifest, not of the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckptcore import frame
from ckptcore.dtype import BY_NAME
from ckptcore.errors import DamagedCheckpoint, MalformedCheckpoint, SourceChanged
from ckptcore.formats.base import Arrangement, FileLayout, Format, Literal
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
from ckptcore.paths import Path
from ckptcore.planrows import (
    behind,
    copies_in,
    derived_in,
    followers_of,
    gather_rows,
    held,
    subset,
    subset_files,
)
from ckptcore.selection import told_of
from ckptcore.store import Store

PLACE, COMPARE = 0, 1
HEAD = "head.json"


@dataclass(frozen=True, slots=True)
class Target:
    """What is wanted.

    format: writer's name. single: name of the one output file, or None for a folder.
    max_file_bytes: tensor bytes per file of a folder. dtypes: name -> output dtype, where it
    differs. objects: non-tensor values to carry, JSON form.
    """

    format: str
    single: str | None = None
    max_file_bytes: int = 5_000_000_000
    dtypes: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of an output file.

    name, dtype, shape: as written. start: first byte in the file. source_dtype: as stored, or as
    computed; a cast is needed where it differs.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    source_dtype: str

    @property
    def nbytes(self) -> int:
        return TensorSpec(self.name, self.dtype, self.shape).nbytes


@dataclass(frozen=True)
class FilePlan:
    """Everything a worker needs to write one file.

    index, path, nbytes, commit: see `FileLayout`. tensors: in file order. literals: known bytes.
    reads: chunk columns grouped by tensor; ``reads.item`` points into items. op: int8 per read,
    PLACE or COMPARE. items, files: the parts of the source this file needs. source: its root URL.
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
    files: tuple[StoredFile, ...]
    derived: Mapping[int, Derived] = field(default_factory=dict)
    inputs: tuple[PlannedTensor, ...] = ()

    @cached_property
    def dumped(self) -> bytes:
        """The frame of this file's plan: what is saved, and what the plan's digest covers."""
        r, i = self.reads, self.items
        head = {
            "index": self.index, "path": self.path, "nbytes": self.nbytes, "commit": self.commit,
            "source": self.source,
            "tensors": [[t.name, t.dtype, list(t.shape), t.start, t.source_dtype] for t in self.tensors],
            "literals": [[x.start, len(x.data), [list(c) for c in x.crc_at]] for x in self.literals],
            "files": [[f.path, f.size] for f in self.files],
            "codecs": list(i.codecs), "member": [[k, v] for k, v in sorted(i.member.items())],
        }  # fmt: skip
        if self.derived:
            head["derived"] = dump_derived(self.derived)
            head["inputs"] = [[t.name, t.dtype, list(t.shape)] for t in self.inputs]
        data = np.frombuffer(b"".join(x.data for x in self.literals), np.uint8)
        arrays: dict[str, frame.Array] = {
            "first": r.first, "lo": r.lo, "shape": r.shape, "item": r.item, "op": self.op,
            "i.file": i.file, "i.start": i.start, "i.length": i.length, "i.envelope": i.envelope,
            "i.codec": i.codec, "i.crc32": i.crc32, "literals": data,
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
            tuple(PlannedTensor(n, d, tuple(s), b, e) for n, d, s, b, e in h["tensors"]),
            tuple(literals),
            Chunks(a["first"], a["lo"], a["shape"], a["item"], a.get("view")), a["op"],
            Items(a["i.file"], a["i.start"], a["i.length"], a["i.envelope"], a["i.codec"],
                  a["i.crc32"], tuple(h["codecs"]), dict(h["member"])),
            tuple(StoredFile(p, s) for p, s in h["files"]), load_derived(h.get("derived", [])),
            tuple(PlannedTensor(n, d, tuple(s), 0, d) for n, d, s in h.get("inputs", [])),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A row of the plan's table of files. reads: source bytes it needs."""

    index: int
    path: str
    nbytes: int
    tensors: int
    reads: int


@dataclass(frozen=True)
class Plan:
    """A whole plan: the head, and the file plans while they are in memory.

    digest covers everything that decides the output's bytes.
    """

    source: str
    manifest_digest: str
    target: Target
    files: tuple[PlannedFile, ...]
    renamed: tuple[tuple[str, str], ...]
    cast: tuple[tuple[str, str, str], ...]
    dropped: tuple[tuple[str, str], ...]
    ties: tuple[tuple[str, str], ...]
    bytes_in: int
    bytes_out: int
    digest: str = ""
    extra: tuple[tuple[str, str], ...] = ()
    derived: tuple[tuple[str, str], ...] = ()

    def head(self) -> dict[str, Any]:
        """The JSON of ``head.json``."""
        form = asdict(self)
        form["target"].pop("objects")
        return form


def make_plan(
    manifest: Manifest,
    target: Target,
    writer: Format,
    *,
    twins: Manifest | None = None,
    ties: Sequence[tuple[str, str]] = (),
    renamed: Sequence[tuple[str, str]] = (),
    dropped: Sequence[tuple[str, str]] = (),
    extra: Sequence[tuple[str, str]] = (),
    source: Manifest | None = None,
    paths: Mapping[str, Path] | None = None,
) -> tuple[Plan, tuple[FilePlan, ...]]:
    """The plan that writes every tensor of ``manifest`` as ``target`` wants it.

    twins: tensors, one per tie, whose bytes must equal those of the tie's kept tensor.
    extra: (path, text digest) of small files that go beside the output; they are part of the digest.
    source: the manifest before remapping, when that differs; its digest goes into the plan.
    paths: where names stand in the tree, for writers that nest.
    Raises `DamagedCheckpoint` for a chunk without a place, and what the writer's `arrange` raises.
    """
    stored = (manifest.chunks, *([manifest.inputs.chunks] if manifest.inputs is not None else []))
    if any(bool((chunks.item < 0).any()) for chunks in stored):
        raise DamagedCheckpoint("a chunk of the manifest has no place in any file",
                                findings=manifest.findings)  # fmt: skip
    wanted = [TensorSpec(t.fqn, target.dtypes.get(t.fqn, t.dtype), t.shape) for t in manifest.tensors]
    assert writer.arrange is not None  # the caller asked for a format that writes
    layouts = writer.arrange(
        Arrangement(wanted, target.objects, paths or {}, target.single, target.max_file_bytes)
    )
    copies = copies_in(manifest), None if manifest.inputs is None else copies_in(manifest.inputs)
    followers = followers_of(manifest, twins, ties)
    plans = tuple(
        _file_plan(n, layout, manifest, wanted, copies, twins, followers) for n, layout in enumerate(layouts)
    )
    rows = tuple(PlannedFile(p.index, p.path, p.nbytes, len(p.tensors), _bytes_in(p)) for p in plans)
    cast = tuple(
        (t.fqn, t.dtype, w.dtype) for t, w in zip(manifest.tensors, wanted, strict=True) if t.dtype != w.dtype
    )
    whole = blake3()
    for p in plans:
        whole.update(blake3(p.dumped).digest())
    origin = (source or manifest).digest
    whole.update(frame.canonical_json([origin, target.format, target.single, list(map(list, extra))]))
    plan = Plan(
        manifest.root, origin, target, rows, tuple(renamed), cast, tuple(dropped),
        tuple((a, b) for a, b in ties), sum(r.reads for r in rows), sum(r.nbytes for r in rows),
        whole.hexdigest(), tuple(extra),
        tuple((manifest.tensors[t].fqn, told_of(manifest, t)) for t in sorted(manifest.derived)),
    )  # fmt: skip
    return plan, plans


def save_plan(store: Store, plan: Plan, files: Sequence[FilePlan]) -> None:
    """Writes a plan as a folder; the head comes last, so that a folder with a head is whole."""
    for p in files:
        store.put(file_name(p.index), p.dumped)
    store.put(HEAD, frame.canonical_json(plan.head()))


def load_head(store: Store) -> Plan:
    """The head of a saved plan; raises `MalformedCheckpoint`, `SourceUnreadable`."""
    size = store.size(HEAD)
    if size is None:
        raise MalformedCheckpoint(f"{store.url} holds no plan", hint="make one: ckptcore plan --save")
    try:
        form = json.loads(store.read(HEAD, 0, size))
        target = Target(**form.pop("target"))
        rows = tuple(PlannedFile(**row) for row in form.pop("files"))
        pairs: dict[str, Any] = {
            k: tuple(tuple(r) for r in form.pop(k))
            for k in ("renamed", "cast", "dropped", "ties", "extra", "derived")
        }
        return Plan(target=target, files=rows, **pairs, **form)
    except (ValueError, TypeError, KeyError) as error:
        raise MalformedCheckpoint(f"{store.url}/{HEAD} is damaged: {error}", hint="plan again") from error


def load_file_plan(store: Store, index: int) -> FilePlan:
    """One file's plan of a saved plan."""
    name = file_name(index)
    size = store.size(name)
    if size is None:
        raise SourceChanged(f"{store.url} lacks {name}")
    return FilePlan.load(store.read(name, 0, size))


def file_name(index: int) -> str:
    """Name of a file plan in a plan folder."""
    return f"file-{index:05d}.plan"


def _file_plan(index: int, layout: FileLayout, manifest: Manifest, wanted: Sequence[TensorSpec],
               copies: Any, twins: Manifest | None, followers: dict[int, list[int]]) -> FilePlan:  # fmt: skip
    starts = {slot.tensor: slot.start for slot in layout.slots}
    tensors = tuple(
        PlannedTensor(wanted[t].fqn, wanted[t].dtype, wanted[t].shape, starts[n], manifest.tensors[t].dtype)
        for n, t in enumerate(layout.tensors)
    )
    chunks = manifest.chunks
    rows: list[Ints] = []
    ops: list[npt.NDArray[np.int8]] = []
    twin_rows: list[Ints] = []
    first = [0]
    for t in layout.tensors:
        span = held(chunks, t)  # a chunk named twice in the metadata is read once
        ops.append(copies[0][span].astype(np.int8))
        rows.append(span)
        extra = np.zeros(0, np.int64)
        if twins is not None and t in followers:
            first_of = twins.chunks.first
            extra = np.concatenate([np.arange(first_of[f], first_of[f + 1]) for f in followers[t]])
            extra = extra[(twins.chunks.shape[extra] > 0).all(axis=1)]
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
    inputs = tuple(PlannedTensor(x.fqn, x.dtype, x.shape, 0, x.dtype) for x in specs)
    items, renumbered = subset(manifest.items, reads.item)
    files, items = subset_files(manifest.files, items)
    reads = Chunks(reads.first, reads.lo, reads.shape, renumbered, reads.view)
    return FilePlan(index, layout.path, layout.nbytes, layout.commit, manifest.root, tensors,
                    layout.literals, reads, op, items, files, nodes, inputs)  # fmt: skip


def _bytes_in(plan: FilePlan) -> int:
    if not len(plan.reads):
        return 0
    stored = (*plan.tensors, *plan.inputs)
    width = np.array([BY_NAME[t.source_dtype].itemsize for t in stored], np.int64)
    return int((width[plan.reads.tensor] * np.prod(plan.reads.shape, axis=1)).sum())
