"""Test publishing on file systems without hard links, and without renames that refuse to replace."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.errors import DestinationExists, DestinationUnwritable
from ckptcore.store import folder_tree
from ckptcore.store.folder_tree import DirEntryAt, rename_file_new

NO_LINKS = [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file({"w": torch.arange(6.0)}, tmp_path / "source.safetensors")
    return tmp_path / "source.safetensors"


def refuse_links(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refused)


def refuse_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system answers whose rename has no flags."""
    monkeypatch.setattr(folder_tree, "_renameat2", lambda *_: errno.EINVAL)


@pytest.fixture(params=[True, False], ids=["flags", "no flags"])
def flags(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        refuse_flags(monkeypatch)
    return bool(request.param)


@pytest.mark.alike(3)
@pytest.mark.parametrize("number", NO_LINKS, ids=[errno.errorcode[n] for n in NO_LINKS])
def test_one_file_is_published(
    number: int, flags: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_links(monkeypatch, number)
    out = tmp_path / "place" / "out.safetensors"
    for overwrite in (False, True):
        ckptcore.convert(str(source), str(out), overwrite=overwrite)
        assert torch.equal(load_file(out)["w"], torch.arange(6.0))
        save_file({"w": torch.zeros(2)}, source)
        assert os.listdir(out.parent) == ["out.safetensors"]
        save_file({"w": torch.arange(6.0)}, source)


def test_a_folder_is_published(
    flags: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_links(monkeypatch, errno.EPERM)
    for overwrite in (False, True):
        ckptcore.convert(str(source), str(tmp_path / "place" / "out"), to="dcp", overwrite=overwrite)
        assert os.listdir(tmp_path / "place") == ["out"]


def test_a_file_that_appeared_is_kept(
    flags: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "place" / "out.safetensors"
    ready = ckptcore.prepare(str(source), str(out))
    ckptcore.execute(ready)

    def refused(*_: Any, **__: Any) -> None:
        out.write_bytes(b"another's")
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(DestinationExists, match="appeared meanwhile"):
        ckptcore.publish(ready)
    assert out.read_bytes() == b"another's"


def test_other_failures_stay_errors(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_links(monkeypatch, errno.EIO)
    with pytest.raises(DestinationUnwritable):
        ckptcore.convert(str(source), str(tmp_path / "out.safetensors"))
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("what", ["replaced", "written"])
def test_a_name_taken_from_the_empty_file_is_not_replaced(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_flags(monkeypatch)
    (tmp_path / "old").write_bytes(b"ours")
    new = tmp_path / "new"
    really = os.fstat

    def fstat(fd: int) -> os.stat_result:
        seen = really(fd)
        if what == "replaced":
            (tmp_path / "other").write_bytes(b"")
            (tmp_path / "other").replace(new)
        else:
            new.write_bytes(b"another's")
        return seen

    at = os.open(tmp_path, os.O_RDONLY)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", fstat)
            with pytest.raises(FileExistsError):
                rename_file_new(DirEntryAt(at, "old", "old"), DirEntryAt(at, "new", "new"))
    finally:
        os.close(at)
    assert (tmp_path / "old").read_bytes() == b"ours"
    assert new.read_bytes() == (b"" if what == "replaced" else b"another's")


def test_a_move_that_fails_leaves_no_empty_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_flags(monkeypatch)
    at = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(FileNotFoundError):
            rename_file_new(DirEntryAt(at, "missing", "missing"), DirEntryAt(at, "new", "new"))
    finally:
        os.close(at)
    assert not os.listdir(tmp_path)
