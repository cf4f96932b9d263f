"""A process that was stopped for long behind its last look goes on: what others counted on meanwhile stays.

The catalog counts its conversion as ended by then, and on an object store its lease has ended, too.
"""

from __future__ import annotations

from datetime import timedelta

import fault_s3
import pytest
from custody_buckets import COPY, IN_PLACE, OTHER, SOURCE, Bucket
from custody_copies import Copies, files_of, is_copy_of
from retiring import MEANS
from sqlalchemy import update

from ckptcore.catalog import open_catalog
from ckptcore.catalog.models import ConversionProcess
from ckptcore.conversion import pipeline
from ckptcore.conversion.pipeline import convert
from ckptcore.conversion.staging import local_staging, remote_publication
from ckptcore.custody.upkeep import listed
from ckptcore.errors import Busy, DestinationExists, Interrupted
from ckptcore.planning.request import Request
from ckptcore.store.objects import lease

on_each = pytest.mark.parametrize("either", ["sqlite", "postgresql"], indirect=True)
on_some = pytest.mark.parametrize(
    "either", ["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)], indirect=True
)


@pytest.fixture
def copies(either, tmp_path):
    with open_catalog(either) as catalog:
        yield Copies(catalog, either, tmp_path)


@pytest.fixture
def bucket(either, tmp_path, monkeypatch):
    with fault_s3.serving() as server, open_catalog(either) as catalog:
        yield Bucket(server, catalog, either, tmp_path)


def silence(catalog):
    """Every conversion that runs is of a machine that has been silent for an hour."""
    with catalog.writing() as conn:
        then = catalog.now() - timedelta(hours=1)
        conn.execute(update(ConversionProcess).values(renewed_at=then, process=""))


def stopped_at(monkeypatch, module, name, catalog, act):
    """The first process that comes to a function is stopped there for long, while something else happens."""
    real, acts = getattr(module, name), [act]

    def stopping(*given, **options):
        if acts:
            silence(catalog)
            acts.pop()()
        return real(*given, **options)

    monkeypatch.setattr(module, name, stopping)


@pytest.mark.alike(1)
@on_each
def test_two_overwrites_do_not_count_on_each_other(copies, monkeypatch):
    second = copies.out / "x"
    copies.convert(copies.source, second)
    copies.counted_on()
    stopped_at(monkeypatch, local_staging, "publish_local", copies.catalog, lambda: copies.refuses(second))
    copies.replaces()
    is_copy_of(second, 1)
    assert {each.place for each in listed(copies.catalog)} == {str(second)}


@on_some
def test_what_a_conversion_set_aside_is_not_purged_because_of_a_copy_that_is_being_replaced(
    copies, monkeypatch
):
    second, third = copies.out / "x", copies.out / "y"
    for place in (second, third):
        copies.convert(copies.source, place)
    copies.counted_on()
    copies.replaces(second)
    (home,) = copies.homes(second)
    stopped_at(monkeypatch, local_staging, "publish_local", copies.catalog, copies.due)
    copies.replaces()
    assert not home.exists()
    is_copy_of(third, 1)
    assert {each.place for each in listed(copies.catalog)} == {str(third)}
    assert not list(copies.out.glob(".k.obligations.ckptcore/*")), list(copies.out.glob(".*/*"))


@on_some
def test_a_copy_that_was_written_since_it_was_read_does_not_count(copies, monkeypatch):
    """The conversion has judged it when it was planned."""
    second = copies.out / "x"
    copies.convert(copies.source, second)
    copies.counted_on()
    before = files_of(copies.copy)

    real = pipeline.finish_staged

    def finish(*given, **options):
        (second / "model.safetensors").write_bytes(b"another file")
        return real(*given, **options)

    monkeypatch.setattr(pipeline, "finish_staged", finish)
    with pytest.raises(DestinationExists, match="only proven copy"):
        copies.overwrite()
    assert files_of(copies.copy) == before


@on_some
def test_a_stopped_overwrite_in_place_removes_nothing_that_another_counts_on(bucket, monkeypatch):
    second = "s3://b/out/x"
    bucket.convert(SOURCE, second)
    bucket.counted_on()
    before = bucket.there("out/k/")
    _end_leases(monkeypatch)

    def other():
        bucket.convert(OTHER, second, **IN_PLACE)

    stopped_at(monkeypatch, remote_publication, "_begin", bucket.catalog, other)
    with pytest.raises((Busy, Interrupted)):
        bucket.convert(OTHER, COPY, **IN_PLACE)
    assert bucket.there("out/k/") == before


@on_some
def test_nobody_counts_on_what_the_holder_of_a_lease_is_about_to_replace(bucket, monkeypatch):
    second = "s3://b/out/x"
    bucket.convert(SOURCE, second)
    bucket.counted_on()
    stopped_at(monkeypatch, remote_publication, "_begin", bucket.catalog, lambda: bucket.refuses(second))
    bucket.convert(OTHER, COPY, **IN_PLACE)
    bucket.refuses(second)


def _end_leases(monkeypatch):
    """Leases have ended when they are taken, and are renewed only when they are asked for."""
    monkeypatch.setattr(lease, "TTL_S", -20.0)
    monkeypatch.setattr(lease.Lease, "_renewing", lambda _: None)


@on_some
def test_a_stopped_overwrite_without_a_catalog_removes_nothing_that_a_deletion_counts_on(bucket, monkeypatch):
    before = bucket.there("out/k/")
    _end_leases(monkeypatch)
    stopped_at(monkeypatch, remote_publication, "_begin", bucket.catalog, bucket.counted_on)
    with pytest.raises(Busy):
        convert(Request(OTHER, COPY, **IN_PLACE), MEANS, None, False)
    assert bucket.there("out/k/") == before
    bucket.refuses()


@on_some
def test_a_copy_does_not_count_while_a_part_of_it_is_replaced(copies):
    part = copies.copy / "part"
    copies.convert(copies.other, part)
    request = Request(str(copies.other), str(part), overwrite=True)
    uris = {"source_uri": request.source, "destination_uri": request.destination}
    begun = copies.catalog.begin(request.as_dict(), **uris, verb="consolidate", tool_version="0")
    done = copies.fate()
    assert (done.fate.value, "writes to" in done.why[0]) == ("unsafe", True), done.why
    copies.catalog.fail(begun, code="interrupted", message="stopped")
