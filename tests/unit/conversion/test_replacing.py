"""Test that replacing removes only checked files, even if other processes swap folders or write meanwhile."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.conversion.staging import local_staging as publishing
from ckptcore.conversion.staging.open_staging import open_staging
from ckptcore.errors import CkptError, DestinationExists, StagingForeign

stages = importlib.import_module("ckptcore.conversion.pipeline")
OTHER = 4712  # a user that no machine has
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")


class Killed(BaseException):
    """A simulated kill: nothing may handle it."""


@pytest.fixture(params=["folder", "file"])
def single(request: pytest.FixtureRequest) -> bool:
    """Whether the destination is one file."""
    return bool(request.param == "file")


@pytest.fixture
def place(tmp_path: Path, single: bool) -> Path:
    """``new.safetensors``, and ``place/out`` with an older output."""
    save_file({f"w{n}": torch.arange(6.0) + n for n in range(3)}, tmp_path / "new.safetensors")
    save_file({f"w{n}": torch.zeros(3) for n in range(3)}, tmp_path / "old.safetensors")
    (tmp_path / "place").mkdir()
    ckptcore.convert(
        str(tmp_path / "old.safetensors"), str(name(tmp_path / "place", single)), **options(single)
    )
    return tmp_path / "place"


def name(place: Path, single: bool) -> Path:
    return place / ("out.safetensors" if single else "out")


def options(single: bool) -> dict[str, Any]:
    return {} if single else {"to": "safetensors", "max_file_size": 100}


def replaced(place: Path, single: bool, **more: Any) -> Any:
    source = place.parent / "new.safetensors"
    return ckptcore.convert(str(source), str(name(place, single)), overwrite=True, **options(single), **more)


def picture(folder: Path) -> dict[str, Any]:
    """Everything in a folder: kinds, inodes, times and bytes."""
    found = {}
    for path in sorted(folder.rglob("*")):
        seen = path.lstat()
        rewritten = path.read_bytes() if stat.S_ISREG(seen.st_mode) else b""
        found[str(path.relative_to(folder))] = (seen.st_mode, seen.st_ino, seen.st_uid, rewritten)
    return found


def content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path.parent)): p.read_bytes() for p in files}


def a_file(dst: Path) -> Path:
    return dst if dst.is_file() else next(iter(sorted(dst.glob("*.safetensors"))))


def rewrite(path: Path) -> None:
    """Rewrite a file in place, with the same size, inode and modification time."""
    before, data = path.stat(), path.read_bytes()
    with path.open("r+b") as file:
        file.write(data[:-4] + b"mine")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def touch_status(path: Path) -> None:
    path.chmod(0o600)


# --------------------------------------------------------------------------- the time of status


@pytest.mark.parametrize("how", [rewrite, touch_status])
def test_a_change_with_equal_times_is_not_replaced(
    how: Callable[[Path], None], place: Path, single: bool
) -> None:
    dst, source = name(place, single), str(place.parent / "new.safetensors")
    ready = ckptcore.prepare(source, str(dst), overwrite=True, **options(single))
    ckptcore.execute(ready)
    how(a_file(dst))
    before = picture(dst.parent)
    with pytest.raises(DestinationExists, match="status") as caught:
        ckptcore.publish(ready)
    assert caught.value.hint
    assert {n: p for n, p in picture(dst.parent).items() if not n.startswith(".")} == {
        n: p for n, p in before.items() if not n.startswith(".")
    }
    repeated = ckptcore.prepare(source, str(dst), overwrite=True, **options(single))
    assert repeated.plan_digest == ready.plan_digest  # no digest knows of it
    ckptcore.publish(repeated)  # checked anew: written files are kept
    assert [p.name for p in place.iterdir()] == [dst.name]


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("single", [False], indirect=True, ids=["folder"])
def test_files_rewritten_during_publishing_are_restored(
    exchange: bool, place: Path, single: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst, real, rewritten = name(place, single), publishing._exchange, {}

    def exchanged(a: Any, b: Any) -> bool:
        if not rewritten:
            rewrite(a_file(dst))
            rewritten.update(content(dst))
        return exchange and real(a, b)

    monkeypatch.setattr(publishing, "_exchange", exchanged)
    with pytest.raises(DestinationExists):
        replaced(place, single)
    assert content(dst) == rewritten


def test_a_check_without_ctimes_is_repeated(place: Path, single: bool) -> None:
    """Such a record counts as none: files are accounted for once more, by reading."""
    dst, source = name(place, single), str(place.parent / "new.safetensors")
    for strange in (True, False):
        ready = ckptcore.prepare(source, str(dst), overwrite=True, **options(single))
        ckptcore.execute(ready)
        record = place / f".{dst.name}.ckptcore" / "replaces.json"
        form = json.loads(record.read_text())
        for entry in form["inventory"].values():
            del entry[4:]
        record.write_text(json.dumps(form))
        if strange and not single:
            (dst / "precious").write_text("mine")
            with pytest.raises(DestinationExists, match="precious"):
                ckptcore.publish(ready)
            assert (dst / "precious").read_text() == "mine"
            (dst / "precious").unlink()
        else:
            rewrite(a_file(dst)) if single else touch_status(a_file(dst))
            ckptcore.publish(ready)
            assert [p.name for p in place.iterdir()] == [dst.name]
            break


def test_all_hard_links_among_replaced_files_are_removed(place: Path, single: bool) -> None:
    dst = name(place, single)
    if not single:
        os.link(a_file(dst), dst / "twin.safetensors")
    replaced(place, single, overwrite_foreign=True)
    assert [p.name for p in place.iterdir()] == [dst.name]


# --------------------------------------------------------------------------- swapped parents

CHANGES = ("rename", "unlink", "rmdir", "link")


def run_until(
    stop: int, call: Callable[[], object], then: Callable[[], None] | None, *, exchange: bool
) -> bool:
    """Return whether a call ran to its end. At its n-th change it dies, or an event happens first."""
    calls: list[int] = []
    real_exchange = publishing._exchange

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def change(*args: Any, **kwargs: Any) -> object:
            calls.append(1)
            if len(calls) == stop + 1:
                if then is None:
                    raise Killed
                then()
            return real(*args, **kwargs)

        return change

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "_exchange", counted(lambda a, b: exchange and real_exchange(a, b)))
        for each in ("note", "rename_new"):
            patch.setattr(publishing, each, counted(getattr(publishing, each)))
        for each in CHANGES:
            patch.setattr(os, each, counted(getattr(os, each)))
        try:
            call()
        except Killed:
            return False
        except CkptError:
            return len(calls) <= stop
    return len(calls) <= stop


class World:
    """A place with an old output, in a folder of its own that another process swaps."""

    def __init__(self, work: Path, single: bool) -> None:
        work.mkdir()
        self.here, self.twin, self.away, self.single = work / "place", work / "twin", work / "away", single
        self.here.mkdir()
        for each in ("new.safetensors", "old.safetensors"):
            os.link(work.parent / each, work / each)
        old = str(work / "old.safetensors")
        ckptcore.convert(old, str(name(self.here, single)), **options(single))
        self.staging = open_staging(str(name(self.here, single)))
        self.seen: dict[str, Any] = {}

    def swap(self) -> None:
        """The folder becomes a link to its twin."""
        shutil.copytree(self.here, self.twin, symlinks=True)
        self.here.rename(self.away)
        self.here.symlink_to(self.twin)
        self.seen = picture(self.twin)

    def end(self) -> None:
        with self.staging.lock():
            self.staging.finish_interrupted_publish()

    def replace(self) -> None:
        replaced(self.here, self.single)

    def holds(self, either: tuple[dict[str, bytes], ...]) -> bool:
        """Return whether one of the outputs is complete, in its place or aside."""
        dst = name(self.away if self.away.exists() else self.here, self.single)
        aside = dst.with_name(f".{dst.name}.ckptcore") / "replaced"
        return any(
            list(content(p).values()) == list(e.values()) for p in (dst, aside) for e in either if p.exists()
        )


# By default at every third change.
changes = pytest.mark.parametrize(
    ("exchange", "every"), [(True, 3), *(pytest.param(e, 1, marks=pytest.mark.soak) for e in (True, False))]
)


@pytest.mark.alike(1)
@changes
def test_a_swapped_parent_redirects_nothing(
    exchange: bool, every: int, place: Path, single: bool, tmp_path: Path
) -> None:
    """At every change of publishing and cleaning, the folder above becomes a link to its twin."""
    old, steps = content(name(place, single)), 0
    replaced(place, single)
    new = content(name(place, single))
    for stop in range(0, 60, every):
        world = World(tmp_path / f"try-{stop}", single)
        if run_until(stop, world.replace, world.swap, exchange=exchange):
            steps = stop
            break
        assert picture(world.twin) == world.seen, stop
        assert world.holds((old, new)), stop
    assert steps > 5


@pytest.mark.alike(1)
@changes
def test_a_swapped_parent_while_a_killed_run_is_finished(
    exchange: bool, every: int, place: Path, single: bool, tmp_path: Path
) -> None:
    """The same if the next run removes what a killed one replaced, or restores it."""
    tried = 0
    for killed in range(1, 12):
        for stop in range(0, 8, every):
            world = World(tmp_path / f"try-{killed}-{stop}", single)
            if run_until(killed, world.replace, None, exchange=exchange):
                break
            if run_until(stop, world.end, world.swap, exchange=exchange):
                break
            assert picture(world.twin) == world.seen, (killed, stop)
            tried += 1
    assert tried > 1


# --------------------------------------------------------------------------- others' hands


@pytest.mark.alike(3)
@root_only
@pytest.mark.parametrize(
    "whose", ["receipts", *(pytest.param(w, marks=pytest.mark.soak) for w in ("plan", "request.json"))]
)
@pytest.mark.parametrize("end", ["convert", "finish", "remove_staging", "remove_leftover_staging"])
def test_nothing_is_finished_in_a_folder_with_foreign_files(
    end: str, whose: str, place: Path, single: bool, tmp_path: Path
) -> None:
    """A run was killed after old and new changed places: the old output is neither removed nor moved."""
    dst = name(place, single)
    for stop in range(3, 20):
        if run_until(stop, lambda: replaced(place, single), None, exchange=True):
            pytest.fail("it was not killed where something waits for its end")
        if (place / f".{dst.name}.ckptcore" / "replaced").exists():
            break
    staging = place / f".{dst.name}.ckptcore"
    for path in [staging / whose, *(staging / whose).rglob("*")]:
        os.lchown(path, OTHER, OTHER)
    before = picture(place)
    plan = str(staging / "plan")
    calls: dict[str, Callable[[], object]] = {
        "convert": lambda: replaced(place, single),
        "finish": lambda: stages.finish(plan),
        "remove_staging": lambda: stages.remove_staging(plan),
        "remove_leftover_staging": lambda: stages.remove_leftover_staging(str(dst)),
    }
    if end == "remove_leftover_staging":
        calls[end]()  # it says so, and leaves it to whoever put it there
    else:
        with pytest.raises(StagingForeign):
            calls[end]()
    assert picture(place) == before


def test_only_what_was_moved_aside_is_restored(place: Path, single: bool) -> None:
    dst = name(place, single)
    aside = place / f".{dst.name}.ckptcore" / "replaced"
    real = publishing.rename_new

    def dying(old: Any, new: Any) -> None:
        real(old, new)
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "_exchange", lambda a, b: False)
        patch.setattr(publishing, "rename_new", dying)
        with pytest.raises(Killed):
            replaced(place, single)
    assert (aside.exists(), dst.exists()) == (True, False)
    aside.rename(place / "mine")
    aside.mkdir()
    (aside / "planted").write_text("planted")
    with pytest.raises(CkptError):
        replaced(place, single)
    assert not dst.exists()
    assert (aside / "planted").read_text() == "planted"


# --------------------------------------------------------------------------- names in a staging folder

TAKEN = [".x.part", "tmpabcdefgh", ".nfs00000000000000010000000a"]
KNOWN = ["lock", "plan", "receipts", "files", "publishing.json", "replaces.json", "request.json"]


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "precious").write_text("mine")


def _link(path: Path) -> None:
    (path.parent.parent / "aim").mkdir()
    (path.parent.parent / "aim" / "precious").write_text("mine")
    path.symlink_to(path.parent.parent / "aim")


@pytest.mark.alike(3)
@pytest.mark.parametrize("single", [False], indirect=True, ids=["folder"])
@pytest.mark.parametrize("make", [_folder, _link, os.mkfifo])
@pytest.mark.parametrize(
    "taken", [TAKEN[1], *(pytest.param(n, marks=pytest.mark.soak) for n in (TAKEN[0], TAKEN[2]))]
)
@pytest.mark.parametrize("where", [".out.ckptcore", ".out.ckptcore.gone-1-1", "while it runs"])
def test_only_regular_files_are_ours_by_name(
    where: str,
    taken: str,
    make: Callable[[Path], None],
    place: Path,
    single: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = place / (where if where[0] == "." else ".out.ckptcore")
    if where[0] == ".":
        folder.mkdir()
        (folder / "lock").touch()
        make(folder / taken)
    else:
        finish = stages.finish_staged

        def late(*given: Any) -> Any:
            make(folder / taken)
            return finish(*given)

        monkeypatch.setattr(stages, "finish_staged", late)
    before = picture(folder) if folder.exists() else {}
    if where == ".out.ckptcore":
        for resume in (True, False):
            with pytest.raises(StagingForeign, match="does not create"):
                replaced(place, single, resume=resume)
    else:
        replaced(place, single)
    after = picture(folder)
    if before:
        assert after == before
    assert taken in after
    if make is not os.mkfifo:
        assert (folder / taken / "precious").read_text() == "mine"


@pytest.mark.parametrize("single", [False], indirect=True, ids=["folder"])
def test_regular_files_of_these_names_are_removed(place: Path, single: bool) -> None:
    staging = place / ".out.ckptcore"
    staging.mkdir()
    for each in ("lock", *TAKEN):
        (staging / each).touch()
    replaced(place, single)
    assert [p.name for p in place.iterdir()] == ["out"]


@pytest.mark.parametrize("single", [False], indirect=True, ids=["folder"])
@pytest.mark.parametrize("known", KNOWN)
def test_files_of_a_run_have_their_kind(known: str, place: Path, single: bool) -> None:
    """A folder instead of a file, a file instead of a folder: left in place, and reported."""
    staging = place / ".out.ckptcore"
    staging.mkdir()
    (staging / "lock").touch()
    if known in ("plan", "receipts", "files"):
        (staging / known).write_text("mine")
    else:
        (staging / known).unlink(missing_ok=True)
        _folder(staging / known)
    before = picture(staging)
    for resume in (True, False):
        with pytest.raises(CkptError):
            replaced(place, single, resume=resume)
        assert picture(staging) == before
