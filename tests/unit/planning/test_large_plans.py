"""Plans of large jobs: Python work per chunk is bounded, and a file's plan is readable alone.

Counts, not seconds: a call per chunk where columns would do is what makes a plan of millions take hours.
"""

from __future__ import annotations

import cProfile
import gc
import math
import pickle
import pstats
import weakref
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import ckptcore
from ckptcore.conversion.staging.staged_plan import plan_into
from ckptcore.core.box import Box
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import DEFAULT, metered
from ckptcore.errors import DamagedCheckpoint
from ckptcore.planning.compose import Composed, compose
from ckptcore.planning.plan import load_file_plan, load_head
from ckptcore.planning.request import Request
from ckptcore.store import open_store

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import metadata as meta  # noqa: E402
from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402

RANKS, MESH = 64, "fsdp=32"
# A call of a built-in counts like one of a function; a chunk by itself costs 100 to read.
READS_PER_CHUNK, CALLS_PER_PIECE = 25, 20
ITEM = 1400  # bytes that a zip adds, about


def hollow(folder: Path, tensors: int) -> Path:
    """A DCP folder of 64 ranks whose data files are holes."""
    folder.mkdir()
    shapes: dict[str, tuple[int, ...]] = {}
    for n in range(tensors):
        kinds = {"w": (640, 16), "up": (192, 16), "norm": (64,), "odd": (601, 8)}
        name = list(kinds)[n % 4]
        shapes[f"model.layers.{n}.{name}"] = kinds[name]
    listed: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    ends = [0] * RANKS
    for name, shape in shapes.items():
        step, chunks = -(-shape[0] // RANKS), []
        for rank in range(RANKS):
            sizes = (max(min(step, shape[0] - rank * step), 0), *shape[1:])
            if not sizes[0]:
                continue
            offset = torch.Size((rank * step, *(0 for _ in shape[1:])))
            stored[meta.MetadataIndex(name, offset, len(chunks))] = _StorageInfo(
                f"__{rank}_0.distcp", ends[rank], 2 * math.prod(sizes) + ITEM
            )
            ends[rank] += 2 * math.prod(sizes) + ITEM
            chunks.append(meta.ChunkStorageMetadata(offset, torch.Size(sizes)))
        properties = meta.TensorProperties(dtype=torch.bfloat16)
        listed[name] = meta.TensorStorageMetadata(properties, torch.Size(shape), chunks)
    for rank, end in enumerate(ends):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(end)
    paths = {name: ("model", name.removeprefix("model.")) for name in shapes}
    (folder / ".metadata").write_bytes(pickle.dumps(meta.Metadata(listed, paths, stored), protocol=4))
    return folder


def request(source: Path, largest: int = 5_000_000_000) -> Request:
    out = str(source.with_name("out"))
    return Request(str(source), out, "reshard", "dcp", mesh=MESH, max_file_size=largest)


def calls(work: Callable[[], Any]) -> tuple[int, Any]:
    """How many calls of functions, Python's and C's, the work makes."""
    profile = cProfile.Profile()
    result = profile.runcall(work)
    return pstats.Stats(profile).total_calls, result  # type: ignore[attr-defined]


@pytest.mark.alike(1)
@pytest.mark.parametrize("files", [1, 2])  # of each rank; their columns are shared with the next rank's
def test_work_per_chunk(tmp_path: Path, files: int) -> None:
    largest = {1: 5_000_000_000, 2: 70_000}[files]
    few, many = hollow(tmp_path / "few", 40), hollow(tmp_path / "many", 440)
    compose(request(few, largest), ckptcore.open(str(few)))  # imports
    grown: dict[str, tuple[int, int]] = {}
    for source in (few, many):
        reading, manifest = calls(lambda at=source: ckptcore.open(str(at)))
        planning, planned = calls(lambda at=source, m=manifest: compose(request(at, largest), m))
        grown[source.name] = reading, planning
    assert len(planned.plan.files) == 32 * files + 1
    chunks, pieces = 400 * RANKS, 400 * 32
    reading, planning = (b - a for a, b in zip(*grown.values(), strict=True))
    assert reading / chunks < READS_PER_CHUNK
    assert planning / pieces < CALLS_PER_PIECE


def test_each_file_plan_is_readable_alone(tmp_path: Path) -> None:
    source = hollow(tmp_path / "src", 40)
    manifest = ckptcore.open(str(source))
    composed = plan_into(tmp_path / "plan", request(source), manifest)
    store = open_store(str(tmp_path / "plan"))
    head = load_head(store)
    assert head.digest == compose(request(source), manifest).plan.digest == composed.plan.digest
    assert len(head.files) == 33
    written: dict[str, list[Box]] = {}
    for row in head.files:
        plan = load_file_plan(store, row.index)
        assert (plan.path, plan.nbytes, len(plan.tensors)) == (row.path, row.nbytes, row.tensors)
        assert (plan.bytes_in, plan.requests) == (row.reads, row.requests)
        for n, tensor in enumerate(plan.tensors):
            written.setdefault(tensor.name, []).append(tensor.box)
            reads = range(int(plan.reads.first[n]), int(plan.reads.first[n + 1]))
            boxes = [
                Box(tuple(plan.reads.lo[r].tolist()), tuple(plan.reads.shape[r].tolist())) for r in reads
            ]
            rank = len(tensor.shape)
            shared = [Box(b.offset[:rank], b.shape[:rank]).intersect(tensor.box) for b in boxes]
            assert sum(b.numel for b in shared if b) == tensor.box.numel, tensor
        slots = sorted((t.start, t.nbytes) for t in plan.tensors)
        texts = sorted((x.start, len(x.data)) for x in plan.literals)
        at = 0
        for start, length in sorted([*slots, *texts]):
            assert start == at
            at += length
        assert at == plan.nbytes
    for spec in manifest.tensors:
        assert sum(b.numel for b in written[spec.fqn]) == spec.numel


def test_large_plans_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hollow(tmp_path / "src", 40)
    manifest = ckptcore.open(str(source))
    kept = compose(request(source), manifest)
    assert list(kept.files) == list(kept.files)
    monkeypatch.setattr(import_module("ckptcore.planning.plan"), "_KEPT_BYTES", 1000)
    made = compose(request(source), manifest)
    first, second = list(made.files), list(made.files)
    assert first[0] is not second[0]
    assert [p.dumped for p in first] == [p.dumped for p in second] == [p.dumped for p in kept.files]


def test_a_digest_that_is_computed_beside_the_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hollow(tmp_path / "src", 4)
    plan = compose(request(source), ckptcore.open(str(source))).plan
    monkeypatch.setattr(import_module("ckptcore.planning.plan"), "_LARGE", 1)
    assert compose(request(source), ckptcore.open(str(source))).plan == plan


def test_a_plan_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hollow(tmp_path / "src", 8)
    manifest = ckptcore.open(str(source))

    def fails(*_: Any) -> Composed:
        (tmp_path / "plan" / "file-00000.plan").parent.mkdir(exist_ok=True)
        (tmp_path / "plan" / "file-00000.plan").write_bytes(b"begun")
        raise DamagedCheckpoint("no")

    monkeypatch.setattr("ckptcore.conversion.staging.staged_plan.compose", fails)
    with pytest.raises(DamagedCheckpoint):
        plan_into(tmp_path / "plan", request(source), manifest)
    assert not (tmp_path / "plan").exists()


def test_columns_of_a_reading_are_freed_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reference cycle keeps the builder, and no collection of garbage is needed."""
    source = hollow(tmp_path / "src", 8)
    builders: list[weakref.ref[Builder]] = []

    def made() -> Builder:
        builder = Builder()
        builders.append(weakref.ref(builder))
        return builder

    monkeypatch.setattr("ckptcore.formats.dcp.reader.Builder", made)
    gc.disable()
    try:
        manifest = ckptcore.open(str(source))
        assert [builder() for builder in builders] == [None]
    finally:
        gc.enable()
    assert manifest.num_tensors == 8


def test_large_jobs_fit_the_budget_of_metadata(tmp_path: Path) -> None:
    """What a chunk counts for leaves room for the 3.5 million of a 405B model in training."""
    few, many = hollow(tmp_path / "few", 40), hollow(tmp_path / "many", 440)
    used = []
    for folder in (few, many):
        with metered() as meter:
            ckptcore.open(str(folder))
            used.append(meter.taken + meter.kept)
    assert (used[1] - used[0]) / (400 * RANKS) * 3_500_000 < DEFAULT
