"""Random programs of real verbs under simulated faults: whatever happens, nothing is lost, and none is half.

`python -m tests.simulation --seed S` runs one again.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from tests.simulation.crash_disk import CrashDisk
from tests.simulation.mutants import MUTANTS


def simulated(*options: object) -> tuple[int, list[str]]:
    """Run the command, and return its exit status and its lines."""
    command = [sys.executable, "-m", "tests.simulation", *map(str, options)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stdout, ended.stderr
    return ended.returncode, ended.stdout.splitlines()


def test_programs_hold_and_known_faults_are_found() -> None:
    """In one process, which takes seconds to begin: the programs, those that once failed, and mutants."""
    status, lines = simulated("--suite", 16, "--jobs", 2)
    assert not status, "\n".join(lines)


@pytest.mark.soak
def test_a_seed_ends_in_the_same_line() -> None:
    first, second = (simulated("--seed", 13)[1][-1] for _ in range(2))
    assert first == second


@pytest.mark.parametrize("count", [2, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_programs_hold_on_postgresql(count: int, postgres: Any, upgraded: str) -> None:
    from tests.simulation.running import run_steps
    from tests.simulation.themes import program

    for seed in range(count):
        with postgres.database(upgraded) as url:
            assert not run_steps(program(seed), url=url).broken, seed


@pytest.mark.soak
def test_known_faults_are_found() -> None:
    status, lines = simulated("--mutants", 1)
    assert not status, lines[-1]


@pytest.mark.soak
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize(("disk", "count"), [("local", 9500), ("bucket", 500)])
def test_ten_thousand_programs_hold(disk: str, count: int, pytestconfig: pytest.Config) -> None:
    first = pytestconfig.getoption("--seed") or 1000
    status, lines = simulated("--disk", disk, "--seed", first, "--count", count, "--jobs", 2)
    assert not status, "\n".join(line for line in lines if not re.match("seed [0-9]+: held", line))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_fault_fits_the_code(name: str) -> None:
    """A function that changes keeps its mutants, or they go."""
    from tests.simulation.mutants import changed

    changed(MUTANTS[name])


def test_a_power_cut_undoes_what_is_not_synced(tmp_path: Path) -> None:
    """Names of one folder in their order, those of several in any, a rename in both or in none."""
    states = set()
    for seed in range(60):
        root, grave = tmp_path / f"{seed}/root", tmp_path / f"{seed}/grave"
        for folder in (root / "a", root / "b", grave):
            folder.mkdir(parents=True)
        (root / "a/kept").write_bytes(b"kept")
        disk = CrashDisk(root, grave)
        (root / "a/new").write_bytes(b"12345678")
        disk.look()
        if seed % 2:
            disk.sync(str(root / "a/new"))
        os.rename(root / "a/new", root / "b/moved")
        disk.look(str(root / "a/new"), str(root / "b/moved"))
        (root / "b/later").write_bytes(b"later")
        disk.look()
        if seed % 3 == 0:
            disk.sync(str(root / "b"))
        disk.cut(random.Random(seed))
        files = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        assert files.pop("a/kept") == b"kept"
        assert not ("a/new" in files and "b/moved" in files)
        assert "b/later" not in files or "b/moved" in files, "changes of one folder keep their order"
        if seed % 3 == 0:
            assert {"b/moved", "b/later"} <= files.keys()
        if seed % 2:
            assert files.get("a/new", b"12345678") == files.get("b/moved", b"12345678") == b"12345678"
        states.add((tuple(sorted(files)), files.get("b/moved", b"")))
    assert {names for names, _ in states} >= {(), ("a/new",), ("b/moved",), ("b/later", "b/moved")}
    assert len({data for _, data in states}) > 2, "unsynced bytes are torn"
