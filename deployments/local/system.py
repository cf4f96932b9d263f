"""Start all services in order, each once the one before is ready; stop them without losing a run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from xmlrpc.client import Fault, ServerProxy

import httpx
from supervisor.xmlrpc import SupervisorTransport

from ckptcore.errors import UsageError
from ckptcore.redaction import ending
from ckptcore.utils import terminal
from deployments import POOL, database_server, with_project
from deployments.local.state import State, load, load_or_create, locked, write_private
from deployments.processes import end_having

# What runs, in order: steps, which end, and services, with the path that answers once one is ready.
READY = {"postgres": "", "prefect": "/api/ready", "worker": "/health", "receiver": "/readyz"}
ORDER = ("initdb", "postgres", "databases", "prefect", "deploy", "worker", "receiver")
# Settings of another Prefect server must not leak in. Only variables about this machine are kept.
INHERITED = ("HOME", "PATH", "LANG", "TZ", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
INHERITED_GROUPS = ("AWS_", "FSSPEC_", "GOOGLE_", "AZURE_", "SSL_", "LC_")
READY_SECONDS = 180.0  # the first start migrates Prefect's database
ANSWER_SECONDS = 60.0  # for what runs already, and may have been started again a moment ago
LOOK = 0.2

Supervisor: TypeAlias = Callable[..., Any]  # of a method of its API, and its arguments


def up(folder: Path, chosen: State) -> State:
    """Start or restart the services that do not run as chosen, and wait until all are ready.

    If one does not start, those that this call started are stopped; those that ran before stay.

    Args:
        folder: the state folder.
        chosen: new values of `CHOICES`; the others are kept.

    Raises:
        UsageError: a service does not start. The message has the end of its log.
    """
    with locked(folder):
        state = load_or_create(folder, chosen)
        for place in (state["root"], state["exports"]):
            if "://" not in place:
                Path(place).mkdir(parents=True, exist_ok=True)
        account = database_server.account()
        os.chown(folder / "postgres", account.pw_uid, account.pw_gid)
        supervisor = _configured(state)
        before = _live(supervisor)
        try:
            for name in ORDER:
                _bring_up(supervisor, name, state)
        except BaseException:
            if before:
                _stop(supervisor, *(name for name in reversed(ORDER) if name not in before))
            else:
                _shut_down(supervisor, state)
            raise
    return state


def down(folder: Path, patience: float) -> None:
    """Stop everything: first the runs, then the processes, in reverse order.

    Args:
        folder: the state folder.
        patience: seconds for runs to end. The worker reschedules the others, and the next `up` resumes them.
    """
    state = load(folder)
    if state is None:
        terminal.line(f"nothing to stop: no `up` was run in {folder}")
        return
    with locked(folder):
        supervisor = _supervisor(folder)
        if supervisor is not None and "prefect" in _live(supervisor) and is_ready("prefect", state):
            # Without a worker no run can end.
            waits = {"pause": READY_SECONDS, "drain": patience if "worker" in _live(supervisor) else 0}
            for name, seconds in waits.items():
                _start(supervisor, name)
                if not _becomes_ready(supervisor, name, state, seconds):
                    terminal.line(f"{name}: not done; runs that are left go on after the next `up`")
        _shut_down(supervisor, state)


def pids(folder: Path) -> Mapping[str, int]:
    """Return the process of each program that runs."""
    supervisor = _supervisor(folder)
    return {} if supervisor is None else _live(supervisor)


def status(folder: Path) -> dict[str, bool]:
    """Return which services run and are ready."""
    state, programs = load(folder), pids(folder)
    return {name: state is not None and name in programs and is_ready(name, state) for name in READY}


def is_ready(name: str, state: State) -> bool:
    """Return whether a service does its work."""
    if name == "postgres":
        return database_server.answers(state["postgres_port"])
    try:
        return httpx.get(state[name] + READY[name], timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def filled(name: str, state: State) -> str:
    """Return a template of this folder with the values of the state."""
    values = {
        **state,
        "deployments": Path(__file__).parents[1],
        "python": sys.executable,
        "program": _program(),
        "pool": POOL,
        # TOML's strings are JSON's.
        "roots": json.dumps([state["root"]]),
        "destination": json.dumps(state["exports"] + "/{path}"),
    }
    if name.endswith(".conf"):
        account = database_server.account()
        values |= {"programs": database_server.programs(), "postgres_user": account.pw_name}
        values = {key: str(value).replace("%", "%%") for key, value in values.items()}
    return Path(__file__).with_name(name).read_text().format_map(values)


def machine_env() -> dict[str, str]:
    """Return the variables that every process inherits: those about this machine, and where the code is."""
    names = (name for name in os.environ if name in INHERITED or name.startswith(INHERITED_GROUPS))
    return with_project({name: os.environ[name] for name in names})


def _program() -> str:
    """Return the command for ``ckptcore`` here: its environment need not be active in the user's shell."""
    ours, in_path = Path(sys.executable).with_name("ckptcore"), shutil.which("ckptcore")
    working_dir = Path.cwd()
    if not ours.exists() or (in_path is not None and Path(in_path).samefile(ours)):
        return "ckptcore"
    return shlex.quote(str(ours.relative_to(working_dir) if ours.is_relative_to(working_dir) else ours))


