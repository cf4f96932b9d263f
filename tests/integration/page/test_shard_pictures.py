"""Pictures: boxes of ranks, holes and overlaps of real checkpoints; graphs of lineage."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ckptcore.catalog.types import CheckpointRow, ConversionRow, Lineage, LineageStep
from ckptcore.checking.examine import inspect
from ckptcore.errors import UsageError
from ckptcore.page import pictures
from ckptcore.page.shards import Manifests, ShardBox, laid_out, owner_of, shard_map

FIXTURES = Path(__file__).parents[2] / "fixtures"
AT = datetime(2026, 1, 1, tzinfo=UTC)


def box(rank: int, lo: tuple[int, ...], shape: tuple[int, ...]) -> ShardBox:
    return ShardBox(f"rank {rank}", f"__{rank}_0.distcp", lo, shape)


def test_a_real_checkpoint_is_complete() -> None:
    manifest = inspect(str(FIXTURES / "torch" / "dcp_dims_4r" / "ckpt"))
    for spec in manifest.tensors:
        found = shard_map(manifest, spec.fqn)
        assert (found.holes, found.overlaps) == (0, 0), spec.fqn
        stored = sum(len(range(1)) if not b.shape else _product(b.shape) for b in found.boxes)
        assert stored == _product(spec.shape), spec.fqn
    cut = [shard_map(manifest, s.fqn) for s in manifest.tensors if len(s.shape) == 2]
    assert {owner for found in cut for owner in found.owners} == {f"rank {n}" for n in range(4)}


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def test_holes_and_overlaps_are_counted_and_red() -> None:
    found = laid_out(
        "w", "float32", (8, 6), [box(0, (0, 0), (4, 6)), box(1, (4, 0), (2, 4)), box(2, (3, 0), (2, 2))]
    )
    assert (found.holes, found.overlaps) == (2 * 6 + 2 * 2, 2 + 2)
    picture = str(pictures.shards(found))
    assert picture.count('class="hole"') == sum(cell.times == 0 for cell in found.cells)
    assert picture.count('class="overlap"') == sum(cell.times > 1 for cell in found.cells)
    area = sum(cell.height * cell.width for cell in found.cells)
    assert area == 48
    assert "16 elements missing, 4 stored more than once" in picture


def test_a_hole_behind_the_drawn_dimensions_is_seen() -> None:
    boxes = [box(0, (0, 0, 0), (2, 4, 4)), box(1, (2, 0, 0), (1, 4, 2))]
    found = laid_out("w", "float32", (3, 4, 4), boxes)
    assert found.holes == 8
    assert any(cell.times == 0 for cell in found.cells)


@pytest.mark.parametrize(("shape", "cells"), [((), 1), ((5,), 1), ((0, 4), 0), ((3, 0), 0)])
def test_small_and_empty_tensors(shape: tuple[int, ...], cells: int) -> None:
    found = laid_out("w", "float32", shape, [box(0, (0,) * len(shape), shape)])
    assert (found.holes, found.overlaps, len(found.cells)) == (0, 0, cells)
    assert "<script" not in str(pictures.shards(found))


def test_too_many_parts_are_refused() -> None:
    boxes = [box(n, (n,) * 4, (1,) * 4) for n in range(200)]
    with pytest.raises(UsageError, match="is cut into"):
        laid_out("w", "float32", (200,) * 4, boxes)


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        ("__12_3.distcp", "rank 12"),
        ("model/rank3.pt", "rank 3"),
        ("mp_rank_01_002/model_optim_rng.pt", "rank 01_002"),
        ("zero_pp_rank_3_mp_rank_00_optim_states.pt", "rank 3"),
        ("model_world_size_4_rank_2.pt", "rank 2"),
        ("model-00001-of-00004.safetensors", "model-00001-of-00004.safetensors"),
    ],
)
def test_ranks_in_file_names(file: str, owner: str) -> None:
    assert owner_of(file) == owner


def test_a_checkpoint_that_changed_is_not_drawn(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "torch" / "dcp_dims_4r" / "ckpt", tmp_path / "a")
    manifest = inspect(str(tmp_path / "a"))
    kept = Manifests()
    digest = manifest.digest.rpartition(":")[2]
    assert kept.read(str(tmp_path / "a"), digest).tensors == manifest.tensors
    with pytest.raises(UsageError, match="is another one now"):
        kept.read(str(tmp_path / "a"), "0" * 64)


def _row(n: int) -> CheckpointRow:
    return CheckpointRow(
        f"id-{n}",
        "derived",
        "dcp",
        f"/c/<{n}>",
        "present",
        "r",
        n,
        1,
        1,
        1,
        ("f",),
        "m",
        None,
        {},
        AT,
        None,
        None,
        None,
    )


def _conversion(n: int) -> ConversionRow:
    none = (None,) * 2
    return ConversionRow(
        f"v{n}", "export", "succeeded", "/a", "/b", {}, None, "1", None, AT, *none, None, None, None, None, {}
    )


def test_a_lineage_of_ten_is_a_graph_without_overlap() -> None:
    rows = [_row(n) for n in range(11)]
    steps = tuple(LineageStep(n + 1, rows[n // 2], _conversion(n), rows[n + 1]) for n in range(10))
    drawn = str(pictures.lineage(Lineage(rows[0], (), steps), lambda row: f"/c/{row.id}"))
    places = re.findall(r'<rect class="node[^"]*" x="(\d+)" y="(\d+)"', drawn)
    assert len(places) == len(set(places)) == 11
    assert drawn.count('class="edge"') == 10
    # No edge is drawn over a label, and each label is before the node that its conversion made.
    assert drawn.rindex('class="edge"') < drawn.index('class="verb"') < drawn.index('class="node')
    labels = re.findall(r'<text class="verb" x="(\d+)" y="(\d+)"', drawn)
    assert len(set(labels)) == 10
    assert {(str(int(x) - 8), str(int(y) + 20)) for x, y in places} > set(labels)
    assert "<0>" not in drawn


def test_a_lineage_that_bites_its_tail_ends() -> None:
    rows = [_row(n) for n in range(3)]
    steps = tuple(LineageStep(1, rows[n], _conversion(n), rows[(n + 1) % 3]) for n in range(3))
    loop = (*steps, LineageStep(1, rows[0], _conversion(9), rows[0]))
    drawn = str(pictures.lineage(Lineage(rows[0], loop, loop), lambda row: "/"))
    assert drawn.count("<rect") == 3
