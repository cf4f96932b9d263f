"""Universal folders of ours in DeepSpeed itself, beside those of its own converter.

Needs an interpreter with deepspeed 0.19.8 and torch 2.13; ``CKPTCORE_DEEPSPEED_PYTHON`` names it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from library_values import same, values
from paths import JOBS

import ckptcore
from ckptcore.conversion.pipeline import convert
from ckptcore.planning.request import Request

VARIABLE = "CKPTCORE_DEEPSPEED_PYTHON"
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800), pytest.mark.xdist_group("deepspeed")]
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def python() -> str:
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"{VARIABLE} names no interpreter with deepspeed")
    return named


@pytest.fixture
def run(python: str, tmp_path: Path) -> Run:
    def start(**form: Any) -> dict[str, Any]:
        out = tmp_path / "out.pt"
        out.unlink(missing_ok=True)
        job = [python, "-W", "ignore", str(JOBS / "deepspeed_job.py"), json.dumps({**form, "out": str(out)})]
        done = subprocess.run(job, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return torch.load(out, weights_only=False) if out.exists() else {}

    return start


def universal(source: Path, stage: int) -> Path:
    target = source.parent / f"ours{stage}"
    form = "deepspeed_universal_zero3" if stage == 3 else "deepspeed_universal"
    convert(Request(str(source), str(target), to=form), catalog_url=False)
    return target


def masters_and_moments(known: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{name}.{key}": value for name, states in known.items() for key, value in states.items()}


def require_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = masters_and_moments(one["known"]), masters_and_moments(other["known"])
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def require_of(loaded: dict[str, Any], source: Path, model: str, state: str) -> None:
    """Masters and moments in the engine are those of a checkpoint, bit for bit."""
    manifest = ckptcore.open(str(source))
    for name, states in loaded["known"].items():
        assert torch.equal(states["fp32"], ckptcore.read(manifest, f"{model}{name}")), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(states[key], ckptcore.read(manifest, f"{state}{name}.{key}")), (name, key)


@pytest.mark.parametrize(
    ("stage", "groups", "bf16"), [(1, 2, False), (2, 1, True), (2, 2, True), (3, 1, False), (3, 1, True)]
)
def test_other_world_size_as_by_deepspeeds_own_converter(
    python: str, run: Run, tmp_path: Path, stage: int, groups: int, bf16: bool
) -> None:
    root = tmp_path / "run"
    run(world=2, stage=stage, groups=groups, bf16=bf16, steps=3, save=str(root))
    own = [python, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(root / "save")]
    command = [*own, "--output_folder", str(root / "save_universal")]
    subprocess.run(
        command, check=True, capture_output=True, timeout=600, env={**os.environ, "DS_BUILD_OPS": "0"}
    )
    ours = universal(root / "save", stage)
    # The engine starts from other weights and options: nothing may be left of them.
    start = {
        "world": 4,
        "stage": stage,
        "groups": groups,
        "bf16": bf16,
        "universal": True,
        "seed": 9,
        "lr": 0.5,
    }
    theirs = run(**start, steps=5, load=str(root))
    found = run(**start, steps=5, load=str(ours))
    require_equal(found, theirs)
    require_of(found, root / "save", "module.", "optimizer.state.")
    assert found["options"] == theirs["options"]
    assert found["losses"] == theirs["losses"]
    assert (found["start"], found["epoch"], found["client"]) == (3, theirs["epoch"], {"mine": {"a": 1}})


@pytest.mark.parametrize(("stage", "to"), [(2, 3), (3, 2)])
def test_other_stage(run: Run, tmp_path: Path, stage: int, to: int) -> None:
    root = tmp_path / "run"
    run(world=2, stage=stage, steps=3, save=str(root))
    unbroken = run(world=2, stage=stage, steps=8)
    ours = universal(root / "save", to)
    found = run(world=2, stage=to, universal=True, steps=5, load=str(ours), seed=9, lr=0.5)
    require_of(found, root / "save", "module.", "optimizer.state.")
    assert found["losses"] == pytest.approx(unbroken["losses"][3:], rel=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_fsdp2_to_deepspeed(run: Run, tmp_path: Path, stage: int) -> None:
    root = tmp_path / "run"
    run(world=2, fsdp2=True, steps=3, save=str(root / "save"))
    ours = universal(root / "save", stage)
    found = run(
        world=2, stage=stage, universal=True, steps=5, load=str(ours), seed=9, lr=0.5, scheduler=False
    )
    require_of(found, root / "save", "model.", "optim.state.")
    assert [g["weight_decay"] for g in found["options"]] == [0.05]


@pytest.mark.parametrize("stage", [2, 3])
def test_values_of_libraries_reach_the_engine(run: Run, tmp_path: Path, stage: int) -> None:
    """What a job keeps in ``client_state`` comes back from `load_checkpoint` as what it was."""
    root = tmp_path / "run"
    kept = {key: value for key, value in values().items() if key != "simple"}  # read as a Namespace
    torch.save(kept, tmp_path / "client.pt")
    run(world=2, stage=stage, steps=1, save=str(root), client=str(tmp_path / "client.pt"))
    ours = universal(root / "save", stage)
    found = run(world=4, stage=stage, universal=True, steps=1, load=str(ours))["client"]["mine"]
    assert found.keys() == kept.keys()
    assert [key for key, value in kept.items() if not same(found[key], value)] == []
