"""SQL queries by users: reading works, and the database refuses all else."""

import contextlib
import json
import sqlite3
import time

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from ckptcore.catalog import open_catalog
from ckptcore.catalog.sql_query import ask
from ckptcore.cli.catalog import app
from ckptcore.errors import CatalogError, UsageError

EVERYWHERE = [
    "DELETE FROM checkpoint",
    "INSERT INTO training_run (name, created_at) VALUES ('x', '2026-01-01')",
    "UPDATE checkpoint SET state = 'damaged'",
    "DROP TABLE tag",
    "DROP VIEW incomplete",
    "CREATE TABLE songs (id integer)",
    "CREATE TEMPORARY TABLE songs (id integer)",
    "ALTER TABLE checkpoint ADD COLUMN x integer",
    "SELECT 1; DELETE FROM checkpoint",
    "COMMIT",
    "BEGIN",
    "WITH gone AS (DELETE FROM checkpoint RETURNING id) SELECT * FROM gone",
    "DELETE FROM checkpoint RETURNING id",
    "SELECT * FROM nowhere",
    "",
    "--",
]
SQLITE = [
    "PRAGMA query_only=OFF",
    "PRAGMA journal_mode=DELETE",
    "PRAGMA writable_schema=ON",
    "VACUUM",
    "REINDEX",
    "ATTACH 'other.sqlite' AS other",
    "ANALYZE",
    "SELECT load_extension('x')",
    "SELECT zeroblob(1000000000)",
    "SAVEPOINT a",
    "DETACH main",
]
POSTGRESQL = [
    "SET default_transaction_read_only = off",
    "SET TRANSACTION READ WRITE",
    "COMMIT; DELETE FROM checkpoint; COMMIT",
    "SELECT 1; COMMIT; BEGIN READ WRITE; DELETE FROM checkpoint; COMMIT",
    "SELECT set_config('transaction_read_only', 'off', false)",
    "SELECT nextval('checkpoint_id_seq')",
    "SELECT * FROM checkpoint FOR UPDATE",
    "DO $$ BEGIN DELETE FROM checkpoint; END $$",
    "COPY checkpoint TO '/tmp/stolen'",
    "COPY (SELECT 1) TO PROGRAM 'cat'",
    "TRUNCATE checkpoint",
    "LOCK TABLE checkpoint",
    "GRANT ALL ON checkpoint TO PUBLIC",
    "CALL nothing()",
    "PREPARE p AS DELETE FROM checkpoint",
]
SLOW = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"


OWNER = [
    f"GRANT ALL ON {what} public TO keeper"
    for what in ("ALL TABLES IN SCHEMA", "ALL SEQUENCES IN SCHEMA", "SCHEMA")
]


@pytest.fixture
def filled(catalog, facts, url, request):
    """The URL of a catalog with five rows; on PostgreSQL with a role that may change them."""
    for n in range(5):
        catalog.record_validation(facts(f"/runs/step-{n}", step=n))
    return url if "://" not in url else request.getfixturevalue("postgres").as_role(url, "keeper", *OWNER)


def listed(catalog):
    return [(row.id, row.state, row.uri) for row in catalog.list()]


