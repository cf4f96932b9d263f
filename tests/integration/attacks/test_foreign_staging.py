"""Foreign staging: what somebody else put where a run works is neither used, nor emptied, nor published."""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import shutil
import stat
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from paths import FIXTURES
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.conversion.staging import Staging
from ckptcore.errors import CkptError, StagingForeign

SAMPLE = FIXTURES / "torch" / "dcp_dims_4r" / "ckpt"

stages = importlib.import_module("ckptcore.conversion.pipeline")  # `ckptcore.convert` is the verb
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
MINE, OTHER = 4711, 4712  # users that no machine has


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder that other users may look into: pytest's own are shut, and shared with its other workers."""
    folder = Path(tempfile.mkdtemp(prefix="ckptcore-open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def source(open_folder: Path) -> Path:
    torch.manual_seed(0)
    path = open_folder / "source.safetensors"
    save_file({f"layers.{n}.weight": torch.randn(40, 50) for n in range(6)}, path)
    path.chmod(0o644)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where outputs go: ``place / "out"``, staged in ``place / ".out.ckptcore"``."""
    folder = tmp_path / "place"
    folder.mkdir()
    folder.chmod(0o755)
    return folder


def convert(source: Path, place: Path, **options: Any) -> Any:
    settings = options.pop("settings", ckptcore.Settings(workers=1))
    return ckptcore.convert(
        str(source),
        str(place / "out"),
        settings=settings,
        to="safetensors",
        max_file_size=options.pop("max_file_size", 9_000),
        **options,
    )


def half_done(source: Path, place: Path, files: int = 2) -> Path:
    """The staging folder of a run that was stopped when some files were finished."""
    ready = ckptcore.prepare(str(source), str(place / "out"), to="safetensors", max_file_size=9_000)
    assert len(ready.files) > files
    ckptcore.execute(ready, range(files), settings=ckptcore.Settings(workers=1))
    return place / ".out.ckptcore"


@pytest.fixture(scope="module")
def left(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `half_done` leaves, to be copied."""
    return half_done(source, tmp_path_factory.mktemp("left"))


def copied(left: Path, place: Path) -> Path:
    """The staging folder of a stopped run, for tests in which its files are not kept."""
    return Path(shutil.copytree(left, place / ".out.ckptcore"))


def weights(place: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted((place / "out").glob("*.safetensors")):
        found |= load_file(file)
    return found


def right(source: Path, place: Path) -> bool:
    expected, found = load_file(source), weights(place)
    return sorted(found) == sorted(expected) and all(torch.equal(found[n], expected[n]) for n in found)


def picture(folder: Path) -> dict[str, Any]:
    """Everything that a folder holds: kinds, owners, modes, times and bytes."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        seen = path.lstat()
        data = (
            path.read_bytes()
            if stat.S_ISREG(seen.st_mode)
            else os.readlink(path)
            if path.is_symlink()
            else ""
        )
        found[str(path)] = (seen.st_mode, seen.st_uid, seen.st_ino, seen.st_mtime_ns, data)
    return found


def refused(call: Callable[[], Any], code: str = "staging-foreign") -> CkptError:
    with pytest.raises(CkptError) as caught:
        call()
    assert caught.value.code == code, caught.value
    assert caught.value.hint
    return caught.value


def precious(tmp_path: Path) -> Path:
    folder = tmp_path / "precious"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "thesis").write_text("years of work")
    (folder / "thesis").write_text("more years of work")
    return folder


# ------------------------------------------------------------------------- another user's

PARTS = [
    "",
    "lock",
    "plan",
    "receipts",
    "files",
    "request.json",
    "plan/head.json",
    "plan/file-00000.plan",
    "receipts/file-00000.json",
    "files/model-00001-of-00006.safetensors",
]


@root_only
@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("whose", PARTS)
def test_what_belongs_to_another_user_is_left(
    whose: str, resume: bool, source: Path, left: Path, place: Path
) -> None:
    """Whatever of it is another's, whole or in one file, and whether its bytes would be right or not."""
    staging = copied(left, place)
    victim = staging / whose
    for path in [victim, *victim.rglob("*")]:
        os.lchown(path, OTHER, OTHER)
    before = picture(staging)
    error = refused(lambda: convert(source, place, resume=resume))
    assert str(OTHER) in error.message
    assert picture(staging) == before
    assert not (place / "out").exists()


@root_only
def test_a_planted_folder_of_another_user_is_not_published(source: Path, place: Path) -> None:
    """In a sticky folder, as /tmp is: forged weights with receipts that fit them, and a file more."""
    place.chmod(0o1777)
    staging = half_done(source, place, files=5)
    forge(staging)
    (staging / "files" / "evil.safetensors").write_bytes(b"evil")
    for path in [staging, *staging.rglob("*")]:
        os.lchown(path, OTHER, OTHER)
    before = picture(staging)
    refused(lambda: convert(source, place))
    assert picture(staging) == before
    assert not (place / "out").exists()
    # Neither by the stages, each by itself.
    plan = str(staging / "plan")
    refused(lambda: ckptcore.prepare(str(source), str(place / "out"), to="safetensors"))
    refused(lambda: stages.execute(plan))
    refused(lambda: stages.finish(plan))
    refused(lambda: ckptcore.convert(str(source), str(place / "out"), to="safetensors", overwrite=True))
    assert picture(staging) == before


@root_only
def test_removed_folders_of_another_user_are_left(source: Path, place: Path, tmp_path: Path) -> None:
    """Names of folders that are being removed: another's, one with things that no run makes, and a link."""
    mine = precious(tmp_path)
    shutil.copytree(mine, place / ".out.ckptcore.gone-1")
    os.chown(place / ".out.ckptcore.gone-1", OTHER, OTHER)
    shutil.copytree(mine, place / ".out.ckptcore.gone-2")
    (place / ".out.ckptcore.gone-3").symlink_to(mine)
    ours = half_done(source, place)
    ours.rename(place / ".out.ckptcore.gone-4")
    (place / ".out.ckptcore.gone-4" / "files" / "link").symlink_to(mine)
    before = picture(tmp_path / "precious"), picture(place / ".out.ckptcore.gone-1")
    convert(source, place)
    assert right(source, place)
    assert (picture(tmp_path / "precious"), picture(place / ".out.ckptcore.gone-1")) == before
    assert sorted(p.name for p in place.iterdir()) == [
        ".out.ckptcore.gone-1",
        ".out.ckptcore.gone-2",
        ".out.ckptcore.gone-3",
        "out",
    ]


# --------------------------------------------------------------------------------- links

LINKS = [
    *PARTS,
    "replaced",
    "files/.model-00003-of-00006.safetensors.joint",
    "files/sub",
    "receipts/new",
    "plan/.x.1-0.part",
    "files/.x.1-0.part",
    "publishing.json",
]


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("where", LINKS)
def test_no_link_is_followed(
    where: str, resume: bool, source: Path, left: Path, place: Path, tmp_path: Path
) -> None:
    """A link in any place, to a folder or to a file, also one that holds what would be found there."""
    staging = copied(left, place)
    link = staging / where if where else staging
    aim = tmp_path / "aim"
    if link.exists():
        link.rename(aim)
    else:
        precious(tmp_path).rename(aim)
    link.symlink_to(aim)
    before = picture(aim), picture(place)
    refused(lambda: convert(source, place, resume=resume))
    assert (picture(aim), picture(place)) == before


@pytest.mark.parametrize("part", ["plan", "receipts", "files"])
def test_links_are_not_followed_by_workers(
    part: str, source: Path, left: Path, place: Path, tmp_path: Path
) -> None:
    staging = copied(left, place)
    (staging / part).rename(tmp_path / "aim")
    (staging / part).symlink_to(tmp_path / "aim")
    before = picture(tmp_path / "aim")
    plan = str(staging / "plan")
    refused(lambda: stages.execute(plan))
    refused(lambda: stages.finish(plan))
    assert picture(tmp_path / "aim") == before


def test_links_among_the_parents_are_followed(source: Path, place: Path, tmp_path: Path) -> None:
    (tmp_path / "way").symlink_to(place)
    convert(source, tmp_path / "way")
    assert right(source, place)
    assert [p.name for p in place.iterdir()] == ["out"]


@pytest.mark.parametrize("where", ["files/model-00001-of-00006.safetensors", "plan/head.json"])
def test_a_file_with_another_name_is_not_written_to(
    where: str, source: Path, left: Path, place: Path, tmp_path: Path
) -> None:
    """A hard link: what is done to the staged file would be done to the other."""
    staging = copied(left, place)
    os.link(staging / where, tmp_path / "mine")
    before = (tmp_path / "mine").read_bytes()
    refused(lambda: convert(source, place))
    assert (tmp_path / "mine").read_bytes() == before
    assert not (place / "out").exists()


def test_a_part_is_not_written_into_a_file_with_another_name(
    source: Path, place: Path, tmp_path: Path
) -> None:
    ready = ckptcore.prepare(str(source), str(place / "out"), to="safetensors", max_file_size=9_000)
    (tmp_path / "thesis").write_bytes(b"years of work")
    joint = place / ".out.ckptcore" / "files" / f".{ready.files[0].path}.joint"
    joint.parent.mkdir(exist_ok=True)
    os.link(tmp_path / "thesis", joint)
    from ckptcore.conversion.pipeline import execute_part, parts

    settings = ckptcore.Settings(workers=1)
    (part, *_) = parts(ready.plan_uri, 0, 1 << 30, settings)
    refused(lambda: execute_part(ready.plan_uri, part, settings))
    assert (tmp_path / "thesis").read_bytes() == b"years of work"


# ----------------------------------------------------------------------- forged by ourselves


def forge(staging: Path, *, old: bool = False) -> None:
    """Other weights in every finished file, and receipts that fit them. old: receipts without stamps."""
    for name in (staging / "receipts").iterdir():
        form = json.loads(name.read_text())
        file = staging / "files" / form["path"]
        data = bytearray(file.read_bytes())
        data[-1000:] = bytes(1000)
        file.write_bytes(data)
        form["digest"] = blake3(bytes(data)).hexdigest()
        if old:
            form.pop("stamp", None)
        name.write_text(json.dumps(form))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("digest", [True, False])
def test_forged_files_with_receipts_are_written_anew(
    old: bool, digest: bool, source: Path, place: Path
) -> None:
    """The owner is right, as in an unpacked archive: the source decides."""
    forge(half_done(source, place, files=4), old=old)
    done = convert(source, place, settings=ckptcore.Settings(workers=1, digest=digest))
    assert right(source, place)
    assert not any(r.reused for r in done.files)


def test_a_copied_folder_goes_on(source: Path, place: Path) -> None:
    """Restored from a copy, stamps do not fit: the source proves the files, which are kept."""
    staging = half_done(source, place)
    shutil.copytree(staging, place / "copy")
    shutil.rmtree(staging)
    (place / "copy").rename(staging)
    inodes = {p.name: p.stat().st_ino for p in (staging / "files").iterdir()}
    done = convert(source, place)
    assert right(source, place)
    assert sum(r.reused for r in done.files) == 2
    assert {name: (place / "out" / name).stat().st_ino for name in inodes} == inodes


def test_a_forged_plan_is_planned_again(source: Path, place: Path) -> None:
    """Plans of files that read other bytes, below a head that bears the right digest."""
    staging = half_done(source, place, files=1)
    shutil.copy(staging / "plan/file-00002.plan", staging / "plan/file-00003.plan")
    head = json.loads((staging / "plan/head.json").read_text())
    head["files"][4]["path"] = "evil.safetensors"
    (staging / "plan/head.json").write_text(json.dumps(head))
    convert(source, place)
    assert right(source, place)
    assert not (place / "out" / "evil.safetensors").exists()


@pytest.mark.parametrize("where", ["evil.safetensors", "sub/evil", "sub/"])
def test_only_planned_names_are_published(where: str, source: Path, left: Path, place: Path) -> None:
    staging = copied(left, place)
    odd = staging / "files" / where
    odd.mkdir(parents=True) if where.endswith("/") else odd.parent.mkdir(exist_ok=True)
    if not where.endswith("/"):
        odd.write_bytes(b"evil")
    error = refused(lambda: convert(source, place), "output-mismatch")
    assert where.split("/")[0] in error.message
    assert odd.exists()
    assert not (place / "out").exists()
    convert(source, place, resume=False)
    assert right(source, place)


def test_what_comes_while_files_are_written_is_not_published(source: Path, place: Path) -> None:
    ready = ckptcore.prepare(str(source), str(place / "out"), to="safetensors", max_file_size=9_000)
    ckptcore.execute(ready, settings=ckptcore.Settings(workers=1))
    staged = place / ".out.ckptcore" / "files"
    (staged / "evil").write_bytes(b"evil")
    refused(lambda: stages.finish(ready.plan_uri), "output-mismatch")
    (staged / "evil").unlink()
    file = max(staged.glob("*.safetensors"))
    kept = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    refused(lambda: stages.finish(ready.plan_uri), "output-mismatch")
    assert not (place / "out").exists()
    ckptcore.execute(ready, settings=ckptcore.Settings(workers=1))
    stages.finish(ready.plan_uri)
    assert right(source, place)


def test_small_files_are_held_against_the_plan(source: Path, place: Path) -> None:
    ready = ckptcore.prepare(str(source), str(place / "out"), verb="export")
    ckptcore.execute(ready)
    staged = place / ".out.ckptcore" / "files" / "README.md"
    text = staged.read_text()
    staged.write_text(text.replace("ckptcore", "evilcore"))
    refused(lambda: stages.finish(ready.plan_uri), "output-mismatch")
    ckptcore.convert(str(source), str(place / "out"), verb="export")
    assert (place / "out" / "README.md").read_text() == text


def test_a_folder_of_ours_that_is_no_staging_folder_is_left(
    source: Path, place: Path, tmp_path: Path
) -> None:
    """Who may rename things in the parent can give a folder of ours the name."""
    precious(tmp_path).rename(place / ".out.ckptcore")
    before = picture(place)
    refused(lambda: convert(source, place, resume=False))
    assert picture(place) == before
    (place / ".out.ckptcore").rename(tmp_path / "files")
    (place / ".out.ckptcore").mkdir()
    (tmp_path / "files").rename(place / ".out.ckptcore" / "files")
    before = picture(place)
    refused(lambda: convert(source, place, resume=False))
    assert picture(place) == before


@root_only
def test_what_others_could_write_to_is_begun_anew(source: Path, place: Path) -> None:
    staging = half_done(source, place)
    staging.chmod(0o777)
    forge(staging)
    refused(lambda: stages.execute(str(staging / "plan")))
    done = convert(source, place)
    assert not any(r.reused for r in done.files)
    assert right(source, place)


def test_modes(source: Path, place: Path) -> None:
    """Nobody else works in the staging folder; what is published follows the umask."""
    old = os.umask(0o027)
    try:
        staging = half_done(source, place)
        assert stat.S_IMODE(staging.stat().st_mode) == 0o700
        convert(source, place)
    finally:
        os.umask(old)
    assert stat.S_IMODE((place / "out").stat().st_mode) == 0o750
    assert {stat.S_IMODE(p.stat().st_mode) for p in (place / "out").iterdir()} == {0o640}


@root_only
def test_a_mounted_folder_is_not_emptied(source: Path, left: Path, place: Path, tmp_path: Path) -> None:
    """Of the same file system, so that no device number tells; in a mount namespace of its own."""
    mine, staging = precious(tmp_path), copied(left, place)
    inside = staging / "files" / "sub"
    inside.mkdir()
    before = picture(mine)

    def mounted() -> None:
        libc = ctypes.CDLL(None)
        private, recursive, bind = 1 << 18, 1 << 14, 1 << 12
        allowed = (
            libc.unshare(0x20000) == 0 and libc.mount(b"none", b"/", None, private | recursive, None) == 0
        )
        if not allowed or libc.mount(bytes(mine), bytes(inside), None, bind, None):
            return
        assert (inside / "thesis").exists()
        refused(lambda: convert(source, place, resume=False))
        refused(lambda: convert(source, place))

    as_user(0, mounted)
    assert picture(mine) == before


# ----------------------------------------------------------------------- several trusted users


def as_user(uid: int, call: Callable[[], Any], **env: str) -> None:
    """Runs a call in a process of another user; fails as it fails."""
    here, there = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        try:
            os.environ.update(env)
            if uid:
                os.setgroups([])
                os.setgid(MINE)
                os.setuid(uid)
            call()
            there.send("")
        except BaseException:
            there.send(traceback.format_exc())

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    found = here.recv() if here.poll(60) else "no answer"
    process.kill()
    process.join()
    assert found == ""


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
def test_a_second_configured_user_goes_on(
    source: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of two users with one group: what one has finished the other keeps, without any key."""
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
def test_another_host_and_home_go_on(source: Path, shared: Path) -> None:
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
    """Root on a squashing mount: what it makes belongs to 65534."""
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


def test_a_folder_of_the_version_before_goes_on(source: Path, place: Path) -> None:
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


# ---------------------------------------------------------------------------------- the lock


def _in_time(call: Callable[[], Any], seconds: float = 120) -> CkptError:
    """The error of a call that must not hang; a hang ends this process's child, not the tests."""
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
def test_a_lock_that_is_none_is_refused(
    kind: str, source: Path, left: Path, place: Path, tmp_path: Path
) -> None:
    staging = copied(left, place)
    _lock_as(kind, staging, tmp_path)
    before = picture(staging)
    for call in (lambda: convert(source, place), lambda: stages.execute(str(staging / "plan"))):
        assert _in_time(call).code == "staging-foreign"
    assert picture(staging) == before
    assert not (tmp_path / "free").exists()


@pytest.mark.parametrize("kind", ["fifo", "file", "socket"])
def test_a_folder_that_is_none_is_refused(kind: str, source: Path, place: Path) -> None:
    at = place / ".out.ckptcore"
    {"fifo": os.mkfifo, "file": Path.touch, "socket": lambda p: os.mknod(p, stat.S_IFSOCK | 0o600)}[kind](at)
    assert _in_time(lambda: convert(source, place)).code == "staging-foreign"


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
def test_a_place_where_nothing_can_be_made_is_refused(where: str, source: Path, place: Path) -> None:
    (place / "dangling").symlink_to(place / "nowhere")
    (place / "circle").symlink_to(place / "circle")
    (place / "file").touch()
    before = sorted(p.name for p in place.iterdir())
    error = _in_time(lambda: ckptcore.convert(str(source), str(place / where), to="safetensors"))
    assert error.code == "destination-unwritable", error
    assert where.split("/")[0] in error.message
    assert sorted(p.name for p in place.iterdir()) == before


def test_runs_that_end_beside_each_other(source: Path, place: Path) -> None:
    """Processes that make, lock and remove one folder, again and again: none fails, nothing is left."""

    def run() -> None:
        code = 0
        for _ in range(150):
            staging = Staging(str(place / "out"))
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
    Staging(str(place / "out")).sweep_gone()
    assert list(place.iterdir()) == []


def test_a_folder_that_is_being_removed_is_nobodys(
    source: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened in the moment in which another run takes it away: half of it is gone, the lock too."""
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


def test_a_folder_that_is_swapped_is_not_worked_in(source: Path, place: Path, tmp_path: Path) -> None:
    """Who may rename in the parent swaps the folder behind an open run: it goes on in its own."""
    mine = precious(tmp_path)
    staging = Staging(str(place / "out"))
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
def test_another_output_is_not_taken_for_what_was_staged(
    moment: str, source: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may rename in the parent swaps the staging folder when it is published, or the output."""
    publish = importlib.import_module("ckptcore.conversion.local_publication")._move
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

    monkeypatch.setattr("ckptcore.conversion.local_publication._move", swapped)
    if moment == "behind":
        refused(lambda: convert(source, place))
        return
    convert(source, place)  # what is moved is what was staged, and not what bears its name by now
    assert right(source, place)
    assert list((place / ".out.ckptcore" / "files").iterdir()) == []


@root_only
def test_what_lies_beside_a_published_output_is_left(source: Path, left: Path, place: Path) -> None:
    convert(source, place)
    staging = copied(left, place)
    os.chown(staging, OTHER, OTHER)
    before = picture(staging)
    stages.tidy(str(place / "out"))
    assert picture(staging) == before


def test_the_command_tells_it(cli: Any, source: Path, left: Path, place: Path, tmp_path: Path) -> None:
    copied(left, tmp_path).rename(tmp_path / "aim")
    (place / ".out.ckptcore").symlink_to(tmp_path / "aim")
    done = cli("consolidate", source, place / "out", "--to", "safetensors", "--output", "json")
    assert done.code == 25, done
    assert done.json["error"]["code"] == "staging-foreign"
    assert "link" in done.json["error"]["message"]


# ------------------------------------------------------------------------------- saved plans


@root_only
@pytest.mark.parametrize("whose", ["", "request.json", "head.json", "source.json"])
def test_a_saved_plan_of_another_user_is_not_applied(whose: str, source: Path, place: Path) -> None:
    from ckptcore.conversion.saved_plan import load_request, plan_into
    from ckptcore.planning.request import Request

    request = Request(str(source), str(place / "out"), to="safetensors")
    plan_into(place / "plan", request, ckptcore.open(str(source)))
    assert load_request(place / "plan") == request
    for path in [place / "plan" / whose, *(place / "plan" / whose).rglob("*")]:
        os.lchown(path, OTHER, OTHER)
    before = picture(place)
    refused(lambda: load_request(place / "plan"))
    assert picture(place) == before


@root_only
def test_a_plan_is_not_saved_into_a_folder_of_another_user(source: Path, place: Path) -> None:
    from ckptcore.conversion.saved_plan import plan_into
    from ckptcore.planning.request import Request

    (place / "plan").mkdir()
    os.chown(place / "plan", OTHER, OTHER)
    request = Request(str(source), str(place / "out"), to="safetensors")
    refused(lambda: plan_into(place / "plan", request, ckptcore.open(str(source))))
    assert list((place / "plan").iterdir()) == []


@pytest.mark.parametrize("record", ["{", "", "null"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_was_replaced_is_kept_where_no_record_says_by_what(
    record: str, overwrite: bool, tmp_path: Path
) -> None:
    staging = tmp_path / ".out.ckptcore"
    (staging / "replaced").mkdir(parents=True)
    (staging / "replaced" / "precious").write_text("old")
    (staging / "lock").touch()
    (staging / "publishing.json").write_text(record)
    for resume in (True, False):
        with pytest.raises(StagingForeign, match="no record"):
            ckptcore.convert(str(SAMPLE), str(tmp_path / "out"), overwrite=overwrite, resume=resume)
        assert (staging / "replaced" / "precious").read_text() == "old"


@pytest.mark.parametrize("name", ["publishing.json", "replaces.json", "request.json"])
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_is_called_left_is_left(kind: str, name: str, tmp_path: Path) -> None:
    staging, precious = tmp_path / ".out.ckptcore", tmp_path / "precious"
    staging.mkdir()
    (staging / "lock").touch()
    precious.write_text("mine")
    if kind == "folder":
        (staging / name).mkdir()
        (staging / name / "mine").write_text("mine")
    else:
        (staging / name).symlink_to(precious)
    for _ in range(2):
        with pytest.raises(CkptError):
            ckptcore.convert(str(SAMPLE), str(tmp_path / "out"))
        assert os.path.lexists(staging / name)
        assert (staging / name / "mine" if kind == "folder" else precious).read_text() == "mine"
