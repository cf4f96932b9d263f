"""Kills, races and chains of commands around what is set aside and what is counted on.

The first three would lose data. The next four delete or show what they must not, then some forget. The rest
end in a crash, in a state that no command leaves, or in what was given up or removed coming back.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import fault_s3
import pytest
from custody_buckets import COPY, IN_PLACE, OTHER, SOURCE, Bucket
from custody_copies import WEEK, Copies, files_of, save
from retiring import MEANS
from sqlalchemy import text

from ckptcore.catalog import open_catalog
from ckptcore.catalog.heartbeats import RUNNING, Heartbeats
from ckptcore.conversion.pipeline import convert, execute, finish, inspect, prepare
from ckptcore.conversion.registration import facts, start
from ckptcore.conversion.staging import local_staging
from ckptcore.custody import obligation_records as records
from ckptcore.custody import set_aside as aside
from ckptcore.custody.upkeep import listed, look_after, release
from ckptcore.errors import CatalogError, CkptError
from ckptcore.operations.automation.sweep import SweepSettings, sweep
from ckptcore.operations.retention import purge as module
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.purge import restore
from ckptcore.operations.retention.retire import retire
from ckptcore.planning.request import Request

AT_ONCE = SweepSettings(settle_s=0)


class Killed(BaseException):
    """A simulated kill: nothing handles it."""


def dying(*_given, **_options):
    raise Killed


@pytest.fixture
def copies(tmp_path):
    url = str(tmp_path / "catalog.sqlite")
    with open_catalog(url) as catalog:
        yield Copies(catalog, url, tmp_path)


@pytest.fixture
def bucket(tmp_path):
    url = str(tmp_path / "catalog.sqlite")
    with fault_s3.serving() as server, open_catalog(url) as catalog:
        yield Bucket(server, catalog, url, tmp_path)


def begun(copies, target, url=None):
    """A conversion over a place, of which all but publishing is done, as a flow does it."""
    request = Request(str(copies.other), str(target), overwrite=True)
    registration = start(request, url or copies.url)
    plan = prepare(request, MEANS, None, url or copies.url).plan_uri
    execute(plan, None, MEANS)
    return plan, registration


# What is lost.


def test_a_conversion_that_was_silent_for_too_long_publishes_nothing(copies):
    """Its machine slept. `retire` counted it as ended, and counts on what it was about to replace."""
    plan, registration = begun(copies, copies.copy)
    RUNNING.drop([registration.id])  # its thread slept, too
    long_ago = datetime.now(UTC).replace(tzinfo=None) - timedelta(minutes=10)
    with copies.catalog.writing() as conn:
        other = "UPDATE conversion_process SET renewed_at = :at, process = '1 1 1 elsewhere:1'"
        assert conn.execute(text(other), {"at": long_ago}).rowcount == 1
    copies.counted_on()
    before = files_of(copies.copy)
    with pytest.raises(CkptError):
        finish(plan, MEANS, None, copies.url, registration.id)
    assert files_of(copies.copy) == before


def test_the_stages_of_a_flow_with_another_catalog_publish_nothing(copies, tmp_path):
    """`admit` does not ask again where a conversion has a row; a row in another catalog stops no deletion.

    The record beside the copy is there by then. (In one process, the lock of the staging folder stops it.)
    """
    with open_catalog(str(tmp_path / "other.sqlite")) as other:
        plan, registration = begun(copies, copies.copy, other.url)
        copies.counted_on()
        before = files_of(copies.copy)
        with pytest.raises(CkptError):
            finish(plan, MEANS, None, other.url, registration.id)
        assert files_of(copies.copy) == before


def test_a_resumed_purge_heeds_what_it_finds(copies, monkeypatch):
    """The row says ``purging`` already, from the attempt before; then the copy is exchanged."""
    unlink = os.unlink

    def refused(name, **options):
        if not str(name).endswith((".json", ".part")):
            raise PermissionError(1, "Operation not permitted")
        unlink(name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(aside.os, "unlink", refused)
        assert "the next run resumes" in copies.fate().why[-1]
    (home,) = copies.homes(copies.source)
    before = files_of(home / "step-1")
    assert before
    read = module._read_child

    def exchanged(*given):
        done = read(*given)
        shutil.rmtree(copies.copy)
        save(copies.copy, 7)
        return done

    monkeypatch.setattr(module, "_read_child", exchanged)
    copies.due()
    assert files_of(home / "step-1") == before


# What is deleted, or shown, and must not.


def test_a_copy_that_rots_below_its_store_is_read_anew(bucket):
    """This process has read the copy before, under the ETag that it still has."""
    inspect(COPY)
    copy = next(obj for name, obj in bucket.server.objects.items() if name.endswith("model.safetensors"))
    copy.data = copy.data[:-1] + bytes([copy.data[-1] ^ 1])
    before = bucket.there("runs/llama/step-1/")
    assert bucket.retire().counts == {"kept": 1, "unsafe": 1}
    assert bucket.there("runs/llama/step-1/") == before


def test_a_source_on_s3_that_is_restored_while_a_purge_reads_stays(bucket, monkeypatch):
    """No lock is on its record there."""
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


@pytest.mark.parametrize("verb", ["sweep", "validate"])
def test_what_waits_on_s3_stays_retired(verb, bucket):
    """Its objects are still there."""
    assert bucket.retire(WEEK).counts == {"retired": 1, "kept": 1}
    if verb == "sweep":
        made = sweep(bucket.catalog, lambda each: convert(each, MEANS, None, bucket.url), settings=AT_ONCE)
        assert SOURCE not in [item.source for item in made.items]
    else:
        bucket.catalog.record_validation(facts(inspect(SOURCE), SOURCE), ())
    assert bucket.catalog.show(SOURCE).checkpoint.state == "retired"
    bucket.retire(WEEK)
    assert len([n for n in bucket.there("runs/llama/.") if n.endswith("record.json")]) == 1


def test_what_is_half_purged_is_not_restored(copies, monkeypatch):
    unlink, gone = os.unlink, []

    def once(name, **options):
        if gone and not str(name).endswith((".json", ".part")):
            raise PermissionError(1, "Operation not permitted")
        gone.append(name)
        unlink(name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(aside.os, "unlink", once)
        assert "the next run resumes" in copies.fate().why[-1]
    with pytest.raises(CkptError):
        restore(copies.catalog, str(copies.source))
    assert not copies.source.exists()
    assert copies.catalog.show(str(copies.source)).checkpoint.state == "deleted"


# What forgets.


def test_a_record_is_beside_the_place_itself_and_not_beside_a_link_to_it(copies):
    real = copies.tmp / "disk" / "real"
    real.parent.mkdir()
    copies.copy.rename(real)
    copies.copy.symlink_to(real)
    copies.counted_on()
    copies.refuses(real)
    copies.refuses(real, catalog=False)


def test_purges_that_count_on_one_copy_write_records_of_their_own(copies):
    """Two catalogs may have sources of one copy: no process changes the record of another."""
    copies.counted_on()
    (obligation,) = records.read_obligations(str(copies.copy))
    copies_of_it = [replace(obligation, row=replace(obligation.row, id=f"id-{n}")) for n in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: records.add_obligations(str(copies.copy), [each]), copies_of_it))
    ids = {each.row.id for each in records.read_obligations(str(copies.copy))}
    assert ids == {obligation.row.id, *(each.row.id for each in copies_of_it)}


def test_rebuild_reads_a_record_whose_copy_was_moved_away(copies, tmp_path):
    """The record is still in the folder."""
    copies.counted_on()
    moved = copies.out / "moved"
    copies.copy.rename(moved)
    with open_catalog(str(tmp_path / "new.sqlite")) as catalog:
        copies.catalog, copies.url = catalog, catalog.url
        copies.rebuilt(copies.out)
        copies.refuses(moved)


@pytest.mark.parametrize("beside", [True, False])
def test_a_damaged_row_of_an_obligation_is_a_row(copies, beside):
    """The record beside the copy says it as well; without that, nobody knows what must not go."""
    copies.counted_on()
    (other,) = listed(copies.catalog)
    with copies.catalog.writing() as conn:
        conn.execute(text("UPDATE obligation SET contents = :x"), {"x": b"x"})
    assert "cannot be read" in listed(copies.catalog)[0].contents[0]
    look_after(copies.catalog)
    if beside:
        copies.refuses(copies.copy)
        copies.rebuilt(copies.out)
        assert listed(copies.catalog)[0].contents == other.contents
    else:
        records.drop_obligations(str(copies.copy), [other.id])
        with pytest.raises(CatalogError, match="cannot be read"):
            copies.overwrite(copies.copy)
        release(copies.catalog, other.id, ["*"])
        assert listed(copies.catalog) == ()


def test_a_disk_is_away_when_a_purge_looks(copies):
    """Where it is mounted is an empty folder then."""
    home = copies.aside()
    run, away = copies.source.parent, copies.tmp / "away"
    run.rename(away)
    run.mkdir()
    copies.due()
    run.rmdir()
    away.rename(run)
    assert [item.fate for item in copies.due()] == ["purged"]
    assert not home.exists()


# What nothing ends, and what comes back.


def test_a_purge_while_the_old_output_is_on_its_way(copies, monkeypatch):
    """The folder that it is moved into is still empty, and not locked."""
    copies.convert(copies.source, copies.out / "x")
    copies.counted_on()
    move = local_staging._move

    def purged(*given):
        copies.due()
        return move(*given)

    monkeypatch.setattr(local_staging, "_move", purged)
    copies.replaces(copies.out / "x")


def test_a_purge_after_a_kill_before_the_old_output_is_set_aside(copies, monkeypatch):
    copies.convert(copies.source, copies.out / "x")
    copies.counted_on()
    with monkeypatch.context() as patch:
        patch.setattr(local_staging, "_keep_aside", dying)
        with pytest.raises(Killed):
            copies.overwrite(copies.out / "x")
    copies.due()
    copies.overwrite(copies.out / "x")


def test_a_purge_of_what_was_replaced_that_is_killed_is_finished(copies, monkeypatch):
    """Its folder is not below a watched root."""
    copies.convert(copies.source, copies.out / "x")
    copies.counted_on()
    copies.replaces(copies.out / "x")
    (home,) = copies.homes(copies.out / "x")
    with monkeypatch.context() as patch:
        patch.setattr(aside.LocalSetAside, "remove", dying)
        with pytest.raises(Killed):
            copies.due()
    copies.due()
    assert not home.exists()


def test_an_obligation_ends_while_a_conversion_over_its_copy_runs(copies):
    copies.convert(copies.source, copies.out / "x")
    copies.counted_on()
    plan, registration = begun(copies, copies.out / "x")
    release(copies.catalog, listed(copies.catalog)[0].id, ["*"])
    finish(plan, MEANS, None, copies.url, registration.id)


def test_what_was_given_up_after_it_moved_stays_given_up(copies):
    """No record beside the place that it counted on first says otherwise."""
    copies.convert(copies.source, copies.out / "x")
    copies.counted_on()
    copies.replaces(copies.out / "x")
    (row,) = listed(copies.catalog)
    assert row.place == str(copies.copy)
    release(copies.catalog, row.id, ["*"])
    copies.rebuilt(copies.out / "x", copies.copy)
    assert listed(copies.catalog) == ()
    copies.replaces(catalog=False)


def test_what_is_purged_at_once_is_not_listed_as_restorable(copies):
    copies.counted_on()
    assert retire(copies.catalog, Policy(1)).set_aside == ()


def test_a_folder_with_a_long_name_is_above_the_destination(copies):
    """The name of a record would be too long, so there is none; that is not a record that cannot be read."""
    target = copies.out / ("n" * 238) / "k"
    target.parent.mkdir()
    copies.convert(copies.source, target)
    copies.replaces(target)


def test_who_may_not_read_above_a_destination_on_s3_replaces_it(bucket):
    """A policy for one prefix answers 403 for ``.team.obligations.ckptcore/record.json`` above it."""
    bucket.convert(OTHER, "s3://b/team/mine/x")
    bucket.server.fault(
        "*", path=r"^b/\.team\.|^\.b\.", action="status", status=403, code="AccessDenied", times=99
    )
    bucket.convert(SOURCE, "s3://b/team/mine/x", **IN_PLACE)
    inspect("s3://b/team/mine/x")


def test_a_heartbeat_leaves_no_connection_open(postgres, upgraded):
    """`start` closes all, because a conversion takes hours, and a server has few."""
    with postgres.database(upgraded) as url, open_catalog(url) as catalog:
        uris = {"source_uri": "a", "destination_uri": "b", "verb": "x", "tool_version": "0"}
        running = catalog.begin({}, **uris)
        catalog.close()
        Heartbeats()._renew(catalog.renew, [running])
        assert catalog._engine.pool.checkedin() == 0


def test_a_heartbeat_that_fails_leaves_no_connection_open(postgres, upgraded, caplog):
    with postgres.database(upgraded) as url, open_catalog(url) as catalog:
        with catalog.writing() as connection:
            connection.execute(text("ALTER TABLE conversion RENAME TO conversions"))
        catalog.close()
        Heartbeats()._renew(catalog.renew, ["1"])
        assert catalog._engine.pool.checkedin() == 0
    assert "cannot renew the row" in caplog.text


def test_a_connection_in_use_while_its_catalog_is_closed_is_closed_after_it(postgres, upgraded):
    """A heartbeat's, for example: a forgotten one would stay open until Python collects it."""
    with postgres.database(upgraded) as url:
        with open_catalog(url) as catalog:
            with catalog.writing():
                catalog.close()
            assert catalog._engine.pool.checkedin() == 1
        assert catalog._engine.pool.checkedin() == 0
