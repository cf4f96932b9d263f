"""A URL has one row's facts under every scheme that opens the same place; others stay apart."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from ckptcore.catalog import aliases, claims, holds, maintenance
from ckptcore.catalog.query import files_at
from ckptcore.catalog.run_outputs import output_at
from ckptcore.custody.place_ties import inside_of_place
from ckptcore.errors import UsageError
from ckptcore.operations.claims import made_from, rewritten

NOW = datetime(2026, 3, 1, tzinfo=UTC)
PAIRS = [("s3://b/run", "s3a://b/run/"), ("gcs://b/run", "gs://b/run"), ("az://c/run", "abfss://c/run")]


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_a_checkpoint_is_found_under_each_scheme(catalog, convert, facts, here, there):
    _, made = convert(facts(f"{here}/step-1"), facts(f"{here}/out", content="c"))
    source = catalog.show(f"{here}/step-1").checkpoint
    for uri in (here, there.rstrip("/")):
        assert catalog.show(f"{uri}/step-1").checkpoint.id == source.id
        assert catalog.show(f"{uri}/out").checkpoint.id == made
        row, _ = catalog.at(f"{uri}/out")
        assert row.id == made
        assert [origin.checkpoint.id for origin in catalog.which(f"{uri}/out")] == [made]
        [origin] = catalog.which(f"{uri}/out/{origin_file(catalog, made)}")
        assert origin.checkpoint.id == made
        assert made_from(catalog, f"{uri}/out", f"{uri}/step-1", source.manifest_digest)
        with catalog.reading() as conn:
            assert files_at(conn, f"{uri}/out")
            assert output_at(conn, f"{uri}/out", f"{uri}/step-1")


def origin_file(catalog, made):
    return catalog.show(made).files[0].path


@pytest.mark.parametrize(
    "there",
    ["s3n://b/run", "s3://b//run", "gs://b/run", "s3://B/run", "abfs://b/run", "simplecache::s3://b/run"],
)
def test_other_places_stay_apart(catalog, convert, facts, there):
    """An S3 key with two slashes is another one, and no store opens s3n."""
    convert(facts("s3://b/run"), facts("s3://b/out", content="c"))
    with pytest.raises(UsageError):
        catalog.show(there)


def test_the_newest_of_two_rows_of_one_place_is_current(catalog, convert, facts):
    convert(facts("s3a://b/run"), facts("/out/1", content="c"))
    convert(facts("s3://b/run", manifest="m2"), facts("/out/2", content="c"))
    assert catalog.show("s3a://b/run").checkpoint.manifest_digest.startswith("6d32")


@pytest.mark.parametrize("content", [None, "c"])
def test_a_place_that_was_recorded_under_two_schemes_becomes_one_row(catalog, convert, facts, content):
    """Nothing that keeps it from deletion is lost, and reports count it once."""
    here, there = facts("s3://b/run", content=content), facts("s3a://b/elsewhere", content=content)
    first, _ = convert(here, facts("/out/1", content="o"))
    second, _ = convert(there, facts("/out/2", content="p"))
    kept, other = (catalog.show(each.uri).checkpoint.id for each in (here, there))
    with catalog.writing() as conn:  # one place under two schemes
        conn.exec_driver_sql("UPDATE checkpoint SET uri = 's3a://b/run' WHERE uri = 's3a://b/elsewhere'")
        holds.place(conn, NOW, other, "audit")
        aliases.set_alias(conn, NOW, "best", other)
    for each, key in ((kept, "a"), (other, "a"), (other, "b")):
        catalog.tag(each, key, each)
    catalog.record_validation(here, ())
    detail = catalog.show("s3a://b/run")
    assert (detail.checkpoint.id, catalog.show(other).checkpoint.state) == (kept, "replaced")
    assert detail.tags == {"a": kept, "b": other}
    with catalog.reading() as conn:
        now = datetime.now(UTC)
        ties = maintenance.ties(conn, now, [kept])[kept]
        assert (ties.holds, ties.aliases, sorted(ties.tags)) == (("audit",), ("best",), ["a", "b"])
        assert {made.id for made, _ in maintenance.children(conn, kept)} == {first, second}
        count = "SELECT sum(checkpoints) FROM storage_by_run WHERE kind = 'source'"
        assert conn.exec_driver_sql(count).scalar() == 1


def test_an_output_is_claimed_once_under_all_schemes(catalog):
    one, other = (claims.Key("d", f"{scheme}://b/out", "o") for scheme in ("s3", "s3a"))

    def call(function, *given, **more):
        with catalog.writing() as conn:
            return function(conn, *given, **more)

    first = call(claims.take, NOW, one, "s3://b/run", "a")
    second = call(claims.take, NOW, other, "s3a://b/run", "b")
    assert (first.mine, second.mine, second.id) == (True, False, first.id)
    assert call(claims.current, other).id == first.id
    assert call(claims.done, NOW, first)
    assert not call(claims.take, NOW, other, "s3a://b/run", "b").mine
    assert [c.id for c in call(claims.of_destination, other.destination)] == [first.id]
    assert rewritten(catalog, claims.Key("d2", "s3a://b/out", "o"), "s3a://b/run")
    retried = call(claims.take, NOW + timedelta(days=1), other, "s3a://b/run", "b", retry=True)
    assert retried.mine
    assert call(claims.current, one).id == retried.id


def test_a_worker_that_comes_late_cannot_end_what_another_took_under_another_scheme(catalog):
    """As with one scheme: the number of attempts of the earlier claim is another one."""
    one, other = (claims.Key("d", f"{scheme}://b/out", "o") for scheme in ("s3", "s3a"))
    later = NOW + 2 * claims.LEASE

    def call(function, *given, **more):
        with catalog.writing() as conn:
            return function(conn, *given, **more)

    first = call(claims.take, NOW, one, "s3://b/run", "a")
    second = call(claims.take, later, other, "s3a://b/run", "b")
    assert second.mine
    for settle in (claims.renew, claims.done, claims.drop):
        assert not call(settle, *(() if settle is claims.drop else (later,)), first)
    assert not call(claims.failed, later, first, "busy", "late")
    assert call(claims.current, one).owner == "b"
    assert call(claims.renew, later, second)
    assert not call(claims.take, later, one, "s3://b/run", "c").mine
    assert call(claims.done, later, second)
    assert not call(claims.take, later, one, "s3://b/run", "c").mine


def test_an_output_ends_the_earlier_conversions_to_its_place_under_each_scheme(
    catalog, convert, facts, monkeypatch
):
    monkeypatch.setattr("ckptcore.utils.processes.is_running", lambda process: False)
    given = {"verb": "consolidate", "tool_version": "1"}
    killed = catalog.begin({}, source_uri="s3://b/run", destination_uri="s3a://b/out", **given)
    other = catalog.begin({}, source_uri="s3://b/run", destination_uri="gs://b/out", **given)
    convert(facts("s3://b/run"), facts("s3://b/out", content="c"))
    assert catalog.show(killed).conversion.error_code == "interrupted"
    assert catalog.show(other).conversion.state == "running"


def test_a_checkpoint_inside_another_is_found_under_each_scheme(catalog, convert, facts):
    convert(facts("s3a://b/run/step-1/adapter"), facts("/out/1", content="c"))
    convert(facts("s3a://b/run/step-10"), facts("/out/2", content="d"))
    merged = "merged://[/nowhere/node1,s3a://b/run/step-2]"
    convert(facts(merged), facts("/out/3", content="e"))
    with catalog.reading() as conn:
        assert inside_of_place(conn, "s3://b/run/step-1") == ("s3a://b/run/step-1/adapter",)
        assert inside_of_place(conn, "s3://b/run/step-2") == (merged,)
        assert inside_of_place(conn, "gs://b/run/step-1") == ()
        assert inside_of_place(conn, "s3://b/run/step-1/adapter") == ()


def test_a_conversion_that_writes_is_seen_under_each_scheme(catalog):
    given = {"verb": "consolidate", "tool_version": "1"}
    running = catalog.begin({}, source_uri="s3://b/run", destination_uri="s3a://b/out", **given)
    with catalog.reading() as conn:
        for uri in ("s3://b/out", "s3a://b/out/folder", "s3://b/out/folder"):
            assert maintenance.replacing(conn, uri) == (running,)
        assert maintenance.replacing(conn, "gs://b/out") == ()
