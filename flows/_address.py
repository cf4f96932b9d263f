"""The address of the Prefect server that the user configured, and errors about it in one line.

Prefect answers a malformed address, and a server that does not answer, with a traceback.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ckptcore.errors import CkptError, UsageError
from ckptcore.redaction import bare_url, beginning, redacted
from ckptcore.utils import terminal
from ckptcore.utils.foreign_text import InvalidText, load_toml, parse_url

_MOST_TEXT = 500  # characters of a server's reason
_HINT = "set PREFECT_API_URL, or the active profile's, to http://HOST:PORT/api"
# Answers of a proxy, or of another server at this address; or without the right credentials.
_NO_SERVER = frozenset({401, 403, 404, 405, 502, 503, 504})
_START = "start it, or correct PREFECT_API_URL, which usually ends in /api"


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
