"""Start a service as a process in its own session, find it by its pid file, and end it.

A pid file also records the process's start time, because pids are reused. Child processes inherit a mark, an
environment variable: runs of a worker have sessions of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "CKPTCORE_UP_SERVICE"
STEP = 0.1  # seconds between two checks
TIDY_SECONDS = 5.0  # for child processes that a service leaves behind


@dataclass(frozen=True, slots=True)
class KnownProcess:
    """The process of a pid file. started: in clock ticks since boot. made: digest of command and settings."""

    pid: int
    started: int
    made: str


def start(
    name: str, folder: Path, command: Sequence[str], env: Mapping[str, str], **how: Any
) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one. Its output goes to ``log/NAME.log``.

    Args:
        name: the service.
        folder: the state folder.
        command: the program and its arguments.
        env: the complete environment.
        how: further arguments of `subprocess.Popen`, such as user and group.
    """
    own = dict(env) | {MARK: _owner_mark(name, folder)}
    with (folder / "log" / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=how.pop("cwd", folder),
            **how,
        )
    record = {"pid": process.pid, "started": _stat(process.pid)[1], "made": made_of(command, env)}
    _pid_file(name, folder).write_text(json.dumps(record))
    return process


def made_of(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Return a digest of command and environment. A service is restarted when it changes."""
    text = json.dumps([list(command), sorted(env.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def known(name: str, folder: Path) -> KnownProcess | None:
    """Return the process of a pid file if it is alive."""
    record = _known_process(name, folder)
    return record if record is not None and is_alive(record) else None


def is_alive(one: KnownProcess) -> bool:
    """Return whether the pid still belongs to that process, and it is not a zombie."""
    try:
        state, started = _stat(one.pid)
    except OSError:
        return False
    return state not in "ZX" and started == one.started


def end(name: str, folder: Path, patience: float, how: signal.Signals = signal.SIGTERM) -> bool:
    """End a process and its children; kill it after `patience` seconds.

    Returns:
        Whether it ended by itself.
    """
    one, by_itself = _known_process(name, folder), True
    if one is not None and is_alive(one):
        os.kill(one.pid, how)
        by_itself = _gone(one, patience)
    # Its children, even if it died before it could end them.
    for group_signal in (signal.SIGTERM, signal.SIGKILL):
        for pid in marked(name, folder):
            _kill(pid, group_signal)
        until = time.monotonic() + TIDY_SECONDS
        while marked(name, folder) and time.monotonic() < until:
            time.sleep(STEP)
    _pid_file(name, folder).unlink(missing_ok=True)
    return by_itself


def marked(name: str, folder: Path) -> list[int]:
    """Return the pids of a service and of all processes that it started."""
    return having(f"{MARK}={_owner_mark(name, folder)}")


def having(setting: str) -> list[int]:
    """Return the pids of living processes with this line, ``NAME=value``, in their environment."""
    mark, found = setting.encode(), []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
            except OSError:  # it has ended, or belongs to another user
                continue
    return found  # a zombie has no environment, so it is not included


def tail(name: str, folder: Path, lines: int = 15) -> str:
    """Return the last lines of a service's log."""
    try:
        text = (folder / "log" / f"{name}.log").read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _known_process(name: str, folder: Path) -> KnownProcess | None:
    try:
        return KnownProcess(**json.loads(_pid_file(name, folder).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _gone(one: KnownProcess, patience: float) -> bool:
    until = time.monotonic() + patience
    while is_alive(one):
        if time.monotonic() > until:
            return False
        time.sleep(STEP)
    return True


def _kill(pid: int, how: signal.Signals) -> None:
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        return


def _stat(pid: int) -> tuple[str, int]:
    """Return state and start time of a process; see proc(5). The name before them can contain anything."""
    rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return rest[0], int(rest[19])


def _owner_mark(name: str, folder: Path) -> str:
    return f"{folder}:{name}"


def _pid_file(name: str, folder: Path) -> Path:
    return folder / "run" / f"{name}.json"
