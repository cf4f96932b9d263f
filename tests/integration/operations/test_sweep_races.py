"""Test that a checkpoint that several sweeps find at the same time is converted exactly once."""

from __future__ import annotations

import subprocess
import threading
from datetime import UTC, datetime

import pytest
import warm
from checkpoints import save
from paths import ROOT

from ckptcore.catalog import open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.conversion.pipeline import convert
from ckptcore.operations.automation.sweep import SweepSettings, sweep
from ckptcore.planning.request import Settings

AT_ONCE = SweepSettings(settle_s=0)
SWEEP = """
import sys
from ckptcore.catalog import open_catalog
from ckptcore.conversion.pipeline import convert
from ckptcore.planning.request import Settings
from ckptcore.operations.automation.sweep import SweepSettings, sweep
sys.stdin.readline()
def one(request):
    convert(request, Settings(memory=32 << 20, workers=1), None, sys.argv[1])
with open_catalog(sys.argv[1]) as catalog:
    for item in sweep(catalog, one, settings=SweepSettings(settle_s=0)).items:
        print(item.standing)
"""


def watch(url, runs):
    with open_catalog(url) as catalog, catalog.writing() as conn:
        roots.add(conn, datetime.now(UTC), "r", str(runs))


def conversions(url):
    with open_catalog(url) as catalog:
        return [c.state for c in catalog.conversions(None)]


def race(url, sweeps):
    """Return the standings of sweeps that start together in threads of this process."""
    gate, found, failed = threading.Barrier(sweeps), [], []

    def one(_n):
        try:
            with open_catalog(url) as catalog:
                gate.wait()
                made = sweep(
                    catalog,
                    lambda r: convert(r, Settings(memory=32 << 20, workers=1), None, url),
                    settings=AT_ONCE,
                )
            found.append([i.standing.value for i in made.items])
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=one, args=(n,)) for n in range(sweeps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    return found


def race_often(url, tmp_path, times):
    for n in range(times):
        (tmp_path / "runs").mkdir(exist_ok=True)
        save(tmp_path / "runs" / f"step-{n}", n)
        if n == 0:
            watch(url, tmp_path / "runs")
        found = race(url, 2)
        last = sorted(standings[-1] for standings in found)
        assert last in (["claimed", "made"], ["converted", "made"]), last
        assert conversions(url) == ["succeeded"] * (n + 1)


@pytest.mark.alike(1)
def test_two_sweeps_in_one_process(either, tmp_path):
    race_often(either, tmp_path, 4)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_two_sweeps_in_one_process_a_hundred_times(either, tmp_path):
    race_often(either, tmp_path, 100)


def test_sweeps_in_processes(either, tmp_path):
    for step in range(4):
        save(tmp_path / "runs" / f"step-{step}", step)
    watch(either, tmp_path / "runs")
    started = [
        subprocess.Popen(
            [*warm.python(), "-c", SWEEP, either],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for each in started:
        each.stdin.write("\n")
        each.stdin.flush()
    outputs = [each.communicate(timeout=300) for each in started]
    assert [each.returncode for each in started] == [0, 0, 0], outputs
    standings = " ".join(out for out, _ in outputs).split()
    assert standings.count("made") == 4
    assert set(standings) <= {"made", "claimed", "converted"}
    assert conversions(either) == ["succeeded"] * 4
