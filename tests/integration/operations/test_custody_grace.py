"""What `retire` or a conversion sets aside can be restored, and is purged when it is due and still proven."""

from __future__ import annotations

import shutil
import time
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta

import pytest
import torch
from custody_copies import WEEK, Copies, files_of, flip, is_copy_of, put_rows, rows_of, save
from retiring import MEANS
from safetensors.torch import save_file
from sqlalchemy import update

from ckptcore.catalog import open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.models import Tensor
from ckptcore.conversion.pipeline import inspect
from ckptcore.conversion.registration import facts
from ckptcore.custody import place_contents
from ckptcore.errors import CatalogUnavailable, UsageError
from ckptcore.operations.rebuild_catalog import rebuild
from ckptcore.operations.retention.purge import restore
from ckptcore.store.local import LocalStore

on_each = pytest.mark.parametrize("either", ["sqlite", "postgresql"], indirect=True)
# Where what rows say hardly matters, PostgreSQL is of the long tier.
on_some = pytest.mark.parametrize(
    "either", ["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)], indirect=True
)


def rarely(*values):
    """A case of the long tier."""
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.fixture
def copies(either, tmp_path):
    with open_catalog(either) as catalog:
        yield Copies(catalog, either, tmp_path)


# The grace period.


@contextmanager
def counted_reads(monkeypatch):
    """How many bytes of local files are read meanwhile."""
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
        (done,) = copies.due()
    assert (done.fate, done.why) == ("purged", "")
    assert large.nbytes <= nbytes[0] < 1.25 * large.nbytes
    assert not copies.homes(copies.source)
    copies.refuses()


@pytest.mark.parametrize("either", ["sqlite"], indirect=True)
@pytest.mark.parametrize("form", ["folder", "file", "file with two names"])
def test_what_is_written_into_a_source_that_is_set_aside_is_not_purged(form, copies):
    """By a program that has its file open still, with the same size; and it resets the time of the file."""
    if form != "folder":
        run = copies.runs / "files"
        run.mkdir()
        for number in (1, 2):
            save_file({"weight": torch.full((64,), float(number))}, run / f"step-{number}.safetensors")
        copies.source, copies.newest = run / "step-1.safetensors", run / "step-2.safetensors"
        if form == "file with two names":
            (run / "also").hardlink_to(copies.source)
        copies.catalog.record_validation(facts(inspect(str(copies.newest)), str(copies.newest)), ())
        copies.convert(copies.source, copies.out / "f")
    home = copies.aside()
    (aside,) = [path for path in home.iterdir() if path.name != "record.json"]
    flip(next(aside.glob("*.distcp")) if aside.is_dir() else aside)
    written = files_of(aside)
    (done,) = (each for each in copies.due() if each.uri == str(copies.source))
    assert (done.fate, "was written" in done.why) == ("kept", True)
    assert files_of(aside) == written
    restore(copies.catalog, str(copies.source))
    assert files_of(copies.source) == written
    assert "--fingerprint reads both" in copies.fate().why[0]


@on_some
def test_a_purge_waits_until_it_is_due(copies, cli):
    before = files_of(copies.source)
    home = copies.aside()
    where = ("--catalog", copies.url, "--output", "json")
    for options in ((), ("--purge",), ("--yes",)):
        done = cli("retire", *options, *where, catalog=True)
        assert [each["fate"] for each in done.json["set_aside"]] == ["waiting"], done
        assert files_of(home / "step-1") == before
    assert done.json["files"]["waiting"] == sum(map(len, before.values()))
    (item,) = copies.due(WEEK - timedelta(hours=1))
    assert item.fate == "waiting"
    (item,) = copies.due()
    assert (item.fate, home.exists()) == ("purged", False)
    assert copies.due() == ()
    assert copies.catalog.show(str(copies.source)).checkpoint.state == "deleted"
    copies.refuses()


@on_some
def test_the_gate_reads_no_tensor_of_a_copy_that_the_purge_read(copies, monkeypatch):
    time.sleep(0.1)  # the copy is a moment old: its files would show later writes
    copies.counted_on()
    monkeypatch.setattr(place_contents, "tensor_ids_read", lambda *_: pytest.fail("it was read again"))
    copies.refuses()
    monkeypatch.undo()
    rows = rows_of(copies.catalog)
    with copies.catalog.writing() as conn:
        conn.execute(update(Tensor).values(fingerprint="no digest"))
    copies.refuses()  # it is read: what is odd says nothing
    put_rows(copies.catalog, rows)
    flip(next(copies.copy.glob("*.safetensors")))
    copies.refuses()


@on_some
def test_a_dry_run_purges_nothing_that_is_due(copies, cli):
    home = copies.aside(grace=timedelta(seconds=0.001))
    before = files_of(home / "step-1")
    where = ("--catalog", copies.url, "--output", "json")
    for options in ((), ("--dry-run",), ("--purge", "--dry-run"), ("--yes",)):
        done = cli("retire", *options, *where, catalog=True)
        (item,) = done.json["set_aside"]
        assert (item["fate"], "--purge deletes it" in item["why"]) == ("waiting", True), done
        assert files_of(home / "step-1") == before, options
    done = cli("retire", "--purge", *where, catalog=True)
    assert [each["fate"] for each in done.json["set_aside"]] == ["purged"]
    assert not home.exists()


@on_each
def test_a_hold_during_the_grace_period_blocks_the_purge(copies, cli):
    home = copies.aside()
    public = copies.catalog.show(str(copies.source)).checkpoint.id
    where = ("--catalog", copies.url)
    placed = cli("catalog", "hold", "place", str(copies.source), "--reason", "audit", *where, catalog=True)
    assert placed.code == 0, placed
    (item,) = copies.due()
    assert (item.fate, "audit" in item.why) == ("kept", True), item
    assert home.exists()
    assert restore(copies.catalog, public) == str(copies.source)
    assert copies.catalog.show(str(copies.source)).checkpoint.state == "present"
    assert copies.fate().fate.value == "kept"


@on_some
def test_the_trainer_saves_the_step_anew_during_the_grace_period(copies):
    before = files_of(copies.source)
    home = copies.aside()
    save(copies.source, 9)
    copies.catalog.record_validation(facts(inspect(str(copies.source)), str(copies.source)), ())
    saved = files_of(copies.source)
    with pytest.raises(UsageError, match="something else is there now"):
        restore(copies.catalog, str(copies.source))
    assert files_of(home / "step-1") == before
    (item,) = copies.due()
    assert item.fate == "purged", item
    assert files_of(copies.source) == saved
    assert copies.catalog.show(str(copies.source)).checkpoint.state == "present"
    copies.refuses()


@on_some
@pytest.mark.parametrize("by", ["place", rarely("id"), rarely("folder")])
def test_a_source_is_restored(by, copies):
    before = files_of(copies.source)
    home = copies.aside()
    public = copies.catalog.show(str(copies.source)).checkpoint.id
    refs = {"place": str(copies.source), "id": public[:13], "folder": str(home)}
    assert restore(copies.catalog, refs[by]) == str(copies.source)
    assert files_of(copies.source) == before
    assert not home.exists()
    assert copies.due() == ()
    copies.replaces()  # the copy is not the only one
    assert copies.catalog.show(str(copies.source)).checkpoint.state == "present"


@on_some
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


@on_some
def test_a_catalog_from_before_restores_what_it_does_not_know_is_set_aside(copies):
    before, backup = files_of(copies.source), rows_of(copies.catalog)
    copies.aside()
    put_rows(copies.catalog, backup)
    copies.due(timedelta(0))
    assert files_of(copies.source) == before
    copies.counted_on()
    copies.refuses()


@on_some
def test_another_catalog_restores_and_purges_nothing_that_it_does_not_know(copies, tmp_path):
    home = copies.aside()
    before = files_of(home / "step-1")
    with open_catalog(str(tmp_path / "new.sqlite")) as catalog:
        copies.catalog, copies.url = catalog, catalog.url
        with catalog.writing() as conn:
            roots.add(conn, datetime.now(UTC), "r", str(copies.runs))
        rebuild(catalog, [str(copies.runs)], output_roots=[str(copies.out)], fingerprint_settings=MEANS)
        assert [item.fate for item in copies.due()] == ["kept"]
        assert files_of(home / "step-1") == before


# What a conversion replaces is set aside, if it is under an obligation.


@on_some
@pytest.mark.parametrize("to", ["safetensors", rarely("torch_save")])
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
    (item,) = copies.due()
    assert (item.fate, "only proven copy" in item.why) == ("kept", True)
    kept.rename(copies.copy)
    (item,) = copies.due()
    assert (item.fate, home.exists()) == ("purged", False)
    is_copy_of(copies.copy, 1)
    copies.refuses()


@on_some
def test_what_is_under_no_obligation_is_not_set_aside(copies):
    copies.replaces()
    assert not copies.homes(copies.copy)


# The reply to a commit is lost.


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
                raise CatalogUnavailable("the connection was lost")
        raise CatalogUnavailable("the connection was lost")

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "writing", writing)
        yield calls


