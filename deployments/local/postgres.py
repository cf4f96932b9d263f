"""Set up and run a PostgreSQL server from Debian's packages, in its own folder, as an unprivileged user."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptcore.errors import MissingDependency, UsageError
from ckptcore.redaction import ending
from deployments.local.state import OWNERS, VARIABLE, LocalState

if TYPE_CHECKING:
    import psycopg

# Debian installs server programs outside PATH.
DEBIAN = Path("/usr/lib/postgresql")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
# What a server says to clients while it replays its log; the connection has no SQLSTATE then.
_PASSING = ("starting up", "recovery mode", "not yet accepting connections")


def programs() -> Path:
    """Return the folder of the newest initdb and postgres. Raises `MissingDependency`."""
    newest = sorted(DEBIAN.glob("*/bin"), key=lambda p: -int(p.parent.name)) if DEBIAN.is_dir() else []
    found = shutil.which("initdb")
    folders = [*newest, *([Path(os.path.realpath(found)).parent] if found else [])]
    for folder in folders:
        if os.access(folder / "initdb", os.X_OK):
            return folder
    raise MissingDependency("PostgreSQL's server is not installed", hint="run apt-get install postgresql")


def prepare(state: LocalState) -> Path:
    """Return the server's data folder, and create it if needed. Raises `UsageError`."""
    home = state.folder / "postgres"
    data = home / "data"
    home.mkdir(mode=0o700, exist_ok=True)
    run_as = unprivileged()
    if run_as:
        os.chown(home, run_as["user"], run_as["group"])
    if data.exists():
        return data
    new = home / "data.new"  # a killed initdb must not leave a folder that looks complete
    shutil.rmtree(new, ignore_errors=True)
    password = home / "password"
    with open(os.open(password, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(state.secrets["POSTGRES_PASSWORD"])
    if run_as:
        os.chown(password, run_as["user"], run_as["group"])
    command: list[str | Path] = [
        programs() / "initdb",
        "-D",
        new,
        "-U",
        "postgres",
        "-A",
        "scram-sha-256",
        "--pwfile",
        password,
        "-E",
        "UTF8",
        "--locale=C.UTF-8",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd="/", env=ENVIRONMENT, check=False, **run_as
    )
    password.unlink()
    if done.returncode:
        raise UsageError(
            f"initdb failed in {home}: {ending(done.stderr.strip(), 500)}",
            hint=f"set {VARIABLE} to a folder that the user {_name(run_as)} can reach",
        )
    new.rename(data)
    return data


def command(state: LocalState, data: Path) -> list[str]:
    """Return the command that starts the server. It listens on the loopback address only."""
    settings = (
        "listen_addresses=127.0.0.1",
        f"port={state.choices.ports.postgres}",
        "unix_socket_directories=",
        "max_connections=100",
        "shared_buffers=64MB",
    )
    return [str(programs() / "postgres"), "-D", str(data), *(w for s in settings for w in ("-c", s))]


def is_ready(state: LocalState) -> bool:
    """Return whether the server accepts connections with the stored password."""
    import psycopg

    try:
        _as_administrator(state, "postgres").close()
    except psycopg.OperationalError:
        return False
    return True


def is_recovering(state: LocalState) -> bool:
    """Return whether the server runs, and refuses connections until it has replayed its log.

    It does so after its own crash or that of one of its processes.
    """
    import psycopg

    try:
        _as_administrator(state, "postgres").close()
    except psycopg.OperationalError as error:
        return any(text in str(error) for text in _PASSING)
    return False


def is_still_ending(log: str) -> bool:
    """Return whether a server could not start because processes of a killed one still end."""
    return "is still in use" in log or 'lock file "postmaster.pid" already exists' in log


def make_databases(state: LocalState) -> None:
    """Create the databases of Prefect and of the catalog, each with an owner without other rights."""
    from psycopg.sql import SQL, Identifier, Literal

    with _as_administrator(state, "postgres") as connection:
        roles = {row[0] for row in connection.execute("SELECT rolname FROM pg_roles").fetchall()}
        there = {row[0] for row in connection.execute("SELECT datname FROM pg_database").fetchall()}
        for name, secret in OWNERS.items():
            # Encrypted here: the server logs the full text of a failed statement.
            password = connection.pgconn.encrypt_password(
                state.secrets[secret].encode(), name.encode(), b"scram-sha-256"
            ).decode()
            owner = Identifier(name)
            role = "ALTER ROLE {} LOGIN PASSWORD {}" if name in roles else "CREATE ROLE {} LOGIN PASSWORD {}"
            connection.execute(SQL(role).format(owner, Literal(password)))
            database = "ALTER DATABASE {} OWNER TO {}" if name in there else "CREATE DATABASE {} OWNER {}"
            connection.execute(SQL(database).format(owner, owner))
            connection.execute(SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(owner))


def _as_administrator(state: LocalState, database: str) -> psycopg.Connection[tuple[Any, ...]]:
    """Open a connection with autocommit: each statement is a transaction."""
    import psycopg

    return psycopg.connect(
        host="127.0.0.1",
        port=state.choices.ports.postgres,
        dbname=database,
        user="postgres",
        password=state.secrets["POSTGRES_PASSWORD"],
        connect_timeout=2,
        autocommit=True,
    )


def unprivileged() -> dict[str, Any]:
    """Return `subprocess` arguments for programs that refuse root: user ``postgres``, else ``nobody``."""
    if os.geteuid() != 0:
        return {}
    names = {user.pw_name for user in pwd.getpwall()}
    user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _name(run_as: dict[str, Any]) -> str:
    return pwd.getpwuid(run_as.get("user", os.geteuid())).pw_name
