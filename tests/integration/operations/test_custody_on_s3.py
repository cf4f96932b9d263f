"""On object stores, the last copy of what `retire` deleted is not replaced either, object by object."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime

import fault_s3
import pytest
from custody_buckets import COPY, IN_PLACE, OTHER, SOURCE, Bucket
from custody_copies import NOW, WEEK
from retiring import MEANS

from ckptcore.catalog import open_catalog
from ckptcore.conversion.pipeline import convert, execute, finish, inspect, prepare, remove_staging
from ckptcore.conversion.registration import facts, start
from ckptcore.conversion.staging import remote_publication
from ckptcore.errors import CkptError, DestinationExists, UsageError
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.purge import purge, restore
from ckptcore.operations.retention.retire import retire
from ckptcore.planning.request import Request

on_some = pytest.mark.parametrize(
    "either", ["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)], indirect=True
)


@pytest.fixture
def bucket(either, tmp_path):
    with fault_s3.serving() as server, open_catalog(either) as catalog:
        yield Bucket(server, catalog, either, tmp_path)


@on_some
def test_what_holds_the_only_copy_is_not_replaced(bucket):
    bucket.counted_on()
    bucket.refuses()
    bucket.refuses(overwrite_foreign=True)
    bucket.refuses(catalog=False)
    bucket.convert(COPY, "s3://b/out/x")
    bucket.convert(OTHER, COPY, **IN_PLACE)
    bucket.refuses("s3://b/out/x")


@on_some
def test_an_overwrite_in_place_begins_while_retire_reads_the_copy(bucket, monkeypatch):
    from ckptcore.operations.retention import purge as module

    request, begun = Request(OTHER, COPY, **IN_PLACE), []
    read = module._read_child

    def overtaken(*given):
        done = read(*given)
        if not begun:  # it looks at the destination now, and publishes when the source is gone
            begun.append(start(request, bucket.url))
            begun.append(prepare(request, MEANS, None, bucket.url).plan_uri)
            execute(begun[1], None, MEANS)
        return done

    monkeypatch.setattr(module, "_read_child", overtaken)
    (done,) = (each for each in bucket.retire().items if each.source.uri == SOURCE)
    assert (done.fate.value, "writes to" in done.why[0]) == ("unsafe", True), done.why
    finish(begun[1], MEANS, None, bucket.url, begun[0].id)
    remove_staging(begun[1])
    assert set(bucket.there("runs/llama/step-1/")) >= {"b/runs/llama/step-1/.metadata"}


@pytest.mark.alike(1)
@on_some
@pytest.mark.parametrize("behind", ["the record of its first step", "its first removal"])
def test_a_killed_overwrite_in_place_is_resumed_after_the_deletion(behind, bucket, monkeypatch):
    """Behind its first removal nothing opens there, so that no deletion counts on it."""

    def dying(catalog):
        step = remote_publication._begin if behind == "the record of its first step" else None

        def begin(*given, **options):
            step(*given, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        def remove(*given):
            removed(*given)
            os.kill(os.getpid(), signal.SIGKILL)

        removed = remote_publication._remove
        if step is not None:
            remote_publication._begin = begin
        else:
            remote_publication._remove = remove
        convert(Request(OTHER, COPY, to=to, **IN_PLACE), MEANS, None, bucket.url)

    to = "dcp" if behind == "its first removal" else "safetensors"
    bucket.put("other2", 5)
    if behind == "its first removal":
        bucket.convert(SOURCE, COPY, to="dcp", **IN_PLACE)
    before = bucket.there("out/k/")
    assert bucket.killed(-1, dying)
    if behind == "its first removal":
        (done,) = (each for each in bucket.retire().items if each.source.uri == SOURCE)
        assert done.fate.value == "unsafe"
        bucket.convert(OTHER, COPY, to=to, **IN_PLACE)  # the same command resumes
        inspect(COPY)
        return
    bucket.counted_on()
    for request in (Request(OTHER, COPY, **IN_PLACE), Request("s3://b/other2", COPY, **IN_PLACE)):
        with pytest.raises(DestinationExists, match="only proven copy"):
            convert(request, MEANS, None, bucket.url)
        assert bucket.there("out/k/") == before


@on_some
def test_the_objects_of_a_source_stay_until_it_is_purged(bucket):
    before = bucket.there("runs/llama/step-1/")
    log = bucket.server.log
    log.clear()
    assert bucket.retire(WEEK).counts == {"retired": 1, "kept": 1}
    read = [
        path for method, path, *_ in log if method == "GET" and path.endswith((".distcp", ".safetensors"))
    ]
    assert len(read) <= 3, read  # the header of the copy; of the source the heads of its items
    assert bucket.there("runs/llama/step-1/") == before
    assert [each.fate for each in bucket.retire(WEEK).set_aside] == ["waiting"]
    assert restore(bucket.catalog, SOURCE) == SOURCE
    assert bucket.catalog.show(SOURCE).checkpoint.state == "present"
    assert not bucket.there("runs/llama/.")
    assert bucket.retire(WEEK).counts == {"retired": 1, "kept": 1}
    assert [each.fate for each in bucket.due()] == ["purged"]
    assert not bucket.there("runs/llama/step-1")
    bucket.refuses()


@on_some
def test_a_step_that_is_saved_anew_while_it_waits_is_kept(bucket):
    assert bucket.retire(WEEK).counts == {"retired": 1, "kept": 1}
    bucket.put("runs/llama/step-1", 9)
    saved = bucket.there("runs/llama/step-1/")
    with pytest.raises(CkptError):
        restore(bucket.catalog, SOURCE)
    bucket.due()
    assert bucket.there("runs/llama/step-1/") == saved
    inspect(SOURCE)
    assert not bucket.there("runs/llama/.")  # nothing of the old one is there any more


@on_some
def test_a_destination_with_a_record_in_it_is_not_replaced(bucket):
    bucket.counted_on()
    before = bucket.there("out/")
    with pytest.raises(UsageError, match="has obligations"):
        bucket.convert(OTHER, "s3://b/out", **IN_PLACE, overwrite_foreign=True)
    assert bucket.there("out/") == before


@pytest.mark.soak
@pytest.mark.parametrize("either", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("grace", "first"), [(NOW, 3), *(pytest.param(each, 0, marks=pytest.mark.soak) for each in (NOW, WEEK))]
)
def test_retire_killed_at_each_change_of_the_bucket(grace, first, bucket):
    """Each ends with the whole source, or with its contents in the copy, where they are protected."""
    before, last = bucket.there("runs/llama/step-1/"), first
    copy = bucket.there("out/k/")

    def act(catalog):
        retire(catalog, Policy(1), yes=True, grace=grace, fingerprint_settings=MEANS)
        if grace:
            tuple(purge(catalog, MEANS, None, due=datetime.now(UTC) + 2 * WEEK))

    while True:
        last += 1
        killed = bucket.killed(last, act)
        assert bucket.there("out/k/") == copy
        if bucket.there("runs/llama/step-1/") != before:
            bucket.refuses()
        bucket.due()
        if bucket.there("runs/llama/step-1/"):
            assert bucket.there("runs/llama/step-1/") == before
        else:
            bucket.refuses()
            bucket.refuses(catalog=False)
            assert not bucket.there("runs/llama/.")
        if not killed:
            break
        for name, data in before.items():  # it is restored from a backup
            bucket.server.put(name, data)
        bucket.catalog.record_validation(facts(inspect(SOURCE), SOURCE), ())
    assert last > 3
