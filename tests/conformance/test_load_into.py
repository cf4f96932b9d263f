"""Test that a live, sharded state dict gets its own bytes from any other job's checkpoint."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
import warm
from driver import REPOSITORY
from paths import JOBS
from samples import seed_of

LOAD = JOBS / "load_job.py"
APP = JOBS / "app_job.py"


@pytest.mark.parametrize(("saved", "loaded"), [(3, 4), pytest.param(4, 2, marks=pytest.mark.soak)])
def test_load_into(saved: int, loaded: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Saved by so many ranks, loaded by others under other placements."""
    save_and_load(seed_of(request), saved, loaded, 1, tmp_path)


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.soak)]
)
def test_objects_and_values_on_several_ranks(
    ranks: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """torch's own `load` beside it, in the same job."""
    run(APP, seed_of(request) % 1000 + 1, tmp_path / "ckpt", "--ranks", ranks)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(20))
def test_load_into_many(number: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seed = seed_of(request) + number
    rng = random.Random(seed)
    save_and_load(seed, rng.choice([1, 2, 3, 4, 6]), rng.choice([1, 2, 3, 4, 6]), 6, tmp_path)


def save_and_load(seed: int, saved: int, loaded: int, cases: int, folder: Path) -> None:
    print(f"--seed {seed}: saved by {saved} ranks, loaded by {loaded}")
    run(JOBS / "fresh_job.py", seed, folder, "--ranks", saved, "--cases", cases)
    for truth in sorted(folder.glob("*/truth.pt")):
        run(LOAD, seed, truth.parent / "ckpt", truth, "--ranks", loaded)


def run(program: Path, *argv: object) -> None:
    done = subprocess.run(
        [*warm.python(), str(program), *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=dict(os.environ) | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, f"{argv}\n{done.stderr[-3000:]}"
