"""The last copy of what `retire` deleted is not replaced, whatever happened to it, to others, to the catalog.

Each test is a chain of ordinary commands that all end well; the last one would take the only copy.
"""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta

import pytest
import torch
from custody_copies import (
    Copies,
    copy_by_hand,
    files_of,
    flip,
    is_copy_of,
    put_rows,
    rewrite,
    rows_of,
    save,
    tensor_bytes,
)
from retiring import MEANS
from sqlalchemy import text

from ckptcore.catalog import open_catalog
from ckptcore.conversion.pipeline import execute, finish, prepare
from ckptcore.conversion.staging.open_staging import staging_of_plan
from ckptcore.conversion.staging.staging import REPLACES
from ckptcore.errors import CkptError, DestinationExists, UsageError
from ckptcore.operations.scrub import scrub
from ckptcore.planning.request import Request

on_each = pytest.mark.parametrize("either", ["sqlite", "postgresql"], indirect=True)
# Where what rows say hardly matters, PostgreSQL is of the long tier.
on_some = pytest.mark.parametrize(
    "either", ["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)], indirect=True
)


def rarely(value):
    """A case of the long tier."""
    return pytest.param(value, marks=pytest.mark.soak)


@pytest.fixture
def copies(either, tmp_path):
    with open_catalog(either) as catalog:
        yield Copies(catalog, either, tmp_path)


# What happened to the copy.


@on_some
def test_its_disk_was_away_during_a_scrub(copies):
    copies.counted_on()
    away = copies.tmp / "away"
    copies.out.rename(away)
    scrub(copies.catalog, share=1)
    assert copies.catalog.show(str(copies.copy)).checkpoint.state == "gone"
    away.rename(copies.out)
    copies.refuses()


@on_some
@pytest.mark.parametrize("how", ["rebuild", rarely("validate")])
def test_it_was_moved_and_recorded_there(how, copies):
    copies.counted_on()
    moved = copies.tmp / "archive" / "k"
    moved.parent.mkdir()
    copies.copy.rename(moved)
    scrub(copies.catalog, share=1)
    if how == "rebuild":
        copies.rebuilt(moved)
    else:
        copies.validated(moved)
    copies.refuses(moved)


@on_some
def test_it_was_renamed_and_no_catalog_is_used(copies):
    """Its record is still beside its old name, in the same folder."""
    copies.counted_on()
    moved = copies.copy.with_name("renamed")
    copies.copy.rename(moved)
    copies.refuses(moved, catalog=False)


@pytest.mark.soak
@on_some
def test_it_was_moved_and_nobody_recorded_it(copies):
    copies.counted_on()
    moved = copies.tmp / "archive"
    copies.copy.rename(moved)
    copies.refuses(moved)


@on_some
@pytest.mark.parametrize("known", [False, rarely(True)])
def test_it_was_rewritten_by_hand_with_one_tensor_more(known, copies):
    copies.counted_on()
    rewrite(copies.copy, extra=torch.ones(3))
    if known:
        copies.validated(copies.copy)
    copies.refuses()


@pytest.mark.soak
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


@pytest.mark.soak
@on_some
def test_it_is_inside_what_is_replaced(copies):
    copies.counted_on()
    shutil.rmtree(copies.out / ".k.obligations.ckptcore")  # with it, nothing that is around it is replaced
    copies.refuses(copies.out, overwrite_foreign=True)


# What happened to other copies.


@on_some
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


@pytest.mark.soak
@on_some
def test_a_copy_by_hand_is_replaced_after_it(copies):
    copies.counted_on()
    second = copy_by_hand(copies.copy, copies.out / "x")
    copies.refuses()  # the catalog does not know what it holds
    copies.validated(second)
    copies.replaces()
    copies.refuses(second)


@on_some
def test_another_place_with_a_part_of_it_is_replaced(copies):
    """Saves have contents in common; who replaces these elsewhere leaves the record beside the copy."""
    copies.counted_on()
    copies.validated(copies.newest)
    place = copies.out / "m"
    copies.convert(copies.other, place)
    copies.overwrite(place)
    copies.refuses(catalog=False)
    copies.refuses()


def test_the_other_copy_lacks_an_object(copies):
    copies.counted_on()
    second = copy_by_hand(copies.copy, copies.out / "x")
    rewrite(second, drop_objects=True)
    copies.rebuilt(second)
    assert copies.refuses().values["contents"] == ["note", "step"]


@on_some
@pytest.mark.parametrize("place", ["first", rarely("last")])
def test_the_other_copy_rotted_and_nobody_looked(place, copies):
    second = copies.out / "x"
    copies.convert(copies.source, second, to="torch_save")
    copies.convert(copies.source, copies.copy, overwrite=True)  # the newest, so it is counted on
    copies.counted_on()
    rotten, intact = (second, copies.copy) if place == "first" else (copies.copy, second)
    flip(*tensor_bytes(rotten, torch.full((4,), 1.5)))
    copies.refuses(intact)


@on_some
@pytest.mark.parametrize("moved", [False, True])
def test_both_copies_rotted_and_one_is_read_in_part(moved, copies):
    """Lineage leads to it, or nobody recorded it: one tensor of it can still be read."""
    part, newest = copies.out / "part", copies.out / "newest"
    copies.convert(copies.source, part, to="torch_save")
    copies.convert(copies.source, newest)
    flip(*tensor_bytes(part, torch.full((4,), 1.5)))
    copies.counted_on()
    for other in (copies.copy, newest):
        flip(*tensor_bytes(other, torch.arange(12.0) + 100))
    if moved:
        part = part.rename(copies.tmp / "moved")
    refusal = copies.refuses(part, overwrite_foreign=True)
    assert refusal.values["contents"] == ["weight"]


def unopened_beside_counted_on(copies):
    """The source is deleted because of its copy; another one, which does not open any more, is returned."""
    second = copies.out / "x.pt"
    copies.convert(copies.source, second, to="torch_save")
    copies.convert(copies.source, copies.copy, overwrite=True)
    flip(second, second.read_bytes().index(b"archive/data/0"))
    copies.counted_on()
    return second


@on_some
def test_both_copies_rotted_and_one_does_not_open(copies):
    """Nothing of it is read, and it may be what is left: its lineage says what of."""
    second = unopened_beside_counted_on(copies)
    flip(*tensor_bytes(copies.copy, torch.arange(12.0) + 100))
    copies.refuses(second, overwrite_foreign=True)


@on_some
def test_a_moved_copy_that_does_not_open(copies):
    """Nothing of it is read, nobody recorded it there, and the copy that counts is not where it was."""
    copies.convert(copies.source, copies.copy, to="torch_save", overwrite=True)
    copies.counted_on()
    moved = copies.copy.rename(copies.tmp / "moved")
    (file,) = moved.glob("*.pt")
    flip(file, file.read_bytes().index(b"archive/data/0"))
    copies.refuses(moved, overwrite_foreign=True)


@on_some
def test_what_does_not_open_is_replaced_while_the_copy_is_where_it_was(copies):
    copies.counted_on()
    foreign = copies.tmp / "foreign.pt"
    torch.save({"weight": torch.zeros(3)}, foreign)
    flip(foreign, foreign.read_bytes().index(b"foreign/data/0"))
    copies.overwrite(foreign, overwrite_foreign=True)


@on_some
def test_a_copy_that_does_not_open_is_replaced_while_another_is_intact(copies):
    second = unopened_beside_counted_on(copies)
    copies.overwrite(second, overwrite_foreign=True)
    assert torch.load(second)["weight"][0, 0] == 300


@on_some
@pytest.mark.parametrize("how", [rarely("exclude"), rarely("dtype")])
def test_the_other_copy_is_a_part_or_cast(how, copies):
    copies.counted_on()
    options = {"exclude": ("bias",)} if how == "exclude" else {"dtype": "bfloat16"}
    copies.convert(copies.copy, copies.out / "x", **options)
    copies.refuses()


@on_some
def test_two_parts_are_as_good_as_all_of_it(copies):
    copies.counted_on()
    copies.convert(copies.copy, copies.out / "x", exclude=("bias",))
    copies.convert(copies.copy, copies.out / "y", include=("bias",))
    copies.replaces()
    copies.refuses(copies.out / "x")
    copies.refuses(copies.out / "y")


@pytest.mark.soak
@on_some
def test_copies_of_copies_in_turns(copies):
    copies.counted_on()
    for _ in range(3):
        copies.convert(copies.copy, copies.out / "x", overwrite=True)
        copies.replaces()
        copies.convert(copies.out / "x", copies.copy, overwrite=True)
    copies.replaces(copies.out / "x")
    copies.refuses()


@on_some
def test_the_other_copy_lacks_a_file(copies):
    shutil.copy(copies.copy / "model.safetensors", copies.source / "export.bin")
    copies.counted_on()
    copies.convert(copies.copy, copies.out / "x", to="dcp")
    assert copies.refuses().values["contents"] == ["model.safetensors"]
    copies.convert(copies.copy, copies.out / "y")
    copies.replaces()


@pytest.mark.soak
@on_some
def test_it_can_be_read_in_part(copies):
    shutil.rmtree(copies.source)
    save(copies.source, 1, **{f"t{n}": torch.randn(300) for n in range(4)})
    copies.convert(copies.source, copies.copy, overwrite=True, max_file_size=2000)
    copies.counted_on()
    file = min(copies.copy.glob("model-*.safetensors"))
    data = bytearray(file.read_bytes())
    data[9] ^= 255
    file.write_bytes(data)
    copies.refuses(overwrite_foreign=True)


@pytest.mark.soak
@on_some
def test_the_destination_is_a_link_to_it(copies):
    copies.counted_on()
    link, before = copies.tmp / "link", files_of(copies.copy)
    link.symlink_to(copies.copy)
    for catalog in (None, False):
        with pytest.raises(CkptError):
            copies.overwrite(link, catalog=catalog, overwrite_foreign=True)
    assert files_of(copies.copy) == before


# Copies of links: the bytes are beside no record of theirs.


def links_to(place, links):
    links.mkdir()
    for file in place.iterdir():
        (links / file.name).symlink_to(file)
    return links


@on_some
def test_its_newest_child_consists_of_links_to_it(copies):
    copies.rebuilt(links_to(copies.copy, copies.out / "links"))
    copies.counted_on(fingerprint_settings=MEANS)
    copies.refuses(catalog=False)
    copies.refuses()


@on_some
def test_its_only_child_consists_of_links(copies):
    real = copies.tmp / "real"
    copies.copy.rename(real)
    links_to(real, copies.copy)
    done = copies.fate(fingerprint_settings=MEANS)
    assert done.fate.value == "unsafe"
    assert f"/model.safetensors is a link to {real}/model.safetensors" in str(done.why)
    assert copies.source.exists()


@on_some
def test_its_child_has_links_within_its_own_folder(copies):
    file = copies.copy / "model.safetensors"
    file.rename(copies.copy / "bytes")
    file.symlink_to("bytes")
    copies.counted_on(fingerprint_settings=MEANS)
    copies.refuses(catalog=False, overwrite_foreign=True)


@on_some
def test_a_copy_of_links_to_a_copy_that_nobody_recorded_does_not_count(copies):
    copies.counted_on()
    hidden = copy_by_hand(copies.copy, copies.out / "hidden")
    copies.validated(links_to(hidden, copies.out / "links"))
    copies.refuses()
    copies.validated(hidden)
    copies.replaces()
    copies.refuses(hidden, catalog=False)


@on_some
def test_its_obligation_follows_it_behind_a_link(copies):
    """What is beside the old name, which is a link by now, is beside the new one."""
    copies.counted_on()
    moved = copies.out / "moved"
    copies.copy.rename(moved)
    scrub(copies.catalog, share=1)
    copies.copy.symlink_to(moved)
    copies.validated(moved)
    scrub(copies.catalog, share=1)
    copies.refuses(moved, catalog=False)


@on_some
def test_its_record_was_removed_by_hand(copies):
    copies.counted_on()
    shutil.rmtree(copies.out / ".k.obligations.ckptcore")
    scrub(copies.catalog, share=1)
    copies.refuses(catalog=False)


@on_some
@pytest.mark.parametrize("first", ["links", rarely("moved")])
def test_its_obligation_follows_it_and_not_links_to_it(copies, first):
    copies.counted_on()
    moved = copies.out / "moved"
    copies.copy.rename(moved)
    links = links_to(moved, copies.out / "links")
    for place in (links, moved) if first == "links" else (moved, links):
        copies.validated(place)
    scrub(copies.catalog, share=1)
    copies.refuses(moved, catalog=False)


# What happened to the catalog.


@on_each
def test_the_catalog_was_restored_from_before_the_deletion(copies):
    backup = rows_of(copies.catalog)
    copies.counted_on()
    put_rows(copies.catalog, backup)
    assert copies.catalog.show(str(copies.source)).checkpoint.state == "present"
    copies.refuses()


@pytest.mark.soak
@on_some
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
    """Without its list of what it replaces: a crash truncated it."""
    request = Request(str(copies.other), str(copies.copy), overwrite=True)
    plan = prepare(request, MEANS, None, copies.url).plan_uri
    execute(plan, None, MEANS)
    copies.counted_on()
    if list_of == "lost":
        staging_of_plan(plan).root.remove(REPLACES)
    before = files_of(copies.copy)
    with pytest.raises(DestinationExists, match="only proven copy"):
        finish(plan, MEANS, None, copies.url)
    assert files_of(copies.copy) == before


# How an obligation ends.


@on_some
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


@on_some
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


# What is no destination.


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


@on_some
def test_the_folder_of_what_is_set_aside_is_no_destination(copies):
    home = copies.aside()
    before = files_of(home)
    for target in (home, home / "step-1"):
        for options in ({}, {"overwrite_foreign": True}, {"catalog": False}):
            with pytest.raises(CkptError):
                copies.overwrite(target, **options)
            assert files_of(home) == before


@on_some
def test_a_record_that_cannot_be_read_blocks(copies):
    copies.counted_on()
    (copies.out / ".k.obligations.ckptcore" / "a.json").write_bytes(b"{")
    for catalog in (None, False):
        with pytest.raises(CkptError):
            copies.overwrite(catalog=catalog)
    is_copy_of(copies.copy, 1)
