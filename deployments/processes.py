"""Find the processes that inherited a mark in their environment, and end them: of a worker, and of `make up`.

A module of its own for both. Runs of a worker have sessions of their own: neither a process group nor the
parent's pid leads to them.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

STEP = 0.1  # seconds between two looks


def having(setting: str) -> list[int]:
    """Return the pids of living processes with this line, ``NAME=value``, in their environment."""
    mark, pids = setting.encode(), []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    pids.append(int(entry))
            except OSError:  # it has ended, or belongs to another user
                continue
    return pids  # a zombie has no environment, so it is not included


def end_having(setting: str, seconds: float) -> None:
    """End these processes: SIGTERM, and SIGKILL to those that are left after `seconds`."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + seconds
        for pid in having(setting):
            try:
                os.kill(pid, signal_number)
            except ProcessLookupError:
                continue
        while having(setting) and time.monotonic() < until:
            time.sleep(STEP)
