"""Megatron-Core's own GPTModel resumes from a reshard for its mesh as from the original checkpoint.

Dense, tied embeddings, mixture of experts, and latent attention; on TP, PP with uneven stages, and a virtual
pipeline. The original was saved on tp=2 pp=2 (ep=2 pp=2) by megatron-core 0.19.2.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import megatron_models
import pytest
import torch
from megatron_releases import release_folder
from paths import JOBS
from samples import FIXTURES, unpack

import ckptcore

pytestmark = [pytest.mark.soak, pytest.mark.xdist_group("megatron_resume")]
JOB = JOBS / "megatron_resume_job.py"
SAMPLES = {
    "gpt_llama_tp2pp2_0.19.2": "hf_llama",
    "gpt_qwen2_tied_bias_tp2pp2_0.19.2": "hf_qwen2",
    "gpt_deepseekv3_tp2pp2_0.19.2": "hf_deepseekv3",
    "gpt_mixtral_ep2pp2_0.19.2": "hf_mixtral",
}
DENSE = tuple(SAMPLES)[:2]
UNEVEN = {"num_layers_in_first_pipeline_stage": 1}  # of 4 layers
# (tp, pp, vpp) of the job, the mesh that it was written for, more of the config, samples, releases
JOBS_OF = {
    "tp1": ((1, 1, None), "tp=1", {}, tuple(SAMPLES)),
    "tp2": ((2, 1, None), "tp=2", {}, DENSE),
    "pp2": ((1, 2, None), "pp=2,tp=2", {}, tuple(SAMPLES)),
    "pp2-uneven": ((1, 2, None), "pp=2,tp=1", UNEVEN, DENSE),
    "pp2-virtual": ((1, 2, 2), "pp=2,tp=1", {}, DENSE),
}
RELEASES = ("0.19.2",)  # earlier ones cannot open the originals: these have no common.pt


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of megatron-core in a folder of its own."""
    return release_folder(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest) -> dict[str, Path]:
    """Name -> folder, of samples and truths."""
    cache = request.config.rootpath / ".pytest_cache/samples"
    roots = [unpack(cache, FIXTURES / name) for name in ("megatron-core.tar.zst", "maps/truths.tar.zst")]
    return {p.name: p for root in roots for p in root.iterdir()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", JOBS_OF)
def test_megatrons_own_model_resumes(
    job: str, release: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Weights are the original's, and losses those of a resume from it, bit for bit."""
    (tp, pp, vpp), mesh, more, names = JOBS_OF[job]
    maker, cases = torch.Generator().manual_seed(3), {}
    for name in names:
        source, out = folders[name] / "ckpt", tmp_path / name
        ckptcore.convert(str(source), str(out), verb="reshard", to="torch_dist", mesh=mesh, catalog=False)
        config = json.loads((folders[SAMPLES[name]] / "config.json").read_text())
        fields = (
            megatron_models.megatron_config(config, megatron_models.FAMILIES[config["model_type"]]) | more
        )
        (rows, _), *_ = (
            t.shape for t in ckptcore.open(str(source)).tensors if t.fqn == "embedding.word_embeddings.weight"
        )
        cases[name] = {
            "config": fields,
            "model": megatron_models.gpt_model(config, rows),
            "ids": torch.randint(100, (2, 9), generator=maker),
            "folders": {"original": str(source), "written": str(out)},
        }
    torch.save({"tp": tp, "pp": pp, "vpp": vpp, "cases": cases}, tmp_path / "asked.pt")
    ranks = run(tmp_path, release, tp * pp)
    for name in names:
        for rank in ranks:
            native, ours = rank[name]["original"], rank[name]["written"]
            assert len(ours["tensors"]) > 4
            assert ours == native, name
            assert len(set(ours["losses"])) == (2 if pp == 1 else 0)


def run(folder: Path, release: Path, world: int) -> list[dict[str, Any]]:
    """What each rank of a job found."""
    line = [sys.executable, str(JOB), str(folder / "asked.pt"), str(folder / "answer.json")]
    ranks = [
        subprocess.Popen(
            line,
            env=os.environ | {"PYTHONPATH": str(release), "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    errors = [one.communicate(timeout=500)[1] for one in ranks]
    assert all(one.returncode == 0 for one in ranks), "\n".join(errors)[-4000:]
    found: list[dict[str, Any]] = json.loads((folder / "answer.json").read_text())
    return found
