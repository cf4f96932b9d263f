"""Each database user owns its own database, and can access neither the machine nor the other database."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import postgres as postgresql
import pytest
import yaml
from paths import ROOT

from ckptcore.catalog import upgrade
from ckptcore.catalog.sql_query import ask
from ckptcore.errors import UsageError
from deployments.local.postgres import make_databases
from deployments.local.state import OWNERS, Choices, LocalState, Ports, load, settle

psycopg = pytest.importorskip("psycopg", reason="pip install 'ckptcore[postgres]'")
COMPOSE = ROOT / "deployments" / "compose.yaml"


@pytest.fixture
def server() -> Iterator[postgresql.Server]:
    """A separate server: users belong to a server."""
    if postgresql.programs() is None:
        pytest.skip("no PostgreSQL programs on this machine: apt-get install postgresql")
    with postgresql.serving() as found:
        yield found


@pytest.fixture
def state(server: postgresql.Server, tmp_path: Path) -> LocalState:
    """The state of `make up` for that server."""
    settle(tmp_path, Choices(ports=Ports(1, 1, server.port, 1)))
    found = load(tmp_path)
    assert found is not None
    return replace(found, secrets=dict(found.secrets) | {"POSTGRES_PASSWORD": password_of(server)})


def password_of(server: postgresql.Server) -> str:
    return server.url().split(":")[2].split("@")[0]


def owners_do_their_work_and_nothing_else(state: LocalState) -> None:
    assert upgrade(state.catalog)[1]
    assert ask(state.catalog, "SELECT count(*) FROM checkpoint").rows == ((0,),)
    assert ask(state.catalog, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user").rows == (
        (False,),
    )
    for reach in (
        "SELECT pg_read_file('/etc/passwd')",
        "SELECT * FROM pg_ls_dir('/')",
        "SELECT rolpassword FROM pg_authid",
    ):
        with pytest.raises(UsageError, match="permission denied"):
            ask(state.catalog, reach)
    mine, other = (state.database("postgresql", name) for name in ("prefect", "ckptcore"))
    with psycopg.connect(mine) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS pg_trgm")  # as Prefect's migrations do
        connection.execute("CREATE TABLE mine (id int)")
    for url in (mine.removesuffix("/prefect") + "/ckptcore", other.removesuffix("/ckptcore") + "/prefect"):
        with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
            psycopg.connect(url)


def test_make_up_gives_each_database_an_owner(state: LocalState) -> None:
    for _ in range(2):
        make_databases(state)
    owners_do_their_work_and_nothing_else(state)


def test_compose_gives_each_database_an_owner(state: LocalState, server: postgresql.Server) -> None:
    psql = shutil.which("psql")
    if psql is None:
        pytest.skip("no psql on this machine: apt-get install postgresql-client")
    made = yaml.safe_load(COMPOSE.read_text())
    given = made["services"]["postgres"]["environment"]
    assert {*OWNERS.values(), "POSTGRES_PASSWORD"} == set(given)
    secrets = {name: state.secrets[name] for name in OWNERS.values()}
    # As the image's entrypoint does it, except for the socket.
    done = subprocess.run(
        [
            psql,
            "-v",
            "ON_ERROR_STOP=1",
            "--no-psqlrc",
            "-h",
            "127.0.0.1",
            "-p",
            str(server.port),
            "-U",
            "postgres",
        ],
        input=made["configs"]["databases"]["content"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | secrets | {"PGPASSWORD": password_of(server)},
    )
    assert done.returncode == 0, done.stderr
    owners_do_their_work_and_nothing_else(state)


def test_only_the_database_knows_its_administrator() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    who = {name for name, service in services.items() if "POSTGRES_PASSWORD" in json.dumps(service)}
    assert who == {"postgres"}
