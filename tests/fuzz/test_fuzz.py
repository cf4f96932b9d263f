"""Run the fuzzer briefly: it works, and finds nothing. `make fuzz` runs for a long time."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def fuzz(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "fuzz.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000)


@pytest.mark.parametrize(
    ("inputs", "seed"),
    [(800, 20), pytest.param(200_000, random.SystemRandom().randrange(1 << 30), marks=pytest.mark.soak)],
    ids=["short", "long"],
)
def test_changed_checkpoints_cause_no_defect(inputs: int, seed: int, tmp_path: Path) -> None:
    done = fuzz("--inputs", inputs, "--jobs", 2, "--seed", seed, "--found", tmp_path / "found")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert ", 0 defects" in done.stdout


def test_a_defect_is_reported_and_saved(tmp_path: Path) -> None:
    """A reader that raises an undocumented error is a defect."""
    broken = tmp_path / "sitecustomize.py"
    broken.write_text(
        "import dataclasses, ckptcore.formats as f\n"
        "def read(source): raise IndexError('planted')\n"
        "own = next(x for x in f.FORMATS if x.name == 'dcp')\n"
        "planted = dataclasses.replace(own, reader=f.Reader(read))\n"
        "f.FORMATS = tuple(planted if x.name == 'dcp' else x for x in f.FORMATS)\n"
    )
    command = [sys.executable, str(HERE / "fuzz.py"), "--inputs", "50", "--jobs", "1", "--only", "dcp_dims"]
    import os

    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{HERE.parents[1]}"}
    done = subprocess.run(
        [*command, "--found", str(tmp_path / "found")], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "planted" in done.stdout + done.stderr