@on_some
@pytest.mark.parametrize("done", [True, rarely(False)])
@pytest.mark.parametrize("last", [1, 2, rarely(3), rarely(4)])
def test_the_reply_to_a_commit_of_retire_is_lost(last, done, copies, monkeypatch):
    """With a grace period, and then the purge's: each ends right, and the next run finishes."""
    before = files_of(copies.source)
    with losing(monkeypatch, last, done=done) as calls:
        try:
            copies.retire(WEEK)
        except CatalogUnavailable:
            assert len(calls) >= last
    homes = copies.homes(copies.source)
    assert [files_of(h / "step-1") for h in homes] == [before] * len(homes)
    assert copies.source.exists() == (not homes)
    if not homes:
        copies.aside()
    with losing(monkeypatch, last, done=done), suppress(CatalogUnavailable):
        copies.due()
    for home in copies.homes(copies.source):
        assert files_of(home / "step-1") == before
    copies.due()
    assert not copies.homes(copies.source)
    assert not copies.source.exists()
    is_copy_of(copies.copy, 1)
    assert copies.catalog.show(str(copies.source)).checkpoint.state == "deleted"
    copies.refuses()
    copies.refuses(catalog=False)
    assert copies.due() == ()


@on_some
@pytest.mark.parametrize("done", [True, rarely(False)])
@pytest.mark.parametrize("last", [rarely(1), 2, rarely(3)])
def test_the_reply_to_a_commit_without_a_grace_period_is_lost(last, done, copies, monkeypatch):
    before = files_of(copies.source)
    with losing(monkeypatch, last, done=done), suppress(CatalogUnavailable):
        copies.retire()
    if copies.source.exists():
        assert files_of(copies.source) == before
    for home in copies.homes(copies.source):
        assert files_of(home / "step-1") == before
    copies.retire()
    assert not copies.source.exists()
    assert not copies.homes(copies.source)
    is_copy_of(copies.copy, 1)
    copies.refuses()
