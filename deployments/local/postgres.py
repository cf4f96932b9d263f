"""PostgreSQL: a server of our own from Debian's programs, in its own folder, under a user without rights."""

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

# Debian keeps server programs out of PATH.
DEBIAN = Path("/usr/lib/postgresql")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
# What an older version made as the administrator: tables, views, sequences that are no column's own, enums.
# REASSIGN OWNED does not take what is the administrator's.
_RELATIONS = """
    SELECT 'TABLE', relname FROM pg_class
    WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v', 'm', 'S')
      AND relowner = 'postgres'::regrole
      AND NOT EXISTS (SELECT FROM pg_depend WHERE classid = 'pg_class'::regclass AND objid = pg_class.oid
                      AND (deptype = 'e' OR relkind = 'S' AND deptype IN ('a', 'i')))
    UNION ALL
    SELECT 'TYPE', typname FROM pg_type
    WHERE typnamespace = 'public'::regnamespace AND typtype = 'e' AND typowner = 'postgres'::regrole
"""


def programs() -> Path:
    """The folder of initdb and postgres, the newest; raises `MissingDependency`."""
    newest = sorted(DEBIAN.glob("*/bin"), key=lambda p: -int(p.parent.name)) if DEBIAN.is_dir() else []
    found = shutil.which("initdb")
    folders = [*newest, *([Path(os.path.realpath(found)).parent] if found else [])]
    for folder in folders:
        if os.access(folder / "initdb", os.X_OK):
            return folder
    raise MissingDependency("PostgreSQL's server is not installed", hint="apt-get install postgresql")


def prepare(state: LocalState) -> Path:
    """The server's data folder, made where there is none. Raises `UsageError`."""
    home = state.folder / "postgres"
    data = home / "data"
    home.mkdir(mode=0o700, exist_ok=True)
    run_as = unprivileged()
    if run_as:
        os.chown(home, run_as["user"], run_as["group"])
    if data.exists():
        return data
    new = home / "data.new"  # what a killed initdb leaves must not be taken for a whole one
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
    """How the server is started: it listens on the loopback address alone."""
    settings = (
        "listen_addresses=127.0.0.1",
        f"port={state.choices.ports.postgres}",
        "unix_socket_directories=",
        "max_connections=100",
        "shared_buffers=64MB",
    )
    return [str(programs() / "postgres"), "-D", str(data), *(w for s in settings for w in ("-c", s))]


def is_ready(state: LocalState) -> bool:
    """Whether it takes connections with our password."""
    import psycopg

    try:
        _as_administrator(state, "postgres").close()
    except psycopg.OperationalError:
        return False
    return True


def make_databases(state: LocalState) -> None:
    """The databases of Prefect and of the catalog, each with an owner who may do nothing else.

    What an older version made as the administrator becomes the owner's.
    """
    from psycopg.sql import SQL, Identifier, Literal

    with _as_administrator(state, "postgres") as connection:
        roles = {row[0] for row in connection.execute("SELECT rolname FROM pg_roles").fetchall()}
        there = {row[0] for row in connection.execute("SELECT datname FROM pg_database").fetchall()}
        for name, secret in OWNERS.items():
            # Encrypted here: a statement that fails is logged with all its words.
            password = connection.pgconn.encrypt_password(
                state.secrets[secret].encode(), name.encode(), b"scram-sha-256"
            ).decode()
            owner = Identifier(name)
            role = "ALTER ROLE {} LOGIN PASSWORD {}" if name in roles else "CREATE ROLE {} LOGIN PASSWORD {}"
            connection.execute(SQL(role).format(owner, Literal(password)))
            database = "ALTER DATABASE {} OWNER TO {}" if name in there else "CREATE DATABASE {} OWNER {}"
            connection.execute(SQL(database).format(owner, owner))
            connection.execute(SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(owner))
    for name in OWNERS:
        with _as_administrator(state, name) as connection:
            for kind, thing in connection.execute(_RELATIONS).fetchall():
                change = SQL("ALTER {} public.{} OWNER TO {}")
                connection.execute(change.format(SQL(kind), Identifier(thing), Identifier(name)))


def _as_administrator(state: LocalState, database: str) -> psycopg.Connection[tuple[Any, ...]]:
    """A connection in which each statement is a transaction of its own."""
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
    """How `subprocess` runs something that refuses root: as ``postgres``, else ``nobody``."""
    if os.geteuid() != 0:
        return {}
    names = {user.pw_name for user in pwd.getpwall()}
    user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _name(run_as: dict[str, Any]) -> str:
    return pwd.getpwuid(run_as.get("user", os.geteuid())).pw_name
