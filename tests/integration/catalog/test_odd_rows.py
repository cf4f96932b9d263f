"""One odd row of the catalog is one odd row: lists, details and sweeps show it, and everything else."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from checkpoints import save
from sqlalchemy import make_url, text

from ckptcore.catalog import (
    as_dict,
    audit,
    browse,
    maintenance,
    open_catalog,
    queues,
    tensor_differences,
    upgrade,
)
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.figures import figures
from ckptcore.catalog.queues import inbox, outbox
from ckptcore.catalog.views import VIEWS
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import convert, inspect
from ckptcore.conversion.registration import facts
from ckptcore.errors import finding
from ckptcore.operations import scrub
from ckptcore.operations.automation import sweep
from ckptcore.planning.request import Request, Settings

AT_ONCE = sweep.SweepSettings(settle_s=0)

SETTINGS = Settings(memory=64 << 20, workers=1)
# (table, column, value, what can be in the database on PostgreSQL, too)
ODD = [  # by default every fourth
    ("checkpoint", "total_bytes", "x", False),
    ("checkpoint", "num_tensors", "1e999", False),
    ("checkpoint", "step", "later", False),
    ("checkpoint", "verified_at", 12, False),
    ("checkpoint", "origin", "{", True),
    ("checkpoint", "origin", "[1e999]", True),
    ("checkpoint", "origin", "[" * 100_000, True),
    ("tensor", "shape", "[-1]", True),
    ("tensor", "shape", "[1e999]", True),
    ("tensor", "shape", "{}", True),
    ("tensor", "nbytes", "x", False),
    ("conversion", "bytes_in", "x", False),
    ("conversion", "request", "[]", True),
    ("conversion", "timings", '{"write": 1e999}', True),
    ("conversion", "export_checks", '{"names": 3}', True),
    ("conversion", "started_at", "yesterday", False),
    ("checkpoint", "created_at", "yesterday", False),
    ("checkpoint_file", "nbytes", "x", False),
]

# (what is asked, table) whose answer has a finding for an odd row.
LISTED = {
    ("list", "checkpoint"),
    ("list --conversions", "conversion"),
    *(("show", table) for table in ("checkpoint", "checkpoint_file")),  # a text lists no tensors
}
KEYS = {"checkpoint": "id", "conversion": "id", "tensor": "fqn", "checkpoint_file": "path"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two checkpoints, and a catalog of them and of their conversions."""
    folder = tmp_path_factory.mktemp("filled")
    for step in range(2):
        save(folder / "runs" / f"step-{step}", step)
    fill(folder, str(folder / "catalog.sqlite"))
    return folder


def fill(folder, url):
    for step in range(2):
        source, output = (str(folder / kind / f"step-{step}") for kind in ("runs", "out"))
        convert(Request(source, output, "consolidate", overwrite=True), SETTINGS, None, url)


@pytest.fixture(scope="module")
def filled_on_postgresql(folder, postgres, upgraded):
    with postgres.database(upgraded) as url:
        fill(folder, url)
        yield make_url(url).database


@pytest.fixture(params=["sqlite", "postgresql"])
def filled(request, folder, tmp_path):
    """The URL of a catalog with two checkpoints and their conversions."""
    if request.param == "sqlite":
        yield str(shutil.copy(folder / "catalog.sqlite", tmp_path / "catalog.sqlite"))
        return
    template = request.getfixturevalue("filled_on_postgresql")
    with request.getfixturevalue("postgres").database(template) as url:
        yield url


@contextmanager
def odd(catalog, table, column, value):
    """Write a value into rows of the checkpoint or conversion of step 1 while the block runs."""
    where = {
        "checkpoint": "uri LIKE '%runs/step-1'",
        "conversion": "source_uri LIKE '%runs/step-1'",
        "tensor": "checkpoint_id = (SELECT id FROM checkpoint WHERE uri LIKE '%runs/step-1')",
    }
    where["checkpoint_file"] = where["tensor"]
    with catalog.writing() as conn:
        key = KEYS[table]
        before = conn.execute(text(f"SELECT {key}, {column} FROM {table} WHERE {where[table]}")).all()
        conn.execute(text(f"UPDATE {table} SET {column} = :v WHERE {where[table]}"), {"v": value})
    assert before
    yield
    with catalog.writing() as conn:
        for name, old in before:
            change = f"UPDATE {table} SET {column} = :v WHERE {where[table]} AND {key} = :name"
            conn.execute(text(change), {"v": old, "name": name})


