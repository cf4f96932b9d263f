"""Start quickly where a flow is run as a command, ``python -m flows.convert``.

Python imports the package before the module, so this is the first code that runs. Prefect's temporary server
takes longer to start than this process to import Prefect: both go on at the same time.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckptcore.__main__ import start_quickly

COMMANDS = frozenset({"flows.consolidate", "flows.convert", "flows.export", "flows.reshard"})
PORTS = range(8000, 9000)  # as Prefect chooses them
# Files of the current folder in which Prefect looks for settings, and what shows that there are any.
SETTINGS = {"prefect.toml": b"", ".env": b"PREFECT", "pyproject.toml": b"tool.prefect"}


@dataclass(slots=True)
class EarlyServer:
    """A server that was started before Prefect was imported. taken: whether Prefect ends it."""

    port: int
    process: subprocess.Popen[Any]
    taken: bool = False


_early: EarlyServer | None = None


def is_command() -> bool:
    """Return whether this process was started as ``python -m flows.NAME``, while it imports the package."""
    # Until the module is found, its place in `sys.argv` has "-m".
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m") in COMMANDS


def start_command(server_configured: bool, env: MutableMapping[str, str] = os.environ) -> None:
    """Start the server, unless one is configured or only help is asked for."""
    global _early
    start_quickly()
    if server_configured or "--help" in sys.argv or _settings_here():
        return
    port = next((port for port in random.sample(PORTS, 10) if _is_free(port)), None)
    prefect = find_spec("prefect")  # imports nothing
    if port is None or prefect is None or prefect.origin is None:
        return
    # As `SubprocessASGIServer` starts it. The settings are those of the environment and of the profile, which
    # the server reads itself.
    command = ["uvicorn", "--app-dir", str(Path(prefect.origin).parent), "--factory"]
    command += ["prefect.server.api.server:create_app", "--host", "127.0.0.1", "--port", str(port)]
    quiet = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    with_signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, "--log-level", "error", "--lifespan", "on"], env={**env, **quiet}
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, with_signals)
    _early = EarlyServer(port, process)
    atexit.register(_end, _early)
    end_with_this_process(process.pid)


def early_server() -> EarlyServer | None:
    """Return the server that was started early, if it still runs."""
    return _early if _early is not None and _early.process.poll() is None else None


def end_with_this_process(pid: int) -> None:
    """End another process with this one, even if this one is killed."""
    # The pipe closes when this process ends. A session of its own: Ctrl-C must not reach the watcher.
    watcher = subprocess.Popen(
        ["/bin/sh", "-c", f"read _; kill {pid}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(watcher.terminate)  # on a normal exit the server is stopped already


def _end(server: EarlyServer) -> None:
    if not server.taken:  # the arguments were wrong, or a server is configured after all
        server.process.terminate()
        server.process.wait()


def _settings_here() -> bool:
    """Return whether the current folder may configure Prefect."""
    for name, sign in SETTINGS.items():
        with suppress(OSError):  # no such file, or one that Prefect cannot read either
            if sign in Path(name).read_bytes():
                return True
    return False


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
