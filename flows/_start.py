"""Start quickly where a flow is run as a command, ``python -m flows.convert``.

Python imports the package before the module, so this is the first code that runs. Prefect's temporary server
takes longer to start than this process to import Prefect: both go on at the same time. Prefect itself sees a
server that is configured, so it does not import its own server into this process to start one.
"""

from __future__ import annotations

import atexit
import gc
import http.client
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NoReturn

from ckptcore.utils.command_process import start_quickly

COMMANDS = frozenset(
    f"flows.{name}"
    for name in ("consolidate", "convert", "export", "reshard", "resume", "retire", "scrub", "sweep")
)
# Files of the current folder in which Prefect looks for settings, and what shows that there are any.
SETTINGS = {"prefect.toml": b"", ".env": b"PREFECT", "pyproject.toml": b"tool.prefect"}
# The user's own settings take precedence over these. Blocks register themselves where they are saved: at its
# start the server would import all collections of Prefect that are installed, a quarter of a second with
# Dask's. And it would record each state of a task in a transaction of its own, while the run waits for it.
SERVER = {
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
    "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
}
EPHEMERAL = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
GRACE = 30.0  # seconds for the server to record the last events and to end
LATE = "_CKPTCORE_SERVER_LATE"  # set where the early server did not start, and Prefect is to start its own

# Prefect's, which tells the same of its own temporary server.
_log = logging.getLogger("prefect")


@dataclass(frozen=True, slots=True)
class EarlyServer:
    """A server that was started before Prefect was imported."""

    port: int
    process: subprocess.Popen[Any]
    log: str

    @property
    def address(self) -> str:
        """The beginning of its URLs."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def api_url(self) -> str:
        """The URL of its API."""
        return f"{self.address}/api"


_early: EarlyServer | None = None
_command = False


def is_command() -> bool:
    """Return whether this process was started as ``python -m flows.NAME``, while it imports the package."""
    # Until the module is found, its place in `sys.argv` has "-m".
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m") in COMMANDS


def start_command(server_configured: bool, env: MutableMapping[str, str] = os.environ) -> None:
    """Start the server, and configure it, unless one is configured or only help is asked for."""
    global _command, _early
    _command = True
    start_quickly()
    late = env.pop(LATE, None)
    if server_configured or late or "--help" in sys.argv or _settings_here() or find_spec("prefect") is None:
        return
    # A socket that listens already cannot be taken by another process, and a request waits in its queue until
    # the server is ready: nobody has to ask in turns.
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = Path(__file__).with_name("_server.py")
        command = [sys.executable, "-P", str(server), str(listening.fileno()), str(gc.get_threshold()[0])]
        # Ctrl-C would end the server too, and the run could not report its final state.
        with_signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _log_of_server(env) as log:
                process = subprocess.Popen(
                    command, env={**SERVER, **env, **EPHEMERAL}, pass_fds=[listening.fileno()], stderr=log
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, with_signals)
        _early = EarlyServer(listening.getsockname()[1], process, log.name)
    env["PREFECT_API_URL"] = _early.api_url
    atexit.register(_end, _early)
    end_with_this_process(process.pid)


def started_as_command() -> bool:
    """Return whether this process runs one of `COMMANDS`."""
    return _command


def early_server() -> EarlyServer | None:
    """Return the server that was started early, if there is one."""
    return _early


def wait_for(server: EarlyServer, seconds: float) -> None:
    """Return when the server answers. If it does not, start this command anew, without an early server.

    seconds: the most to wait.
    """
    _log.info("Starting temporary server on %s", server.address)
    asking = http.client.HTTPConnection("127.0.0.1", server.port, timeout=seconds)
    try:
        asking.request("GET", "/api/health")
        status = asking.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        _start_anew(f"{type(error).__name__}: {error}; see {server.log}")
    finally:
        asking.close()
    if status != http.client.OK:
        _start_anew(f"status {status}; see {server.log}")


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


def _start_anew(why: str) -> NoReturn:
    # Prefect reads its settings once, when it is imported. No run has begun yet.
    _log.warning("the temporary server did not start (%s); Prefect starts its own", why)
    env = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    atexit._run_exitfuncs()  # it ends the server
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**env, LATE: "1"})


def _end(server: EarlyServer) -> None:
    _log.info("Stopping temporary server on %s", server.address)
    server.process.terminate()
    try:
        server.process.wait(GRACE)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()


def _log_of_server(env: Mapping[str, str]) -> IO[bytes]:
    """Open the file that gets what the server writes, such as a traceback where it is slow to end."""
    home = env.get("PREFECT_HOME", "")
    try:
        os.makedirs(home, exist_ok=True)
        return open(os.path.join(home, "ckptcore-server.log"), "wb")
    except OSError:  # a folder of the user that cannot be written
        return tempfile.NamedTemporaryFile(prefix="ckptcore-server-", suffix=".log", delete=False)


def _settings_here() -> bool:
    """Return whether the current folder may configure Prefect."""
    for name, sign in SETTINGS.items():
        with suppress(OSError):  # no such file, or one that Prefect cannot read either
            if sign in Path(name).read_bytes():
                return True
    return False
