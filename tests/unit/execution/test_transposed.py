"""Large tensors with dims in another order are read in long runs: a few rows at a time have runs of bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptcore
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import Budget
from ckptcore.reading.gather import StoredOrder
from ckptcore.reading.payload import Payload

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.view(2048, 2048).t(),
    "dims turned": lambda t: t.view(8, 512, 1024).permute(2, 0, 1),
    "a part of it": lambda t: t.view(2048, 2048)[:, :1500].t(),
}


def saved(values: torch.Tensor, kind: str, folder: Path) -> str:
    """Write a checkpoint whose manifest has the strides (a pickle), or whose item alone has them (DCP)."""
    if kind == "dcp":
        dcp.save({"w": values}, checkpoint_id=folder / "ckpt")
        return str(folder / "ckpt")
    torch.save({"w": values}, folder / "model.pt")
    return str(folder / "model.pt")


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["torch_save", "dcp"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("workers", [1, 3])
def test_reads_are_as_long_as_pages(view: str, kind: str, workers: int, tmp_path: Path) -> None:
    values = VIEWS[view](torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)))
    source, target = saved(values, kind, tmp_path), str(tmp_path / "out.safetensors")
    reads: list[int] = []
    fill = Payload.fill

    def counted(self: Payload, start: int, into: memoryview, seen: object) -> None:
        reads.append(len(into))
        fill(self, start, into, seen)  # type: ignore[arg-type]

    settings = ckptcore.Settings(workers=workers)
    with mock.patch.object(Payload, "fill", counted):
        ckptcore.convert(source, target, settings=settings)
        written = len(reads)
        compared = ckptcore.diff(source, target, settings=settings)
    assert torch.equal(load_file(target)["w"], values)
    assert compared.equal
    assert written <= 1.5 * values.nbytes / 4096
    assert len(reads) <= 3.5 * values.nbytes / 4096  # the comparison reads the source once more


@pytest.mark.parametrize(
    ("shape", "strides", "rows"),
    [
        ((8192, 8192), (1, 8192), 1024),  # runs of a page
        ((100_000, 100_000), (1, 100_000), 167),  # of as much as a tile has
        ((8192, 8192), (8192, 1), 64),  # row-major, however it came here
        ((512, 8192), (1, 512), 512),  # rows that are one run together: all
        ((8192, 8192), (8200, 1), 64),  # gaps between rows: longer tiles have no longer runs
        ((8192, 8192), (0, 1), 64),  # one row for all
    ],
)
def test_rows_of_a_tile(shape: tuple[int, int], strides: tuple[int, int], rows: int) -> None:
    budget = Budget.of(Settings(memory=512 << 20, workers=2))
    step = budget.step(StoredOrder(0, shape, strides), shape, 4)
    assert step <= budget.tile
    assert step // (4 * shape[1]) == rows
