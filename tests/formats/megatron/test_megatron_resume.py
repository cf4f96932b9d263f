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
import trainer_names
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
EXPERT_RELEASES = ("0.15.3", "0.19.2")
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
    ranks = run(tmp_path, release, cases, tp=tp, pp=pp, vpp=vpp)
    for name in names:
        for rank in ranks:
            native, ours = rank[name]["original"], rank[name]["written"]
            assert len(ours["tensors"]) > 4
            assert ours == native, name
            assert len(set(ours["losses"])) == (2 if pp == 1 else 0)


# Models whose experts are on two ranks, and on one.
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3")
EXACT, LATENT = 1e-5, 1e-3  # of logits whose standard deviation is about 1; latent attention rounds more


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("begun", EXPERT_RELEASES)
def test_ranks_of_experts_begin_from_the_hub(
    begun: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """A strict load on ep=2 has the logits of transformers, and three steps the losses of one rank."""
    transformers: Any = pytest.importorskip("transformers", minversion="5.0")
    cases: dict[str, Any] = {}
    expected: dict[str, torch.Tensor] = {}
    for family in FAMILIES:
        model = trainer_names.tiny_model(family).float()
        model.save_pretrained(tmp_path / f"hub/{family}")
        ids = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(5))
        read = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / f"hub/{family}", dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            expected[family] = read.eval()(ids).logits
        config = model.config.to_dict()
        options = {"to": "torch_dist", "names": "megatron", "verb": "reshard", "catalog": False}
        ckptcore.convert(
            str(tmp_path / f"hub/{family}"), str(tmp_path / family), mesh="ep=2,fsdp=1", **options
        )
        rows = next(
            t.shape[0]
            for t in ckptcore.open(str(tmp_path / family)).tensors
            if t.fqn == "embedding.word_embeddings.weight"
        )
        cases[family] = {
            "config": megatron_models.megatron_config(config, megatron_models.FAMILIES[family]),
            "model": megatron_models.gpt_model(config, rows),
            "ids": ids,
            "folders": {"hub": str(tmp_path / family / "release")},
        }
    folder = release_folder(begun, tmp_path_factory)
    first, second = run(tmp_path, folder, cases, ep=2, steps=3)
    (alone,) = run(tmp_path, folder, cases, steps=3)
    for family, logits in expected.items():
        limit = LATENT if family == "deepseek_v3" else EXACT
        for rank in (first, second, alone):
            answer = torch.tensor(rank[family]["hub"]["logits"])[..., : logits.shape[-1]]
            assert float((answer - logits).abs().max()) < limit, family
        parts = [set(rank[family]["hub"]["tensors"]) for rank in (first, second, alone)]
        assert len(parts[0]) < len(parts[2])  # a rank has a part of the experts
        losses = [[float.fromhex(x) for x in r[family]["hub"]["losses"]] for r in (first, second, alone)]
        assert losses[0] == losses[1]
        assert losses[0] == pytest.approx(losses[2], rel=1e-6)
        assert losses[2][0] > losses[2][1] > losses[2][2]


def run(
    folder: Path,
    release: Path,
    cases: dict[str, Any],
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    steps: int = 2,
) -> list[dict[str, Any]]:
    """What each rank of a job found."""
    asked = {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "steps": steps, "cases": cases}
    torch.save(asked, folder / "asked.pt")
    (folder / "answer.json.store").unlink(missing_ok=True)
    line = [sys.executable, str(JOB), str(folder / "asked.pt"), str(folder / "answer.json")]
    ranks = [
        subprocess.Popen(
            line,
            env=os.environ | {"PYTHONPATH": str(release), "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(tp * pp * ep)
    ]
    errors = [one.communicate(timeout=500)[1] for one in ranks]
    assert all(one.returncode == 0 for one in ranks), "\n".join(errors)[-4000:]
    found: list[dict[str, Any]] = json.loads((folder / "answer.json").read_text())
    return found
