"""The state of a local installation: its folder, ports, secrets and addresses.

It is created once. Stored values take precedence over defaults, so a second `up` uses those of the first.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from urllib.parse import quote

from platformdirs import user_state_path

from ckptcore.errors import UsageError
from ckptcore.utils import terminal

VARIABLE = "CKPTCORE_STATE"
# Databases, and the password secret of each owner, a user of the same name without other rights.
OWNERS = {"prefect": "POSTGRES_PREFECT_PASSWORD", "ckptcore": "POSTGRES_CKPTCORE_PASSWORD"}
# PostgreSQL refuses to run as root, and other users cannot read root's home.
ROOT_STATE = Path("/var/lib/ckptcore/up")


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports on the loopback address. 0 picks a free port, once."""

    prefect: int = 4200
    receiver: int = 8080
    postgres: int = 5440
    worker: int = 8090  # health checks only

    def settled(self) -> Ports:
        """Return the ports with free ones instead of 0."""
        probes = {f.name: socket.socket() for f in fields(self) if getattr(self, f.name) == 0}
        for probe in probes.values():  # all open at once, or the same port could be picked twice
            probe.bind(("127.0.0.1", 0))
        found = replace(self, **{name: probe.getsockname()[1] for name, probe in probes.items()})
        for probe in probes.values():
            probe.close()
        return found


@dataclass(frozen=True, slots=True)
class Choices:
    """The user's choices.

    root: folder of announced checkpoints. exports: folder of converted ones. limit: concurrent runs.
    """

    ports: Ports = Ports()
    root: str = ""
    exports: str = ""
    limit: int = 2


@dataclass(frozen=True, slots=True)
class LocalState:
    """A local installation. folder: absolute. secrets: by names of environment variables."""

    folder: Path
    choices: Choices
    secrets: Mapping[str, str]

    @property
    def api(self) -> str:
        """The URL of Prefect's API."""
        return f"http://127.0.0.1:{self.choices.ports.prefect}/api"

    @property
    def receiver(self) -> str:
        """The URL of the receiver."""
        return f"http://127.0.0.1:{self.choices.ports.receiver}"

    @property
    def root(self) -> str:
        """The folder of announced checkpoints."""
        return self.choices.root or str(self.folder / "checkpoints")

    @property
    def exports(self) -> str:
        """The folder of converted checkpoints."""
        return self.choices.exports or str(self.folder / "exports")

    @property
    def catalog(self) -> str:
        """The URL of the catalog, including its password."""
        return self.database("postgresql+psycopg", "ckptcore")

    def database(self, driver: str, name: str) -> str:
        """Return the URL of a database of the local PostgreSQL, as its owner."""
        password = self.secrets[OWNERS[name]]
        place = f"127.0.0.1:{self.choices.ports.postgres}/{name}"
        return f"{driver}://{name}:{quote(password, safe='')}@{place}"


def folder() -> Path:
    """Return the state folder: ``CKPTCORE_STATE``, or a folder below the user's state folder."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given).expanduser().absolute()
    return ROOT_STATE if os.geteuid() == 0 else user_state_path("ckptcore") / "up"


def settle(at: Path, wanted: Choices | None) -> LocalState:
    """Create or update the state in an existing folder. The caller holds `locked`.

    Args:
        at: the state folder.
        wanted: new choices; None keeps the earlier ones.

    Raises:
        UsageError: the folder cannot be used.
    """
    try:
        at.chmod(0o711 if os.geteuid() == 0 else 0o700)
        for name in ("log", "run", "tmp"):
            (at / name).mkdir(exist_ok=True)
    except OSError as error:
        raise _unusable(at, error) from error
    found = load(at)
    known = {} if found is None else found.secrets
    found = replace(found or LocalState(at, Choices(), {}), secrets=_new_secrets() | dict(known))
    if found.secrets != known:
        _write(at / "secrets.json", found.secrets)
    if wanted is not None or not (at / "choices.json").exists():
        chosen = wanted or found.choices
        found = replace(found, choices=replace(chosen, ports=chosen.ports.settled()))
        _write(at / "choices.json", asdict(found.choices))
    return found


def load(at: Path) -> LocalState | None:
    """Return the state in a folder, or None if no `up` was run there. Raises `UsageError`."""
    try:
        known = json.loads((at / "secrets.json").read_text())
        chosen = json.loads((at / "choices.json").read_text()) if (at / "choices.json").exists() else {}
        ports = Ports(**chosen.pop("ports", {}))
        return LocalState(at, Choices(ports=ports, **chosen), known)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"cannot read the state in {at}: {error}", hint="move it away, and run `make up` again"
        ) from error


@contextmanager
def locked(at: Path) -> Iterator[None]:
    """Lock the folder for one `up` or `down`. Raises `UsageError` if the folder cannot be created."""
    try:
        at.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(at, error) from error
    with (at / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            terminal.line("waiting for another `up` or `down` of this installation", err=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unusable(at: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot use {at} as the state folder: {error.strerror}", hint=f"set {VARIABLE}")


def _new_secrets() -> dict[str, str]:
    return {
        "POSTGRES_PASSWORD": secrets.token_urlsafe(24),
        **{secret: secrets.token_urlsafe(24) for secret in OWNERS.values()},
        "PREFECT_PASSWORD": secrets.token_urlsafe(24),
        "CKPTCORE_HOOK_TOKEN": secrets.token_urlsafe(24),
        "CKPTCORE_HOOK_SECRET": "whsec_" + base64.b64encode(secrets.token_bytes(24)).decode(),
    }


def _write(path: Path, value: object) -> None:
    write_private(path, json.dumps(value, indent=2) + "\n")


def write_private(path: Path, text: str) -> None:
    """Write a file atomically that only its owner can ever read."""
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