def cli(capsys, url, *arguments):
    capsys.readouterr()
    code = run([*arguments, "--catalog", url, "--output", "json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.alike(1)
@pytest.mark.parametrize("cases", [ODD[::4], pytest.param(ODD, marks=pytest.mark.soak)], ids=["some", "all"])
def test_lists_show_it_and_the_others(filled, capsys, folder, cases):
    with open_catalog(filled) as catalog:
        for table, column, value, everywhere in cases:
            if everywhere or not filled.startswith("postgresql"):  # its types refuse the others
                with odd(catalog, table, column, value):
                    _look_at_all(catalog, filled, capsys, folder, table)
    _, rows = cli(capsys, filled, "catalog", "list")
    assert not [row for row in rows if "trouble" in row]


def _look_at_all(catalog, url, capsys, folder, table):
    code, rows = cli(capsys, url, "catalog", "list")
    assert (code, len(rows)) == (0, 4)
    code, made = cli(capsys, url, "catalog", "list", "--conversions")
    assert (code, len(made)) == (0, 2)
    listed = {"checkpoint": rows, "conversion": made}.get(table, [])
    assert len([row for row in listed if "trouble" in row]) == (table in ("checkpoint", "conversion"))
    sources, outputs = ([str(folder / kind / f"step-{n}") for n in range(2)] for kind in ("runs", "out"))
    for asked, of in (("list", ()), ("list --conversions", ()), ("find", outputs[1:]), ("show", sources[1:])):
        assert run(["catalog", *asked.split(), *of, "--catalog", url]) == 0
        assert ("catalog-row" in capsys.readouterr().out) == ((asked, table) in LISTED)
    for source, output in zip(sources, outputs, strict=True):
        assert cli(capsys, url, "catalog", "show", output)[0] == 0
        assert cli(capsys, url, "catalog", "lineage", output)[0] == 0
        code, detail = cli(capsys, url, "catalog", "show", source, "--tensors")
        parts = (detail["checkpoint"], *detail["tensors"], *detail["files"])
        odd_parts = [part for part in parts if "trouble" in part]
        assert bool(odd_parts) == (source == sources[1] and table != "conversion")
        assert [f["code"] for f in detail["findings"]].count("catalog-row") == len(odd_parts)
    with catalog.reading() as conn:
        assert len(maintenance.due(conn)) == 4
        assert len(maintenance.sources(conn)) == 2
        assert len(browse.checkpoints(conn).rows) == 4
        assert len(browse.conversions(conn).rows) == 2
        assert paged(browse.checkpoints, conn) == 4
        assert paged(browse.conversions, conn) == 2
        for row in browse.checkpoints(conn).rows:
            json.dumps(as_dict(row))
            browse.tensors(conn, row.checkpoint.id)
            browse.files(conn, row.checkpoint.id)
            browse.tensor_counts(conn, row.checkpoint.id)
        tensor_differences.compare(conn, *sources)
        for run_row in browse.runs(conn).rows:
            assert paged(browse.steps_of, conn, run_row.name) in (2, 4)
    upgrade(url)


def paged(rows, conn, *arguments):
    """The number of rows that pages of one row have together."""
    ids, before = set(), None
    for _ in range(10):
        page = rows(conn, *arguments, before=before, limit=1)
        ids |= {getattr(row, "checkpoint", row).id for row in page.rows}
        before = page.next
        if before is None:
            return len(ids)
    raise AssertionError("pages without an end")


SERVER_TIMES = ("infinity", "-infinity", "0044-03-15 BC", "20000-01-01")
NO_TIMES = ("never", 12, b"x")
LARGE = (2**63 - 1, -(2**63))  # the sum with another one is an error of SQLite
TIMES = ("checkpoint.verified_at", "checkpoint.created_at", "conversion.started_at", "conversion.ended_at")


def test_the_figures_are_of_the_others(filled):
    """Times that only a database has, of which a monitor asks the first."""
    server = filled.startswith("postgresql")
    cases = [(name, value) for name in TIMES for value in (SERVER_TIMES if server else NO_TIMES)]
    for name in ("checkpoint.total_bytes", "conversion.bytes_out", "conversion.verb"):
        of_server = ("x" * 300,) if name.endswith("verb") else (-1, *LARGE)
        of_file = NO_TIMES if name.endswith("verb") else (*NO_TIMES, *LARGE)
        cases += [(name, value) for value in (of_server if server else of_file)]
    with open_catalog(filled) as catalog:
        for name, value in cases:
            with odd(catalog, *name.split("."), value):
                with catalog.reading() as conn:
                    counted = figures(conn, catalog.now())
                    browse.runs(conn)
                assert sum(each.checkpoints for each in counted.stock.values()) == 4, (name, value)
                assert sum(counted.conversions.values()) == 2, (name, value)


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_views_show_the_other_rows(filled, step):
    server = filled.startswith("postgresql")
    cases = [("checkpoint", "total_bytes", value) for value in LARGE]
    cases += [odd_value[:3] for odd_value in ODD if odd_value[3] or not server]
    if server:
        cases += [(*name.split("."), time) for time in SERVER_TIMES for name in TIMES]
    with open_catalog(filled) as catalog:
        with catalog.reading() as conn:
            usual = {view: len(conn.execute(text(f"SELECT * FROM {view}")).all()) for view in VIEWS}
        assert usual["conversion_stages"] >= 2
        for table, column, value in cases[::step]:
            with odd(catalog, table, column, value), catalog.reading() as conn:
                for view in VIEWS:
                    rows = conn.execute(text(f"SELECT * FROM {view}")).all()
                    assert len(rows) >= usual[view] // 2, (view, table, column, value)


ODD_FINDINGS = ("code", "level", "message", "fqn", "file", "hint", "severity")


def test_an_odd_finding_is_one_finding(url, tmp_path, capsys):
    if url.startswith("postgresql"):
        pytest.skip("its types refuse such values")
    place = str(save(tmp_path / "step-1", 1))
    both = [finding("unused-bytes", "coverage", f"of {name}", file=name) for name in ("a", "b")]
    with open_catalog(url) as catalog:
        catalog.record_validation(facts(inspect(place), place), both, level="coverage")
        for column in ODD_FINDINGS:
            change = f"UPDATE finding SET {column} = :v WHERE file = 'b'"
            with catalog.writing() as conn:
                old = conn.execute(text(f"SELECT {column} FROM finding WHERE file = 'b'")).scalar_one()
                conn.execute(text(change), {"v": b"\xff"})
            code, detail = cli(capsys, url, "catalog", "show", place)
            assert (code, [f["code"] for f in detail["findings"]]) == (0, ["unused-bytes", "catalog-row"])
            assert f"{column} holds" in detail["findings"][1]["message"]
            assert run(["catalog", "show", place, "--catalog", url]) == 0
            with catalog.writing() as conn:
                back = change.replace("file = 'b'", "file <> 'a'") if column == "file" else change
                conn.execute(text(back), {"v": old})


def test_a_scrub_checks_the_others(filled, capsys):
    with open_catalog(filled) as catalog, odd(catalog, "checkpoint", "origin", "{"):
        found = scrub.scrub(catalog, share=1.0)
        assert len(found.looked) == 4
        (wrong,) = [each for each in found.looked if each.proven.proof.value == "unread"]
        assert "origin holds" in wrong.proven.message
        assert "not a JSON object" in wrong.proven.message
        # It comes last in the next run.
        next_scrub = scrub.scrub(catalog, share=0.01)
        assert next_scrub.looked[0].checkpoint.id != wrong.checkpoint.id


def test_one_odd_root_is_one_root(url, tmp_path):
    now = datetime.now(UTC)
    save(tmp_path / "b" / "step-0", 0)
    with open_catalog(url) as catalog:
        with catalog.writing() as conn:
            for name in ("a", "b"):
                roots.add(
                    conn, now, name, str(tmp_path / name), targets=[{"destination": "{root}/../out/{name}"}]
                )
            conn.execute(text("UPDATE watched_roots SET target = '{' WHERE name = 'a'"))
        found = sweep.sweep(catalog, lambda r: convert(r, SETTINGS, None, url), settings=AT_ONCE)
        assert [(i.root, i.standing.value) for i in found.items] == [("a", "refused"), ("b", "made")]
        assert "target holds" in found.items[0].why


def test_an_odd_state_of_a_place_is_checked_anew(url, tmp_path):
    now = datetime.now(UTC)
    for step in range(2):
        save(tmp_path / "a" / f"step-{step}", step)
    with open_catalog(url) as catalog:
        with catalog.writing() as conn:
            roots.add(conn, now, "a", str(tmp_path / "a"), targets=[{"destination": "{root}/../out/{name}"}])

        def swept():
            found = sweep.sweep(catalog, lambda r: convert(r, SETTINGS, None, url), settings=AT_ONCE)
            return [i.standing.value for i in found.items]

        assert swept() == ["made", "made"]
        for value in ("findings = '{'", "findings = '[3]'", "state = 'odd'"):
            with catalog.writing() as conn:
                conn.execute(text(f"UPDATE sightings SET {value} WHERE uri LIKE '%step-1'"))
            assert swept() == ["converted", "converted"]


def test_queues_and_the_journal(url):
    now = datetime.now(UTC)
    with open_catalog(url) as catalog:
        with catalog.queueing() as conn:
            for n in range(2):
                outbox.put(conn, now, "e", str(n), type="t", body={"n": n})
                inbox.accept(conn, now, queues.NewEvent("s", str(n)))
            conn.execute(text("UPDATE outbox SET body = '{' WHERE key = '1'"))
            audit.note(conn, now, "a", "b", {"n": 1})
            conn.execute(text("UPDATE audit SET detail = '{'"))
        with catalog.reading() as conn:
            rows = outbox.listed(conn)
            assert [bool(r.trouble) for r in rows] == [True, False]
            (change,) = audit.listed(conn)
            assert "detail holds" in change.trouble
        with catalog.queueing() as conn:
            (taken,) = outbox.take(conn, now, limit=10)
            assert taken.key == "0"
        with catalog.reading() as conn:
            (failed,) = outbox.listed(conn, "failed")
        assert failed.key == "1"
        assert "body holds" in (failed.error_message or "")
