"""Claims and sightings: an output is made once, whichever process asks, dies or comes late."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from ckptcore.catalog import claims, sightings
from ckptcore.catalog.claims import Key
from ckptcore.catalog.sightings import Condition, SightingRow
from ckptcore.errors import finding

NOW = datetime(2026, 3, 1, tzinfo=UTC)
KEY = Key("d", "/out/step-1", "o")
PROCESSES = 4

TAKE = """
import sys
from dataclasses import replace
from datetime import UTC, datetime
from ckptcore.catalog import claims, open_catalog
with open_catalog(sys.argv[1]) as catalog:
    for n in range(int(sys.argv[3])):
        with catalog.writing() as conn:
            found = claims.take(conn, datetime.now(UTC), claims.Key(f"d{n}", "/out", "o"), "/s", sys.argv[2])
        if found.mine:
            print(n)
            with catalog.writing() as conn:
                assert claims.done(conn, datetime.now(UTC), found)
"""

TAKE_AND_END = f"""
import sys
from datetime import datetime
from ckptcore.catalog import claims, open_catalog
now = datetime.fromisoformat("{NOW.isoformat()}")
with open_catalog(sys.argv[1]) as catalog, catalog.writing() as conn:
    assert claims.take(conn, now, claims.Key("{KEY.source_digest}", "{KEY.destination}", "o"), "/s", "a").mine
"""


@pytest.fixture
def claim(catalog):
    """Return a function that calls one of `claims` in its own transaction."""

    def call(function, *given, **more):
        with catalog.writing() as conn:
            return function(conn, *given, **more)

    return call


def test_one_owner_takes_a_claim_and_a_done_claim_stays_done(claim):
    first = claim(claims.take, NOW, KEY, "/runs/step-1", "a")
    other = claim(claims.take, NOW, KEY, "/runs/step-1", "b")
    assert (first.mine, first.attempts) == (True, 1)
    assert (other.mine, other.owner, other.state) == (False, "a", "taken")
    assert claim(claims.take, NOW, Key("d", "/out/step-1", "other"), "/runs/step-1", "b").mine
    assert claim(claims.take, NOW, Key("other", "/out/step-1", "o"), "/runs/step-1", "b").mine
    assert claim(claims.done, NOW, first)
    assert not claim(claims.done, NOW, first)
    later = claim(claims.take, NOW + timedelta(days=9), KEY, "/runs/step-1", "b")
    assert (later.mine, later.state) == (False, "done")
    assert claim(claims.take, NOW, KEY, "/runs/step-1", "b", retry=True).mine


def test_an_expired_claim_goes_to_the_next_owner_and_the_first_cannot_end_it(claim):
    first = claim(claims.take, NOW, KEY, "/s", "a")
    assert claim(claims.renew, NOW + timedelta(minutes=4), first)
    assert not claim(claims.take, NOW + timedelta(minutes=8), KEY, "/s", "b").mine
    second = claim(claims.take, NOW + timedelta(minutes=9), KEY, "/s", "b")
    assert (second.mine, second.attempts, second.owner) == (True, 2, "b")
    for settle in (claims.renew, claims.done):
        assert not claim(settle, NOW, first)
    assert not claim(claims.failed, NOW, first, "busy", "late")
    assert claim(claims.failed, NOW, second, "disk-full", "no room")
    assert claim(claims.current, KEY).error == "no room"
    third = claim(claims.take, NOW, KEY, "/s", "c")
    assert (third.mine, third.error_code) == (True, None)
    assert [c.owner for c in claim(claims.of_destination, KEY.destination)] == ["c"]


def test_the_same_owner_retakes_its_claim_at_once(claim):
    claim(claims.take, NOW, KEY, "/s", "flow run 1")
    retried = claim(claims.take, NOW, KEY, "/s", "flow run 1")
    assert (retried.mine, retried.attempts) == (True, 2)


def test_a_claim_of_a_process_that_has_ended_is_free_where_that_can_be_proven(claim, url, forks, finish):
    finish(forks(TAKE_AND_END, url))
    found = claim(claims.current, KEY)
    assert (found.owner, found.is_in_use(NOW)) == ("a", False)
    assert claim(claims.take, NOW, KEY, "/s", "b").attempts == 2


def test_a_claim_of_a_process_that_has_ended_keeps_no_source(
    claim, catalog, url, convert, facts, forks, finish
):
    """`retire` keeps a source that is being converted."""
    from sqlalchemy import select

    from ckptcore.catalog import maintenance
    from ckptcore.catalog.models import Checkpoint

    convert(facts("/s"), facts("/out/other", content="c"))
    with catalog.reading() as conn:
        source = conn.execute(select(Checkpoint.uuid).where(Checkpoint.uri == "/s")).scalar_one()

    def readers():
        return claim(maintenance.ties, NOW, [source])[source].readers

    finish(forks(TAKE_AND_END, url))
    assert claim(claims.current, KEY).state == "taken"
    assert readers() == ()
    assert claim(claims.take, NOW, KEY, "/s", "b").mine
    assert readers() == ("b",)


def test_a_claim_of_an_older_version_is_free_when_its_lease_ends(claim, catalog, url, forks, finish):
    finish(forks(TAKE_AND_END, url))
    with catalog.writing() as conn:
        conn.exec_driver_sql("UPDATE claims SET owner = 'host 1 aaaa'")
    taken = claim(claims.take, NOW, KEY, "/s", "b")
    assert (taken.mine, taken.owner) == (False, "host 1 aaaa")
    assert claim(claims.take, NOW + claims.LEASE, KEY, "/s", "b").mine


def test_processes_that_race_take_each_claim_once(catalog, url, forks, finish, rounds):
    outputs = finish(*[forks(TAKE, url, f"p{n}", rounds) for n in range(PROCESSES)])
    assert sorted(int(line) for text in outputs for line in text.split()) == list(range(rounds))


def test_one_sighting_per_uri_keeps_its_first_time(catalog):
    first = SightingRow("/runs/step-1", "/runs", 1, Condition.WRITING, "s1", None, None, (), NOW, NOW, NOW)
    gone, later = finding("missing-file", "files", "gone", file="a"), NOW + timedelta(hours=1)
    second = replace(first, uri="/runs/step-1/", state=Condition.BROKEN, stamp="s2", findings=(gone,))
    with catalog.writing() as conn:
        sightings.note(conn, first)
        sightings.note(conn, replace(first, uri="/runs-of-others/step-1"))
        sightings.note(conn, replace(second, first_seen_at=later, last_seen_at=later))
    with catalog.reading() as conn:
        found = sightings.below(conn, "/runs")
    assert list(found) == ["/runs/step-1"]
    row = found["/runs/step-1"]
    assert (row.state, row.stamp, row.first_seen_at) == ("broken", "s2", NOW)
    assert row.last_seen_at == NOW + timedelta(hours=1)
    assert [f.code for f in row.findings] == ["missing-file"]


def test_outputs_below_a_root_are_those_of_its_conversions(catalog, convert, facts):
    convert(facts("/runs/step-1"), facts("/runs/exports/step-1", content="c"))
    catalog.begin(
        {}, source_uri="/runs/step-2", destination_uri="/runs/exports/step-2", verb="export", tool_version="1"
    )
    with catalog.reading() as conn:
        assert sightings.outputs_below(conn, "/runs") == {"/runs/exports/step-1", "/runs/exports/step-2"}
        assert sightings.outputs_below(conn, "/runs/exp") == frozenset()
