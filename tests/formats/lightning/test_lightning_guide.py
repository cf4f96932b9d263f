"""Lightning's guides to distributed checkpoints, followed with this tool in place of Lightning's own.

Needs an interpreter with lightning; ``CKPTCORE_LIGHTNING_PYTHON`` names it.
"""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning_cases import differences, lightning_python, official
from paths import JOBS

import ckptcore
from ckptcore.conversion.pipeline import validate

if TYPE_CHECKING:
    from driver import Cli

JOB = JOBS / "lightning_guide_job.py"
FOUR_RANKS = {".metadata", "meta.pt", *(f"__{r}_0.distcp" for r in range(4))}
pytestmark = [pytest.mark.xdist_group("lightning"), pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def python() -> str:
    return lightning_python()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the text that the guide trains on."""
    vocabulary, chosen = ["alpha", "beta", "gamma", "delta", "zeta"], random.Random(1)
    lines = (" ".join(chosen.choice(vocabulary) for _ in range(30)) for _ in range(60))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wikitext-2.txt").write_text("\n".join(lines))
    return tmp_path


def run(python: str, here: Path, *arguments: str) -> None:
    done = subprocess.run(
        [python, "-W", "ignore", *arguments],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def load(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=False))


def consolidated(python: str, here: Path, folder: Path, cli: Cli, kind: str) -> dict[str, Any]:
    """The file has the default name, and equals what Lightning makes of the folder."""
    assert {p.name for p in folder.iterdir()} == FOUR_RANKS
    assert validate(ckptcore.open(str(folder)), "bytes").ok
    tool = f"lightning.{kind}.utilities.consolidate_checkpoint"
    run(python, here, "-m", tool, str(folder), "--output_file", str(here / "theirs"))
    done = cli("consolidate", folder, "--to", "lightning", "--output", "json")
    assert done.code == 0, done
    ours = load(folder.with_name(folder.name + ".consolidated"))
    assert differences(load(here / "theirs"), ours) == []
    assert differences(official(folder), ours) == []
    return ours


def test_the_trainers_guide(python: str, here: Path, cli: Cli) -> None:
    run(python, here, str(JOB), "save")
    folder = here / "lightning_logs" / "version_0" / "checkpoints" / "epoch=0-step=3.ckpt"
    truth = load(here / "save.truth")
    ours = consolidated(python, here, folder, cli, "pytorch")
    assert differences(truth, dict(ours["state_dict"])) == []
    assert ours["global_step"] == 3
    for path in (folder, Path(f"{folder}.consolidated")):  # on two processes
        run(python, here, str(JOB), "load", str(path))
        assert differences(truth, load(here / "load.truth")) == [], path
        (here / "load.truth").unlink()


def test_fabrics_guide(python: str, here: Path, cli: Cli) -> None:
    run(python, here, str(JOB), "fabric-save")
    folder = here / "my-checkpoint.ckpt"
    truth = load(here / "fabric-save.truth")
    ours = consolidated(python, here, folder, cli, "fabric")
    assert differences(truth, dict(ours["model"])) == []
    assert list(ours) == ["model", "optimizer", "iteration"]
    for path in (folder, here / "my-checkpoint.ckpt.consolidated"):
        run(python, here, str(JOB), "fabric-load", str(path))
        assert differences(truth, load(here / "fabric-load.truth")) == [], path
        (here / "fabric-load.truth").unlink()
