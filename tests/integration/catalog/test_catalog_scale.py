"""Queries on a large catalog use indexes and answer in time."""

import random
import re
import time

import pytest
import sqlalchemy as sa
from bigcatalog import digest_of, fill, uuid_of

from ckptcore.catalog import aliases, open_catalog, upgrade
from ckptcore.catalog.database import engine_for, parse
from ckptcore.catalog.views import VIEWS

# Queries about one object, answered at once. n: an even number, of a derived checkpoint.
POINTS = {
    "show by id": lambda c, n: c.show(uuid_of("c", n), tensors=False),
    "show by prefix": lambda c, n: c.show(uuid_of("c", n)[:18], tensors=False),
    "show by URI": lambda c, n: c.show(f"/out/run-{n % 200}/step-{n // 200}", tensors=False),
    "show by alias": lambda c, n: c.show(f"run-{n % 100 + 1}/best", tensors=False),
    "show with tensors": lambda c, n: c.show(uuid_of("c", n)),
    "show a conversion": lambda c, n: c.show(uuid_of("v", n // 2)),
    "lineage": lambda c, n: c.lineage(uuid_of("c", n)),
    "which, by digest": lambda c, n: c.which(digest_of("file", 2 * n)),
    "which, by prefix": lambda c, n: c.which(digest_of("file", 2 * n)[:16]),
    "which, by file": lambda c, n: c.which(f"/out/run-{n % 200}/step-{n // 200}/part-1.bin"),
    "copies of a checkpoint": lambda c, n: c.copies(digest_of("f", (n - n % 6 + 2) // 2)),
    "list": lambda c, n: c.list(),
    "list a run": lambda c, n: c.list(run=f"run-{n % 200}"),
    "list a state": lambda c, n: c.list(state="damaged"),
    "list conversions": lambda c, n: c.conversions(),
    "list failures": lambda c, n: c.conversions(state="failed"),
    "tag": lambda c, n: c.tag(uuid_of("c", n), "eval.gsm8k", str(n)),
    "begin": lambda c, n: c.begin({}, source_uri=f"/s{n}", destination_uri="/d", verb="x", tool_version="1"),
    "a tensor of a checkpoint": lambda c, n: _ask(
        c,
        f"SELECT shape FROM tensor t JOIN checkpoint c ON c.id = t.checkpoint_id WHERE c.uuid ="
        f" '{uuid_of('c', n)}' AND t.fqn = 'layers.3.mlp.weight'",
    ),
    "alias": lambda c, n: _alias(c, f"run-{n % 100 + 1}/best"),
}

# Queries about all objects.
AGGREGATES = {
    **{f"all of {name}": f"SELECT count(*) FROM {name}" for name in VIEWS},
    "latest exports": "SELECT * FROM latest_exports",
    "latest exports of a run": "SELECT * FROM latest_exports WHERE run = 'run-8'",
    "storage": "SELECT * FROM storage_by_run ORDER BY bytes DESC",
    "incomplete": "SELECT * FROM incomplete ORDER BY found_at DESC LIMIT 100",
    "unverified": "SELECT * FROM unverified WHERE days > 30 ORDER BY days DESC LIMIT 100",
    "throughput": "SELECT verb, avg(bytes_per_second) FROM conversion_throughput GROUP BY verb",
    "stages": "SELECT stage, sum(seconds) FROM conversion_stages GROUP BY stage",
    "failures": "SELECT error_code, count(*) FROM conversion WHERE state = 'failed' GROUP BY error_code",
    "best": "SELECT c.uri FROM tag t JOIN checkpoint c ON c.id = t.checkpoint_id WHERE t.key = 'eval.mmlu'"
    " ORDER BY CAST(t.value AS DOUBLE PRECISION) DESC LIMIT 5",
    "a tensor everywhere": "SELECT count(*) FROM tensor t JOIN checkpoint c ON c.id = t.checkpoint_id"
    " WHERE t.fqn = 'layers.3.mlp.weight' AND c.state = 'present'",
}

BIG = ("checkpoint", "checkpoint_file", "tensor", "conversion", "conversion_io", "finding", "tag", "aliases")
# aggregate -> tables that it must not scan in full, because an index leads to the rows.
BESIDE_THE_POINT = {"checkpoint_file", "tensor", "finding", "tag", "aliases"}
NOT_FULL = {
    **dict.fromkeys(AGGREGATES, BESIDE_THE_POINT),
    **{name: set(BIG) for name in ("all of incomplete", "incomplete", "failures", "a tensor everywhere")},
    "latest exports of a run": BESIDE_THE_POINT | {"checkpoint"},
}
SAMPLES, P95 = 100, 94


def _ask(catalog, sql):
    with catalog.reading() as conn:
        return conn.execute(sa.text(sql)).all()


def _alias(catalog, name):
    with catalog.reading() as conn:
        return aliases.get(conn, name)


def full_scans(url, statements, *, indexes=True):
    """Return the big tables that the database would scan in full, by statement.

    indexes: whether full scans of an index count, too. PostgreSQL scans a small table in full anyway; with
    sequential scans off, it still must if no index serves.
    """
    found = {}
    engine = engine_for(parse(url))
    with engine.connect() as connection:
        look = _rewound if connection.dialect.name == "sqlite" else _unconditional
        for statement, parameters in statements:
            names = {
                table for table, index in look(connection, statement, parameters) if indexes or not index
            }
            if names & set(BIG):
                found[statement] = names & set(BIG)
    engine.dispose()
    return found


def _rewound(connection, statement, parameters):
    """(table, whether by an index) of the b-trees that SQLite's program walks from one end."""
    rows = connection.exec_driver_sql("SELECT rootpage, tbl_name, type FROM sqlite_master WHERE rootpage > 0")
    trees = {page: (table, kind == "index") for page, table, kind in rows}
    program = connection.exec_driver_sql(f"EXPLAIN {statement}", parameters).all()
    opened = {
        row[2]: trees.get(row[3]) for row in program if row[1] in ("OpenRead", "OpenWrite", "ReopenIdx")
    }
    walked = {row[2] for row in program if row[1] in ("Rewind", "Last", "Count")}
    return {tree for cursor, tree in opened.items() if tree is not None and cursor in walked}


def _unconditional(connection, statement, parameters):
    """(table, whether by an index) of what PostgreSQL's plan reads without a condition on a key."""
    connection.exec_driver_sql("SET enable_seqscan = off")
    tables = dict(connection.exec_driver_sql("SELECT indexname, tablename FROM pg_indexes").tuples().all())
    [plan] = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", parameters).scalar_one()
    found, todo = set(), [plan["Plan"]]
    while todo:
        node = todo.pop()
        todo += node.get("Plans", ())
        if node["Node Type"] == "Seq Scan":
            found.add((node["Relation Name"], False))
        elif "Index Name" in node and "Index Cond" not in node:
            found.add((tables[node["Index Name"]], True))
    return found


@pytest.fixture
def small(url):
    fill(url, 20, 5, 1980)
    return url


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def aggregated(request, tmp_path_factory):
    """The URL of a read-only catalog."""
    if request.param == "sqlite":
        made = str(tmp_path_factory.mktemp("aggregated") / "catalog.sqlite")
        open_catalog(made).close()
        fill(made, 200, 5, 9800)
        yield made
        return
    with request.getfixturevalue("postgres").database() as made:
        upgrade(made)
        fill(made, 200, 5, 9800)
        yield made


@pytest.mark.alike(1)
def test_point_queries_use_indexes(small):
    seen = []

    def note(connection, cursor, statement, parameters, context, executemany):
        reads = statement.lstrip().upper().startswith(("SELECT", "WITH", "UPDATE", "DELETE"))
        if reads and "pg_" not in statement:
            seen.append((statement, parameters))

    with open_catalog(small) as catalog:
        for question, ask in POINTS.items():
            seen.clear()
            # Only meanwhile: catalogs of one file share an engine, and the plans are asked through it, too.
            sa.event.listen(catalog._engine, "before_cursor_execute", note)
            ask(catalog, 500)
            sa.event.remove(catalog._engine, "before_cursor_execute", note)
            assert seen or question == "begin"
            assert full_scans(small, seen, indexes=False) == {}, question


@pytest.mark.alike(4)
@pytest.mark.parametrize("question", AGGREGATES)
def test_aggregates_do_not_scan_unrelated_tables(aggregated, question):
    sql = AGGREGATES[question]
    assert full_scans(aggregated, [(sql, None)]).get(sql, set()) & NOT_FULL[question] == set()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT uuid FROM checkpoint WHERE origin = 'x'",
        "SELECT c.uuid FROM checkpoint AS c WHERE c.origin = 'x'",
        "SELECT f.path FROM (SELECT path FROM checkpoint_file g WHERE g.nbytes = 7) f",
    ],
)
def test_a_full_table_scan_is_detected(aggregated, sql):
    [table] = {"checkpoint", "checkpoint_file"} & set(re.findall(r"FROM (\w+)", sql))
    assert full_scans(aggregated, [(sql, None)], indexes=False) == {sql: {table}}


def test_a_full_index_scan_is_detected(aggregated):
    sql = "SELECT count(*) FROM tensor"
    assert full_scans(aggregated, [(sql, None)]) == {sql: {"tensor"}}


def _seconds(ask, *given):
    begun = time.perf_counter()
    ask(*given)
    return time.perf_counter() - begun


@pytest.fixture
def large(url):
    fill(url, 2000, 500, 98_000)
    return url


@pytest.mark.soak
def test_answers_in_time(large, capsys):
    draw = random.Random(3)
    took = {}
    with open_catalog(large) as catalog:
        for name, ask in POINTS.items():
            times = []
            for _ in range(SAMPLES):
                n = 2 * draw.randrange(100, 49_000)
                n -= n % 50 if name == "show with tensors" else 0  # those that have tensors
                times.append(_seconds(ask, catalog, n))
            took[name] = sorted(times)[P95]
        for name, sql in AGGREGATES.items():
            took[name] = max(_seconds(_ask, catalog, sql) for _ in range(3))
    with capsys.disabled():
        print(f"\n{parse(large).get_backend_name()}: 100,000 checkpoints, 1,000,000 tensors")
        for name, seconds in sorted(took.items(), key=lambda item: -item[1]):
            print(f"  {1000 * seconds:8.1f} ms  {name}")
    assert {name: s for name, s in took.items() if s > (0.1 if name in POINTS else 1.0)} == {}
