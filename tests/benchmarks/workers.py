"""Measure how much faster two worker processes write than one.

    python workers.py SRC OUT [--seconds 60] [--json]

Casts to bf16 with a digest, in one flow run on a Dask cluster of one worker and then of two, one thread each,
against a running Prefect server. A run writes the source often enough for SECONDS of processor time on the
one worker; published outputs are removed, so that they fit a RAM disk. The wall time is that of the process
that runs the flow. Exit status 1 when two are not 1.5 times as fast.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import services
from verdicts import ended

BOUND = 1.5
TRIED = 2  # outputs of the trial that estimates how many are needed
MARGIN = 1.6  # of that estimate: the first outputs are slower, they pay for imports and for fresh memory
BATCH = "400MB"  # of output in a file, and in a task


@contextmanager
def collecting(out: Path, last: int) -> Iterator[None]:
    """Remove outputs as they are published, except the last one."""
    end = threading.Event()

    def collect() -> None:
        for number in range(last):
            folder = _place(out, number)
            staging = folder.with_name(f".{folder.name}.ckptcore")
            while staging.exists() or not folder.exists():
                if end.wait(0.05):
                    return
            shutil.rmtree(folder)

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def children_seconds() -> float:
    """Return the processor time of children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _place(out: Path, number: int) -> Path:
    return out.with_name(f"{out.name}-{number}")


def run(
    source: Path, out: Path, times: int, workers: int, env: Mapping[str, str], folder: Path
) -> dict[str, Any]:
    """Measure one flow run.

    Returns:
        Wall seconds, processor seconds of each worker and of the flow's process, and the flow's own figures.
    """
    with services.dask_workers(workers, folder / f"dask-{workers}", env) as (address, pids):
        before = [services.cpu_seconds(pid) for pid in pids]
        job = [sys.executable, __file__, str(source), str(out), "--job", str(times), "--address", address]
        begin, spent_here = time.perf_counter(), children_seconds()
        with collecting(out, times - 1):
            done = subprocess.run(job, env=env, capture_output=True, text=True)
        wall, client = time.perf_counter() - begin, children_seconds() - spent_here
        cpu = [services.cpu_seconds(pid) - spent for pid, spent in zip(pids, before, strict=True)]
    if done.returncode:
        raise RuntimeError(f"{' '.join(job)}: exit {done.returncode}: {done.stderr[-1000:]}")
    return {"workers": workers, "wall": wall, "cpu": cpu, "client_cpu": client} | json.loads(
        done.stdout.splitlines()[-1]
    )


def job(source: Path, out: Path, times: int, address: str) -> None:
    """Run the flow, in its own process; print the seconds of its steps."""
    from prefect import flow

    from ckptcore.planning.request import Request, Settings
    from ckptcore.utils.units import parse_size
    from flows._engine import Engine
    from flows._options import FlowJob
    from flows.convert import fan_out

    @flow(name="bench")
    def bench() -> dict[str, float]:
        requests = [
            Request(
                source=str(source),
                destination=str(_place(out, number)),
                verb="consolidate",
                dtype="bf16",
                max_file_size=parse_size(BATCH),
            )
            for number in range(times)
        ]
        results = fan_out(
            requests, FlowJob(Settings(workers=1), False, parse_size(BATCH), Engine("dask", address))
        )
        steps: dict[str, float] = {}
        for result in results:
            for name, seconds in result.timings.items():
                steps[name] = steps.get(name, 0.0) + seconds
        return steps

    begin = time.perf_counter()
    steps = bench()
    print(json.dumps({"flow": time.perf_counter() - begin, "steps": steps}))


def measure(source: Path, out: Path, seconds: float) -> list[dict[str, Any]]:
    """Measure one worker and two; the last output stays."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = folder / "prefect"
        env = services.own(home) | services.ONE_THREAD
        with services.prefect_server(home, env) as url:
            env["PREFECT_API_URL"] = url
            try:
                times = 1
                if seconds:
                    tried = run(source, out, TRIED, 1, env, folder)
                    shutil.rmtree(_place(out, TRIED - 1))
                    times = math.ceil(MARGIN * seconds * TRIED / tried["cpu"][0])
                found = []
                for workers in (1, 2):
                    found.append(run(source, out, times, workers, env, folder) | {"outputs": times})
                    if workers == 1:
                        shutil.rmtree(_place(out, times - 1))
                _place(out, times - 1).rename(out)
            finally:
                for left in [*out.parent.glob(f"{out.name}-*"), *out.parent.glob(f".{out.name}-*.ckptcore")]:
                    shutil.rmtree(left)
    return found


def verdict(one: Mapping[str, Any], two: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Judge whether two workers are fast enough, with enough work; return figures and texts for the table."""
    figure, work = one["wall"] / two["wall"], sum(one["cpu"])
    return {
        "figure": figure,
        "measured": f"{figure:.2f} x: {one['wall']:.1f} s ({work:.0f} s of work) with one,"
        f" {two['wall']:.1f} s with two",
        "bound": f"≥ {BOUND:g} x with two worker processes, ≥ {seconds:g} s of work",
        "ok": figure >= BOUND and work >= seconds,
        "dtype": "bf16",
    }


def main() -> int:
    """Run it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="processor time of one worker, at least")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job is not None:
        job(given.source, given.out, given.job, given.address)
        return 0
    services.end_in_order()
    load = os.getloadavg()[0]
    one, two = measure(given.source, given.out, given.seconds)
    result = verdict(one, two, given.seconds)
    return ended(result, load, as_json=given.json, runs=[one, two])


if __name__ == "__main__":
    sys.exit(main())
