"""Megatron-Core loads the model part of a folder whose optimizer was left out in place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import closing

import pytest
import torch
import torch.distributed.checkpoint as dcp
import warm
from megatron_releases import release_folder
from paths import JOBS
from safetensors.torch import load_file, save_file
from samples import SAMPLES

from ckptcore.checking.examine import inspect
from ckptcore.conversion.staging.open_staging import open_staging
from ckptcore.formats.base import SourceRange
from ckptcore.operations.retention.thin import stage
from ckptcore.operations.retention.thin_plan import plan_thin, prove_thin
from ckptcore.planning.request import Settings
from ckptcore.store import open_store

MEANS = Settings(memory=32 << 20, workers=1)
SAMPLES_OF = {
    "optim_llama_tp2dp2_dp_reshardable_0.19.2": "0.19.2",
    "optim_llama_tp2dp2_fully_sharded_model_space_0.12.3": "0.12.3",
    "api_torch_dist_0.9.0": "0.12.3",
}


def thinned(place):
    """(plan, folder) of a thinned place."""
    plan = plan_thin(str(place), ("optimizer",))
    staging = open_staging(str(place))
    with staging.lock(make=True):
        stage(staging, plan.uri, plan.manifest.versions, plan.files)
        prove_thin(plan, staging.files.url, MEANS)
    return plan, staging.files.url


@pytest.mark.soak
@pytest.mark.parametrize("name", SAMPLES_OF)
def test_megatron_loads_the_model_of_a_thinned_step(name, pytestconfig, tmp_path_factory, tmp_path):
    release = release_folder(SAMPLES_OF[name], tmp_path_factory)
    sample = next(s for s in pytestconfig.stash[SAMPLES] if s.name == name)
    plan, folder = thinned(shutil.copytree(sample.root / "ckpt", tmp_path / "step-1"))
    kept = {t.fqn for t in inspect(folder).tensors}
    stored = {t.fqn for t in plan.manifest.tensors}
    truth = {n: v for n, v in load_file(sample.root / "expected.safetensors").items() if n in kept}
    assert len(truth) > 5
    assert stored - kept
    save_file(truth, tmp_path / "truth.safetensors")
    answer = tmp_path / "answer.json"
    line = [*warm.python(), str(JOBS / "mcore_job.py"), folder, str(tmp_path / "truth.safetensors"), "{}"]
    ended = subprocess.run(
        [*line, str(answer)],
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(release)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not ended.returncode, ended.stderr[-3000:]
    got = json.loads(answer.read_text())
    assert got["differ"] == []
    assert not [key for key in got["listed"] if "exp_avg" in key or "fp32_param" in key]


def test_four_fifths_of_a_step_with_masters_are_freed(tmp_path):
    """A model in bfloat16 with the masters and moments of its optimizer in float32."""
    state = {}
    for n in range(4):
        name = f"decoder.layers.{n}.mlp.linear_fc1.weight"
        state[name] = torch.randn(256, 512).bfloat16()
        for key in ("fp32_param", "exp_avg", "exp_avg_sq"):
            state[f"optimizer.state.{key}.{name}"] = torch.randn(256, 512)
    place = tmp_path / "iter_0000001"
    dcp.save(state, checkpoint_id=place, no_dist=True)
    torch.save({"iteration": 1, "checkpoint_version": 3.0}, place / "common.pt")
    form = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (place / "metadata.json").write_text(
        json.dumps(form | {"common_backend": "torch", "common_backend_version": 1})
    )
    plan, folder = thinned(place)
    assert 1 - plan.after / plan.before >= 0.8
    assert {t.fqn for t in inspect(folder).tensors} == {n for n in state if n.startswith("decoder")}
    with closing(open_store(folder)) as store:
        assert sum(store.list().values()) == plan.after
    assert all(isinstance(p, SourceRange) for p in plan.files["__0_0.distcp"])
