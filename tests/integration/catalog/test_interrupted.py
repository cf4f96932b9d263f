"""A conversion whose process has ended holds nothing, where that can be proven; else while it shows life."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from ckptcore.catalog import conversions, heartbeats, maintenance, query
from ckptcore.catalog.models import ConversionProcess
from ckptcore.catalog.types import ConversionStart
from ckptcore.errors import Interrupted
from ckptcore.utils import processes

BEGIN_AND_END = """
import sys
from ckptcore.catalog import open_catalog
with open_catalog(sys.argv[1]) as catalog:
    ends = {"source_uri": "/s", "destination_uri": "/out/new"}
    print(catalog.begin({}, **ends, verb="consolidate", tool_version="1"))
"""
PROCESS = "from ckptcore.utils.processes import this_process; print(*this_process())"


@pytest.fixture
def source(convert, facts, catalog):
    """The id of a source that was converted before."""
    convert(facts("/s"), facts("/out/other", content="c"))
    return catalog.show("/s").checkpoint.id


@pytest.fixture
def killed(source, url, forks, finish):
    """The id of a conversion whose process ended without a word."""
    [[line]] = [output.split() for output in finish(forks(BEGIN_AND_END, url))]
    return line


def begin(catalog, uri="/s"):
    return catalog.begin({}, source_uri=uri, destination_uri="/out/new", verb="consolidate", tool_version="1")


def silent(catalog, how_long):
    """Let every conversion have shown its last sign of life so long ago."""
    with catalog.writing() as conn:
        then = conversions.clock(conn) - how_long
        conn.execute(update(ConversionProcess).values(renewed_at=then))


def readers(catalog, source, now=None):
    now = now or datetime.now(UTC)
    with catalog.reading() as conn:
        mine = maintenance.ties(conn, now, [source])[source].readers
        every = maintenance.ties_at(conn, now, ["/s"]).get("/s", maintenance.Ties()).readers
        assert mine == every
        assert set(maintenance.replacing(conn, "/out/new")) == set(mine)
        return mine


def test_a_conversion_of_a_process_that_has_ended_keeps_neither_source_nor_destination(
    catalog, source, killed
):
    assert catalog.show(killed).conversion.state == "running"
    assert readers(catalog, source) == ()
    now = begin(catalog)
    assert readers(catalog, source) == (now,)


def test_it_is_kept_where_its_end_cannot_be_proven(catalog, source, killed, monkeypatch):
    here = processes._this_identity()
    for elsewhere in ((*here[:3], "another boot"), (*here[:2], "pid:[1]", here[3]), ("", "", "", "")):
        with monkeypatch.context() as patch:
            patch.setattr(processes, "_this_identity", lambda found=elsewhere: found)
            assert readers(catalog, source) == (killed,)
    assert readers(catalog, source) == ()
    with monkeypatch.context() as patch:
        patch.setattr(processes, "_this_identity", lambda: (*here[:3], "another boot"))
        silent(catalog, timedelta(minutes=4))
        assert readers(catalog, source) == (killed,)
        silent(catalog, timedelta(minutes=6))
        assert readers(catalog, source) == ()
    with catalog.writing() as conn:  # as a version before this one began it
        conn.exec_driver_sql("DELETE FROM conversion_process")
    assert readers(catalog, source) == (killed,)


def test_a_live_process_of_this_machine_runs_however_long_it_is_silent(catalog, source):
    running = begin(catalog)
    silent(catalog, timedelta(days=3))
    assert readers(catalog, source) == (running,)
    assert catalog.end_interrupted() == ()


def test_a_thread_renews_the_rows_of_running_conversions(catalog, source, monkeypatch):
    running = begin(catalog)
    for how_long, ended in ((timedelta(minutes=4), False), (timedelta(minutes=6), True)):
        silent(catalog, how_long)
        heartbeats.RUNNING._renew(catalog.renew, [running])
        with catalog.reading() as conn:
            (silence,) = [row.silent for row in conversions._recorded(conn)]
        assert silence is ended  # what it was about to replace may be counted on by now


def test_a_conversion_that_lost_its_row_publishes_nothing(catalog, source, monkeypatch):
    """It was stopped for longer than its lease, and another machine has ended its row."""
    running = begin(catalog)
    heartbeats.RUNNING.require(catalog.renew, running)
    with catalog.writing() as conn:
        conversions._end(conn, datetime.now(UTC), conversions.Conversion.uuid == running, "silent")
    heartbeats.RUNNING.require(catalog.renew, running)  # it was renewed a moment ago: nobody could end it
    monkeypatch.setattr(heartbeats, "_SURE_S", -1.0)
    with pytest.raises(Interrupted, match="counts as ended"):
        heartbeats.RUNNING.require(catalog.renew, running)


def test_its_row_ends_when_a_sweep_begins(catalog, source, killed):
    assert catalog.end_interrupted() == (killed,)
    alive = begin(catalog)
    row = catalog.show(killed).conversion
    assert (row.state, row.error_code) == ("failed", "interrupted")
    assert "ended" in row.error_message
    assert row.ended_at is not None
    assert catalog.show(alive).conversion.state == "running"
    assert catalog.end_interrupted() == ()
    assert readers(catalog, source) == (alive,)


@pytest.mark.parametrize("several", [False, True])
def test_its_row_ends_when_another_one_begins_on_the_machine(catalog, killed, monkeypatch, several):
    """The marks that prove its end are removed some time after another process has seen it."""
    here = processes._this_identity()
    with monkeypatch.context() as elsewhere:
        there = ("7", "7", here[2], "another boot:mark")
        elsewhere.setattr("ckptcore.catalog.catalog.this_process", lambda: there)
        begin(catalog)
    assert catalog.show(killed).conversion.state == "running"
    if several:
        catalog.begin_each([])
    else:
        begin(catalog)
    assert catalog.show(killed).conversion.error_code == "interrupted"
    assert [row.state for row in catalog.conversions()].count("running") == 1 + (not several)


def test_a_process_is_looked_at_once_for_all_its_conversions_and_all_sources(
    catalog, convert, facts, url, forks, finish, monkeypatch
):
    """Thousands of killed conversions, and a plan of thousands of sources, which are read in parts."""
    for n in range(5):
        convert(facts(f"/s{n}"), facts(f"/out/other{n}", content=f"c{n}"))
    [[*process]] = [text.split() for text in finish(forks(PROCESS))]
    with catalog.writing() as conn:
        rows = tuple(
            conversions.begin_conversion(
                conn, datetime.now(UTC), ConversionStart({}, "/s0", f"/out/{n}", "consolidate", "1"), process
            )
            for n in range(5)
        )
    monkeypatch.setattr(query, "_AT_ONCE", 2)
    seen = []
    real = processes.has_ended
    monkeypatch.setattr(processes, "has_ended", lambda found: seen.append(tuple(found)) or real(found))
    sources = [catalog.show(f"/s{n}").checkpoint.id for n in range(5)]
    with catalog.reading() as conn:
        found = maintenance.ties(conn, datetime.now(UTC), sources)
    assert [each.readers for each in found.values()] == [()] * 5
    assert seen == [tuple(process)]
    assert catalog.end_interrupted() == rows
    assert {catalog.show(each).conversion.state for each in rows} == {"failed"}


def test_a_conversion_whose_process_runs_is_not_ended_by_another_one_to_its_destination(
    catalog, source, convert, facts
):
    """It reads its source meanwhile, and replaces the destination when its turn comes."""
    alive = begin(catalog)
    convert(facts("/s2"), facts("/out/new", content="c"))
    assert catalog.show(alive).conversion.state == "running"
    assert readers(catalog, source) == (alive,)


def test_a_process_is_recorded_while_its_conversion_runs(catalog, convert, facts, monkeypatch):
    def recorded():
        with catalog.reading() as conn:
            return conn.exec_driver_sql("SELECT count(*) FROM conversion_process").scalar()

    convert(facts("/s"), facts("/out", content="c"))
    assert recorded() == 0
    running = begin(catalog)
    assert recorded() == 1
    catalog.fail(running, code="busy", message="no")
    assert recorded() == 0
    begin(catalog)
    monkeypatch.setattr(processes, "is_running", lambda process: False)
    convert(facts("/s"), facts("/out/new", content="c"))  # it published there: nothing else is known to run
    assert recorded() == 0


def test_marks_go_with_the_conversions_of_a_process(catalog, tmp_path, monkeypatch):
    (tmp_path / "marks").mkdir()
    monkeypatch.setattr(processes, "_FOLDERS", (str(tmp_path / "marks"),))
    monkeypatch.setattr(processes, "_MARKS", processes._Marks())
    starts = [ConversionStart({}, source, "/out", "consolidate", "1") for source in ("/b", "/c", None)]
    with pytest.raises(AttributeError):
        catalog.begin_each(starts)  # the last one names no source
    assert catalog.begin_each([]) == ()
    assert not list((tmp_path / "marks").iterdir())
    first = begin(catalog, "/a")
    for conversion in (first, *(begun.id for begun in catalog.begin_each(starts[:2]))):
        assert list((tmp_path / "marks").iterdir())
        catalog.fail(conversion, code="x", message="")
    assert not list((tmp_path / "marks").iterdir())
