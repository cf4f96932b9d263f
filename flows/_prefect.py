"""The Prefect server that flows use: its address, its environment and its errors, each in one line.

1. A server that the user configured, by environment or profile, is used as it is. Prefect answers a malformed
   address, and a server that does not answer, with a traceback.
2. Otherwise Prefect starts an ephemeral server. Its database is in a separate folder, so that a conversion
   does not migrate or fill the user's ``~/.prefect``.
3. Nothing is sent to third parties.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from platformdirs import user_state_path

from ckptcore.errors import CkptError, UsageError
from ckptcore.redaction import bare_url, beginning, redacted
from ckptcore.utils import terminal
from ckptcore.utils.foreign_text import InvalidText, load_toml, parse_url

_MOST_TEXT = 500  # characters of a server's reason
_HINT = "set PREFECT_API_URL, or the active profile's, to http://HOST:PORT/api"
# Answers of a proxy, or of another server at this address; or without the right credentials.
_NO_SERVER = frozenset({401, 403, 404, 405, 502, 503, 504})
_START = "start it, or correct PREFECT_API_URL, which usually ends in /api"
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


def configured(env: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return the address, "" if there is none, and where it is set: by the environment or a profile."""
    if env.get("PREFECT_API_URL"):
        return env["PREFECT_API_URL"], "PREFECT_API_URL"
    home = Path(env.get("PREFECT_HOME") or Path.home() / ".prefect").expanduser()
    path = Path(env.get("PREFECT_PROFILES_PATH") or home / "profiles.toml").expanduser()
    try:
        profiles_file = load_toml(path.read_bytes())
    except (OSError, InvalidText):
        return "", ""  # no profiles, or none that Prefect itself could read
    name = env.get("PREFECT_PROFILE") or profiles_file.get("active")
    profiles = profiles_file.get("profiles")
    profile = profiles.get(name) if isinstance(profiles, dict) and isinstance(name, str) else None
    url = profile.get("PREFECT_API_URL") if isinstance(profile, dict) else None
    return (str(url), f"PREFECT_API_URL of the profile {name!r} in {path}") if url else ("", "")


def require_address(env: Mapping[str, str] = os.environ) -> None:
    """Raise `UsageError` if the address cannot be that of a server."""
    url, where = configured(env)
    if not url:
        return
    with suppress(ValueError):
        parts = parse_url(url)
        _ = (parts.hostname or "").encode("idna")
        if parts.scheme in ("http", "https") and parts.hostname:
            return
    raise UsageError(f"{where} must be the URL of a Prefect server's API (got {_bare(url)!r})", hint=_HINT)


def require_address_of_command() -> None:
    """Check the address; end this process if it was started as ``python -m`` of this package."""
    try:
        require_address()
    except UsageError as error:
        if sys.argv[:1] == ["-m"]:  # until the module is found
            end_with(error)
        raise


def await_server(seconds: float) -> None:
    """Wait until something listens at the address; raise `UsageError` if nothing does for so long.

    Nothing is asked for without an address, and behind a proxy, which alone may reach it.
    """
    url, _ = configured()
    if not url or urllib.request.getproxies():
        return
    parts, until = parse_url(url), time.monotonic() + seconds
    place = parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    while True:
        try:
            socket.create_connection(place, timeout=5.0).close()
        except OSError as error:
            if time.monotonic() > until:
                raise UsageError(
                    f"cannot reach the Prefect server at {_bare(url)}: {error}", hint=_START
                ) from error
            time.sleep(0.5)
        else:
            return


def unanswered(error: BaseException) -> UsageError | None:
    """Return the error for a server that does not answer Prefect's client; None for any other error."""
    chain = list(_chain(error))
    if not any(link.__class__.__module__.partition(".")[0] == "httpx" for link in chain):
        return None
    cause = chain[-1]
    answer = getattr(cause, "response", None)
    status = getattr(answer, "status_code", None)
    reason = f"HTTP {status}" if status is not None else str(cause) or type(cause).__name__
    verb = "cannot reach"
    hint = _START
    if status in (401, 403):
        hint = "set PREFECT_API_AUTH_STRING or PREFECT_API_KEY as the server wants it"
    elif status is not None and status not in _NO_SERVER:
        verb, hint = "got an error from", "look for its reason in the server's log"
        reason += f": {beginning(getattr(answer, 'text', ''), _MOST_TEXT)}"
    from prefect.settings import get_current_settings  # it was imported when its client failed

    url = get_current_settings().api.url or ""
    return UsageError(f"{verb} the Prefect server at {_bare(url)}: {redacted(reason)}", hint=hint)


def end_with(error: CkptError) -> NoReturn:
    """Print an error and its next step, and end this process with its exit code."""
    terminal.block(f"{error.code}: {error.message}\nnext: {error.hint}", err=True, indent="")
    sys.exit(error.exit_code)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that led to it, within httpx."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = None if type(link).__module__.startswith("httpx") else link.__cause__ or link.__context__


def _bare(url: str) -> str:
    try:
        return bare_url(url)
    except ValueError:
        return redacted(url)


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
