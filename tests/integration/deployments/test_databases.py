"""Each database user owns its own database, and can access neither the machine nor the other database."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator

import postgres as postgresql
import pytest
import yaml
from local_system import state as new_state
from paths import ROOT

from ckptcore.catalog import upgrade
from ckptcore.catalog.sql_query import ask
from ckptcore.errors import UsageError
from deployments.local.system import State

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
def state(server: postgresql.Server) -> State:
    """The state of `make up` for that server."""
    return new_state(postgres_port=server.port, POSTGRES_PASSWORD=password_of(server))


def password_of(server: postgresql.Server) -> str:
    return server.url().split(":")[2].split("@")[0]


def owners_do_their_work_and_nothing_else(state: State) -> None:
    assert upgrade(state["catalog"])[1]
    assert ask(state["catalog"], "SELECT count(*) FROM checkpoint").rows == ((0,),)
    assert ask(state["catalog"], "SELECT rolsuper FROM pg_roles WHERE rolname = current_user").rows == (
        (False,),
    )
    for reach in (
        "SELECT pg_read_file('/etc/passwd')",
        "SELECT * FROM pg_ls_dir('/')",
        "SELECT rolpassword FROM pg_authid",
    ):
        with pytest.raises(UsageError, match="permission denied"):
            ask(state["catalog"], reach)
    mine, other = (
        f"postgresql://{state[name].partition('://')[2]}" for name in ("prefect_database", "catalog")
    )
    with psycopg.connect(mine) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS pg_trgm")  # as Prefect's migrations do
        connection.execute("CREATE TABLE mine (id int)")
    for url in (mine.removesuffix("/prefect") + "/ckptcore", other.removesuffix("/ckptcore") + "/prefect"):
        with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
            psycopg.connect(url)


@pytest.mark.soak
def test_each_database_has_an_owner(state: State, server: postgresql.Server) -> None:
    """The script of `make up`, which repeats it, and of Compose."""
    psql = shutil.which("psql")
    if psql is None:
        pytest.skip("no psql on this machine: apt-get install postgresql-client")
    made = yaml.safe_load(COMPOSE.read_text())
    script = COMPOSE.parent / made["configs"]["databases"]["file"]
    assert "postgres/owners.sql" in (COMPOSE.parent / "local" / "supervisord.conf").read_text()
    secrets = {name: state[name] for name in made["services"]["postgres"]["environment"]}
    # As the image's entrypoint does it, except for the socket.
    command = [psql, "--no-psqlrc", "-h", "127.0.0.1", "-p", str(server.port), "-U", "postgres", "-f", script]
    env = os.environ | secrets | {"PGPASSWORD": password_of(server)}
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr
    owners_do_their_work_and_nothing_else(state)


def test_only_the_database_knows_its_administrator() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    who = {name for name, service in services.items() if "POSTGRES_PASSWORD" in json.dumps(service)}
    assert who == {"postgres"}
