"""What a catalog records about a place counts under every name of it: links, and other schemes of a URL."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime, timedelta

import pytest
from checkpoints import save
from retiring import delete_now as retire

from ckptcore.catalog import aliases, claims, holds
from ckptcore.catalog import watched_roots as roots
from ckptcore.conversion.pipeline import convert
from ckptcore.errors import CkptError, DestinationExists, UsageError
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.replacement import Allowed
from ckptcore.planning.request import Request, Settings

MEANS = Settings(memory=32 << 20, workers=1, fingerprint=True)


def converted(url, source, target, **options):
    return convert(Request(str(source), str(target), **options), MEANS, None, url)


@pytest.fixture
def moved(catalog, url, runs, watch, tmp_path):
    """A run of two steps that was converted, then moved behind a link, and converted again from there."""
    watch()
    for step in (1, 2):
        save(runs / f"llama/step-{step}", step)
        converted(url, runs / f"llama/step-{step}", tmp_path / f"out/step-{step}")
    return tmp_path / "disk" / "runs"


def move_behind_a_link(catalog, url, runs, moved):
    moved.parent.mkdir()
    runs.rename(moved)
    runs.symlink_to(moved)
    with catalog.writing() as conn:
        roots.add(conn, datetime.now(UTC), "moved", str(moved))
    for step in (1, 2):
        converted(url, moved / f"llama/step-{step}", moved.parent / f"out/step-{step}")


def fates(catalog, *, yes):
    return {i.source.uri: i for i in retire(catalog, Policy(1), "moved", yes=yes).items}


def test_a_hold_counts_under_another_name(catalog, url, runs, moved):
    with catalog.writing() as conn:
        holds.place(conn, datetime.now(UTC), str(runs / "llama/step-1"), "audit")
    move_behind_a_link(catalog, url, runs, moved)
    for yes in (False, True):
        item = fates(catalog, yes=yes)[str(moved / "llama/step-1")]
        assert item.fate.value == "kept"
        assert item.why == (f"held: audit (as {runs}/llama/step-1)",)
    assert (moved / "llama/step-1/.metadata").exists()


def test_an_alias_and_a_tag_count_under_another_name(catalog, url, runs, moved):
    step, now = str(runs / "llama/step-1"), datetime.now(UTC)
    catalog.tag(step, "keep", "yes")
    with catalog.writing() as conn:
        holds.place(conn, now, step, "audit", until=now + timedelta(hours=1))
        aliases.set_alias(conn, now, "best", step)
    move_behind_a_link(catalog, url, runs, moved)
    (*why,) = fates(catalog, yes=True)[str(moved / "llama/step-1")].why
    assert [reason.partition(" (as ")[0] for reason in why] == ["tagged keep", "alias best", "held: audit"]


def test_a_conversion_that_reads_counts_under_another_name(catalog, url, runs, moved):
    key = claims.Key("0" * 64, "/elsewhere", "1" * 64)
    with catalog.writing() as conn:
        claims.take(conn, datetime.now(UTC), key, str(runs / "llama/step-1"), "host 1 abc")
    move_behind_a_link(catalog, url, runs, moved)
    item = fates(catalog, yes=True)[str(moved / "llama/step-1")]
    assert item.fate.value == "kept"
    assert "reads it" in item.why[0]


@pytest.mark.parametrize("tie", ["hold", "alias", "tag", "reader"])
def test_a_link_with_another_name_than_the_step_counts_in_the_plan_as_in_the_deletion(
    catalog, url, runs, watch, tmp_path, tie
):
    """A row of `latest`, which is a link to a step by now, is a row of that step."""
    watch()
    latest, step, now = runs / "llama/latest", runs / "llama/step-1", datetime.now(UTC)
    save(latest, 1)
    converted(url, latest, tmp_path / "out/latest")
    with catalog.writing() as conn:
        if tie == "hold":
            holds.place(conn, now, str(latest), "audit")
        elif tie == "alias":
            aliases.set_alias(conn, now, "best", str(latest))
        elif tie == "reader":
            claims.take(conn, now, claims.Key("0" * 64, "/elsewhere", "1" * 64), str(latest), "host 1 abc")
    if tie == "tag":
        catalog.tag(str(latest), "keep", "yes")
    latest.rename(step)
    latest.symlink_to(step)
    save(runs / "llama/step-2", 2)
    for number in (1, 2):
        converted(url, runs / f"llama/step-{number}", tmp_path / f"out/step-{number}")
    found = []
    for yes in (False, True):
        (item,) = (i for i in retire(catalog, Policy(1), yes=yes).items if i.source.uri == str(step))
        found.append((item.fate.value, item.why))
    assert found[0] == found[1]
    assert found[0][0] == "kept"
    assert f" (as {latest})" in found[0][1][0]
    assert (step / ".metadata").exists()


def test_a_checkpoint_inside_another_keeps_it_in_the_plan_as_in_the_deletion(
    catalog, url, runs, watch, tmp_path
):
    watch()
    for number in (1, 2):
        save(runs / f"llama/step-{number}", number)
        converted(url, runs / f"llama/step-{number}", tmp_path / f"out/step-{number}")
    inner = runs / "llama/step-1/adapter"
    save(inner, 3)
    converted(url, inner, tmp_path / "out/adapter")
    allowed = Allowed(loss=("adapter/*", "adapter"))
    found = []
    for yes in (False, True):
        items = retire(
            catalog, Policy(1), yes=yes, allowed=allowed, verify_settings=MEANS, fingerprint_settings=MEANS
        ).items
        (item,) = (i for i in items if i.source.uri == str(runs / "llama/step-1"))
        found.append((item.fate.value, item.why))
    assert found[0] == found[1]
    assert found[0][0] == "kept"
    assert inner.joinpath(".metadata").exists()


@pytest.mark.parametrize("name", ["adapter", "merged"])
def test_a_checkpoint_inside_another_keeps_it_under_another_name(catalog, url, runs, watch, tmp_path, name):
    """What was recorded below `latest`, which is a link to the step by now, is in the step."""
    watch()
    latest, step = runs / "llama/latest", runs / "llama/step-1"
    save(latest, 1)
    save(latest / "adapter", 3)
    inner = str(latest / "adapter")
    if name == "merged":
        inner = f"merged://[{latest}/adapter,{tmp_path}/node1]"
    converted(url, latest / "adapter", tmp_path / "out/adapter")
    if name == "merged":
        with catalog.writing() as conn:
            conn.exec_driver_sql(f"UPDATE checkpoint SET uri = '{inner}' WHERE uri LIKE '%/latest/adapter'")
    latest.rename(step)
    latest.symlink_to(step)
    save(runs / "llama/step-2", 2)
    for number in (1, 2):
        converted(url, runs / f"llama/step-{number}", tmp_path / f"out/step-{number}")
    allowed = Allowed(loss=("adapter/*", "adapter"))
    found = []
    for yes in (False, True):
        items = retire(
            catalog, Policy(1), yes=yes, allowed=allowed, verify_settings=MEANS, fingerprint_settings=MEANS
        ).items
        (item,) = (i for i in items if i.source.uri == str(step))
        found.append((item.fate.value, item.why))
    assert found[0] == found[1] == ("kept", (f"{inner} is inside it",))
    assert (step / "adapter/.metadata").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_folder_that_is_mounted_in_a_step_keeps_it_in_the_plan_as_in_the_deletion(
    catalog, url, runs, watch, tmp_path
):
    watch()
    away, inner = tmp_path / "away", runs / "llama/step-1/logs"
    for number in (1, 2):
        save(runs / f"llama/step-{number}", number)
        converted(url, runs / f"llama/step-{number}", tmp_path / f"out/step-{number}")
    away.mkdir()
    inner.mkdir()
    bind = ["mount", "--bind", str(away), str(inner)]
    if subprocess.run(bind, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        allowed = Allowed(loss=("logs", "logs/*"))
        fates = [
            i.fate.value
            for yes in (False, True)
            for i in retire(
                catalog,
                Policy(1),
                yes=yes,
                allowed=allowed,
                verify_settings=MEANS,
                fingerprint_settings=MEANS,
            ).items
            if i.source.uri.endswith("step-1")
        ]
    finally:
        subprocess.run(["umount", str(inner)], check=True)
    assert fates == ["unsafe", "unsafe"]


@pytest.mark.parametrize("where", ["step-1", ""])
def test_a_child_that_is_being_replaced_under_another_name_proves_nothing(
    catalog, url, runs, watch, tmp_path, where
):
    watch()
    for number in (1, 2):
        save(runs / f"llama/step-{number}", number)
        converted(url, runs / f"llama/step-{number}", tmp_path / f"out/step-{number}")
    writer = catalog.begin(
        {},
        source_uri="/elsewhere",
        destination_uri=str(tmp_path / "link" / where),
        verb="consolidate",
        tool_version="1",
    )
    (tmp_path / "link").symlink_to(tmp_path / "out")
    planned, item = (retire(catalog, Policy(1), yes=yes).items[0] for yes in (False, True))
    assert (planned.fate, planned.why) == (item.fate, item.why)
    assert item.fate.value == "unsafe"
    assert writer in item.why[0]
    assert (runs / "llama/step-1/.metadata").exists()
    catalog.fail(writer, code="busy", message="no")
    assert [i.fate.value for i in retire(catalog, Policy(1), yes=True).items] == ["deleted", "kept"]


def test_without_a_tie_it_goes(catalog, url, runs, moved):
    move_behind_a_link(catalog, url, runs, moved)
    assert fates(catalog, yes=True)[str(moved / "llama/step-1")].fate.value == "deleted"


def test_the_only_copy_is_not_replaced_under_another_name(catalog, url, runs, moved, tmp_path):
    assert [i.fate.value for i in retire(catalog, Policy(1), yes=True).items] == ["deleted", "kept"]
    (tmp_path / "out").rename(tmp_path / "large")
    (tmp_path / "out").symlink_to(tmp_path / "large")
    before = (tmp_path / "large/step-1/model.safetensors").read_bytes()
    with pytest.raises(DestinationExists, match="only proven copy"):
        converted(url, runs / "llama/step-2", tmp_path / "large/step-1", overwrite=True)
    with pytest.raises(UsageError, match="has obligations"):
        converted(url, runs / "llama/step-2", tmp_path / "large", overwrite=True, overwrite_foreign=True)
    assert (tmp_path / "large/step-1/model.safetensors").read_bytes() == before


def test_the_only_copy_is_not_replaced_where_a_link_with_its_name_leads_to_it(
    catalog, url, runs, watch, tmp_path
):
    watch()
    best, step = tmp_path / "out/best", tmp_path / "out/step-1"
    for number, place in ((1, best), (2, tmp_path / "out/step-2")):
        save(runs / f"llama/step-{number}", number)
        converted(url, runs / f"llama/step-{number}", place)
    assert [i.fate.value for i in retire(catalog, Policy(1), yes=True).items] == ["deleted", "kept"]
    best.rename(step)
    best.symlink_to(step)
    before = (step / "model.safetensors").read_bytes()
    with pytest.raises(DestinationExists, match="only proven copy"):
        converted(url, runs / "llama/step-2", step, overwrite=True)
    assert (step / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("there", [False, True])
def test_a_command_with_one_place_too_many_keeps_no_source(there, catalog, url, runs, watch, tmp_path):
    """What it read together is recorded as incomplete; with all its folders there, it may be a save."""
    watch()
    for number in (1, 2):
        save(runs / f"llama/step-{number}", number)
        converted(url, runs / f"llama/step-{number}", tmp_path / f"out/step-{number}")
    step, other = runs / "llama/step-1", tmp_path / "other"  # which is not there
    together = f"merged://[{','.join(sorted(map(str, (step, other))))}]"
    with pytest.raises(CkptError) as refused:
        converted(url, together, tmp_path / "out/both")
    assert refused.value.code == "not-complete"
    assert catalog.at(together)[0].state == "incomplete"
    if there:
        other.mkdir()
    items = retire(catalog, Policy(1), yes=True, verify_settings=MEANS, fingerprint_settings=MEANS).items
    fate = {item.source.uri: item.fate.value for item in items}[str(step)]
    assert fate == ("kept" if there else "deleted")
