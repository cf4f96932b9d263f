"""scratch"""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from custody_copies import NOW, WEEK, Copies, files_of, is_copy_of, save, put_rows, rows_of, flip
from retiring import MEANS

from ckptcore.catalog import open_catalog
from ckptcore.custody import set_aside as aside
from ckptcore.custody import replacing
from ckptcore.conversion import local_publication
from ckptcore.errors import CkptError, DestinationExists, UsageError
from ckptcore.operations import purge as module
from ckptcore.operations.purge import purge, restore
from ckptcore.operations.retention import Policy
from ckptcore.operations.retire import retire


@pytest.fixture
def copies(tmp_path):
    url = str(tmp_path / "catalog.sqlite")
    with open_catalog(url) as catalog:
        yield Copies(catalog, url, tmp_path)


def due(copies):
    return tuple(purge(copies.catalog, MEANS, None, due=datetime.now(UTC) + 2 * WEEK))


def failing_removal(monkeypatch):
    def refused(name, **options):
        if not str(name).endswith(".json") and not str(name).endswith(".part"):
            raise PermissionError(1, "Operation not permitted")
        unlink(name, **options)

    unlink = os.unlink
    monkeypatch.setattr(aside.os, "unlink", refused)


def test_d1_a_purged_one_is_listed_as_restorable(copies):
    copies.counted_on()
    assert retire(copies.catalog, Policy(1)).set_aside == ()


def test_d2_resumed_purge_ignores_a_hold(copies, monkeypatch, cli):
    with monkeypatch.context() as patch:
        failing_removal(patch)
        assert "resumes" in copies.fate().why[-1]
    (home,) = copies.homes(copies.source)
    before = files_of(home / "step-1")
    held = cli("catalog", "hold", "place", str(copies.source), "--reason", "audit", "--catalog", copies.url, catalog=True)
    assert held.code == 0
    due(copies)
    assert files_of(home / "step-1") == before


def test_d2_resumed_purge_ignores_that_the_copy_changed(copies, monkeypatch):
    with monkeypatch.context() as patch:
        failing_removal(patch)
        assert "resumes" in copies.fate().why[-1]
    (home,) = copies.homes(copies.source)
    before = files_of(home / "step-1")
    read = module._read_child

    def rotted(*given):
        done = read(*given)
        shutil.rmtree(copies.copy)
        save(copies.copy, 7)
        return done

    monkeypatch.setattr(module, "_read_child", rotted)
    due(copies)
    assert files_of(home / "step-1") == before


def test_d3_a_purge_between_the_steps_of_a_publication(copies, monkeypatch):
    """What is to be set aside is on its way."""
    copies.convert(copies.source, copies.out / "x")
    copies.counted_on()
    move = local_publication._move

    def purged(*given):
        due(copies)
        return move(*given)

    monkeypatch.setattr(local_publication, "_move", purged)
    copies.replaces(copies.out / "x")


def test_d3_killed_before_it_is_set_aside_then_purged(copies, monkeypatch):
    copies.convert(copies.source, copies.out / "x")
    copies.counted_on()

    class Killed(BaseException):
        pass

    def dying(*given):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(local_publication, "_keep_aside", dying)
        with pytest.raises(Killed):
            copies.overwrite(copies.out / "x")
    due(copies)
    copies.overwrite(copies.out / "x")


def test_d4_killed_between_row_and_removal_of_a_replaced_one(copies, monkeypatch):
    copies.convert(copies.source, copies.out / "x")
    copies.counted_on()
    copies.replaces(copies.out / "x")
    (home,) = copies.homes(copies.out / "x")

    class Killed(BaseException):
        pass

    def dying(*given):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(aside.LocalSetAside, "remove", dying)
        with pytest.raises(Killed):
            due(copies)
    due(copies)
    assert not home.exists()


