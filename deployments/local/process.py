"""Process: one of our processes, started in a session of its own, found again by its pid file, ended.

A pid file says which process it was, by its time of start too: numbers are given again.
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

STEP = 0.1  # seconds between two looks
TIDY_SECONDS = 5.0  # for what a process leaves behind


@dataclass(frozen=True, slots=True)
class Known:
    """A process of a pid file. started: in clock ticks since boot. made: digest of command and settings."""

    pid: int
    started: int
    made: str


def start(
    name: str, folder: Path, command: Sequence[str], env: Mapping[str, str], **how: Any
) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one; its words go to ``log/NAME.log``.

    how: further arguments of `subprocess.Popen`, as user and group.
    """
    with (folder / "log" / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=how.pop("cwd", folder), **how,
        )  # fmt: skip
    record = {"pid": process.pid, "started": _stat(process.pid)[1], "made": made_of(command, env)}
    _pid_file(name, folder).write_text(json.dumps(record))
    return process


def made_of(command: Sequence[str], env: Mapping[str, str]) -> str:
    """A digest of how a process is started: it is started anew when that changes."""
    told = json.dumps([list(command), sorted(env.items())])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def known(name: str, folder: Path) -> Known | None:
    """The process of a pid file while it lives."""
    record = _read(name, folder)
    return record if record is not None and is_alive(record) else None


def is_alive(one: Known) -> bool:
    """Whether it is still that process, and no mere entry of one that ended."""
    try:
        state, started, _ = _stat(one.pid)
    except OSError:
        return False
    return state not in "ZX" and started == one.started


def end(name: str, folder: Path, patience: float, how: signal.Signals = signal.SIGTERM) -> bool:
    """Ask a process to end, and make it after ``patience`` seconds; its children go with it.

    Whether it ended by itself.
    """
    one, by_itself = _read(name, folder), True
    if one is not None and is_alive(one):
        os.kill(one.pid, how)
        by_itself = _gone(one, patience)
    # What it started is in its session, also when it did not live to tidy up. A session's number is not
    # given again before its last process is gone.
    if one is not None and _is_own(one):
        for group_signal in (signal.SIGTERM, signal.SIGKILL):
            for pid in members(one.pid):
                _kill(pid, group_signal)
            until = time.monotonic() + TIDY_SECONDS
            while members(one.pid) and time.monotonic() < until:
                time.sleep(STEP)
    _pid_file(name, folder).unlink(missing_ok=True)
    return by_itself


def members(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, _, of = _stat(int(entry))
            except OSError:
                continue
            if of == session and state not in "ZX":
                found.append(int(entry))
    return found


def tail(name: str, folder: Path, lines: int = 15) -> str:
    """The last words of a process."""
    try:
        text = (folder / "log" / f"{name}.log").read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _read(name: str, folder: Path) -> Known | None:
    try:
        return Known(**json.loads(_pid_file(name, folder).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _is_own(one: Known) -> bool:
    """Whether nobody else has its number, so that the session of that number is its session."""
    try:
        return _stat(one.pid)[1] == one.started
    except OSError:
        return True


def _gone(one: Known, patience: float) -> bool:
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


def _stat(pid: int) -> tuple[str, int, int]:
    """State, time of start and session of a process: proc(5). The name before them may hold anything."""
    rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return rest[0], int(rest[19]), int(rest[3])


def _pid_file(name: str, folder: Path) -> Path:
    return folder / "run" / f"{name}.json"
