"""Measure how much longer a conversion takes as a flow than by the command line.

    python overhead.py SRC OUT --server none|running [--runs 5] [--json]

Processes run in turn, a different one first in each round, with their own Prefect home whose database exists
already. The result is the median of the flow's wall time minus that of the command line's. ``none``: the
flow starts and stops a server, as it does where none is configured. Each file is its own task, the worst
case for Prefect. Exit status 1 when the result is above the bound.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import services
from verdicts import ended

FILES = 20
SIZE = "1MiB"  # of a tensor of the source, and so of a file
BOUNDS = {"none": 10.0, "running": 2.0}  # seconds for all files


def timed(argv: Sequence[str], env: Mapping[str, str], out: Path) -> float:
    """Return wall seconds of one conversion, and remove its output.

    Raises:
        RuntimeError: The output is incomplete.
    """
    begin = time.perf_counter()
    done = subprocess.run(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - begin
    found = len(list(out.glob("*.safetensors")))
    if done.returncode or found != FILES:
        raise RuntimeError(f"{' '.join(argv)}: exit {done.returncode}, {found} files: {done.stderr[-600:]}")
    shutil.rmtree(out)
    return seconds


def measure(source: Path, out: Path, server: str, runs: int, ckptcore: Path) -> dict[str, list[float]]:
    """Return seconds of each run, by contender."""
    common = [str(source), str(out), "--max-file-size", SIZE]
    commands = {
        "cli": [str(ckptcore), "consolidate", *common],
        "flow": [sys.executable, "-m", "flows.convert", *common, "--batch", SIZE],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "prefect"
        env = services.own(home) | {"CKPTCORE_CATALOG_URL": f"sqlite:///{folder}/catalog.db"}
        subprocess.run([str(ckptcore), "catalog", "upgrade"], env=env, check=True, stdout=subprocess.DEVNULL)
        with services.prefect_server(home, env) if server == "running" else nullcontext() as url:
            if url is not None:
                env["PREFECT_API_URL"] = url
            for command in commands.values():  # the first run creates the database, and does not count
                timed(command, env, out)
            for turn in range(runs):
                for name in sorted(commands, reverse=bool(turn % 2)):
                    times[name].append(timed(commands[name], env, out))
    return times


def verdict(times: Mapping[str, Sequence[float]], server: str) -> dict[str, Any]:
    """Judge the medians; return the figures and the texts for the table."""
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    figure, most = medians["flow"] - medians["cli"], BOUNDS[server]
    each_time = ", ".join(f"{n} {medians[n]:.2f} s ({min(t):.2f}-{max(t):.2f})" for n, t in times.items())
    return {
        "figure": figure,
        "measured": f"{figure:.2f} s more: {each_time}",
        "bound": f"≤ {most:g} s more than cli, {FILES} files",
        "ok": figure <= most,
    }


def main() -> int:
    """Run it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--server", choices=BOUNDS, required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ckptcore", type=Path, default=Path(sys.executable).with_name("ckptcore"))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    services.end_in_order()
    load = os.getloadavg()[0]
    times = measure(given.source, given.out, given.server, given.runs, given.ckptcore)
    result = verdict(times, given.server)
    return ended(result, load, as_json=given.json, seconds=times)


if __name__ == "__main__":
    sys.exit(main())