def _call(socket_path: Path, method: str, *arguments: Any) -> Any:
    """Return the answer of a method of the supervisor: http://supervisord.org/api.html."""
    with ServerProxy("http://localhost", SupervisorTransport(serverurl=f"unix://{socket_path}")) as proxy:
        return getattr(proxy.supervisor, method)(*arguments)


def _supervisor(folder: Path) -> Supervisor | None:
    """Return the supervisor that runs, or None."""
    supervisor = partial(_call, folder / "run" / "supervisor.sock")
    try:
        with suppress(Fault):  # it shuts down
            supervisor("getState")
    except OSError:
        return None
    return supervisor


def _configured(state: State) -> Supervisor:
    """Write all files; return the calls of a supervisor that has read its own. What changed is stopped."""
    path, supervisor = state["folder"] / "supervisord.conf", _supervisor(state["folder"])
    before = path.read_text() if path.exists() else ""
    for name in ("receiver.toml", "env.sh", path.name):
        write_private(state["folder"] / name, filled(name, state))
    common = [text.partition("[program:")[0] for text in (before, path.read_text())]
    if supervisor is None or common[0] != common[1]:
        _shut_down(supervisor, state)  # or end what a supervisor that was killed has left
        supervisor = None
    command = ("supervisord", "-c", path) if supervisor is None else ("supervisorctl", "-c", path, "update")
    outcome = subprocess.run(
        [sys.executable, "-m", f"supervisor.{command[0]}", *command[1:]],
        env=machine_env(),
        capture_output=True,
        text=True,
        check=False,
    )
    if outcome.returncode:
        raise UsageError(f"{command[0]} failed: {ending(outcome.stdout + outcome.stderr, 500)}")
    return partial(_call, state["folder"] / "run" / "supervisor.sock")


def _live(supervisor: Supervisor) -> Mapping[str, int]:
    """Return the pids of the programs that run, or are about to."""
    rows = supervisor("getAllProcessInfo")
    return {row["name"]: row["pid"] for row in rows if row["statename"] not in ("STOPPED", "EXITED", "FATAL")}


def _bring_up(supervisor: Supervisor, name: str, state: State) -> None:
    """Carry out a step, or start a service that does not run and answer."""
    if name in _live(supervisor):
        if _becomes_ready(supervisor, name, state, ANSWER_SECONDS):
            terminal.line(f"{name}: already running (process {_live(supervisor)[name]})")
            return
        _stop(supervisor, name)
    if name in READY and is_ready(name, state):
        raise UsageError(
            f"cannot start {name}: its port is already used by another {name}",
            hint="stop that one, or choose other ports: make up UP='--prefect-port 0 --receiver-port 0'",
        )
    _start(supervisor, name)
    if not _becomes_ready(supervisor, name, state, READY_SECONDS):
        lives = supervisor("getProcessInfo", name)["statename"] in ("STARTING", "RUNNING")
        problem = f"is not ready after {READY_SECONDS:.0f} s" if lives else "ended"
        log = ending(supervisor("readProcessStdoutLog", name, -2000, 0).strip(), 1500)
        raise UsageError(
            f"{name} {problem}:\n{log or 'it has written nothing'}",
            hint=f"{state['folder']}/log/{name}.log has more",
        )
    terminal.line(
        f"{name}: started (process {_live(supervisor)[name]})" if name in READY else f"{name}: done"
    )


def _start(supervisor: Supervisor, name: str) -> None:
    with suppress(Fault):  # SPAWN_ERROR, where it has ended before the answer: its state says so
        supervisor("startProcess", name, False)


def _becomes_ready(supervisor: Supervisor, name: str, state: State, seconds: float) -> bool:
    """Wait until a service is ready, or a step has succeeded; return whether it did so in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        info = supervisor("getProcessInfo", name)
        if name not in READY and info["statename"] == "EXITED":
            return bool(info["exitstatus"] == 0)
        # PostgreSQL is tried again: it cannot start while processes of its killed predecessor still end.
        ended = ("EXITED", "FATAL") if name == "postgres" else ("EXITED", "FATAL", "BACKOFF")
        if info["statename"] in ended:
            return False
        if name in READY and is_ready(name, state):
            return True
        time.sleep(LOOK)
    return False


def _stop(supervisor: Supervisor, *names: str) -> None:
    for name in names:
        if name in _live(supervisor):
            with suppress(Fault):  # it has ended since
                supervisor("stopProcess", name)
            terminal.line(f"{name}: stopped")


def _shut_down(supervisor: Supervisor | None, state: State) -> None:
    """End the supervisor, if it runs, and all processes that it or a predecessor has left."""
    if supervisor is not None:
        _stop(supervisor, "pause", "drain", *reversed(ORDER))
        supervisor("shutdown")
        while _supervisor(state["folder"]) is not None:
            time.sleep(LOOK)
    end_having(f"CKPTCORE_UP={state['folder']}", ANSWER_SECONDS)
