"""On object stores, the last copy of what `retire` deleted is not replaced either, object by object."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime, timedelta

import fault_s3
import pytest
from custody_copies import NOW, WEEK, save
from retiring import MEANS

from ckptcore.catalog import open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.conversion import remote_publication
from ckptcore.conversion.pipeline import convert, execute, finish, inspect, prepare, settle
from ckptcore.conversion.registration import facts, start
from ckptcore.errors import CkptError, DestinationExists, UsageError
from ckptcore.operations.purge import purge, restore
from ckptcore.operations.retention import Policy
from ckptcore.operations.retire import retire
from ckptcore.planning.request import Request

on_some = pytest.mark.parametrize(
    "either", ["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)], indirect=True
)
SOURCE, COPY, OTHER = "s3://b/runs/llama/step-1", "s3://b/out/k", "s3://b/other"
IN_PLACE = {"overwrite": True, "overwrite_in_place": True}


class Bucket:
    """Two watched steps, the copy of the first, and `other`, of other contents."""

    def __init__(self, server, catalog, url, tmp):
        self.server, self.catalog, self.url, self.tmp = server, catalog, url, tmp
        for number, place in enumerate(("runs/llama/step-1", "runs/llama/step-2", "other"), start=1):
            self.put(place, number)
        with catalog.writing() as conn:
            roots.add(conn, datetime.now(UTC), "r", "s3://b/runs")
        newest = "s3://b/runs/llama/step-2"
        catalog.record_validation(facts(inspect(newest), newest), ())
        self.convert(SOURCE, COPY)

    def put(self, place, number, **more):
        for file in save(self.tmp / f"{place}-{number}", number, **more).iterdir():
            self.server.put(f"b/{place}/{file.name}", file.read_bytes())

    def convert(self, source, target, *, catalog=None, **options):
        url = self.url if catalog is None else catalog
        return convert(Request(str(source), str(target), **options), MEANS, None, url)

    def retire(self, grace=NOW, **options):
        return retire(self.catalog, Policy(1), yes=True, grace=grace, **options)

    def due(self):
        return tuple(purge(self.catalog, MEANS, None, due=datetime.now(UTC) + 2 * WEEK))

    def counted_on(self):
        assert self.retire().counts == {"deleted": 1, "kept": 1}
        assert not self.there("runs/llama/step-1/")
        return self

    def there(self, prefix):
        prefix = f"b/{prefix}"
        found = self.server.objects.items()
        return {name: stored.data for name, stored in sorted(found) if name.startswith(prefix)}

    def refuses(self, target=COPY, **options):
        before = self.there(target.removeprefix("s3://b/"))
        assert before
        with pytest.raises(DestinationExists, match="only proven copy") as error:
            self.convert(OTHER, target, **IN_PLACE, **options)
        assert self.there(target.removeprefix("s3://b/")) == before
        return error.value

    def killed(self, last, act):
        """Something in a process of its own, which is killed after its n-th change; False: it ended before."""
        child = os.fork()
        if not child:
            try:
                with open_catalog(self.url) as catalog:
                    act(catalog)
                os._exit(0)
            except CkptError:
                os._exit(3)
            finally:
                os._exit(4)
        left = [last]

        def strike(_path):
            left[0] -= 1
            if left[0] == 0:
                os.kill(child, signal.SIGKILL)

        self.server.after = strike
        status = os.waitpid(child, 0)[1]
        self.server.after = None
        assert status in (0, signal.SIGKILL), status
        return status == signal.SIGKILL


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
    from ckptcore.operations import purge as module

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
    settle(begun[1])
    assert set(bucket.there("runs/llama/step-1/")) >= {"b/runs/llama/step-1/.metadata"}


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
    read = [path for method, path, *_ in log if method == "GET" and path.endswith((".distcp", ".safetensors"))]
    assert len(read) <= 1, read  # the header of the copy
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
def test_a_step_that_is_saved_again_while_it_waits_is_kept(bucket):
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


@pytest.mark.parametrize("either", ["sqlite"], indirect=True)
@pytest.mark.parametrize("grace", [NOW, timedelta(days=7)])
def test_retire_killed_at_each_change_of_the_bucket(grace, bucket):
    """Each ends with the whole source, or with its contents in the copy, where they are protected."""
    before, last = bucket.there("runs/llama/step-1/"), 0
    copy = bucket.there("out/k/")

    def act(catalog):
        retire(catalog, Policy(1), yes=True, grace=grace, take=MEANS)
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


@pytest.mark.parametrize("either", ["sqlite"], indirect=True)
def test_d20_restored_while_a_purge_reads(bucket, monkeypatch):
    from ckptcore.operations import purge as module

    assert bucket.retire(WEEK).counts == {"retired": 1, "kept": 1}
    before = bucket.there("runs/llama/step-1/")
    read = module._read_child

    def overtaken(*given):
        assert restore(bucket.catalog, SOURCE) == SOURCE
        return read(*given)

    monkeypatch.setattr(module, "_read_child", overtaken)
    bucket.due()
    assert bucket.there("runs/llama/step-1/") == before
    assert bucket.catalog.show(SOURCE).checkpoint.state == "present"


@pytest.mark.parametrize("either", ["sqlite"], indirect=True)
def test_d21_swept_or_validated_while_it_waits(bucket):
    from ckptcore.operations.sweep import sweep

    assert bucket.retire(WEEK).counts == {"retired": 1, "kept": 1}
    found = sweep(bucket.catalog, lambda r: convert(r, MEANS, None, bucket.url), settle_s=0)
    print([(i.source, str(i.standing) if hasattr(i, "standing") else i) for i in found.items])
    print(sorted(bucket.server.objects))
    assert bucket.catalog.show(SOURCE).checkpoint.state == "retired"


@pytest.mark.parametrize("either", ["sqlite"], indirect=True)
def test_d21b_validated_while_it_waits(bucket):
    assert bucket.retire(WEEK).counts == {"retired": 1, "kept": 1}
    bucket.catalog.record_validation(facts(inspect(SOURCE), SOURCE), ())
    done = bucket.retire(WEEK)
    print(done.counts, done.set_aside)
    assert len([n for n in bucket.there("runs/llama/.") if n.endswith("record.json")]) == 1


@pytest.mark.parametrize("either", ["sqlite"], indirect=True)
def test_d18_requests_of_the_gate(bucket):
    bucket.counted_on()
    bucket.server.log.clear()
    bucket.convert(COPY, "s3://b/out/x")
    bucket.server.log.clear()
    bucket.convert(OTHER, COPY, **IN_PLACE)
    for row in bucket.server.log:
        if "obligations" in row[1]:
            print(row)


@pytest.mark.parametrize("either", ["sqlite"], indirect=True)
def test_d18_a_user_of_one_prefix(bucket):
    """Who may not read what is above the destination may replace it."""
    bucket.convert(OTHER, "s3://b/team/mine/x")
    bucket.server.fault("*", path=r"^b/\.team|^b/\.b|^\.", action="status", status=403, code="AccessDenied", times=99)
    bucket.convert(SOURCE, "s3://b/team/mine/x", **IN_PLACE)
