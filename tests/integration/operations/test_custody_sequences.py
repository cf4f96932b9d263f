"""Random programs of commands, kills and accidents: whatever they do, nothing that a purge deleted is lost.

`custody_program` has the verbs, and what must be true after each step. A program comes from its seed alone.
One that breaks something is printed with its steps; `python -m pytest ... --seed N` runs it again.
"""

from __future__ import annotations

import time

import fault_s3
import pytest
from custody_model import BucketDisk, LocalDisk
from custody_program import Broken, Run, program

from ckptcore.catalog import upgrade

LENGTH = 40
# Seeds of `make test`: few steps, which delete, replace, refuse and are killed.
SHORT = {"local-sqlite": (16, 16), "bucket-sqlite": (0, 16), "local-postgresql": (38, 12)}


class Worlds:
    """Fresh disks with fresh catalogs, one for each program."""

    def __init__(self, disk, database, request, tmp_path):
        self.kind, self.database, self.request, self.tmp = disk, database, request, tmp_path

    def run(self, steps, name):
        tmp = self.tmp / str(name)
        for folder in ("disk/runs/llama", "disk/out", "disk/disk", "made"):
            (tmp / folder).mkdir(parents=True)
        if self.database == "sqlite":
            self._run(steps, tmp, str(tmp / "catalog.sqlite"))
            return
        with self.request.getfixturevalue("postgres").database() as url:
            upgrade(url)
            self._run(steps, tmp, url)

    def _run(self, steps, tmp, url):
        if self.kind == "local":
            self._carried_out(steps, LocalDisk(tmp / "disk"), url, tmp)
            return
        with fault_s3.serving() as server:
            self._carried_out(steps, BucketDisk(server), url, tmp)

    def _carried_out(self, steps, disk, url, tmp):
        run = Run(disk, url, tmp / "made")
        try:
            run.run(steps)
        finally:
            run.close()


@pytest.fixture
def worlds(disk, database, request, tmp_path, monkeypatch):
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", str(tmp_path / "default.sqlite"))
    return Worlds(disk, database, request, tmp_path)


on_every = [(disk, database) for disk in ("local", "bucket") for database in ("sqlite", "postgresql")]


@pytest.mark.parametrize(("disk", "database"), [name.split("-") for name in SHORT])
def test_nothing_is_lost(disk, database, worlds):
    seed, length = SHORT[f"{disk}-{database}"]
    worlds.run(program(seed, length), seed)


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize(("disk", "database"), on_every)
def test_nothing_is_lost_in_ten_thousand_steps(disk, database, worlds, pytestconfig):
    """2,500 on each; a seed that is given is run alone."""
    first = pytestconfig.getoption("--seed")
    seeds = [first] if first is not None else range(2500 // LENGTH + 1)
    broken = []
    for seed in seeds:
        try:
            worlds.run(program(seed, LENGTH), f"{seed}-{time.monotonic_ns()}")
        except Broken as error:
            broken.append(f"seed {seed}\n{error}")
    assert not broken, "\n\n".join(broken)
