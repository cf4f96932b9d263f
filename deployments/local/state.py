"""The state of a local installation: its choices and secrets in one private file, and its addresses.

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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from platformdirs import user_state_path

from ckptcore.errors import UsageError
from ckptcore.utils import terminal

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
# Of PostgreSQL's administrator, of the owners of the two databases, and of Prefect's API.
PASSWORDS = ("POSTGRES", "POSTGRES_PREFECT", "POSTGRES_CKPTCORE", "PREFECT")

State: TypeAlias = Mapping[
    str, Any
]  # choices, secrets by names of environment variables, and what `complete` adds


def folder() -> Path:
    """Return the state folder: ``CKPTCORE_STATE``, or a folder below the user's state folder."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]).expanduser().absolute()
    return ROOT_STATE if os.geteuid() == 0 else user_state_path("ckptcore") / "up"


def initial() -> State:
    """Return the default choices and new secrets, of letters that need no quotes in a URL or in a shell."""
    choices = {name: default for name, (default, _) in CHOICES.items()}
    passwords = {f"{name}_PASSWORD": secrets.token_urlsafe(24) for name in PASSWORDS}
    signing = "whsec_" + base64.b64encode(secrets.token_bytes(24)).decode()
    tokens = {f"CKPTCORE_{name}_TOKEN": secrets.token_urlsafe(24) for name in ("HOOK", "PAGE")}
    return choices | passwords | tokens | {"CKPTCORE_HOOK_SECRET": signing}


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
    """Create the state in an existing folder, or change what is `chosen`. The caller holds `locked`."""
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
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
