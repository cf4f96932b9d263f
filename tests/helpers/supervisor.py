"""Supervisor: what systemd is to the four processes: whatever ends, however it ends, is started again."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

from deployments.local import process
from deployments.local.services import SERVICES
from deployments.local.state import load

RESTART_SECONDS = 1.0
LOOK = 0.1


class Supervisor:
    """Keeps what `make up` has started alive, the same way, until it is stopped.

    kills: of each service, by `kill`. starts: of each, by this supervisor.
    """

    def __init__(self, folder: Path) -> None:
        state = load(folder)
        assert state is not None
        self._state, self._services = state, {service.name: service for service in SERVICES}
        self.kills: Counter[str] = Counter()
        self.starts: Counter[str] = Counter()
        self._children: list[subprocess.Popen[bytes]] = []
        self._gone: dict[str, float] = {}
        self._end = threading.Event()
        self._turn = threading.Lock()
        self.trouble: Exception | None = None
        self._thread = threading.Thread(target=self._keep, name="supervisor", daemon=True)
        self._thread.start()

    def is_alive(self, name: str) -> bool:
        """Whether a service's process lives, ready or not."""
        return process.known(name, self._state.folder) is not None

    def kill(self, name: str) -> bool:
        """kill -9 a service with all that it has started, as its unit would be; False if it is not up."""
        with self._turn:
            known = process.known(name, self._state.folder)
            if known is None:
                return False
            victims = list(dict.fromkeys([*_family(known.pid), *process.marked(name, self._state.folder)]))
            for pid in victims:
                _kill(pid)
            while left := [pid for pid in victims if _lives(pid)]:
                # What was being started while the others were killed.
                for pid in {child for one in left for child in _family(one)}:
                    _kill(pid)
                time.sleep(0.01)
            for pid in process.marked(name, self._state.folder):
                _kill(pid)
            self.kills[name] += 1
            return True

    def stop(self) -> None:
        """Start nothing again any more."""
        self._end.set()
        self._thread.join()

    def reap(self) -> None:
        """Take note of children that have ended; call it when all is down."""
        for child in self._children:
            child.wait(60)

    def _keep(self) -> None:
        while not self._end.wait(LOOK):
            try:
                for name in self._services:
                    with self._turn:
                        self._look(name)
            except Exception as error:
                self.trouble = error
                raise

    def _look(self, name: str) -> None:
        for child in self._children:
            child.poll()
        if self.is_alive(name):
            self._gone.pop(name, None)
            return
        since = self._gone.setdefault(name, time.monotonic())
        if time.monotonic() - since >= RESTART_SECONDS:
            service, state = self._services[name], self._state
            self._children.append(
                process.start(name, state.folder, service.command(state), service.env(state), **service.how())
            )
            self.starts[name] += 1
            self._gone.pop(name)


def _family(pid: int) -> list[int]:
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
