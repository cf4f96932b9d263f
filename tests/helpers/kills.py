"""Kills: kill -9 of a service of `make up` with all that it has started, as if its machine had lost power."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

from deployments.local.system import pids


class Kills:
    """Kill services, which their supervisor starts again. count: of each service."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.count: Counter[str] = Counter()

    def kill(self, name: str) -> bool:
        """kill -9 a service and what it has started; False if it is not up."""
        pid = pids(self._folder).get(name, 0)
        if not pid:
            return False
        victims = list(dict.fromkeys(family(pid)))
        for victim in victims:
            _kill(victim)
        while left := [pid for pid in victims if _lives(pid)]:
            # What was being started while the others were killed.
            for pid in {child for one in left for child in family(one)}:
                _kill(pid)
            time.sleep(0.01)
        self.count[name] += 1
        return True


def family(pid: int) -> list[int]:
    """A process and what it has started, and so on; a parent before its children."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry))
    found, queue = [], [pid]
    while queue:
        one = queue.pop(0)
        found.append(one)
        queue += parents.get(one, [])
    return found


def _lives(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX"


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
