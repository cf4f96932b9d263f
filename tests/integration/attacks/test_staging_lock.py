"""Test that one run at a time uses a staging folder, and that an invalid lock is refused."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from staging_folders import (
    OTHER,
    convert,
    copied,
    half_done,
    picture,
    precious,
    refused,
    right,
    root_only,
    stages,
)

import ckptcore
from ckptcore.conversion.staging.open_staging import open_staging
from ckptcore.errors import CkptError


def _in_time(call: Callable[[], Any], seconds: float = 120) -> CkptError:
    """Return the error of a call that must not hang; a hang ends this process's child, not the tests."""
    here, there = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        try:
            call()
        except CkptError as error:
            there.send(error)

    process = multiprocessing.get_context("fork").Process(target=run)
    began = time.monotonic()
    process.start()
    answered = here.poll(seconds)
    process.kill()
    process.join()
    assert answered, f"no answer within {time.monotonic() - began:.1f} s"
    found = here.recv()
    assert isinstance(found, CkptError)
    return found


def _lock_as(kind: str, staging: Path, tmp_path: Path) -> None:
    lock = staging / "lock"
    lock.unlink()
    if kind == "fifo":
        os.mkfifo(lock)
    elif kind == "folder":
        lock.mkdir()
    elif kind == "device":
        os.mknod(lock, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    elif kind == "socket":
        os.mknod(lock, stat.S_IFSOCK | 0o666)
    else:
        lock.symlink_to(
            {
                "into nothing": tmp_path / "no" / "lock",
                "to itself": lock,
                "to a file": tmp_path / "f",
                "free": tmp_path / "free",
            }[kind]
        )
        (tmp_path / "f").write_text("mine")


@pytest.mark.alike(3)
@pytest.mark.parametrize(
    "kind",
    [
        "fifo",
        "folder",
        "socket",
        "into nothing",
        "to itself",
        "to a file",
        "free",
        pytest.param("device", marks=root_only),
    ],
)
def test_an_invalid_lock_is_refused(kind: str, source: Path, left: Path, place: Path, tmp_path: Path) -> None:
    staging = copied(left, place)
    _lock_as(kind, staging, tmp_path)
    before = picture(staging)
    for call in (lambda: convert(source, place), lambda: stages.execute(str(staging / "plan"))):
        assert _in_time(call).code == "staging-foreign"
    assert picture(staging) == before
    assert not (tmp_path / "free").exists()


@pytest.mark.parametrize("kind", ["fifo", "file", "socket"])
def test_an_invalid_folder_is_refused(kind: str, source: Path, place: Path) -> None:
    at = place / ".out.ckptcore"
    {"fifo": os.mkfifo, "file": Path.touch, "socket": lambda p: os.mknod(p, stat.S_IFSOCK | 0o600)}[kind](at)
    assert _in_time(lambda: convert(source, place)).code == "staging-foreign"


@pytest.mark.alike(3)
@pytest.mark.parametrize(
    "where",
    [
        "/proc/x",
        "/proc/self/x",
        "/sys/x",
        "dangling/out",
        "dangling/deep/out",
        "circle/out",
        "file/out",
        "file/deep/out",
    ],
)
def test_an_unwritable_place_is_refused(where: str, source: Path, place: Path) -> None:
    (place / "dangling").symlink_to(place / "nowhere")
    (place / "circle").symlink_to(place / "circle")
    (place / "file").touch()
    before = sorted(p.name for p in place.iterdir())
    error = _in_time(lambda: ckptcore.convert(str(source), str(place / where), to="safetensors"))
    assert error.code == "destination-unwritable", error
    assert where.split("/")[0] in error.message
    assert sorted(p.name for p in place.iterdir()) == before


def test_runs_that_end_beside_each_other(source: Path, place: Path) -> None:
    """Processes that make, lock and remove one folder repeatedly: none fails, nothing is left."""

    def run() -> None:
        code = 0
        for _ in range(150):
            staging = open_staging(str(place / "out"))
            try:
                with staging.lock(make=True):
                    staging.root.put("request.json", b"{}")
                    staging.remove()
            except CkptError as error:
                code = code if error.code == "busy" else 1
        os._exit(code)

    processes = [multiprocessing.get_context("fork").Process(target=run) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    open_staging(str(place / "out")).sweep_gone()
    assert list(place.iterdir()) == []


def test_a_folder_that_is_being_removed_is_not_used(
    source: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened at the moment when another run removes it: half of it is gone, and the lock, too."""
    first = [half_done(source, place)]
    listed = os.listdir

    def removed(path: Any) -> list[str]:
        if first and isinstance(path, int) and (first[0] / "lock").exists():
            staging = first.pop()
            staging.rename(place / "gone")
            (place / "gone" / "lock").unlink()
        return listed(path)

    monkeypatch.setattr("os.listdir", removed)
    convert(source, place)
    assert not first
    assert right(source, place)


def test_a_swapped_folder_is_not_used(source: Path, place: Path, tmp_path: Path) -> None:
    """A user who may rename in the parent swaps the folder of an open run: the run stays in its own."""
    mine = precious(tmp_path)
    staging = open_staging(str(place / "out"))
    with staging.lock(make=True):
        staging.root.put("request.json", b"{}")
        (place / ".out.ckptcore").rename(place / "away")
        (place / ".out.ckptcore").symlink_to(mine)
        before = picture(mine)
        staging.files.put("sub/x", b"x")
        staging.clear()
        staging.remove()
    assert picture(mine) == before
    assert not list((place / "away").rglob("x"))


@root_only
@pytest.mark.parametrize("moment", ["before", "behind"])
def test_another_output_is_not_published(
    moment: str, source: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who may rename in the parent swaps the staging folder when it is published, or the output."""
    publish = importlib.import_module("ckptcore.conversion.staging.local_staging")._move
    evil = place / "evil"
    (evil / "files").mkdir(parents=True)
    for path in (evil, evil / "files"):
        os.chown(path, OTHER, OTHER)

    def swapped(staged: Path, *rest: Any) -> None:
        if moment == "before":
            (place / ".out.ckptcore").rename(place / "away")
            evil.rename(place / ".out.ckptcore")
        publish(staged, *rest)
        if moment == "behind":
            (place / "out").rename(place / "away")
            (place / "out").symlink_to(evil)

    monkeypatch.setattr("ckptcore.conversion.staging.local_staging._move", swapped)
    if moment == "behind":
        refused(lambda: convert(source, place))
        return
    convert(source, place)  # what is moved is what was staged, and not what bears its name by now
    assert right(source, place)
    assert list((place / ".out.ckptcore" / "files").iterdir()) == []


@root_only
def test_files_beside_a_published_output_are_kept(source: Path, left: Path, place: Path) -> None:
    convert(source, place)
    staging = copied(left, place)
    os.chown(staging, OTHER, OTHER)
    before = picture(staging)
    stages.remove_leftover_staging(str(place / "out"))
    assert picture(staging) == before


def test_the_command_reports_it(cli: Any, source: Path, left: Path, place: Path, tmp_path: Path) -> None:
    copied(left, tmp_path).rename(tmp_path / "aim")
    (place / ".out.ckptcore").symlink_to(tmp_path / "aim")
    done = cli("consolidate", source, place / "out", "--to", "safetensors", "--output", "json")
    assert done.code == 25, done
    assert done.json["error"]["code"] == "staging-foreign"
    assert "link" in done.json["error"]["message"]
