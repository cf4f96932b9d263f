"""Measure the peak memory of a command and all of its children.

The proportional set size (PSS) counts a page that n processes share as 1/n in each. So its sum over
the process tree is the memory that the tree uses, mapped file pages included.

    python memory.py -- COMMAND ARG...      prints one line of JSON
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

INTERVAL_SECONDS = 0.020


@dataclass(frozen=True, slots=True)
class Usage:
    """What one command used.

    Attributes:
        seconds: Wall time, sampling included.
        peak_bytes: The largest sum of PSS over the tree in a sample.
        samples: Number of samples.
        longest_gap_seconds: The longest time between the starts of two samples; shorter peaks may be missed.
        returncode: Exit status of the command.
        stderr: The last 4000 bytes of its stderr.
    """

    seconds: float
    peak_bytes: int
    samples: int
    longest_gap_seconds: float
    returncode: int
    stderr: str


def measure(command: Sequence[str], env: Mapping[str, str] | None = None) -> Usage:
    """Run ``command`` and sample its tree every `INTERVAL_SECONDS`. Linux only."""
    with tempfile.TemporaryFile() as err:
        begin = last = time.perf_counter()
        peak = samples = 0
        gap = 0.0
        with started(command, env, stderr=err) as process:
            while process.poll() is None:
                now = time.perf_counter()
                gap, last = max(gap, now - last), now
                peak = max(peak, sum(_pss(pid) for pid in tree(process.pid)))
                samples += 1
                time.sleep(max(0.0, now + INTERVAL_SECONDS - time.perf_counter()))
        seconds = time.perf_counter() - begin
        err.seek(max(0, err.seek(0, os.SEEK_END) - 4000))
        tail = err.read().decode(errors="replace")
    return Usage(seconds, peak, samples, gap, process.returncode, tail)


@contextmanager
def started(
    command: Sequence[str], env: Mapping[str, str] | None, stderr: Any, stdout: Any = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[str]]:
    """Start a command in its own process group, which ends with the block.

    An interrupted run must not leave children that go on writing. Stdout is discarded by default.
    """
    with subprocess.Popen(
        command, env=env, stdout=stdout, stderr=stderr, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        except BaseException:
            with suppress(ProcessLookupError):  # it has ended meanwhile, and was waited for
                os.killpg(process.pid, signal.SIGKILL)
            raise


def tree(pid: int) -> Iterator[int]:
    """Yield ``pid`` and all of its live descendants."""
    yield pid
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return  # ended since it was listed
    for thread in threads:
        try:
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children.split():
            yield from tree(int(child))


def _pss(pid: int) -> int:
    """Return bytes; 0 for a process that has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main() -> int:
    """Measure the command after "--"."""
    if len(sys.argv) < 3 or sys.argv[1] != "--":
        print("usage: memory.py -- COMMAND ARG...", file=sys.stderr)
        return 2
    usage = measure(sys.argv[2:])
    print(json.dumps(asdict(usage)))
    return usage.returncode


if __name__ == "__main__":
    sys.exit(main())
