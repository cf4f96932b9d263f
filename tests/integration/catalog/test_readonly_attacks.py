"""SQL as an attack: what a statement may cost is bounded, and nothing that it calls has an effect."""

import contextlib
import json
import subprocess
import sys
from datetime import UTC, date, datetime
from decimal import Decimal

import pytest
import sqlalchemy as sa

from ckptcore.catalog import open_catalog
from ckptcore.catalog.sql_query import ask
from ckptcore.errors import UsageError

RIGHTS = (
    "GRANT ALL ON ALL TABLES IN SCHEMA public TO keeper",
    "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO keeper",
    "GRANT ALL ON SCHEMA public TO keeper",
)

# Each is one call of SQLite, or needs far too much memory.
NUMBERS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"
COSTLY = [
    "SELECT length(replace(hex(zeroblob(30000000)), '0', 'aa'))",
    "SELECT hex(randomblob(30000000)) LIKE '%' || substr(hex(zeroblob(490)), 1, 980) || '%'",
    "SELECT replace(hex(zeroblob(8000000)), '0', '_a') LIKE replace(hex(zeroblob(240)), '0', '%a') || 'b'",
    "SELECT hex(zeroblob(2000000)) GLOB '*' || replace(hex(zeroblob(200)), '0', '0*') || 'b'",
    "SELECT instr(hex(zeroblob(30000000)), hex(zeroblob(15000000)) || 'b')",
    "SELECT trim(hex(zeroblob(20000000)), hex(randomblob(1000000)))",
    "SELECT randomblob(1000000000)",
    "SELECT hex(randomblob(40000000))",
    f"{NUMBERS} SELECT group_concat(hex(randomblob(1000000))) FROM n",
    f"{NUMBERS} SELECT randomblob(1000000) AS b FROM n ORDER BY b",
    f"{NUMBERS} SELECT hex(randomblob(100000)) FROM n",
    "SELECT printf('%.*c', 999999999, 'x')",
    "SELECT json_group_array(hex(zeroblob(60000000)))",
    "SELECT " + "abs(" * 600 + "1" + ")" * 600,
    "SELECT " + " UNION ALL SELECT ".join("1" * 300),
]
# 60 million times up to 900 comparisons: minutes, in which SQLite checks nothing else.
ONE_CALL = "SELECT hex(zeroblob(30000000)) LIKE '%' || hex(zeroblob(450)) || 'b'"


@pytest.fixture
def catalog_file(tmp_path, facts):
    path = str(tmp_path / "catalog.sqlite")
    with open_catalog(path) as catalog:
        catalog.record_validation(facts("/runs/step-1"))
    return path


