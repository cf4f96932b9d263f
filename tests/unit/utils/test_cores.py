"""The cores that a process may use: its affinity, and the quotas of the control groups around it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptcore.planning.request import Settings
from ckptcore.utils import workers

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine of 64 cores without quotas; the folder of its control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(workers, "_GROUPS", tmp_path)
    monkeypatch.setattr(workers, "_OWN_GROUPS", tmp_path / "own")
    workers._quota.cache_clear()
    yield tmp_path
    workers._quota.cache_clear()


def put(path: Path, text: str) -> None:
    """Write a file of a machine; a process that starts then reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    workers._quota.cache_clear()


def test_without_a_quota_the_affinity_counts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert workers.usable_cores() == 64
    put(machine / "cpu.max", "max 100000\n")
    assert workers.usable_cores() == 64
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert workers.usable_cores() == 2


@pytest.mark.parametrize(
    ("quota", "count"), [("600000 100000", 6), ("50000 100000", 1), ("650000 100000", 6)]
)
def test_a_quota_of_the_container(machine: Path, quota: str, count: int) -> None:
    put(machine / "cpu.max", f"{quota}\n")
    assert workers.usable_cores() == count


def test_the_smallest_quota_of_the_groups_around_it(machine: Path) -> None:
    put(machine / "own", "0::/slice/job/step\n")
    put(machine / "slice/job/step/cpu.max", "max 100000\n")
    put(machine / "slice/job/cpu.max", "800000 100000\n")
    put(machine / "slice/cpu.max", "1600000 100000\n")
    assert workers.usable_cores() == 8


def test_version_1(machine: Path) -> None:
    put(machine / "own", "12:memory:/pod\n4:cpu,cpuacct:/pod\n")
    put(machine / "cpu,cpuacct/pod/cpu.cfs_quota_us", "300000\n")
    put(machine / "cpu,cpuacct/pod/cpu.cfs_period_us", "100000\n")
    assert workers.usable_cores() == 3
    put(machine / "cpu,cpuacct/pod/cpu.cfs_quota_us", "-1\n")
    assert workers.usable_cores() == 64


def test_workers_follow_the_cores_and_the_memory(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings(memory=8192 * MIB).threads == 64
    assert Settings(memory=1024 * MIB).threads == 16
    assert Settings(memory=16 * MIB).threads == 2
    assert Settings(memory=16 * MIB, workers=5).threads == 5
    assert Settings(memory=1024 * MIB).within(128 * MIB).threads == 16  # what has begun keeps its threads
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert Settings().threads == 2
