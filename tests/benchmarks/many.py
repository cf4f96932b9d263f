"""Measure how many small checkpoints one sweep converts in a second.

    python many.py SRC OUT [--count 1000] [--runs 1] [--json]

SRC appears COUNT times below a watched root, by links to its files; one `ckptcore sweep` in default mode
converts all of them. The first output is compared with the source tensor by tensor, the others with the first
byte by byte. Exit status 1 when the median rate is below the bound.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verdicts import ended

COUNT = 1000
RATE = 2.0  # checkpoints in a second
MIB = 1 << 20


def call(ckptcore: Path, folder: Path, *argv: str | Path) -> str:
    """Run one command against the catalog of a folder; return what it prints.

    Raises:
        RuntimeError: The command failed.
    """
    env = os.environ | {"CKPTCORE_CATALOG_URL": f"sqlite:///{folder}/catalog.db"}
    done = subprocess.run([str(ckptcore), *map(str, argv)], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, argv))}: exit {done.returncode}: {done.stderr[-600:]}")
    return done.stdout


def sweep(source: Path, folder: Path, count: int, ckptcore: Path) -> dict[str, float]:
    """Sweep a new root once, verify every output, and remove both.

    Returns:
        Wall seconds, processor seconds of a checkpoint, and peak bytes of all commands so far.

    Raises:
        RuntimeError: An output is missing or differs.
    """
    try:
        for n in range(count):
            shutil.copytree(source, folder / "runs" / "run" / f"step-{n}", copy_function=os.link)
        place = ("--verb", "consolidate", "--destination", f"{folder}/out/{{name}}")
        call(ckptcore, folder, "catalog", "root", "add", "many", folder / "runs", *place)
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        answer = call(ckptcore, folder, "sweep", "--min-age", "0s")
        seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        if f"{count} made" not in answer:
            raise RuntimeError(f"the sweep did not make {count}: {answer[-300:]}")
        first = folder / "out" / "step-0"
        call(ckptcore, folder, "diff", source, first)
        names = sorted(p.name for p in first.iterdir())
        for n in range(1, count):
            _, differ, lost = filecmp.cmpfiles(first, folder / "out" / f"step-{n}", names, shallow=False)
            if differ or lost:
                raise RuntimeError(f"step-{n} differs from step-0: {differ + lost}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"seconds": seconds, "cpu": cpu / count, "peak": float(after.ru_maxrss << 10)}


def verdict(runs: Sequence[Mapping[str, float]], count: int) -> dict[str, Any]:
    """Judge the median; return the figures and the texts for the table."""
    seconds = [run["seconds"] for run in runs]
    figure = count / statistics.median(seconds)
    cpu = statistics.median(run["cpu"] for run in runs)
    peak = max(run["peak"] for run in runs)
    return {
        "figure": figure,
        "measured": f"{figure:.2f} a second ({count} in {min(seconds):.1f}-{max(seconds):.1f} s, "
        f"{cpu:.3f} CPU s each, {peak / MIB:.0f} MiB)",
        "bound": f"≥ {RATE:g} a second",
        "ok": figure >= RATE,
    }


def main() -> int:
    """Run it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--runs", type=int, default=1)  # the rate is a mean of so many already
    parser.add_argument("--ckptcore", type=Path, default=Path(sys.executable).with_name("ckptcore"))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    runs = [sweep(given.source, given.out, given.count, given.ckptcore) for _ in range(given.runs)]
    result = verdict(runs, given.count)
    return ended(result, load, as_json=given.json, runs=runs)


if __name__ == "__main__":
    sys.exit(main())