@pytest.mark.alike(1)
def test_rows_and_names(filled):
    found = ask(filled, "SELECT uri, step FROM checkpoint ORDER BY step DESC;", limit=2)
    assert found.columns == ("uri", "step")
    assert found.rows == (("/runs/step-4", 4), ("/runs/step-3", 3))
    assert found.more
    assert not ask(filled, "SELECT uri FROM checkpoint", limit=5).more
    assert ask(filled, "SELECT uri FROM checkpoint WHERE step < 0").rows == ()
    assert ask(filled, "SELECT '100%' AS a, '?:x' AS b").as_dict()["rows"] == [{"a": "100%", "b": "?:x"}]
    [row] = ask(
        filled,
        "SELECT step, max(created_at), sum(total_bytes), NULL AS none FROM checkpoint"
        " GROUP BY step ORDER BY step LIMIT 1",
    ).as_dict()["rows"]
    assert row["step"] == 0
    json.dumps(row)
    assert ask(filled, "SELECT 1 AS x, 2 AS x").as_dict()["rows"] == [[1, 2]]
    assert ask(filled, "WITH a AS (SELECT 1 AS x) SELECT x FROM a").rows == ((1,),)
    assert ask(filled, "VALUES (1), (2)").rows == ((1,), (2,))


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_other_statements_are_refused(every, filled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = sorted(tmp_path.iterdir())
    with open_catalog(filled) as catalog:
        before = listed(catalog)
        for statement in (*EVERYWHERE, *(POSTGRESQL if "://" in filled else SQLITE))[::every]:
            with pytest.raises(UsageError, match=r"refused the statement|is not a query"):
                print(statement, ask(filled, statement))
            assert listed(catalog) == before, statement
    assert sorted(tmp_path.iterdir()) == names


@pytest.mark.alike(1)
def test_explain_returns_the_plan(filled):
    found = ask(filled, "SELECT * FROM checkpoint WHERE uuid = 'x';", explain=True)
    plan = " ".join(map(str, found.rows))
    assert "checkpoint" in plan
    # PostgreSQL's plan for five rows does not matter.
    assert "Scan" in plan if "://" in filled else "USING INDEX" in plan
    assert ask(filled, "SELECT * FROM incomplete", explain=True, limit=1).more


@pytest.mark.parametrize(
    ("option", "every"),
    [("ANALYZE ", 6), *(pytest.param(o, 1, marks=pytest.mark.soak) for o in ("ANALYZE ", "", "(ANALYZE) "))],
)
def test_explain_changes_nothing(filled, option, every):
    with open_catalog(filled) as catalog:
        before = listed(catalog)
        for statement in (*EVERYWHERE, *(POSTGRESQL if "://" in filled else SQLITE))[::every]:
            with contextlib.suppress(UsageError):  # EXPLAIN of a DELETE may answer, without deleting
                ask(filled, option + statement, explain=True)
            assert listed(catalog) == before, option + statement
    with pytest.raises(UsageError, match="refused the statement"):
        ask(filled, "ANALYZE DELETE FROM checkpoint", explain=True)
    with pytest.raises(UsageError, match="refused the statement"):
        ask(filled, "SELECT 1; DELETE FROM checkpoint", explain=True)


def test_the_database_refuses_what_passes_the_grammar(postgres, upgraded):
    # A function can write inside any statement.
    with postgres.database(upgraded) as made:
        url = postgres.as_role(made, "keeper", *OWNER)
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "CREATE FUNCTION wipe() RETURNS integer LANGUAGE sql AS 'DELETE FROM tensor; SELECT 1'"
            )
        engine.dispose()
        with pytest.raises(UsageError, match="read-only transaction"):
            ask(url, "SELECT wipe()")
        with pytest.raises(UsageError, match="read-only transaction"):
            ask(url, "ANALYZE SELECT wipe()", explain=True)


@pytest.mark.alike(1)
def test_time_is_limited(filled):
    begun = time.monotonic()
    with pytest.raises(UsageError, match=r"more than 0\.3 s and was stopped"):
        ask(filled, SLOW, seconds=0.3)
    assert time.monotonic() - begun < 120
    assert ask(filled, "SELECT 1 AS x").rows == ((1,),)


def test_reading_does_not_wait_for_a_writer(filled, catalog):
    with catalog.writing():
        assert ask(filled, "SELECT count(*) AS n FROM checkpoint").rows == ((5,),)


def test_a_file_by_its_uri(tmp_path, facts):
    path = tmp_path / "a b%.sqlite"
    with open_catalog(str(path)) as catalog:
        catalog.record_validation(facts("/runs/step-1"))
    assert ask(str(path), "SELECT uri FROM checkpoint").rows == (("/runs/step-1",),)
    uri = f"sqlite:///file:{tmp_path}/a%20b%25.sqlite?mode=ro&uri=true"
    assert ask(uri, "SELECT uri FROM checkpoint").rows == (("/runs/step-1",),)


def test_no_catalog(tmp_path):
    with pytest.raises(CatalogError, match="there is no catalog"):
        ask(str(tmp_path / "none.sqlite"), "SELECT 1")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CatalogError, match="no tables yet"):
        ask("sqlite://", "SELECT 1")
    with sqlite3.connect(tmp_path / "other.sqlite") as connection:
        connection.execute("CREATE TABLE songs (id INTEGER)")
    connection.close()
    with pytest.raises(CatalogError, match="not a ckptcore catalog"):
        ask(str(tmp_path / "other.sqlite"), "SELECT * FROM songs")


@pytest.mark.alike(1)
def test_on_the_command_line(filled):
    runner = CliRunner(env={"COLUMNS": "100"})

    def run(*arguments):
        given = ["sql", *arguments, "--catalog", filled]
        return runner.invoke(app, given, catch_exceptions=False, standalone_mode=False).stdout

    lines = run("SELECT uri, step FROM checkpoint ORDER BY step", "--limit", "2").splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["uri", "step"],
        ["/runs/step-0", "0"],
        ["/runs/step-1", "1"],
    ]
    assert lines[3].startswith("and more")
    assert "checkpoint" in run("SELECT uri FROM checkpoint", "--explain")
    found = json.loads(run("SELECT uri FROM checkpoint WHERE step = 3", "--output", "json"))
    assert found == {"columns": ["uri"], "rows": [{"uri": "/runs/step-3"}], "more": False}
    assert run("SELECT uri FROM checkpoint WHERE step < 0") == "nothing found\n"
    wide = run(
        "SELECT 'x' || uri || '"
        + "y" * 300
        + "' AS w, uri, message FROM checkpoint, (SELECT '[red]' AS message) m"
    )
    assert max(map(len, wide.splitlines())) <= 100
    assert "[red]" in wide