# Linux counts the memory of the process that starts a child as the child's own (ru_maxrss outlives execve):
# a small process asks, not the one that runs the tests.
ASK_ALL = """
import contextlib, json, resource, sys, time
from ckptcore.catalog.sql_query import ask
from ckptcore.errors import UsageError
catalog_file, *statements = json.load(sys.stdin)
for statement in statements:
    begun = time.monotonic()
    with contextlib.suppress(UsageError):
        ask(catalog_file, statement, seconds=0.5, limit=1 << 30)
    print(time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_time_and_memory_are_limited(catalog_file):
    asking = subprocess.run(
        [sys.executable, "-c", ASK_ALL],
        input=json.dumps([catalog_file, *COSTLY]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert asking.returncode == 0, asking.stderr
    seconds, peaks = zip(*(map(float, line.split()) for line in asking.stdout.splitlines()), strict=True)
    assert len(seconds) == len(COSTLY)
    assert max(seconds) < 120, seconds  # a second, on an idle machine
    assert max(peaks) <= 1 << 20, peaks  # kB


def test_a_call_that_ignores_the_clock_is_killed(catalog_file):
    with pytest.raises(UsageError, match="took more than 1 s and was stopped"):
        ask(catalog_file, ONE_CALL, seconds=1)


ODD = [
    "SELECT '\udc80'",
    "SELECT 1\0",
    "\0",
    "SELECT char(0, 55296)",
    "SELECT CAST(x'ff00fe' AS TEXT)",
    "SELECT 9e999, -9e999, x'00'",
]


@pytest.mark.parametrize("statement", ODD)
def test_odd_texts_are_returned_or_refused(statement, catalog_file, postgres, upgraded):
    with postgres.database(upgraded) as made:
        for url in (catalog_file, postgres.as_role(made, "keeper", *RIGHTS)):
            with contextlib.suppress(UsageError):
                json.dumps(ask(url, statement).as_dict())


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e300])
def test_a_timeout_must_be_positive_and_finite(seconds, catalog_file):
    with pytest.raises(UsageError, match="--timeout must be above 0"):
        ask(catalog_file, "SELECT 1", seconds=seconds)


# Functions that an ordinary role may call, with effects that could outlive the transaction.
ON_POSTGRESQL = [
    "SELECT pg_read_file('/etc/passwd')",
    "SELECT pg_read_binary_file('/etc/passwd')",
    "SELECT pg_ls_dir('/')",
    "SELECT pg_stat_file('/etc/passwd')",
    "SELECT lo_import('/etc/passwd')",
    "SELECT lo_export(1, '/tmp/stolen')",
    "SELECT lo_create(7)",
    "SELECT lo_from_bytea(7, 'x')",
    "SELECT pg_notify('a', 'b')",
    "SELECT setval('tag_id_seq', 7)",
    "SELECT nextval('checkpoint_id_seq')",
    "SELECT pg_advisory_lock(7163384699)",
    "SELECT pg_advisory_lock(7163384699), pg_sleep(0.1)",
    "SELECT pg_try_advisory_lock(7163384699)",
    "SELECT set_config('default_transaction_read_only', 'off', false)",
    "SELECT set_config('statement_timeout', '0', false)",
    "SELECT set_config('role', 'postgres', false)",
    "SELECT set_config('session_authorization', 'postgres', false)",
    "SELECT query_to_xml('DELETE FROM tensor RETURNING 1', true, true, '')",
    "SELECT query_to_xml('COMMIT', true, true, '')",
    "SELECT * FROM ts_stat('DELETE FROM tensor RETURNING NULL::tsvector')",
    "SELECT pg_reload_conf()",
    "SELECT pg_switch_wal()",
    "SELECT pg_terminate_backend(1)",
    "SELECT pg_cancel_backend(1)",
    "SELECT pg_export_snapshot()",
    "SELECT pg_create_restore_point('a')",
    "SELECT pg_logical_emit_message(false, 'a', 'b')",
    "SELECT txid_current()",
    "SELECT dblink('dbname=postgres', 'DROP TABLE tag')",
    "SELECT rolpassword FROM pg_authid",
    "COPY checkpoint TO PROGRAM 'touch /tmp/ckptcore-stolen'",
    "COPY checkpoint FROM '/etc/passwd'",
    "COPY checkpoint FROM PROGRAM 'id'",
    "COPY (DELETE FROM tag RETURNING 1) TO STDOUT",
    "NOTIFY a",
    "LISTEN a",
    "SET ROLE postgres",
    "RESET ROLE",
    "SET SESSION AUTHORIZATION postgres",
    "SET statement_timeout = 0",
    "DISCARD ALL",
    "SELECT 1; COMMIT; DROP TABLE tag",
    "SELECT 1) ; DROP TABLE tag; --",
    "SELECT 1 INTO stolen",
    "DO $$ BEGIN PERFORM pg_sleep(9); END $$",
    "CREATE TEMP TABLE x AS SELECT 1",
    "CREATE TEMP VIEW x AS SELECT 1",
    "EXPLAIN ANALYZE DELETE FROM tag",
    "CHECKPOINT",
    "VACUUM",
    "CREATE EXTENSION dblink",
    "ALTER SYSTEM SET work_mem = '1GB'",
    "ALTER ROLE keeper SUPERUSER",
    "WITH a AS (UPDATE checkpoint SET state = 'gone' RETURNING *) SELECT * FROM a",
    "WITH a AS (INSERT INTO training_run (name, created_at) VALUES ('x', now()) RETURNING 1) SELECT 1",
    "WITH a AS MATERIALIZED (DELETE FROM tensor RETURNING 1) SELECT count(*) FROM a",
    "FETCH 1 FROM asked",
    "CLOSE asked",
    "DECLARE b CURSOR WITH HOLD FOR SELECT 1",
    "SELECT * FROM tag FOR UPDATE",
]


@pytest.mark.parametrize(
    ("explain", "every"),
    [(False, 3), *(pytest.param(explain, 1, marks=pytest.mark.soak) for explain in (False, True))],
    ids=["some", "asked", "explained"],
)
def test_nothing_has_an_effect_on_postgresql(explain, every, postgres, upgraded, facts):
    with postgres.database(upgraded) as made:
        with open_catalog(made) as catalog:
            catalog.record_validation(facts("/runs/step-1"))
        url = postgres.as_role(made, "keeper", *RIGHTS)
        before = state_of(made)
        for statement in ON_POSTGRESQL[::every]:
            with contextlib.suppress(UsageError):
                ask(url, f"ANALYZE {statement}" if explain else statement, seconds=1, explain=explain)
            assert state_of(made) == before, statement
        with open_catalog(made) as catalog, catalog.writing():  # no lock is left
            pass
        with pytest.raises(UsageError, match="more than 1 s"):
            ask(url, "SELECT set_config('statement_timeout', '0', true), pg_sleep(30)", seconds=1)


def state_of(url):
    """Everything that could be changed: rows, sequences, settings, roles, locks, objects, extensions."""
    queries = (
        "SELECT count(*), string_agg(c::text, ',' ORDER BY id) FROM checkpoint c",
        "SELECT count(*) FROM tensor",
        "SELECT count(*) FROM tag",
        "SELECT count(*) FROM training_run",
        "SELECT sequencename, last_value FROM pg_sequences ORDER BY 1",
        "SELECT relname FROM pg_class ORDER BY 1",
        "SELECT rolname, rolsuper FROM pg_roles ORDER BY 1",
        "SELECT setdatabase, setconfig::text FROM pg_db_role_setting",
        "SELECT oid FROM pg_largeobject_metadata",
        "SELECT name, setting FROM pg_settings WHERE source = 'configuration file' ORDER BY 1",
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'",
        "SELECT extname FROM pg_extension",
    )
    engine = sa.create_engine(url, poolclass=sa.pool.NullPool)
    with engine.connect() as connection:
        return [[tuple(row) for row in connection.exec_driver_sql(query)] for query in queries]


def test_administrators_are_refused(postgres, upgraded):
    with postgres.database(upgraded) as made:
        with pytest.raises(UsageError, match=r"cannot query as postgres \(a superuser"):
            ask(made, "SELECT 1 AS x")
        for right in ("pg_read_server_files", "pg_execute_server_program"):
            role = right.replace("pg_", "with_")
            grants = [each.replace("keeper", role) for each in RIGHTS]
            url = postgres.as_role(made, role, *grants, f"GRANT {right} TO {role}")
            with pytest.raises(UsageError, match=right):
                ask(url, "SELECT 1 AS x")


def test_a_read_only_role_cannot_affect_other_sessions(postgres, upgraded):
    # As ckptcore/catalog/README.md has it.
    with postgres.database(upgraded) as made:
        select = "GRANT SELECT ON ALL TABLES IN SCHEMA public TO catalog_reader"
        url = postgres.as_role(made, "catalog_reader", select)
        assert ask(url, "SELECT count(*) AS n FROM checkpoint").rows == ((0,),)
        engine = sa.create_engine(postgres.as_role(made, "keeper", *RIGHTS), poolclass=sa.pool.NullPool)
        with engine.connect() as other:
            pid = other.exec_driver_sql("SELECT pg_backend_pid()").scalar()
            with pytest.raises(UsageError, match=r"permission denied|must be"):
                ask(url, f"SELECT pg_terminate_backend({pid})")
            assert other.exec_driver_sql("SELECT 1").scalar() == 1


@pytest.mark.soak
def test_a_large_answer_is_refused(catalog_file, postgres, upgraded):
    many = {
        catalog_file: f"{NUMBERS} SELECT hex(zeroblob(500000)) FROM n",
        "postgresql": "SELECT repeat('x', 1000000) FROM generate_series(1, 1000)",
    }
    with postgres.database(upgraded) as made:
        for url, statement in many.items():
            place = url if url == catalog_file else postgres.as_role(made, "keeper", *RIGHTS)
            with pytest.raises(UsageError, match="more than 64 MiB"):
                ask(place, statement, limit=10_000)
            assert len(ask(place, statement, limit=3).rows) == 3


# A server sends a value, a row and a message of up to 1 GB each, and psycopg keeps what it receives.
LARGE = {
    "a value": "SELECT repeat('x', 400000000)",
    "bytes": "SELECT decode(repeat('00', 200000000), 'hex')",
    "a row": f"SELECT {', '.join(f'repeat({chr(39)}{c}{chr(39)}, 40000000)' for c in 'abcdefghij')}",
    "rows": "SELECT repeat('x', 30000000) FROM generate_series(1, 14)",
    "an array": "SELECT ARRAY[repeat('x', 400000000)]",
    "a name": "SELECT json_build_object(repeat('x', 400000000), 1)",
    "an error": "SELECT CAST(repeat('x', 400000000) AS integer)",
    "its plan": "(VERBOSE) SELECT repeat('x', 400000000)",
}
ASK = """
import resource, sys
from ckptcore.catalog.sql_query import ask
from ckptcore.errors import UsageError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
said = "nothing was refused"
try:
    ask(sys.argv[1], sys.argv[2], explain=sys.argv[2].startswith("(VERBOSE)"))
