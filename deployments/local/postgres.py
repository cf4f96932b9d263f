"""PostgreSQL: a server of our own from Debian's programs, in its own folder, under a user without rights."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path
from typing import Any

from ckptcore.errors import MissingDependency, UsageError
from deployments.local.state import VARIABLE, State

# Debian keeps server programs out of PATH.
DEBIAN = Path("/usr/lib/postgresql")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
DATABASES = ("prefect", "ckptcore")


def programs() -> Path:
    """The folder of initdb and postgres, the newest; raises `MissingDependency`."""
    newest = sorted(DEBIAN.glob("*/bin"), key=lambda p: -int(p.parent.name)) if DEBIAN.is_dir() else []
    found = shutil.which("initdb")
    folders = [*newest, *([Path(os.path.realpath(found)).parent] if found else [])]
    for folder in folders:
        if os.access(folder / "initdb", os.X_OK):
            return folder
    raise MissingDependency("PostgreSQL's server is not installed", hint="apt-get install postgresql")


def prepare(state: State) -> Path:
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
    command: list[str | Path] = [programs() / "initdb", "-D", new, "-U", "postgres", "-A", "scram-sha-256",
               "--pwfile", password, "-E", "UTF8", "--locale=C.UTF-8"]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, cwd="/", env=ENVIRONMENT, check=False, **run_as
    )
    password.unlink()
    if done.returncode:
        raise UsageError(
            f"initdb failed in {home}: {done.stderr.strip()[-500:]}",
            hint=f"set {VARIABLE} to a folder that the user {_name(run_as)} can reach",
        )
    new.rename(data)
    return data


def command(state: State, data: Path) -> list[str]:
    """How the server is started: it listens on the loopback address alone."""
    settings = (
        "listen_addresses=127.0.0.1", f"port={state.choices.ports.postgres}", "unix_socket_directories=",
        "max_connections=100", "shared_buffers=64MB",
    )  # fmt: skip
    return [str(programs() / "postgres"), "-D", str(data), *(w for s in settings for w in ("-c", s))]


def is_ready(state: State) -> bool:
    """Whether it takes connections with our password."""
    import psycopg

    try:
        psycopg.connect(state.database("postgresql", "postgres"), connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def make_databases(state: State) -> None:
    """The databases of Prefect and of the catalog."""
    import psycopg

    with psycopg.connect(state.database("postgresql", "postgres"), autocommit=True) as connection:
        there = {row[0] for row in connection.execute("SELECT datname FROM pg_database").fetchall()}
        for name in DATABASES:
            if name not in there:
                connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(name)))


def unprivileged() -> dict[str, Any]:
    """How `subprocess` runs something that refuses root: as ``postgres``, else ``nobody``."""
    if os.geteuid() != 0:
        return {}
    names = {user.pw_name for user in pwd.getpwall()}
    user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _name(run_as: dict[str, Any]) -> str:
    return pwd.getpwuid(run_as.get("user", os.geteuid())).pw_name
