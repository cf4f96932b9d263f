"""The last copy of what `retire` deleted is not replaced, whatever happened to it, to others, or to the catalog.

Each test is a chain of ordinary commands that all end well; the last one would take the only copy.
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
import torch
from custody_copies import (
    WEEK,
    Copies,
    copy_by_hand,
    files_of,
    flip,
    is_copy_of,
    put_rows,
    rewrite,
    rows_of,
    save,
)
from retiring import MEANS
from sqlalchemy import text

from ckptcore.catalog import open_catalog, upgrade
from ckptcore.catalog.catalog import Catalog
from ckptcore.conversion.pipeline import execute, finish, prepare
from ckptcore.conversion.publication_record import REPLACES
from ckptcore.conversion.staging import Staging
from ckptcore.errors import CatalogAway, DestinationExists, UsageError
from ckptcore.operations.purge import purge, restore
from ckptcore.operations.scrub import scrub
from ckptcore.planning.request import Request

on_each = pytest.mark.parametrize("either", ["sqlite", "postgresql"], indirect=True)
# Where what rows say hardly matters, PostgreSQL is of the long tier.
on_some = pytest.mark.parametrize(
    "either", ["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)], indirect=True
)


@pytest.fixture
def copies(either, tmp_path):
    with open_catalog(either) as catalog:
        yield Copies(catalog, either, tmp_path)


# What happened to the copy.


@on_each
def test_its_disk_was_away_during_a_scrub(copies):
    copies.counted_on()
    away = copies.tmp / "away"
    copies.out.rename(away)
    scrub(copies.catalog, share=1)
    assert copies.catalog.show(str(copies.copy)).checkpoint.state == "gone"
    away.rename(copies.out)
    copies.refuses()


@on_each
@pytest.mark.parametrize("again", ["rebuild", "validate"])
def test_it_was_moved_and_cataloged_again(again, copies):
    copies.counted_on()
    moved = copies.tmp / "archive" / "k"
    moved.parent.mkdir()
    copies.copy.rename(moved)
    scrub(copies.catalog, share=1)
    if again == "rebuild":
        copies.rebuilt(moved)
    else:
        copies.validated(moved)
    copies.refuses(moved)


@on_some
def test_it_was_moved_and_nobody_said_so(copies):
    copies.counted_on()
    moved = copies.tmp / "archive"
    copies.copy.rename(moved)
    copies.refuses(moved)


@on_some
@pytest.mark.parametrize("known", [False, True])
def test_it_was_rewritten_by_hand_with_one_tensor_more(known, copies):
    copies.counted_on()
    rewrite(copies.copy, extra=torch.ones(3))
    if known:
        copies.validated(copies.copy)
    copies.refuses()


@on_some
def test_it_was_overwritten_and_written_back_by_hand(copies):
    """The row of its place is of another content now."""
    kept = copy_by_hand(copies.copy, copies.tmp / "kept")
    copies.counted_on()
    shutil.rmtree(copies.copy)
    save(copies.copy, 7)
    copies.validated(copies.copy)
    shutil.rmtree(copies.copy)
    kept.rename(copies.copy)
    copies.refuses()


@on_some
def test_it_is_inside_what_is_replaced(copies):
    copies.counted_on()
    shutil.rmtree(copies.out / ".k.obligations.ckptcore")  # with it, nothing that is around it is replaced
    copies.refuses(copies.out, overwrite_foreign=True)


# What happened to other copies.


@on_each
def test_a_copy_of_it_is_replaced_after_it(copies):
    copies.counted_on()
    second = copies.out / "x"
    copies.convert(copies.copy, second)
    copies.replaces()
    copies.refuses(second)
    third = copies.out / "y"
    copies.convert(second, third, to="dcp")
    copies.replaces(second)
    copies.refuses(third)


@on_some
def test_a_copy_by_hand_is_replaced_after_it(copies):
    copies.counted_on()
    second = copy_by_hand(copies.copy, copies.out / "x")
    copies.refuses()  # the catalog does not know what it holds
    copies.validated(second)
    copies.replaces()
    copies.refuses(second)


@on_some
def test_the_other_copy_lacks_an_object(copies):
    copies.counted_on()
    second = copy_by_hand(copies.copy, copies.out / "x")
    rewrite(second, drop_objects=True)
    copies.rebuilt(second)
    assert copies.refuses().values["contents"] == ["note", "step"]


@on_some
@pytest.mark.parametrize("place", ["first", "last"])
def test_the_other_copy_rotted_and_nobody_looked(place, copies):
    second = copies.out / "x"
    copies.convert(copies.source, second, to="torch_save", **{})
    copies.convert(copies.source, copies.copy, overwrite=True)  # the newest, so it is counted on
    copies.counted_on()
    rotten, whole = (second, copies.copy) if place == "first" else (copies.copy, second)
    file = next(p for p in rotten.rglob("*") if p.is_file()) if rotten.is_dir() else rotten
    at = file.read_bytes().index(torch.full((4,), 1.5).numpy().tobytes())
    flip(file, at)
    copies.refuses(whole)


@on_some
@pytest.mark.parametrize("how", ["exclude", "dtype"])
def test_the_other_copy_is_a_part_or_cast(how, copies):
    copies.counted_on()
    options = {"exclude": ("bias",)} if how == "exclude" else {"dtype": "bfloat16"}
    copies.convert(copies.copy, copies.out / "x", **options)
    copies.refuses()


@on_some
def test_two_parts_are_as_good_as_a_whole(copies):
    copies.counted_on()
    copies.convert(copies.copy, copies.out / "x", exclude=("bias",))
    copies.convert(copies.copy, copies.out / "y", include=("bias",))
    copies.replaces()
    copies.refuses(copies.out / "x")
    copies.refuses(copies.out / "y")


# What happened to the catalog.


@on_each
def test_the_catalog_was_restored_from_before_the_deletion(copies):
    backup = rows_of(copies.catalog)
    copies.counted_on()
    put_rows(copies.catalog, backup)
    assert copies.catalog.show(str(copies.source)).checkpoint.state == "present"
    copies.refuses()


@on_each
def test_the_catalog_was_restored_from_before_its_copy_was_replaced(copies):
    copies.convert(copies.source, copies.out / "x")
    copies.counted_on()  # on x, the newest
    backup = rows_of(copies.catalog)
    copies.replaces(copies.out / "x")
    put_rows(copies.catalog, backup)
    copies.refuses()


@on_some
def test_no_catalog_is_used(copies):
    copies.counted_on()
    copies.refuses(catalog=False)
    copies.refuses(catalog=False, overwrite_foreign=True)
    copies.convert(copies.copy, copies.out / "x")
    copies.refuses(catalog=False)  # without it, nobody knows of the second


@on_some
@pytest.mark.parametrize("found", ["record", "rebuilt"])
def test_the_catalog_was_lost(found, copies, tmp_path, request):
    copies.counted_on()
    with open_catalog(str(tmp_path / "new.sqlite")) as catalog:
        copies.catalog, copies.url = catalog, catalog.url
        if found == "rebuilt":
            copies.rebuilt(copies.copy)
            shutil.rmtree(copies.out / ".k.obligations.ckptcore")
        copies.refuses()


# What else runs.


@on_each
def test_a_conversion_has_been_running_over_it_for_two_days(copies):
    request = Request(str(copies.other), str(copies.copy), overwrite=True)
    uris = {"source_uri": request.source, "destination_uri": request.destination}
    begun = copies.catalog.begin(request.as_dict(), **uris, verb="consolidate", tool_version="0")
    with copies.catalog.writing() as conn:
        long_ago = datetime.now(UTC).replace(tzinfo=None) - timedelta(days=2)
        conn.execute(
            text("UPDATE conversion SET started_at = :at WHERE uuid = :id"), {"at": long_ago, "id": begun}
        )
    done = copies.fate()
    assert (done.fate.value, "writes to it" in done.why[0] or "writes to" in done.why[0]) == ("unsafe", True)
    assert copies.source.exists()


@on_some
@pytest.mark.parametrize("list_of", ["lost", "kept"])
def test_a_publication_that_was_prepared_before_the_deletion(list_of, copies):
    """Without its list of what it replaces: a crash truncated it, or an earlier version planned."""
    request = Request(str(copies.other), str(copies.copy), overwrite=True)
    plan = prepare(request, MEANS, None, copies.url).plan_uri
    execute(plan, None, MEANS)
    copies.counted_on()
    if list_of == "lost":
        Staging.of_plan(plan).root.remove(REPLACES)
    before = files_of(copies.copy)
    with pytest.raises(DestinationExists, match="only proven copy"):
        finish(plan, MEANS, None, copies.url)
    assert files_of(copies.copy) == before


# How an obligation ends.


@on_each
def test_two_obligations_on_one_copy(copies, cli):
    """Two sources of equal contents; both are deleted because of one copy."""
    twin = copies.runs / "llama/step-0"
    shutil.copytree(copies.source, twin)
    copies.convert(twin, copies.copy, overwrite=True)
    assert copies.retire().counts == {"deleted": 2, "kept": 1}
    assert not twin.exists()
    listed = cli("catalog", "obligation", "list", "--output", "json", "--catalog", copies.url, catalog=True)
    rows = listed.json
    assert {row["source"] for row in rows} == {str(copies.source), str(twin)}
    given = ("catalog", "obligation", "release", rows[0]["id"], "--accept-loss", "*", "--catalog", copies.url)
    assert cli(*given, catalog=True).code == 0
    assert copies.refuses().values["sources"] == [rows[1]["source"]]
    copies.refuses(catalog=False)
    given = ("catalog", "obligation", "release", rows[1]["id"], "--accept-loss", "*", "--catalog", copies.url)
    assert cli(*given, catalog=True).code == 0
    assert not list(copies.out.glob(".*.ckptcore"))
    copies.replaces()


@on_each
def test_contents_are_given_up_by_name(copies, cli):
    copies.counted_on()
    with copies.catalog.reading() as conn:
        public = conn.execute(text("SELECT uuid FROM obligation")).scalar_one()
    given = ("catalog", "obligation", "release", public[:8])
    where = ("--catalog", copies.url)
    unknown = cli(*given, "--accept-loss", "nothing", *where, catalog=True)
    assert (unknown.code, "no contents of these names" in unknown.stderr) == (2, True)
    assert cli(*given, "--accept-loss", "[wbz]*", *where, catalog=True).code == 0
    assert copies.refuses().values["contents"] == ["note", "step"]
    assert copies.refuses(catalog=False).values["contents"] == ["note", "step"]
    rewrite(copies.copy, drop_objects=True)  # now nothing of it is there
    copies.replaces()


@on_some
def test_what_no_place_holds_any_more_is_a_finding(copies, cli):
    copies.counted_on()
    shutil.rmtree(copies.copy)
    scrub(copies.catalog, share=1)
    listed = cli("catalog", "obligation", "list", "--output", "json", "--catalog", copies.url, catalog=True)
    assert [row["lost"] for row in listed.json] == [5]
    with copies.catalog.reading() as conn:
        codes = text("SELECT code FROM finding WHERE resolved_at IS NULL")
        assert "lost-content" in conn.execute(codes).scalars().all()
    save(copies.copy, 7, zero=torch.ones(2))
    copies.replaces()  # it blocks nothing


# The grace period.


@contextmanager
def counted_reads(monkeypatch):
    """How many bytes of local files are read meanwhile."""
    from ckptcore.store.local import LocalStore

    read, read_into, total = LocalStore.read, LocalStore.read_into, [0]

    def counting(self, path, start, length):
        total[0] += length
        return read(self, path, start, length)

    def counting_into(self, path, start, into):
        total[0] += len(into)
        return read_into(self, path, start, into)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "read", counting)
        patch.setattr(LocalStore, "read_into", counting_into)
        yield total


@on_some
def test_a_source_is_set_aside_without_reading_and_purged_by_reading_once(copies, monkeypatch):
    large = torch.randn(1 << 20)  # 4 MiB
    shutil.rmtree(copies.source)
    save(copies.source, 1, large=large)
    copies.convert(copies.source, copies.copy, overwrite=True)
    with counted_reads(monkeypatch) as nbytes:
        copies.aside()
    assert nbytes[0] < 1 << 18
    with counted_reads(monkeypatch) as nbytes:
        (done,) = due(copies)
    assert (done.fate, done.why) == ("purged", "")
    assert large.nbytes <= nbytes[0] < 1.25 * large.nbytes
    assert not copies.homes(copies.source)
    copies.refuses()


def due(copies, after=WEEK + timedelta(hours=1)):
    """A purge after some time."""
    return tuple(purge(copies.catalog, MEANS, None, due=datetime.now(UTC) + after))


@on_each
def test_a_purge_waits_until_it_is_due(copies, cli):
    before = files_of(copies.source)
    home = copies.aside()
    where = ("--catalog", copies.url, "--output", "json")
    for options in ((), ("--purge",), ("--yes",)):
        done = cli("retire", *options, *where, catalog=True)
        assert [each["fate"] for each in done.json["set_aside"]] == ["waiting"], done
        assert files_of(home / "step-1") == before
    assert done.json["files"]["waiting"] == sum(map(len, before.values()))
    (item,) = due(copies, WEEK - timedelta(hours=1))
    assert item.fate == "waiting"
    (item,) = due(copies)
    assert (item.fate, home.exists()) == ("purged", False)
    assert due(copies) == ()
    assert copies.catalog.show(str(copies.source)).checkpoint.state == "deleted"
    copies.refuses()


@on_each
def test_a_hold_during_the_grace_period_blocks_the_purge(copies, cli):
    home = copies.aside()
    public = copies.catalog.show(str(copies.source)).checkpoint.id
    where = ("--catalog", copies.url)
    held = cli("catalog", "hold", "place", str(copies.source), "--reason", "audit", *where, catalog=True)
    assert held.code == 0, held
    (item,) = due(copies)
    assert (item.fate, "audit" in item.why) == ("kept", True), item
    assert home.exists()
    assert restore(copies.catalog, public) == str(copies.source)
    assert copies.catalog.show(str(copies.source)).checkpoint.state == "present"
    assert copies.fate().fate.value == "kept"


@on_each
def test_the_trainer_saves_the_step_again_during_the_grace_period(copies):
    before = files_of(copies.source)
    home = copies.aside()
    save(copies.source, 9)
    copies.catalog.record_validation(facts_of(copies.source), ())
    saved = files_of(copies.source)
    with pytest.raises(UsageError, match="something else is there now"):
        restore(copies.catalog, str(copies.source))
    assert files_of(home / "step-1") == before
    (item,) = due(copies)
    assert item.fate == "purged", item
    assert files_of(copies.source) == saved
    assert copies.catalog.show(str(copies.source)).checkpoint.state == "present"
    copies.refuses()


def facts_of(place):
    from ckptcore.conversion.pipeline import inspect
    from ckptcore.conversion.registration import facts

    return facts(inspect(str(place)), str(place))


@on_each
@pytest.mark.parametrize("by", ["place", "id", "folder"])
def test_a_source_is_restored(by, copies):
    before = files_of(copies.source)
    home = copies.aside()
    public = copies.catalog.show(str(copies.source)).checkpoint.id
    refs = {"place": str(copies.source), "id": public[:13], "folder": str(home)}
    assert restore(copies.catalog, refs[by]) == str(copies.source)
    assert files_of(copies.source) == before
    assert not home.exists()
    assert due(copies) == ()
    copies.replaces()  # the copy is not the only one
    assert copies.catalog.show(str(copies.source)).checkpoint.state == "present"


@on_each
def test_a_source_is_restored_to_another_name(copies, cli):
    before = files_of(copies.source)
    copies.aside()
    save(copies.source, 9)
    where = ("--catalog", copies.url)
    taken = cli("catalog", "restore", copies.source, *where, catalog=True)
    assert (taken.code, "--to" in taken.stderr) == (2, True), taken
    also = cli("catalog", "restore", copies.source, "--to", "step-2", *where, catalog=True)
    assert (also.code, "something else is there" in also.stderr) == (2, True), also
    done = cli("catalog", "restore", copies.source, "--to", "step-1-old", *where, catalog=True)
    assert done.code == 0, done
    assert files_of(copies.source.with_name("step-1-old")) == before
    assert not copies.homes(copies.source)


@on_some
def test_a_source_is_restored_without_the_catalog_that_knew_it(copies, tmp_path):
    before = files_of(copies.source)
    copies.aside()
    with open_catalog(str(tmp_path / "new.sqlite")) as catalog:
        assert restore(catalog, str(copies.source)) == str(copies.source)
    assert files_of(copies.source) == before


@on_each
def test_a_catalog_from_before_restores_what_it_does_not_know_is_set_aside(copies):
    before, backup = files_of(copies.source), rows_of(copies.catalog)
    copies.aside()
    put_rows(copies.catalog, backup)
    due(copies, timedelta(0))
    assert files_of(copies.source) == before
    copies.counted_on()
    copies.refuses()


# What a conversion replaces is set aside, if it is under an obligation.


@on_each
@pytest.mark.parametrize("to", ["safetensors", "torch_save"])
def test_a_copy_under_an_obligation_is_set_aside_when_it_is_replaced(to, copies):
    target = copies.out / ("x.pt" if to == "torch_save" else "x")
    copies.convert(copies.source, target, to=to)
    copies.counted_on()
    before = files_of(target)
    copies.overwrite(target, to=to)
    (home,) = copies.homes(target)
    assert files_of(home / target.name) == before
    with pytest.raises(UsageError, match="something else is there now"):
        restore(copies.catalog, str(target))
    back = restore(copies.catalog, str(target), f"back-{target.name}")
    assert files_of(target.with_name(f"back-{target.name}")) == before
    assert back == str(target.with_name(f"back-{target.name}"))
    copies.validated(target.with_name(f"back-{target.name}"))
    copies.replaces()  # the restored one counts
    copies.refuses(target.with_name(f"back-{target.name}"), to=to)


@on_some
def test_what_was_replaced_is_purged_while_it_is_elsewhere(copies):
    copies.convert(copies.source, copies.out / "x")
    copies.counted_on()
    copies.replaces(copies.out / "x")
    (home,) = copies.homes(copies.out / "x")
    kept = copies.tmp / "kept"
    copies.copy.rename(kept)
    (item,) = due(copies)
    assert (item.fate, "only proven copy" in item.why) == ("kept", True)
    kept.rename(copies.copy)
    (item,) = due(copies)
    assert (item.fate, home.exists()) == ("purged", False)
    is_copy_of(copies.copy, 1)
    copies.refuses()


@on_some
def test_what_is_under_no_obligation_is_not_set_aside(copies):
    copies.replaces()
    assert not copies.homes(copies.copy)


@on_some
@pytest.mark.parametrize("inside", ["set aside", "record"])
def test_a_destination_with_something_of_custody_in_it_is_not_replaced(inside, copies):
    target = copies.source.parent if inside == "set aside" else copies.out
    if inside == "set aside":
        copies.aside()
    else:
        copies.counted_on()
        shutil.rmtree(copies.copy)
    before = files_of(target)
    for catalog in (None, False):
        with pytest.raises(UsageError, match="set aside, or has obligations"):
            copies.overwrite(target, catalog=catalog, overwrite_foreign=True)
    assert files_of(target) == before


# The reply to a commit is lost.


class LostReply(CatalogAway):
    """The connection ended with a commit under way."""


@contextmanager
def losing(monkeypatch, last, *, done):
    """The n-th transaction that writes ends without a reply. done: it was committed."""
    real, calls = Catalog.writing, []

    @contextmanager
    def writing(self, **options):
        calls.append(1)
        if len(calls) != last:
            with real(self, **options) as conn:
                yield conn
            return
        with real(self, **options) as conn:
            yield conn
            if not done:
                raise LostReply("the connection was lost")
        raise LostReply("the connection was lost")

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "writing", writing)
        yield calls


@on_each
@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("last", [1, 2, 3, 4])
def test_the_reply_to_a_commit_of_retire_is_lost(last, done, copies, monkeypatch):
    """With a grace period, and then the purge's: each ends right, and the next run finishes."""
    before = files_of(copies.source)
    with losing(monkeypatch, last, done=done) as calls:
        try:
            copies.retire(WEEK)
        except LostReply:
            assert len(calls) >= last
    homes = copies.homes(copies.source)
    assert [files_of(h / "step-1") for h in homes] == [before] * len(homes)
    assert copies.source.exists() == (not homes)
    if not homes:
        copies.aside()
    with losing(monkeypatch, last, done=done):
        try:
            due(copies)
        except LostReply:
            pass
    for home in copies.homes(copies.source):
        assert files_of(home / "step-1") == before
    due(copies)
    assert not copies.homes(copies.source)
    assert not copies.source.exists()
    is_copy_of(copies.copy, 1)
    assert copies.catalog.show(str(copies.source)).checkpoint.state == "deleted"
    copies.refuses()
    copies.refuses(catalog=False)
    assert due(copies) == ()


@on_some
@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("last", [1, 2, 3])
def test_the_reply_to_a_commit_without_a_grace_period_is_lost(last, done, copies, monkeypatch):
    before = files_of(copies.source)
    with losing(monkeypatch, last, done=done):
        try:
            copies.retire()
        except LostReply:
            pass
    if copies.source.exists():
        assert files_of(copies.source) == before
    for home in copies.homes(copies.source):
        assert files_of(home / "step-1") == before
    copies.retire()
    assert not copies.source.exists()
    assert not copies.homes(copies.source)
    is_copy_of(copies.copy, 1)
    copies.refuses()