except UsageError as error:
    said = str(error)
peak = lambda who: resource.getrusage(who).ru_maxrss
print(peak(resource.RUSAGE_SELF) - before, peak(resource.RUSAGE_CHILDREN), len(said), said[:300])
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    "what", [w if w == "a value" else pytest.param(w, marks=pytest.mark.soak) for w in LARGE]
)
def test_memory_is_bounded_for_large_values_of_postgresql(what, postgres, upgraded, python, finish):
    with postgres.database(upgraded) as made:
        url = postgres.as_role(made, "keeper", *RIGHTS)
        [printed] = finish(python(ASK, url, LARGE[what]))
    grown, child, length, message = printed.split(maxsplit=3)
    assert int(grown) < 100 << 10, printed  # kB: it is not this process that holds it
    assert int(child) < 800 << 10, printed
    assert int(length) < 4000, printed  # nor the message
    assert "refused the statement" in message, printed


def test_a_value_of_sqlite_is_bounded(catalog_file):
    rows = ask(catalog_file, "SELECT zeroblob(1 << 25), 1.5, NULL, 'a', x'00ff'").rows
    assert rows == ((bytes(1 << 25), 1.5, None, "a", b"\x00\xff"),)
    with pytest.raises(UsageError, match="more than 64 MiB"):
        ask(catalog_file, "SELECT zeroblob(1 << 25), zeroblob(1 << 25), 1")
    with pytest.raises(UsageError, match="too big"):
        ask(catalog_file, "SELECT zeroblob((1 << 26) + 1)")


