"""Accelerate's `load_state` resumes from folders that were written for another number of ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from driver import Cli
from paths import JOBS

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.soak, pytest.mark.xdist_group("accelerate")]
JOB = JOBS / "accelerate_job.py"


def run(ranks: int, *argv: str) -> list[dict[str, Any]]:
    """What each rank of a job found, by folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    jobs = [
        subprocess.Popen(
            [sys.executable, str(JOB), *argv],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    printed = [job.communicate(timeout=240) for job in jobs]
    assert all(job.returncode == 0 for job in jobs), printed[0][1][-3000:]
    lines = [line for out, _ in printed for line in out.splitlines() if line.startswith("found: ")]
    assert len(lines) == ranks
    return [json.loads(line.removeprefix("found: ")) for line in lines]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder of two ranks, and the digest of every tensor that they had."""
    folder = tmp_path_factory.mktemp("accelerate") / "ckpt"
    first, _ = run(2, "save", str(folder))
    return folder, first[str(folder)]["tensors"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("states", ["left out", "kept"])
def test_load_state_resumes_on_another_world(
    ranks: int, states: str, saved: tuple[Path, dict[str, str]], cli: Cli, tmp_path: Path
) -> None:
    """Weights and moments are those that were saved; losses those of a native resume."""
    source, truth = saved
    out = tmp_path / "out"
    kept = ("--keep-object", "random_states*") if states == "kept" else ()
    done = cli("reshard", source, out, "--to", "accelerate", "--mesh", f"fsdp={ranks}", *kept)
    assert done.code == 0, done
    for rank in run(ranks, "resume", str(source), str(out)):
        native, ours = rank[str(source)], rank[str(out)]
        assert ours["tensors"] == truth
        assert len(truth) == 120
        assert ours == native
        assert len(set(ours["losses"])) == 2