def test_d5_restoring_what_was_half_purged(copies, monkeypatch):
    copies.convert(copies.source, copies.copy, overwrite=True)
    unlink, gone = os.unlink, []

    class Killed(BaseException):
        pass

    def once(name, **options):
        if str(name).endswith(".json") or str(name).endswith(".part"):
            return unlink(name, **options)
        if gone:
            raise PermissionError(1, "Operation not permitted")
        gone.append(name)
        return unlink(name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(aside.os, "unlink", once)
        assert "resumes" in copies.fate().why[-1]
    with pytest.raises(CkptError):
        restore(copies.catalog, str(copies.source))
    assert not copies.source.exists()
    assert copies.catalog.show(str(copies.source)).checkpoint.state != "present"


def test_d6_a_link_to_the_copy(copies):
    """retire counts on the place by the name of a link."""
    real = copies.tmp / "disk" / "real"
    real.parent.mkdir()
    copies.copy.rename(real)
    copies.copy.symlink_to(real)
    copies.counted_on()
    copies.refuses(real)
    copies.refuses(real, catalog=False)


def test_d7_moved_and_then_the_catalog_is_lost(copies, tmp_path):
    copies.counted_on()
    moved = copies.out / "moved"
    copies.copy.rename(moved)
    with open_catalog(str(tmp_path / "new.sqlite")) as catalog:
        copies.catalog, copies.url = catalog, catalog.url
        copies.rebuilt(copies.out)
        copies.refuses(moved)


def test_d8_destination_is_the_folder_of_what_is_set_aside(copies):
    home = copies.aside()
    before = files_of(home)
    for target in (home, home / "step-1"):
        for options in ({}, {"overwrite_foreign": True}, {"catalog": False}):
            with pytest.raises(CkptError):
                copies.overwrite(target, **options)
            assert files_of(home) == before


def test_d8_destination_is_a_record(copies):
    copies.counted_on()
    home = copies.out / ".k.obligations.ckptcore"
    before = files_of(home)
    for target in (home, home / "record.json"):
        with pytest.raises(CkptError):
            copies.overwrite(target, overwrite_foreign=True)
        assert files_of(home) == before


def test_d10_source_in_what_is_set_aside_is_a_trainers_save(copies):
    """Sweep and rebuild leave it alone."""
    from ckptcore.operations.discover import discover

    home = copies.aside()
    assert [c.uri for c in discover(str(copies.runs))] == [str(copies.newest)]
    assert copies.rebuilt(copies.runs).recorded[0].uri == str(copies.newest)


def test_d11_a_record_that_cannot_be_read_blocks(copies):
    copies.counted_on()
    (copies.out / ".k.obligations.ckptcore" / "record.json").write_bytes(b"{")
    with pytest.raises(CkptError):
        copies.overwrite()
    with pytest.raises(CkptError):
        copies.overwrite(catalog=False)
    is_copy_of(copies.copy, 1)


def test_d14_restored_under_hold_is_proof(copies):
    copies.aside()
    restore(copies.catalog, str(copies.source))
    copies.replaces()


def test_d15_purge_with_lost_catalog_then_rebuild(copies, tmp_path):
    """What is set aside is not known to a new catalog: it is kept, and can be restored."""
    home = copies.aside()
    before = files_of(home / "step-1")
    with open_catalog(str(tmp_path / "new.sqlite")) as catalog:
        copies.catalog, copies.url = catalog, catalog.url
        from ckptcore.catalog import watched_roots as roots
        from ckptcore.operations.rebuild_catalog import rebuild

        rebuild(catalog, [str(copies.runs)], made=[str(copies.out)], take=MEANS)

        with catalog.writing() as conn:
            roots.add(conn, datetime.now(UTC), "r", str(copies.runs))
        items = due(copies)
        assert [i.fate for i in items] == ["kept"]
        assert files_of(home / "step-1") == before



def test_d16_heartbeat_leaves_no_connection(postgres, tmp_path):
    from ckptcore.catalog import upgrade
    from ckptcore.catalog.heartbeats import Heartbeats

    with postgres.database() as url:
        upgrade(url)
        with open_catalog(url) as catalog:
            request = {"source_uri": "a", "destination_uri": "b", "verb": "x", "tool_version": "0"}
            begun = catalog.begin({}, **request)
            catalog.close()
            assert catalog._engine.pool.checkedin() == 0
            Heartbeats()._renew(catalog, [begun])
            assert catalog._engine.pool.checkedin() == 0


@pytest.mark.parametrize("where", ["itself", "above"])
def test_d17_long_names(where, copies):
    name = "n" * 238
    target = copies.out / name if where == "itself" else copies.out / name / "k"
    target.parent.mkdir(exist_ok=True)
    copies.convert(copies.source, target)
    copies.replaces(target)


def test_d19_a_disk_is_away_when_a_purge_looks(copies):
    home = copies.aside()
    run, away = copies.source.parent, copies.tmp / "away"
    run.rename(away)
    run.mkdir()  # where it is mounted
    due(copies)
    run.rmdir()
    away.rename(run)
    assert [item.fate for item in due(copies)] == ["purged"]


def test_d22_a_conversion_that_was_silent_for_long_publishes(copies):
    """Of another machine, which slept: retire counted on what it was about to replace."""
    from sqlalchemy import text

    from ckptcore.catalog.heartbeats import RUNNING
    from ckptcore.conversion.pipeline import execute, finish, prepare
    from ckptcore.conversion.registration import start
    from ckptcore.planning.request import Request

    request = Request(str(copies.other), str(copies.copy), overwrite=True)
    registration = start(request, copies.url)
    plan = prepare(request, MEANS, None, copies.url).plan_uri
    execute(plan, None, MEANS)
    RUNNING.drop([registration.id])  # its thread slept, too
    long_ago = datetime.now(UTC).replace(tzinfo=None) - timedelta(minutes=10)
    with copies.catalog.writing() as conn:
        there = "UPDATE conversion_process SET renewed_at = :at, process = '1 1 1 elsewhere:1'"
        assert conn.execute(text(there), {"at": long_ago}).rowcount == 1
    copies.counted_on()
    before = files_of(copies.copy)
    with pytest.raises(CkptError):
        finish(plan, MEANS, None, copies.url, registration.id)
    assert files_of(copies.copy) == before


def test_d23_an_obligation_ends_while_a_conversion_over_it_runs(copies):
    from ckptcore.custody.upkeep import listed, release
    from ckptcore.conversion.pipeline import execute, finish, prepare
    from ckptcore.conversion.registration import start
    from ckptcore.planning.request import Request

    copies.convert(copies.source, copies.out / "x")
    copies.counted_on()
    request = Request(str(copies.other), str(copies.out / "x"), overwrite=True)
    registration = start(request, copies.url)
    plan = prepare(request, MEANS, None, copies.url).plan_uri
    execute(plan, None, MEANS)
    release(copies.catalog, listed(copies.catalog)[0].id, ["*"])
    finish(plan, MEANS, None, copies.url, registration.id)


def test_d24_released_after_it_moved(copies):
    from ckptcore.custody.upkeep import listed, release

    copies.convert(copies.source, copies.out / "x")
    copies.counted_on()
    copies.replaces(copies.out / "x")
    (row,) = listed(copies.catalog)
    assert row.place == str(copies.copy)
    release(copies.catalog, row.id, ["*"])
    copies.rebuilt(copies.out / "x", copies.copy)
    assert listed(copies.catalog) == ()


def test_d25_moved_obligation_with_both_moved(copies):
    """Names of obligations' records after the second move."""
    copies.convert(copies.source, copies.out / "x")
    copies.counted_on()
    copies.replaces(copies.out / "x")
    copies.refuses(catalog=False)


def test_d26_sizes_of_a_record(copies):
    """The record beside a copy of a copy that is replaced twice."""
    copies.counted_on()
    for n in range(3):
        copies.convert(copies.copy, copies.out / "x", overwrite=True)
        copies.replaces()
        copies.convert(copies.out / "x", copies.copy, overwrite=True)
    copies.replaces(copies.out / "x")
    copies.refuses()
