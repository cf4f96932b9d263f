"""Test that foreign files in a staging folder are not used, removed or published."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from blake3 import blake3
from staging_folders import (
    OTHER,
    SAMPLE,
    as_user,
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
from ckptcore.errors import CkptError, StagingForeign

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
    """Whether all of it or one file is another user's, and whether its bytes are correct or not."""
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
    """In a sticky folder such as /tmp: forged weights with matching receipts, and one more file."""
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
    """Names of folders that are being removed: another user's, one with foreign files, and a link."""
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
    """A link at any place, to a folder or to a file, also to one with the expected content."""
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
    """A hard link: writing the staged file would write the other file."""
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
    """Write other weights into every finished file, with matching receipts. old: receipts without stamps."""
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
def test_forged_files_with_receipts_are_rewritten(old: bool, digest: bool, source: Path, place: Path) -> None:
    """The owner is correct, as in an unpacked archive: the source decides."""
    forge(half_done(source, place, files=4), old=old)
    done = convert(source, place, settings=ckptcore.Settings(workers=1, digest=digest))
    assert right(source, place)
    assert not any(r.reused for r in done.files)


def test_a_copied_folder_is_resumed(source: Path, place: Path) -> None:
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


def test_a_forged_plan_is_replanned(source: Path, place: Path) -> None:
    """File plans that read other bytes, below a head with the correct digest."""
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


def test_files_that_appear_meanwhile_are_not_published(source: Path, place: Path) -> None:
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


def test_small_files_are_compared_with_the_plan(source: Path, place: Path) -> None:
    ready = ckptcore.prepare(str(source), str(place / "out"), verb="export")
    ckptcore.execute(ready)
    staged = place / ".out.ckptcore" / "files" / "README.md"
    text = staged.read_text()
    staged.write_text(text.replace("ckptcore", "evilcore"))
    refused(lambda: stages.finish(ready.plan_uri), "output-mismatch")
    ckptcore.convert(str(source), str(place / "out"), verb="export")
    assert (place / "out" / "README.md").read_text() == text


def test_a_folder_of_ours_that_is_not_a_staging_folder_is_kept(
    source: Path, place: Path, tmp_path: Path
) -> None:
    """A user who may rename in the parent can give a folder of ours the name."""
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
def test_a_folder_that_others_could_write_to_is_emptied(source: Path, place: Path) -> None:
    staging = half_done(source, place)
    staging.chmod(0o777)
    forge(staging)
    refused(lambda: stages.execute(str(staging / "plan")))
    done = convert(source, place)
    assert not any(r.reused for r in done.files)
    assert right(source, place)


def test_modes(source: Path, place: Path) -> None:
    """Only its user works in the staging folder; published files follow the umask."""
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
    """A mount of the same file system, with an equal device number; in a mount namespace of its own."""
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


# ------------------------------------------------------------------------------- saved plans


@root_only
@pytest.mark.parametrize("whose", ["", "request.json", "head.json", "source.json"])
def test_a_saved_plan_of_another_user_is_not_applied(whose: str, source: Path, place: Path) -> None:
    from ckptcore.conversion.staging.staged_plan import load_request, plan_into
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
    from ckptcore.conversion.staging.staged_plan import plan_into
    from ckptcore.planning.request import Request

    (place / "plan").mkdir()
    os.chown(place / "plan", OTHER, OTHER)
    request = Request(str(source), str(place / "out"), to="safetensors")
    refused(lambda: plan_into(place / "plan", request, ckptcore.open(str(source))))
    assert list((place / "plan").iterdir()) == []


@pytest.mark.parametrize("record", ["{", "", "null"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_old_output_without_a_record_is_kept(record: str, overwrite: bool, tmp_path: Path) -> None:
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
