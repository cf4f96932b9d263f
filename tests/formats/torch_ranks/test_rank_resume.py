"""Trainers resume from rank files that were saved on 4 ranks and resharded for other ones.

verl's own ``FSDPCheckpointManager`` saves and loads where ``CKPTCORE_VERL_PYTHON`` names an interpreter with
torch 2.13 and verl 0.9; FSDP1's state dicts by name need torch alone. Beside each resume, the job starts from
the complete tensors by `torch.distributed.checkpoint.state_dict` on the same ranks (rank_resume_job.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from driver import Cli
from paths import JOBS

VARIABLE = "CKPTCORE_VERL_PYTHON"
JOB = JOBS / "rank_resume_job.py"
# Case of the job -> the ranks that its files are written for, and how they are loaded.
TARGETS = {
    "verl_fsdp2": ("ranks,fsdp=1", "ranks,fsdp=2", "ranks,fsdp=3", "ranks,ddp=2,fsdp=2", "dcp,fsdp=3"),
    "verl_hsdp": ("ranks,fsdp=3", "ranks,ddp=2,fsdp=1"),
    "verl_fsdp1": ("ranks,fsdp=2", "ranks,fsdp=3"),
    "verl_fsdp1_orig": ("ranks,fsdp=3",),
    "fsdp1": ("ranks,fsdp=2", "ranks,fsdp=3", "dcp,fsdp=3"),
    "fsdp1_orig": ("ranks,fsdp=2", "ranks,fsdp=3", "dcp,fsdp=2"),
}
# FSDP1's `Optimizer.state_dict` is flat: it is the state of runs of its ranks, and stays behind.
FLAT = ("verl_fsdp1", "verl_fsdp1_orig")

pytestmark = [pytest.mark.soak, pytest.mark.xdist_group("rank_resume")]


def run(verb: str, folder: Path, *names: str) -> None:
    python = sys.executable
    if names[0].startswith("verl"):
        python = os.environ.get(VARIABLE) or pytest.skip(f"no interpreter with verl: {VARIABLE} can name one")
    done = subprocess.run(
        [python, str(JOB), verb, str(folder), *names],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", TARGETS)
def test_a_job_of_another_size_resumes_from_rank_files(case: str, cli: Cli, tmp_path: Path) -> None:
    """Weights, moments and schedule are those that were saved; losses those of torch's own resume."""
    run("save", tmp_path, case)
    here = tmp_path / case
    for target in TARGETS[case]:
        how, mesh = target.split(",", 1)
        left = ("--exclude", "optim*") if case in FLAT else ()
        to = {"ranks": "torch_ranks", "dcp": "dcp"}[how]
        done = cli(
            "reshard", here / "ckpt", here / target, "--to", to, "--mesh", mesh, *left, "--output", "json"
        )
        assert done.code == 0, done
    run("load", tmp_path, *(f"{case}/{target}" for target in TARGETS[case]))
    saved = json.loads((here / "uninterrupted.json").read_text())
    for target in TARGETS[case]:
        found = json.loads((here / f"{target}.json").read_text())
        native, ours = found["native"], found["written"]
        compare(ours, native, saved, optimizer=case not in FLAT)


def compare(ours: dict[str, Any], native: dict[str, Any], saved: dict[str, Any], *, optimizer: bool) -> None:
    parts = (".model.", ".optim.") if optimizer else (".model.",)
    wanted = {n: v for n, v in saved["truth"].items() if n.startswith(parts)}
    assert {n: v for n, v in ours["tensors"].items() if n in wanted} == wanted
    assert ours == native
    assert len(ours["losses"]) == 2
    if optimizer:
        # All ranks have the same tokens, so that other ranks only round otherwise.
        losses = [float.fromhex(x) for x in ours["losses"]]
        assert losses == pytest.approx([float.fromhex(x) for x in saved["losses"]], rel=1e-5)
