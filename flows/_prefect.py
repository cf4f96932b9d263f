"""Prefect's environment: which server do the flows talk to, and how loud is it?

1. A server that the user configured, by environment or profile, is used as it stands.
2. Without one, Prefect starts an ephemeral server; its database lives in a home of our own, so
   that nobody's ``~/.prefect`` is migrated or filled by a conversion.
3. Nothing is sent to third parties.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import MutableMapping
from pathlib import Path

from platformdirs import user_state_path

# Settings that only make a run quieter or more patient; whatever the user has set wins.
QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # The default of 20 s is too short for the first start on a busy machine (migrations).
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    # The core logs from worker threads too, where Prefect sees no flow run.
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # The ephemeral server shares stderr with the run; SQLite retries are its own affair.
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    # What a server answers whose database is away; asked again like one that says "unavailable".
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
}


def settle_environment(env: MutableMapping[str, str] = os.environ) -> None:
    """Write the settings into ``env``; without effect once Prefect has read its own."""
    if "prefect" in sys.modules:
        return
    for name, value in QUIET.items():
        env.setdefault(name, value)
    if not env.get("PREFECT_API_URL"):
        env.pop("PREFECT_API_URL", None)  # an empty one makes Prefect's event sender fail at every event
    if "PREFECT_HOME" not in env and not _server_configured(env):
        env["PREFECT_HOME"] = str(_own_home())


def serve_while_alive() -> None:
    """Start the ephemeral server, unless one is configured; it ends with this process.

    Prefect would start it too, but leave it running for ever behind a process that was killed.
    """
    from prefect.settings import get_current_settings

    if get_current_settings().api.url is not None:
        return
    from prefect.server.api.server import SubprocessASGIServer  # a second of imports

    server = SubprocessASGIServer()
    # Ctrl-C reaches the server too, and the run could not tell it any more how it ended.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        server.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert server.server_process is not None
    # The pipe closes when this process ends, however it ends. A session of its own: Ctrl-C is for
    # the flow.
    watcher = subprocess.Popen(
        ["/bin/sh", "-c", f"read _; kill {server.server_process.pid}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(watcher.terminate)  # in an orderly end Prefect stops the server itself


def _own_home() -> Path:
    # Prefect makes its home, but not the folders above it.
    try:
        return user_state_path("ckptcore", ensure_exists=True) / "prefect"
    except OSError:  # no home folder, or one that is read-only, as in many containers
        return Path(tempfile.mkdtemp(prefix="ckptcore-prefect-"))


def _server_configured(env: MutableMapping[str, str]) -> bool:
    if env.get("PREFECT_API_URL") or env.get("PREFECT_PROFILE"):
        return True
    profiles = Path(env.get("PREFECT_HOME", Path.home() / ".prefect")) / "profiles.toml"
    try:
        known = tomllib.loads(profiles.read_text())
    except (OSError, tomllib.TOMLDecodeError):
        return False  # no profiles, or none that Prefect itself could read
    active = known.get("profiles", {}).get(known.get("active"), {})
    return bool(active.get("PREFECT_API_URL"))
