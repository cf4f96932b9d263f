"""Topologies beside torch: every rank gets what FSDP2, tensor, expert and pipeline parallel give it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import topology_job as job
import warm
from paths import JOBS

import ckptcore
from ckptcore.core.box import Box
from ckptcore.planning.rank_layout import lay_out

JOB = JOBS / "topology_job.py"
CASES = [  # eight processes of torch take half a minute to begin on two cores
    pytest.param(ranks, model, mesh, marks=[pytest.mark.soak] if ranks == 8 else [])
    for ranks in (4, 8)
    for mesh in job.MESHES[ranks]
    for model in job.MODELS
    if job.fits(model, mesh)
]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of a job, by its number of ranks; each is run once."""
    made: dict[int, Path] = {}

    def run(ranks: int) -> Path:
        if ranks not in made:
            made[ranks] = tmp_path_factory.mktemp(f"topology{ranks}")
            command = [*warm.python(), str(JOB), str(made[ranks]), "--ranks", str(ranks)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
        return made[ranks]

    return run


def cut(shape: tuple[int, ...], box: Box) -> list[float]:
    full = np.arange(np.prod(shape, dtype=int), dtype=float).reshape(shape)
    flat: list[float] = full[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
    return np.asarray(flat).reshape(-1).tolist()  # type: ignore[no-any-return]


@pytest.mark.xdist_group("topology")
@pytest.mark.parametrize(("ranks", "model", "mesh"), CASES)
def test_every_rank_has_what_we_say(ranks: int, model: str, mesh: str, jobs: Callable[[int], Path]) -> None:
    folder = jobs(ranks) / f"{model}-{mesh}"
    # A stage's own checkpoint has only its layers: names and shapes are those of any mesh without stages.
    saved = (
        folder
        if (folder / "ckpt").exists()
        else next(jobs(ranks).glob(f"{model}-fsdp*")).parent
        / (f"{model}-{'fsdp=4' if ranks == 4 else 'fsdp=4,tp=2'}")
    )
    manifest = ckptcore.open(str(saved / "ckpt"))
    topology = lay_out(manifest, mesh)
    assert topology.mesh.size == ranks
    shapes = {t.fqn.removeprefix("model."): t.shape for t in manifest.tensors if t.fqn.startswith("model.")}
    for rank in range(ranks):
        expected = json.loads((folder / f"rank{rank}.json").read_text())
        found = {}
        for fqn, shape in shapes.items():
            box = topology.boxes(f"model.{fqn}", shape)[rank]
            if box is not None:
                found[fqn] = [list(box.shape), cut(shape, box)]
        # What a rank's empty part has as other dims proves nothing.
        assert found.keys() == expected.keys()
        differ = {f for f in found if found[f] != expected[f] and (found[f][1] or expected[f][1])}
        assert not differ, (rank, sorted(differ))


@pytest.mark.xdist_group("topology")
@pytest.mark.parametrize(("ranks", "model", "mesh"), [c for c in CASES if "pp" not in str(c.values[2])])
def test_chunks_are_those_that_torch_saves(
    ranks: int, model: str, mesh: str, jobs: Callable[[int], Path]
) -> None:
    """Parameters and optimizer state, moments and steps."""
    manifest = ckptcore.open(str(jobs(ranks) / f"{model}-{mesh}" / "ckpt"))
    topology = lay_out(manifest, mesh)
    moments = 0
    for n, spec in enumerate(manifest.tensors):
        rows = slice(manifest.chunks.first[n], manifest.chunks.first[n + 1])
        rank = len(spec.shape)
        saved = {
            Box(tuple(map(int, lo[:rank])), tuple(map(int, shape[:rank])))
            for lo, shape in zip(manifest.chunks.lo[rows], manifest.chunks.shape[rows], strict=True)
        }
        saved = {box for box in saved if box.numel}
        assert {box for _, box in topology.owners(spec.fqn, spec.shape)} == saved, spec.fqn
        moments += spec.fqn.endswith(".exp_avg")
    assert moments == sum(t.fqn.startswith("model.") for t in manifest.tensors)
