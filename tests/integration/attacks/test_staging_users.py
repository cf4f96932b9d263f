"""Test staging folders that several trusted users share, and those of the previous version."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from staging_folders import (
    MINE,
    OTHER,
    as_user,
    convert,
    copied,
    half_done,
    picture,
    refused,
    right,
    root_only,
)


@pytest.fixture
def shared(open_folder: Path, place: Path) -> Iterator[Path]:
    """A folder that one group writes to, where other users may pass."""
    folder = open_folder / place.parent.name
    folder.mkdir()
    os.chown(folder, MINE, MINE)
    folder.chmod(0o2770)
    yield folder
    shutil.rmtree(folder)


@root_only
def test_a_second_configured_user_resumes(
    source: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of two users with one group: each keeps the files that the other finished, without a key."""
    monkeypatch.setenv("CKPTCORE_TRUSTED_UIDS", f"{MINE},{OTHER}")
    os.umask(old := os.umask(0o002))
    os.umask(0o002)
    try:
        as_user(MINE, lambda: half_done(source, shared))
        staging = shared / ".out.ckptcore"
        assert {p.lstat().st_uid for p in [staging, *staging.rglob("*")]} == {MINE}

        def go_on() -> None:
            done = convert(source, shared)
            assert sum(r.reused for r in done.files) == 2

        as_user(OTHER, go_on, HOME="/nowhere", HOSTNAME="another")
        assert right(source, shared)
        assert [p.name for p in shared.iterdir()] == ["out"]
    finally:
        os.umask(old)


@root_only
def test_another_host_and_home_resume(source: Path, shared: Path) -> None:
    as_user(MINE, lambda: half_done(source, shared), HOME=str(shared / "home"), HOSTNAME="one")

    def go_on() -> None:
        done = convert(source, shared)
        assert sum(r.reused for r in done.files) == 2

    as_user(MINE, go_on, HOME="/nowhere", HOSTNAME="another", XDG_DATA_HOME="/nowhere/else")
    assert right(source, shared)


@root_only
@pytest.mark.parametrize("configured", ["", str(MINE)])
def test_an_unknown_user_is_refused(
    configured: str, source: Path, left: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTCORE_TRUSTED_UIDS", configured)
    copied(left, shared)
    staging = shared / ".out.ckptcore"
    for path in [staging, *staging.rglob("*")]:
        os.lchown(path, OTHER, MINE)
    before = picture(staging)
    as_user(MINE, lambda: refused(lambda: convert(source, shared)))
    error = refused(lambda: convert(source, shared))  # nor by root, which could
    assert "CKPTCORE_TRUSTED_UIDS" in error.hint
    assert picture(staging) == before


@root_only
def test_a_user_that_is_mapped_to_nobody_is_configured(
    source: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root on a squashing mount: its files belong to 65534."""
    staging = half_done(source, place)
    for path in [staging, *staging.rglob("*")]:
        os.lchown(path, 65534, 65534)
    refused(lambda: convert(source, place))
    monkeypatch.setenv("CKPTCORE_TRUSTED_UIDS", "65534")
    for path in [staging, *staging.rglob("*")]:  # chown changed the time that the stamp has
        os.lchown(path, 65534, 65534)
    done = convert(source, place)
    assert sum(r.reused for r in done.files) == 2
    assert right(source, place)


def test_the_setting_is_a_list_of_numbers(source: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTCORE_TRUSTED_UIDS", "nobody")
    error = refused(lambda: convert(source, place), "usage")
    assert "nobody" in error.message
    assert list(place.iterdir()) == []


# ------------------------------------------------------------------------ the version before


def test_a_folder_of_the_previous_version_is_resumed(source: Path, place: Path) -> None:
    """A folder with the umask's mode, and receipts without stamps: the source proves its files."""
    staging = half_done(source, place)
    staging.chmod(0o755)
    for name in (staging / "receipts").iterdir():
        form = json.loads(name.read_text())
        form.pop("stamp", None)
        name.write_text(json.dumps(form))
    done = convert(source, place)
    assert sum(r.reused for r in done.files) == 2
    assert right(source, place)
    assert [p.name for p in place.iterdir()] == ["out"]
