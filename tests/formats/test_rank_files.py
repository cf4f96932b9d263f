"""Rank files as written here: does torch load them on every rank, and do they read back as they were?"""

from __future__ import annotations

import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckptcore
from ckptcore.sharding import Layout, Mesh, Topology

JOB = Path(__file__).with_name("rank_files_job.py")
MESHES = ["fsdp=1", "fsdp=2", "fsdp=3", "fsdp=4", "fsdp=2,tp=2", "dp_replicate=2,fsdp=2", "pp=2,fsdp=2",
          "fsdp=1,tp=2"]  # fmt: skip


def model() -> dict[str, torch.Tensor]:
    """Uneven, empty and 0-d tensors, and dtypes that few have."""
    torch.manual_seed(3)
    return {
        "embed.weight": torch.randn(11, 6),
        "layers.0.up.weight": torch.randn(9, 6).bfloat16(),
        "layers.0.down.weight": torch.randn(6, 9),
        "layers.0.down.bias": torch.randn(6),
        "layers.0.norm": torch.randn(7),
        "layers.1.norm": torch.randn(2, 5),
        "layers.10.scale": torch.randn(1),
        "none": torch.zeros(0, 4),
        "step": torch.tensor(17.0),
        "count": torch.arange(21).reshape(7, 3),
        "mask": torch.rand(9) > 0.5,
        "wave": torch.randn(5, 2, dtype=torch.complex64),
        "eight": torch.randn(6, 3).to(torch.float8_e4m3fn),
        "wide": torch.randint(0, 9, (5,), dtype=torch.uint16),
        "plain": torch.arange(4),
    }


def layouts(axes: dict[str, int]) -> dict[str, Layout]:
    """How the tensors of `model` lie on a mesh: parameters cut, two of them replicated, pipeline stages."""
    data = tuple(a for a in axes if a in ("dp_replicate", "fsdp"))
    cut = (*(Replicate() for _ in data[1:]), Shard(0))
    stage = {"layers.0": (0,), "layers.1": (1,)} if "pp" in axes else {}
    found = {}
    for name, tensor in model().items():
        at = next(((("pp", s),) for prefix, s in stage.items() if name.startswith(prefix + ".")), ())
        if tensor.ndim and name != "plain":
            found[name] = Layout(data, cut, at)
    if "tp" in axes:
        strided = _StridedShard(0, split_factor=axes["tp"])
        found |= {
            "embed.weight": Layout(("fsdp", "tp"), (strided, Shard(0))),
            "layers.0.up.weight": Layout(("fsdp", "tp"), (strided, Shard(0))),
            "layers.0.down.weight": Layout(("fsdp", "tp"), (Shard(0), Shard(-1))),
            "layers.0.down.bias": Layout(("fsdp", "tp"), (Shard(0), Replicate())),
            "count": Layout(("fsdp", "tp"), (Replicate(), Replicate())),
        }
    return found


@pytest.fixture
def lay_out(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a reshard use this mesh and these layouts, whatever the built-in rules say."""

    def use(axes: dict[str, int], layouts: Any) -> None:
        def made(manifest: Any, *args: Any, **options: Any) -> Topology:
            found = layouts(axes) if callable(layouts) else layouts
            return Topology(Mesh(tuple(axes.items())), found)

        monkeypatch.setattr("ckptcore.compose.lay_out", made)

    return use


def reshard(source: Path, target: Path, mesh: str, to: str = "torch_ranks") -> None:
    ckptcore.convert(str(source), str(target), verb="reshard", to=to, mesh=mesh)


def axes_of(mesh: str) -> dict[str, int]:
    return {name: int(size) for name, size in (part.split("=") for part in mesh.split(","))}


@pytest.mark.parametrize("mesh", MESHES)
def test_torch_loads_every_ranks_file(mesh: str, lay_out: Any, tmp_path: Path) -> None:
    """weights_only=True, placements, meshes and process groups as torch's own, whole tensors bit for bit."""
    axes, truth = axes_of(mesh), model()
    lay_out(axes, layouts)
    torch.save(truth, tmp_path / "truth.pt")
    reshard(tmp_path / "truth.pt", tmp_path / "ckpt", mesh)
    placed = {
        n: (a.axes, tuple(Shard(p.dim % truth[n].ndim) if isinstance(p, Shard) and p.dim < 0 else p
                          for p in a.placements), a.at[0][1] if a.at else ())
        for n, a in layouts(axes).items()
    }  # fmt: skip
    torch.save(placed, tmp_path / "placements.pt")
    done = subprocess.run([sys.executable, str(JOB), str(tmp_path), mesh], capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    manifest = ckptcore.open(str(tmp_path / "ckpt"))
    assert not ckptcore.check(manifest, level="bytes").findings
    assert {t.fqn for t in manifest.tensors} == truth.keys()
    for name, tensor in truth.items():
        found = ckptcore.read(manifest, name)
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    world = prod(axes.values())
    assert len(list((tmp_path / "ckpt").iterdir())) == world + 1
