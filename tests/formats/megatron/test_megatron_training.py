"""Megatron-Core's own GPTModel and distributed optimizer resume from a reshard as from their own checkpoint.

Each release trains, saves with its own `dist_checkpointing`, and resumes on other ranks twice: from what it
saved, and from what ckptcore wrote for these ranks (megatron_train_job.py). A layout that other ranks cannot
load is saved beside one that they can.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from megatron_releases import release_folder
from megatron_training import CASES, ROWS
from paths import HELPERS, JOBS

import ckptcore

pytestmark = [pytest.mark.soak, pytest.mark.xdist_group("megatron_training")]
JOB = JOBS / "megatron_train_job.py"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("release", "name"), ROWS)
def test_a_release_trains_on(
    release: str, name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Weights, masters and moments are those of its own resume, and so are the losses, bit for bit."""
    case, folder = CASES[name], release_folder(release, tmp_path_factory)
    layout, loaded = case.layout_in(release), case.native_in(release)
    native = str(tmp_path / "native")
    stored = native if layout == loaded else str(tmp_path / "stored")
    save = {native: loaded, stored: layout}
    ((saved, *_),) = run(tmp_path, folder, [{"model": case.name, "mesh": case.saved.form(), "save": save}])
    asked = []
    for n, ranks in enumerate(case.on):
        out = str(tmp_path / f"written{n}")
        ckptcore.convert(stored, out, verb="reshard", to="torch_dist", mesh=ranks.written, catalog=False)
        load = {"native": [native, loaded], "written": [out, loaded]}
        asked.append({"model": case.name, "mesh": ranks.form(), "load": load})
    uninterrupted = [float.fromhex(x) for x in saved[""]["losses"]]
    for ranks, found in zip(case.on, run(tmp_path, folder, asked), strict=True):
        assert len(found) == ranks.ranks
        for one in found:
            assert sum("exp_avg" in key for key in one["native"]["tensors"]) > 2
            assert one["written"] == one["native"], ranks
            losses = [float.fromhex(x) for x in one["native"]["losses"]]
            # Other ranks round otherwise; bfloat16 keeps 8 bits.
            assert losses == pytest.approx(uninterrupted, rel=1e-5 if case.name == "float32" else 1e-2)


def run(folder: Path, release: Path, runs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return what each rank of each run found."""
    asked, answer = folder / "asked.json", folder / "answer.json"
    asked.write_text(json.dumps({"runs": runs}))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(JOB), str(asked), str(answer)],
        env=os.environ | {"PYTHONPATH": f"{release}:{HELPERS}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[list[dict[str, Any]]] = json.loads(answer.read_text())
    return found