def test_every_type_of_value_is_returned(postgres, upgraded):
    with postgres.database(upgraded) as made:
        url = postgres.as_role(made, "keeper", *RIGHTS)
        found = ask(
            url,
            "SELECT 1, 2.5::float8, 1.50, 'a', NULL, true, '\\x00ff'::bytea, DATE '2026-01-02',"
            " TIMESTAMPTZ '2026-01-02 03:04:05+00', INTERVAL '1 day', 'NaN'::numeric, '{\"a\": 1}'::json",
        )
        assert found.rows[0][:9] == (
            1,
            2.5,
            Decimal("1.50"),
            "a",
            None,
            True,
            b"\x00\xff",
            date(2026, 1, 2),
            datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        )
        json.dumps(found.as_dict())
        none = ask(url, "SELECT uri AS place, step FROM checkpoint")
        assert (none.columns, none.rows, none.more) == (("place", "step"), (), False)
        assert ask(url, "SELECT FROM generate_series(1, 2)").rows == ((), ())
        odd = ask(
            url,
            "SELECT 1, 'infinity'::timestamptz, '-infinity'::date, '0044-03-15 BC'::date, '24:00'::time,"
            " '20000-01-01'::timestamp",
        )
        text = ("infinity", "-infinity", "0044-03-15 BC", "24:00:00", "20000-01-01 00:00:00")
        assert odd.rows == ((1, *text),)
