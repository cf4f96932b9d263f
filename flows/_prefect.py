"""Prefect's environment: the server that the flows use, and its logging.

1. A server that the user configured, by environment or profile, is used as it is.
2. Otherwise Prefect starts an ephemeral server. Its database is in a separate folder, so that a conversion
   does not migrate or fill the user's ``~/.prefect``.
3. Nothing is sent to third parties.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from platformdirs import user_state_path

from ckptcore.utils.foreign_text import InvalidText, parse_url
from flows._address import configured
from flows._start import early_server, end_with_this_process, wait_for

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
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
NO_AUTHORITY = str(Path(__file__).with_name("_no_authority.pem"))


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


def read_no_authorities(env: MutableMapping[str, str] = os.environ) -> None:
    """Let Prefect's clients read no certificates of authorities where the server is at ``http://127.0.0.1``.

    Each of four clients would read all of them, 20 ms each, and use none. If such a server redirects to
    ``https``, the run fails.
    """
    with suppress(InvalidText):  # `require_address` reports it
        url = parse_url(env.get("PREFECT_API_URL", ""))
        if url.scheme == "http" and url.hostname in LOOPBACK:
            env.setdefault("PREFECT_API_SSL_CERT_FILE", NO_AUTHORITY)


def serve_while_alive() -> None:
    """Wait for the early server; else start the ephemeral one, unless one is configured.

    It ends with this process. Prefect would start it too, but leave it running forever after a process that
    was killed.
    """
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    early = early_server()
    if early is not None:
        wait_for(early, settings.server.ephemeral.startup_timeout_seconds)
        return
    if settings.api.url is not None:
        return
    from prefect.server.api.server import SubprocessASGIServer  # a second of imports

    server = SubprocessASGIServer()
    # Ctrl-C would end the server too, and the run could not report its final state.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        server.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert server.server_process is not None
    end_with_this_process(server.server_process.pid)


def _own_home() -> Path:
    # Prefect creates its home, but not the folders above it.
    try:
        return user_state_path("ckptcore", ensure_exists=True) / "prefect"
    except OSError:  # no home folder, or one that is read-only, as in many containers
        return Path(tempfile.mkdtemp(prefix="ckptcore-prefect-"))


def server_configured(env: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether the environment or the active profile names a server."""
    return bool(env.get("PREFECT_PROFILE") or configured(env)[0])
