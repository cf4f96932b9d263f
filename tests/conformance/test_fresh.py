"""Test that checkpoints of the installed torch, in any shape, are converted bit for bit.

Each test starts a real job of several gloo processes from a random seed, which is printed, and
reads the checkpoints that it wrote. `pytest --seed N` repeats one.
"""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import warm
from paths import JOBS
from samples import differences, flatten, read_safetensors, read_torch, seed_of, tensors_of, tree_digest

if TYPE_CHECKING:
    from driver import Cli

JOB = JOBS / "fresh_job.py"
NOT_IN_SAFETENSORS = frozenset({"complex128"})


@pytest.mark.parametrize("ranks", [4, *(pytest.param(ranks, marks=pytest.mark.soak) for ranks in (3, 2, 1))])
def test_fresh(ranks: int, cli: Cli, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A job of so many ranks, five random checkpoints."""
    one_job(seed_of(request), ranks, 5, cli, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(60))
def test_fresh_many(number: int, cli: Cli, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Many jobs of up to 8 ranks."""
    seed = seed_of(request) + number
    one_job(seed, random.Random(seed).choice([1, 2, 3, 4, 5, 6, 8]), 8, cli, tmp_path)


def one_job(seed: int, ranks: int, cases: int, cli: Cli, folder: Path) -> None:
    """Run a job and read every checkpoint that it wrote."""
    print(f"fresh checkpoints of --seed {seed}, {ranks} ranks, {cases} cases")
    done = subprocess.run(
        [*warm.python(), str(JOB), str(seed), str(folder), "--ranks", str(ranks), "--cases", str(cases)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"the job of --seed {seed} failed:\n{done.stderr[-3000:]}"
    written = sorted(folder.glob("*/job.json"))
    assert len(written) == cases
    for truth in written:
        one_checkpoint(truth.parent, json.loads(truth.read_text()), cli, f"--seed {seed}, {ranks} ranks")


def one_checkpoint(folder: Path, job: dict[str, Any], cli: Cli, seed: str) -> None:
    """Validate a checkpoint, consolidate it into both formats, and compare with the truth."""
    about = f"{seed}: {folder.name} {job['options']} {job}"[:3000]
    source = folder / "ckpt"
    before = tree_digest(source)
    truth = flatten(read_torch(folder / "truth.pt", trusted=True))
    tensors = tensors_of(truth)

    checked = cli("validate", source, "--level", "bytes", "--output", "json")
    assert checked.code == 0, f"{about}\n{checked}"
    if not job["crc"]:
        assert "no-checksum" in {f["code"] for f in checked.json["findings"]}, f"{about}\n{checked}"

    done = cli("consolidate", source, folder / "all.pt", "--output", "json")
    assert done.code == 0, f"{about}\n{done}"
    ours = flatten(read_torch(folder / "all.pt"))
    found = tensors_of(ours)
    assert sorted(found) == sorted(tensors), about
    wrong = differences(tensors, found)
    assert not wrong, f"{about}\n{[(w, job['keys'].get(w.split(': ')[0])) for w in wrong]}"
    for key, value in truth.items():
        if key not in tensors and isinstance(value, (int, float, str, type(None))):
            assert key in ours, f"{key} was not carried over; {about}"
            assert ours[key] == value, f"{key}; {about}"

    odd = sorted(k for k, v in tensors.items() if v[0] in NOT_IN_SAFETENSORS)
    flags = [word for key in odd for word in ("--exclude", glob_of(key))]
    done = cli("consolidate", source, folder / "out", "--output", "json", *flags)
    assert done.code == 0, f"{about}\n{done}"
    found = read_safetensors(folder / "out")
    assert sorted(found) == sorted(tensors.keys() - set(odd)), about
    assert not differences({k: v for k, v in tensors.items() if k not in odd}, found), about
    assert tree_digest(source) == before, about


def glob_of(name: str) -> str:
    """Return a glob that matches only this name."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
