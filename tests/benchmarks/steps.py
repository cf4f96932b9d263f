"""Measure what the size of a step costs: processor time, and how long a thread keeps Python's lock.

    python steps.py SRC OUT [--mib 1,4,16] [--threads 1,2,4] [--verb consolidate|fingerprint] [--json]

Each figure is of a process of its own. Threads of one interpreter share a lock: bytes move while it is given
up, in calls that are listed in `_given_up`. What a worker's processor time has besides these calls is
*held* time. A run on any number of cores takes at least its held seconds, so that 0.1 s/GB means 10 GB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MIB = 1 << 20


class _Clock:
    """Adds up the processor time of threads, and the part of it in calls that give up the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seconds = self.outside = 0.0
        self.calls = 0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that gives up the lock, timed."""

        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                spent = time.thread_time() - begin
                with self._lock:
                    self.outside += spent
                    self.calls += 1

        return run

    def thread(self, work: Callable[..., None]) -> Callable[..., None]:
        """Return the work of one thread, timed."""

        def run(*args: Any) -> None:
            begin = time.thread_time()
            try:
                work(*args)
            finally:
                with self._lock:
                    self.seconds += time.thread_time() - begin

        return run


@contextmanager
def _given_up(clock: _Clock) -> Iterator[None]:
    """Time the calls that move, check and digest bytes, and the threads that make them."""
    from ckptcore.comparison import fingerprint
    from ckptcore.core import file_sums
    from ckptcore.execution import file_writer, tensor_filler
    from ckptcore.reading import gather, payload
    from ckptcore.utils import workers

    digest = vars(file_writer)["blake3"]

    class Digest:
        def __init__(self) -> None:
            inner = digest()
            self.update, self.hexdigest = clock.timed(inner.update), inner.hexdigest

    calls = [
        (os, "pread"),
        (os, "preadv"),
        (os, "pwrite"),
        (payload, "crc32"),
        (file_writer, "crc32"),
        (file_sums, "crc64"),
        (gather, "_assign_blocks"),
        (tensor_filler, "cast_into"),
        (fingerprint, "box_sum"),
    ]
    places: list[tuple[Any, str, Any]] = [
        (place, name, clock.timed(vars(place)[name])) for place, name in calls
    ]
    places.append((file_writer, "blake3", Digest))
    places.append((workers._Pool, "_work", clock.thread(workers._Pool._work)))
    before = [(place, name, vars(place)[name]) for place, name, _ in places]
    for place, name, new in places:
        setattr(place, name, new)
    try:
        yield
    finally:
        for place, name, old in before:
            setattr(place, name, old)


def one(source: str, out: Path, nbytes: int, threads: int, verb: str, device: str) -> dict[str, Any]:
    """Measure one conversion in this process; ``nbytes`` of a step, 0 for the usual one."""
    from ckptcore.checking.examine import inspect
    from ckptcore.comparison.fingerprint import fingerprint
    from ckptcore.conversion.pipeline import convert
    from ckptcore.planning.request import Request, Settings
    from ckptcore.planning.tiles import Budget

    usual = Budget.usual
    if nbytes:
        Budget.usual = property(lambda self: min(self.tile, nbytes))  # type: ignore[assignment]
    settings = Settings(max(1 << 30, 4 * threads * nbytes), threads, device)
    clock = _Clock()
    before, began = time.process_time(), time.perf_counter()
    with _given_up(clock):
        if verb == "fingerprint":
            total = (manifest := inspect(source)).nbytes
            fingerprint(manifest, settings)
        else:
            request = Request(source, str(out), to="safetensors", max_file_size=500_000_000)
            total = convert(request, settings, catalog_url=False).nbytes
    wall, spent = time.perf_counter() - began, time.process_time() - before
    gb = total / 1e9
    return {
        "mib": nbytes / _MIB or usual.fget(Budget.of(settings)) / _MIB,  # type: ignore[attr-defined]
        "threads": threads,
        "wall_s_per_gb": wall / gb,
        "cpu_s_per_gb": spent / gb,
        "held_s_per_gb": (clock.seconds - clock.outside) / gb,
        "calls_per_gb": round(clock.calls / gb),
    }


def measure(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the best of some runs for each size and number of threads, each in a process of its own."""
    for threads in given.threads:
        for mib in given.mib:
            runs = []
            for _ in range(given.runs):
                argv = [sys.executable, __file__, str(given.source), str(given.out), "--cell"]
                argv += ["--mib", str(mib), "--threads", str(threads), "--verb", given.verb]
                done = subprocess.run([*argv, "--device", given.device], capture_output=True, text=True)
                shutil.rmtree(given.out, ignore_errors=True)
                if done.returncode:
                    raise RuntimeError(f"exit {done.returncode}: {done.stderr[-1000:]}")
                runs.append(json.loads(done.stdout))
            yield {name: min(run[name] for run in runs) for name in runs[0]}


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def main() -> int:
    """Run it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mib", default="0", type=_numbers, help="sizes; 0 is the usual one")
    parser.add_argument("--threads", default="1,2,4", type=_numbers)
    parser.add_argument("--verb", choices=("consolidate", "fingerprint"), default="consolidate")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cell", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.cell:
        size, threads = int(given.mib[0] * _MIB), int(given.threads[0])
        print(json.dumps(one(str(given.source), given.out, size, threads, given.verb, given.device)))
        return 0
    rows = []
    for row in measure(given):
        rows.append(row)
        if not given.json:
            print("  ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)
    if given.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
