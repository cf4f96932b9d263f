"""The state of a local installation, and its services: started in order, stopped without losing a run."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias
from xmlrpc.client import Fault, ServerProxy

import httpx
from platformdirs import user_state_path
from supervisor.xmlrpc import SupervisorTransport

from ckptcore.errors import UsageError
from ckptcore.redaction import ending
from ckptcore.utils import terminal
from deployments import POOL, database_server, with_project
from deployments.processes import end_having

VARIABLE = "CKPTCORE_STATE"
# PostgreSQL refuses to run as root, and other users cannot read root's home.
ROOT_STATE = Path("/var/lib/ckptcore/up")
# The user's choices: their defaults and help. Ports are on the loopback address; 0 picks a free one, once.
CHOICES: Mapping[str, tuple[Any, str]] = {
    "prefect_port": (4200, "of the server and its UI; 0 picks a free port; default 4200"),
    "receiver_port": (8080, "default 8080"),
    "postgres_port": (5440, "default 5440"),
    "worker_port": (8090, "of health checks; default 8090"),
    "root": ("", "folder of announced checkpoints; default STATE/checkpoints"),
    "exports": ("", "folder of converted checkpoints; default STATE/exports"),
    "limit": (2, "concurrent runs; default 2"),
}
# Of PostgreSQL's administrator, the owners of the two databases and Prefect's API; of hooks and the page.
SECRETS = (
    *(f"{name}_PASSWORD" for name in ("POSTGRES", "POSTGRES_PREFECT", "POSTGRES_CKPTCORE", "PREFECT")),
    *(f"CKPTCORE_{name}_TOKEN" for name in ("HOOK", "PAGE")),
)
# What runs, in order: steps, which end, and services, with the path that answers once one is ready.
READY = {"postgres": "", "prefect": "/api/ready", "worker": "/health", "receiver": "/readyz"}
ORDER = ("initdb", "postgres", "databases", "prefect", "deploy", "worker", "receiver")
# Settings of another Prefect server must not leak in. Only variables about this machine are kept.
INHERITED = ("HOME", "PATH", "LANG", "TZ", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
INHERITED_GROUPS = ("AWS_", "FSSPEC_", "GOOGLE_", "AZURE_", "SSL_", "LC_")
READY_SECONDS = 180.0  # the first start migrates Prefect's database
ANSWER_SECONDS = 60.0  # for what runs already, and may have been started again a moment ago
LOOK = 0.2
# Choices, secrets by names of environment variables, and what `complete` adds.
State: TypeAlias = Mapping[str, Any]


def folder() -> Path:
    """Return the state folder: ``CKPTCORE_STATE``, or a folder below the user's state folder."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]).expanduser().absolute()
    return ROOT_STATE if os.geteuid() == 0 else user_state_path("ckptcore") / "up"


def initial() -> State:
    """Return the default choices and new secrets, of letters that need no quotes in a URL or in a shell."""
    choices = {name: default for name, (default, _) in CHOICES.items()}
    signing = "whsec_" + base64.b64encode(secrets.token_bytes(24)).decode()
    return choices | {n: secrets.token_urlsafe(24) for n in SECRETS} | {"CKPTCORE_HOOK_SECRET": signing}


def complete(folder: Path, stored: State) -> State:
    """Return the stored values with the folders and addresses that follow from them."""
    urls = {name: f"http://127.0.0.1:{stored[f'{name}_port']}" for name in ("prefect", "receiver", "worker")}
    catalog, prefect = (
        f"://{name}:{stored[f'POSTGRES_{name.upper()}_PASSWORD']}@127.0.0.1:{stored['postgres_port']}/{name}"
        for name in ("ckptcore", "prefect")
    )
    return {
        **stored,
        **urls,
        "folder": folder,
        "root": (stored["root"] or f"{folder}/checkpoints").rstrip("/"),
        "exports": (stored["exports"] or f"{folder}/exports").rstrip("/"),
        "catalog": f"postgresql+psycopg{catalog}",
        "prefect_database": f"postgresql+asyncpg{prefect}",
    }


def load_or_create(folder: Path, chosen: State) -> State:
    """Create the state in an existing folder, or change what is `chosen`. The caller holds `locked`.

    Stored values take precedence over defaults, so a second `up` uses those of the first.
    """
    folder.chmod(0o711 if os.geteuid() == 0 else 0o700)
    for name in ("log", "run", "tmp", "postgres"):
        (folder / name).mkdir(mode=0o700 if name == "postgres" else 0o777, exist_ok=True)
    new, earlier = initial(), load(folder) or {}
    stored = {name: earlier.get(name, new[name]) for name in new} | dict(chosen)
    with ExitStack() as probes:  # all open at once, or the same port could be picked twice
        for name in (name for name in stored if name.endswith("_port") and stored[name] == 0):
            probe = probes.enter_context(socket.create_server(("127.0.0.1", 0)))
            stored[name] = probe.getsockname()[1]
    write_private(folder / "state.json", json.dumps(stored, indent=2))
    return complete(folder, stored)


