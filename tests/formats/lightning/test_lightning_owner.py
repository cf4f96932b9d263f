"""Compare with Lightning itself: its consolidation gives the same file, and it loads the written ones.

Needs an interpreter with lightning; ``CKPTCORE_LIGHTNING_PYTHON`` names it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
from lightning_cases import VERSION, differences, fabric, lightning_python, module, official, save, trainer
from paths import JOBS

import ckptcore

JOB = JOBS / "lightning_job.py"
# `meta.pt` as lightning's own tool can read it: with `weights_only`, which knows few classes.
PLAIN = {
    **VERSION,
    "loops": {},
    "callbacks": {"a.b": {"best": torch.tensor(1.5)}},
    "hyper_parameters": {"lr": 0.1},
}


@pytest.fixture(scope="module")
def python() -> str:
    return lightning_python()


def run(python: str, *arguments: str) -> None:
    done = subprocess.run(
        [python, "-W", "ignore", *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def load(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=False))


@pytest.mark.parametrize("kind", ["pytorch", "fabric"])
def test_its_consolidation_gives_the_same(python: str, tmp_path: Path, kind: str) -> None:
    if kind == "pytorch":
        source = trainer(tmp_path / "a.ckpt", "model", PLAIN)
    else:
        source = fabric(tmp_path / "a.ckpt")
        torch.save({"iter": 7, "hparams": {"lr": 0.1}}, source / "meta.pt")
    run(python, "-m", f"lightning.{kind}.utilities.consolidate_checkpoint", str(source))
    ckptcore.convert(str(source), str(tmp_path / "ours"), to="lightning")
    theirs = load(tmp_path / "a.ckpt.consolidated")
    assert differences(theirs, load(tmp_path / "ours")) == []


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> Path:
    """A checkpoint that a Trainer with FSDPStrategy saved on two ranks."""
    name = "lightning_trainer_fsdp_sharded_2r"
    found = next(s for s in request.config.stash[samples.SAMPLES] if s.name == name)
    return found.dcp_folders[0]


@pytest.mark.parametrize("key", ["model", "state_dict"], ids=["FSDP", "ModelParallel"])
def test_a_trainer_resumes_from_the_written_file(python: str, real: Path, tmp_path: Path, key: str) -> None:
    truth = official(real)
    source = real
    if key == "state_dict":  # the same run under the other strategy's key
        meta = {k: v for k, v in truth.items() if k not in ("state_dict", "optimizer_states")}
        state = {key: truth["state_dict"], "optimizer_0": truth["optimizer_states"][0]}
        source = save(tmp_path / "mp.ckpt", state, meta)
    file = tmp_path / "ours.ckpt"
    ckptcore.convert(str(source), str(file), to="lightning")
    assert differences(truth, load(file)) == []
    run(python, str(JOB), "fit", str(file))
    seen = load(Path(f"{file}.state"))
    assert seen["step"] == truth["global_step"]
    assert all(torch.equal(v, truth["state_dict"][k]) for k, v in seen["model"].items())
    (states,) = truth["optimizer_states"]
    for n, name in enumerate(states["param_groups"][0]["params"]):
        if name in states["state"]:
            assert differences(states["state"][name], seen["optimizer"][n], name) == []


def test_fabric_loads_the_written_file(python: str, tmp_path: Path) -> None:
    source = fabric(tmp_path / "ckpt")
    file = tmp_path / "ours.ckpt"
    ckptcore.convert(str(source), str(file), to="lightning")
    run(python, str(JOB), "fabric", str(file))
    seen = load(Path(f"{file}.state"))
    assert all(torch.equal(v, module("")[k]) for k, v in seen["model"].items())
    assert seen["iter"] == 7
    assert seen["rest"] == ["hparams", "list", "optim.sgd"]
