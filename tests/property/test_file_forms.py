"""Files planned together are as files planned one by one, and as every chunk compared with every box says."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore.core.box import Box
from ckptcore.core.manifest import Envelope, Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.formats.base import Arrangement, FileLayout, Literal, Slot
from ckptcore.formats.dcp.writer import arrange_folder
from ckptcore.planning import file_forms
from ckptcore.planning.file_forms import Forms, SortOrder
from ckptcore.planning.file_plan import COMPARE, PLACE, FilePlan
from ckptcore.planning.file_planner import file_plans
from ckptcore.topology.layout import Mesh, Replicate, Shard, TensorLayout, Topology

Ends = tuple[tuple[int, ...], ...]  # of each dim, where its pieces end


@st.composite
def ends(draw: st.DrawFn, shape: tuple[int, ...]) -> Ends:
    """Cuts of each dim, of which some leave empty pieces."""
    return tuple(tuple(sorted([*draw(st.lists(st.integers(0, n), max_size=3)), n])) for n in shape)


def pieces(cut: Ends) -> list[Box]:
    spans = [list(zip((0, *e[:-1]), e, strict=True)) for e in cut]
    return [Box(tuple(a for a, _ in one), tuple(b - a for a, b in one)) for one in product(*spans)]


@st.composite
def sources(draw: st.DrawFn) -> Manifest:
    """Tensors of a few shapes, cut in a few ways, with copies, in items of any order."""
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=3))
    kinds = [(shape, draw(ends(shape)), draw(st.sampled_from(("bfloat16", "float32")))) for shape in shapes]
    kinds += [(shape, draw(ends(shape)), dtype) for shape, _, dtype in kinds]
    builder, rows = Builder(), []
    for n in range(draw(st.integers(1, 12))):
        shape, cut, dtype = draw(st.sampled_from(kinds))
        tensor = builder.tensor(TensorSpec(f"t.{n}", dtype, shape))
        rows += [(tensor, box) for box in pieces(cut)]
    copied = draw(st.sets(st.integers(0, len(rows) - 1), max_size=3))
    rows = [row for n, row in enumerate(rows) for _ in range(1 + (n in copied))]
    numbers = draw(st.sampled_from((range(len(rows)), draw(st.permutations(range(len(rows)))))))
    files = [builder.file(f"file-{n}", 1 << 20) for n in range(draw(st.integers(1, 4)))]
    for n in range(len(rows)):
        builder.plain_item(files[n % len(files)], draw(st.integers(0, 4)) * 64, 64, Envelope.TORCHZIP)
    for (tensor, box), item in zip(rows, numbers, strict=True):
        builder.chunk(tensor, box.offset, box.shape, item)
    return builder.build("test", "nowhere", {})


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Manifest, list[FileLayout]]:
    """The files of the ranks of a mesh: shapes that do not divide, replicas, several files of a rank."""
    manifest = draw(sources())
    mesh = Mesh((("dp", draw(st.integers(1, 4))), ("tp", draw(st.integers(1, 3)))))
    by: dict[tuple[int, ...], TensorLayout] = {}
    placed = {}
    for spec in manifest.tensors:
        if spec.shape not in by or draw(st.integers(0, 3)) == 0:
            how = [Replicate(), *(Shard(d) for d in range(len(spec.shape)))]
            by[spec.shape] = TensorLayout(("dp", "tp"), tuple(draw(st.sampled_from(how)) for _ in range(2)))
        placed[spec.fqn] = by[spec.shape]
    most = draw(st.sampled_from((40, 300, 1 << 30)))
    kind = draw(st.sampled_from(("torch_save", "safetensors")))
    request = Arrangement(
        list(manifest.tensors),
        max_file_bytes=most,
        topology=draw(st.sampled_from((Topology(mesh, placed), None))),
        serialization=kind,
    )
    return manifest, list(arrange_folder(request))


def as_compared(plan: FilePlan, layout: FileLayout, manifest: Manifest) -> None:
    """Require the reads, items and counts that a comparison of each chunk with each box gives."""
    chunks, items = manifest.chunks, manifest.items
    expected, used, nbytes = [], [], 0
    for n, t in enumerate(layout.tensors):
        spec = manifest.tensors[t]
        mine = layout.boxes[n] if layout.boxes else Box.full(spec.shape)
        assert plan.tensors[n].box == mine
        seen: set[Box] = set()
        for row, chunk in enumerate(manifest.chunks_of(t), int(chunks.first[t])):
            common = chunk.box.intersect(mine)
            if common is not None and common.numel:
                use = COMPARE if chunk.box in seen else PLACE
                seen.add(chunk.box)
                expected.append((n, chunk.box, chunk.item, use))
                used.append(int(chunks.item[row]))
                nbytes += common.numel * {"bfloat16": 2, "float32": 4}[spec.dtype]
    reads, found = plan.reads, []
    for n in range(len(layout.tensors)):
        rank = len(plan.tensors[n].shape)
        for row in range(int(reads.first[n]), int(reads.first[n + 1])):
            box = Box(tuple(reads.lo[row, :rank].tolist()), tuple(reads.shape[row, :rank].tolist()))
            found.append((n, box, int(plan.number[reads.item[row]]), int(plan.op[row])))
    assert found == expected
    assert plan.number.tolist() == sorted(set(used))
    assert [plan.items[n].start for n in range(len(plan.items))] == items.start[plan.number].tolist()
    assert [plan.files[f].path for f in plan.items.file.tolist()] == [
        manifest.files[f].path for f in items.file[plan.number].tolist()
    ]
    assert plan.bytes_in == nbytes
    places = sorted((int(items.file[i]), int(items.start[i]), int(items.length[i])) for i in set(used))
    ranges = sum(
        n == 0 or places[n - 1][0] != file or places[n - 1][1] + places[n - 1][2] < start
        for n, (file, start, _) in enumerate(places)
    )
    assert plan.requests == ranges


@settings(max_examples=40, deadline=None)
@given(layouts())
def test_files_planned_together(made: tuple[Manifest, list[FileLayout]]) -> None:
    manifest, files = made
    together = list(file_plans(files * 2, manifest, manifest.tensors, None, {}))
    for n, plan in enumerate(together):
        layout = files[n % len(files)]
        alone = next(file_plans([layout], manifest, manifest.tensors, None, {}))
        assert plan.dumped == replace(alone, index=n).dumped
        assert (plan.requests, plan.bytes_in) == (alone.requests, alone.bytes_in)
        loaded = FilePlan.load(plan.dumped)
        assert (loaded.requests, loaded.bytes_in) == (plan.requests, plan.bytes_in)
        as_compared(plan, layout, manifest)


@settings(max_examples=10, deadline=None)
@given(layouts())
def test_files_of_forgotten_forms(made: tuple[Manifest, list[FileLayout]]) -> None:
    manifest, files = made
    with mock.patch.object(file_forms, "_MOST", 0):
        few = [plan.dumped for plan in file_plans(files * 2, manifest, manifest.tensors, None, {})]
    assert few == [plan.dumped for plan in file_plans(files * 2, manifest, manifest.tensors, None, {})]


def test_the_oldest_forms_are_forgotten() -> None:
    forms = Forms(lambda tensors: np.zeros(len(tensors), np.int64))
    with mock.patch.object(file_forms, "_MOST", 40):
        for n in range(10):
            tensors = (n, n + 1, n + 2)
            form = forms.of(FileLayout("out", 0, tensors, tuple(Slot(k, 0) for k in tensors), ()))
            form.spread(np.array([4]), np.zeros(3, np.int64))
            assert forms.rows == 15 * min(n + 1, 3)  # 3 tensors and 12 reads each


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=2, max_size=4))
def test_other_tensors_with_one_box(shared: list[list[int]]) -> None:
    """Files with the same tensors, of which now these and now those have one box."""
    builder = Builder()
    file = builder.file("data", 1 << 20)
    for n in range(3):
        tensor = builder.tensor(TensorSpec(f"t.{n}", "float32", (8,)))
        for start in range(0, 8, 2):
            builder.chunk(tensor, (start,), (2,), builder.plain_item(file, start, 8, Envelope.RAW))
    manifest = builder.build("test", "nowhere", {})
    boxes = [Box((0,), (3,)), Box((3,), (3,)), Box((6,), (2,)), Box((0,), (8,))]
    files = [
        FileLayout(
            "out", 0, (0, 1, 2), tuple(Slot(n, 0) for n in range(3)), (), boxes=tuple(boxes[n] for n in one)
        )
        for one in shared
    ]
    for plan, layout in zip(file_plans(files, manifest, manifest.tensors, None, {}), files, strict=True):
        as_compared(plan, layout, manifest)


@given(st.lists(st.lists(st.integers(-3, 9), min_size=4, max_size=4), min_size=1, max_size=6))
def test_orders(columns: list[list[int]]) -> None:
    order = SortOrder()
    for column in columns:
        used = np.array(column, np.int64)
        kept, number = order.number(used)
        numbers, inverse = np.unique(used, return_inverse=True)
        assert (kept.tolist(), number.tolist()) == (numbers.tolist(), inverse.tolist())
        assert order.sort(used).tolist() == np.argsort(used, kind="stable").tolist()


def test_more_files_than_are_remembered() -> None:
    """Files of other tensors, starts and texts than those of the last 32 and 64, forwards and backwards."""
    builder, rng = Builder(), random.Random(4)
    file = builder.file("data", 1 << 30)
    for n in range(8):
        tensor = builder.tensor(TensorSpec(f"t.{n}", "uint8", (8,)))
        for at in range(8):
            builder.chunk(tensor, (at,), (1,), builder.plain_item(file, 512 * n + 64 * at, 64, Envelope.RAW))
    manifest, files = builder.build("test", "nowhere", {}), list[FileLayout]()
    for n in range(100):
        tensors = tuple(sorted(rng.sample(range(8), rng.randint(1, 8))))
        slots = tuple(Slot(k, 9 * k + n % 2) for k in range(len(tensors)))
        boxes = tuple(Box((rng.randint(0, 3),), (rng.randint(1, 4),)) for _ in tensors)
        files.append(FileLayout(f"f-{n}", 99, tensors, slots, (Literal(0, b"%d" % (n % 40)),), boxes=boxes))
    assert len({layout.tensors for layout in files}) > file_forms._FORMS
    files += reversed(files)
    for n, plan in enumerate(file_plans(files, manifest, manifest.tensors, None, {})):
        alone = next(file_plans([files[n]], manifest, manifest.tensors, None, {}))
        assert plan.dumped == replace(alone, index=n).dumped
