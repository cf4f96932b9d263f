"""Prefect's environment: the server that the flows use, and its logging.

1. A server that the user configured, by environment or profile, is used as it is.
2. Otherwise Prefect starts an ephemeral server. Its database is in a separate folder, so that a conversion
   does not migrate or fill the user's ``~/.prefect``.
3. Nothing is sent to third parties.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from platformdirs import user_state_path

from flows._address import configured

# Settings that only reduce logging or lengthen timeouts. The user's own take precedence.
QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # The default of 20 s is too short for the first start on a busy machine (migrations).
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    # ckptcore also logs from worker threads, where Prefect sees no flow run.
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # The ephemeral server shares stderr with the run, whose user need not see its SQLite retries.
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    # A server whose database is down replies 500; retry as for "unavailable".
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
}
# Of the temporary server. Blocks register themselves where they are saved: at its start the server would
# import all collections of Prefect that are installed. No proxy is before it whose headers could be believed.
SERVER = {
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
    "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
    "FORWARDED_ALLOW_IPS": "",
}


def set_environment(env: MutableMapping[str, str] = os.environ) -> None:
    """Write the settings into `env`. They have no effect once Prefect has been imported."""
    if "prefect" in sys.modules:
        return
    for name, value in QUIET.items():
        env.setdefault(name, value)
    if not env.get("PREFECT_API_URL"):
        env.pop("PREFECT_API_URL", None)  # an empty one makes Prefect's event sender fail at every event
    if "PREFECT_HOME" not in env and not server_configured(env):
        env["PREFECT_HOME"] = str(_own_home())


def serve_while_alive() -> None:
    """Start Prefect's temporary server, unless a server is configured.

    It ends with this process. Prefect would start it too, but leave it running forever after a process that
    was killed.
    """
    from prefect.settings import get_current_settings

    if get_current_settings().api.url is not None:
        return
    from prefect.server.api.server import SubprocessASGIServer  # a second of imports

    for name, value in SERVER.items():
        os.environ.setdefault(name, value)
    server = SubprocessASGIServer()
    # Ctrl-C would end the server too, and the run could not report its final state.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        server.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert server.server_process is not None
    _end_with_this_process(server.server_process.pid)


def _end_with_this_process(pid: int) -> None:
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


def _own_home() -> Path:
    # Prefect creates its home, but not the folders above it.
    try:
        return user_state_path("ckptcore", ensure_exists=True) / "prefect"
    except OSError:  # no home folder, or one that is read-only, as in many containers
        return Path(tempfile.mkdtemp(prefix="ckptcore-prefect-"))


def server_configured(env: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether the environment or the active profile names a server."""
    return bool(env.get("PREFECT_PROFILE") or configured(env)[0])
