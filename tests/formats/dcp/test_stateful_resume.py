"""A job with a scheduler and torchdata's loader resumes from a reshard as from its own checkpoint.

Saved on fsdp=4 by tests/jobs/stateful_job.py, resumed on other meshes. ``CKPTCORE_TORCHTITAN_PYTHON`` names
an interpreter with torch 2.13 and torchdata, which torchtitan requires; without it these are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from driver import Cli
from paths import JOBS

VARIABLE = "CKPTCORE_TORCHTITAN_PYTHON"
JOB = JOBS / "stateful_job.py"
# Mesh -> whether it has as many data-parallel ranks as saved loaders, so that these are carried.
MESHES = {
    "fsdp=4": True,
    "dp_replicate=2,fsdp=2": True,
    "fsdp=2,tp=2": False,
    "fsdp=1": False,
    "pp=2,fsdp=2": False,
    "pp=2,fsdp=4": True,
}

pytestmark = [pytest.mark.soak, pytest.mark.xdist_group("stateful")]


def run(folder: Path, mesh: str, **spec: Any) -> list[dict[str, Any]]:
    """What each rank of a job found."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"no interpreter with torchdata: {VARIABLE} can name one")
    axes = [(a, int(n)) for a, n in (part.split("=") for part in mesh.split(","))]
    asked, out = folder / "spec.json", folder / "out.json"
    asked.write_text(json.dumps({"axes": axes, "out": str(out), **spec}))
    done = subprocess.run([python, "-W", "ignore", str(JOB), str(asked)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("stateful")
    first, *_ = run(folder, "fsdp=4", original=str(folder / "ckpt"))
    return folder / "ckpt", first


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_job_with_scheduler_and_loader_resumes(
    mesh: str, saved: tuple[Path, dict[str, Any]], cli: Cli, tmp_path: Path
) -> None:
    """Weights, moments, schedule and loaders are those that were saved; losses those of a native resume."""
    source, truth = saved
    done = cli("reshard", source, tmp_path / "out", "--to", "dcp", "--mesh", mesh, "--output", "json")
    assert done.code == 0, done
    ranks = run(tmp_path, mesh, original=str(source), written=str(tmp_path / "out"), loaders=MESHES[mesh])
    seen = set()
    for rank in ranks:
        native, ours = rank["original"], rank["written"]
        for name, value in ours["tensors"].items():
            assert value == truth["tensors"][name], name
        seen |= ours["tensors"].keys()
        assert ours["values"] == native["values"]
        assert any(n.startswith("dataloader.dp_rank_") for n in ours["values"]) == MESHES[mesh]
        assert ours["values"]["lr_scheduler.last_epoch"] == "3"
        assert (ours["losses"], ours["after"]) == (native["losses"], native["after"])
    assert seen == truth["tensors"].keys()
    assert any(len(rank["written"]["losses"]) == 2 for rank in ranks)
