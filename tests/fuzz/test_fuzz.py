"""Run the fuzzer briefly: it works, and finds nothing. `make fuzz` runs for a long time."""

from __future__ import annotations

import os
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
    [(400, 20), pytest.param(200_000, random.SystemRandom().randrange(1 << 30), marks=pytest.mark.soak)],
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
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{HERE.parents[1]}"}
    done = subprocess.run(
        [*command, "--found", str(tmp_path / "found")], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "planted" in done.stdout + done.stderr


def texts(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "texts.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000)


@pytest.mark.parametrize(
    ("inputs", "seed"),
    [(6000, 20), pytest.param(400_000, random.SystemRandom().randrange(1 << 30), marks=pytest.mark.soak)],
    ids=["short", "long"],
)
def test_parsers_of_text_have_one_exception(inputs: int, seed: int, tmp_path: Path) -> None:
    done = texts("--inputs", inputs, "--jobs", 2, "--seed", seed, "--found", tmp_path / "found")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert ", 0 defects" in done.stdout
    outcomes = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines() if ": " in line)
    parsers = {name.rpartition(":")[0] for name in outcomes}
    assert len(parsers) > 40
    assert all(int(outcomes.get(f"{name}: value", 0)) for name in parsers - _RARELY), outcomes


_RARELY = {"sharding rules", "map", "frame"}  # in a short run no change of theirs may be valid


def test_a_parser_with_another_exception_is_a_defect(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import ckptcore.utils.plain_yaml as y\n"
        "def broken(data): raise IndexError('planted')\n"
        "y.load_yaml = broken\n"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{HERE.parents[1]}"}
    done = subprocess.run(
        [sys.executable, str(HERE / "texts.py"), "--inputs", "9", "--jobs", "1", "--only", "yaml"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "planted" in done.stdout + done.stderr