def load(folder: Path) -> State | None:
    """Return the state in a folder, or None if no `up` was run there. Raises `UsageError`."""
    try:
        return complete(folder, json.loads((folder / "state.json").read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"cannot read the state in {folder}: {error}", hint="move it away, and run `make up` again"
        ) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder, which it creates, for one `up` or `down`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            terminal.line("waiting for another `up` or `down` of this installation", err=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_private(path: Path, text: str) -> None:
    """Write a file atomically that only its owner can ever read."""
    new = path.with_suffix(".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_SYNC
    with open(os.open(new, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)


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
        _configure(state)
        before = pids(folder)
        try:
            for name in ORDER:
                _bring_up(name, state)
        except BaseException:
            if before:
                _stop(folder, *(name for name in reversed(ORDER) if name not in before))
            else:
                _shut_down(folder)
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
        running = pids(folder)
        if "prefect" in running and is_ready("prefect", state):
            # Without a worker no run can end.
            waits = {"pause": READY_SECONDS, "drain": patience if "worker" in running else 0}
            for name, seconds in waits.items():
                if not _starts(name, state, seconds):
                    terminal.line(f"{name}: not done; runs that are left go on after the next `up`")
        _shut_down(folder)


def pids(folder: Path) -> Mapping[str, int]:
    """Return the process of each program that runs, or is about to."""
    rows = _ask(folder, "getAllProcessInfo") if _is_supervised(folder) else ()
    return {row["name"]: row["pid"] for row in rows if row["statename"] not in ("STOPPED", "EXITED", "FATAL")}


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
    env = os.environ.items()
    return with_project({n: v for n, v in env if n in INHERITED or n.startswith(INHERITED_GROUPS)})


def _program() -> str:
    """Return the command for ``ckptcore`` here: its environment need not be active in the user's shell."""
    ours, in_path = Path(sys.executable).with_name("ckptcore"), shutil.which("ckptcore")
    working_dir = Path.cwd()
    if not ours.exists() or (in_path is not None and Path(in_path).samefile(ours)):
        return "ckptcore"
    return shlex.quote(str(ours.relative_to(working_dir) if ours.is_relative_to(working_dir) else ours))


def _ask(folder: Path, method: str, *arguments: Any) -> Any:
    """Return the answer of a method of the supervisor: http://supervisord.org/api.html."""
    transport = SupervisorTransport(serverurl=f"unix://{folder}/run/supervisor.sock")
    with ServerProxy("http://localhost", transport) as proxy:
        return getattr(proxy.supervisor, method)(*arguments)


def _is_supervised(folder: Path) -> bool:
    try:
        with suppress(Fault):  # it shuts down
            _ask(folder, "getState")
    except OSError:
        return False
    return True


def _configure(state: State) -> None:
    """Write all files, and let a supervisor read its own. What changed is stopped."""
    path = state["folder"] / "supervisord.conf"
    before = path.read_text() if path.exists() else ""
    for name in ("receiver.toml", "env.sh", path.name):
        write_private(path.with_name(name), filled(name, state))
    common = {text.partition("[program:")[0] for text in (before, path.read_text())}
    program, *verb = "supervisorctl", "update"
    if len(common) > 1 or not _is_supervised(path.parent):
        _shut_down(path.parent)  # or end what a supervisor that was killed has left
        program, *verb = ("supervisord",)
    command = [sys.executable, "-m", f"supervisor.{program}", "-c", str(path), *verb]
    outcome = subprocess.run(command, env=machine_env(), capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise UsageError(f"{program} failed: {ending(outcome.stdout + outcome.stderr, 500)}")


def _bring_up(name: str, state: State) -> None:
    """Carry out a step, or start a service that does not run and answer."""
    folder: Path = state["folder"]
    if name in pids(folder):
        if _becomes_ready(name, state, ANSWER_SECONDS):
            terminal.line(f"{name}: already running (process {pids(folder)[name]})")
            return
        _stop(folder, name)
    if name in READY and is_ready(name, state):
        raise UsageError(
            f"cannot start {name}: its port is already used by another {name}",
            hint="stop that one, or choose other ports: make up UP='--prefect-port 0 --receiver-port 0'",
        )
    if not _starts(name, state, READY_SECONDS):
        lives = _ask(folder, "getProcessInfo", name)["statename"] in ("STARTING", "RUNNING")
        problem = f"is not ready after {READY_SECONDS:.0f} s" if lives else "ended"
        log = ending(_ask(folder, "readProcessStdoutLog", name, -2000, 0).strip(), 1500)
        raise UsageError(
            f"{name} {problem}:\n{log or 'it has written nothing'}", hint=f"{folder}/log/{name}.log has more"
        )
    terminal.line(f"{name}: started (process {pids(folder)[name]})" if name in READY else f"{name}: done")


def _starts(name: str, state: State, seconds: float) -> bool:
    with suppress(Fault):  # SPAWN_ERROR, where it has ended before the answer: its state says so
        _ask(state["folder"], "startProcess", name, False)
    return _becomes_ready(name, state, seconds)


def _becomes_ready(name: str, state: State, seconds: float) -> bool:
    """Wait until a service is ready, or a step has succeeded; return whether it did so in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        info = _ask(state["folder"], "getProcessInfo", name)
        # PostgreSQL is tried again: it cannot start while processes of its killed predecessor still end.
        ended = ("EXITED", "FATAL") if name == "postgres" else ("EXITED", "FATAL", "BACKOFF")
        if info["statename"] in ended:
            return bool(name not in READY and info["statename"] == "EXITED" and info["exitstatus"] == 0)
        if name in READY and is_ready(name, state):
            return True
        time.sleep(LOOK)
    return False


def _stop(folder: Path, *names: str) -> None:
    for name in names:
        with suppress(Fault):  # it does not run
            _ask(folder, "stopProcess", name)
            terminal.line(f"{name}: stopped")


def _shut_down(folder: Path) -> None:
    """End the supervisor, if it runs, and all processes that it or a predecessor has left."""
    if _is_supervised(folder):
        _stop(folder, "pause", "drain", *reversed(ORDER))
        _ask(folder, "shutdown")
        while _is_supervised(folder):
            time.sleep(LOOK)
    end_having(f"CKPTCORE_UP={folder}", ANSWER_SECONDS)
