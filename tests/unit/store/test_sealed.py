"""Sealed folders: a run sees what it put there, and refuses what another user did."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ckptcore.core.byte_ledger import ByteLedger
from ckptcore.errors import SourceUnreadable, StagingForeign, UnsafeContent
from ckptcore.store.local import LocalStore
from ckptcore.store.sealed import Names, SealedFolder, SealedStore, refuse_odd
from ckptcore.store.subfolder import RecordingStore, SubStore


@pytest.fixture
def home(tmp_path: Path) -> SealedFolder:
    folder = SealedFolder(tmp_path / "parent" / "home")
    assert folder.open() is None
    assert folder.open(make=True) is not None
    return folder


def test_a_folder_is_made_for_its_user_alone(home: SealedFolder) -> None:
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    assert not home.strangers_may_write()
    home.path.chmod(0o777)
    assert home.strangers_may_write()
    assert home.anybody_may_write()
    assert home.shut_out()
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700


def test_an_open_folder_stays_the_same(home: SealedFolder, tmp_path: Path) -> None:
    store = SealedStore(home, "files")
    store.put("a", b"ours")
    home.path.rename(tmp_path / "away")
    (tmp_path / "parent" / "home").mkdir()
    assert not home.in_place()
    assert store.read("a", 0, 4) == b"ours"
    home.close()
    assert not store.is_there(), "what is opened next is the other folder"


def test_files_come_and_go(home: SealedFolder) -> None:
    store = SealedStore(home, "files")
    with pytest.raises(SourceUnreadable, match="does not exist"):
        store.list()
    store.put("deep/a", b"12")
    store.put("b", b"1")
    inode = (home.path / "files" / "b").stat().st_ino
    store.put("b", b"1")
    assert (home.path / "files" / "b").stat().st_ino == inode, "what holds the same is left"
    assert store.list() == {"b": 1, "deep/a": 2}
    assert [path for path, _ in store.entries()] == ["b", "deep/", "deep/a"]
    assert store.stamp("b") != store.stamp("deep/a")
    assert store.stamp("nothing") is None
    store.remove("b")
    store.remove("b")
    assert store.size("b") is None
    store.remove_all()
    assert not (home.path / "files").exists()


@pytest.mark.parametrize("name", ["../out", "/tmp/nowhere/out", "a/../../b", ""])
def test_no_name_leaves_the_folder(home: SealedFolder, name: str) -> None:
    store = SealedStore(home)
    for call in (lambda: store.read(name, 0, 1), lambda: store.size(name), lambda: store.remove(name)):
        with pytest.raises(UnsafeContent):
            call()


def test_strange_things_are_neither_read_nor_written_nor_removed(home: SealedFolder, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("years")
    store = SealedStore(home)
    for name in ("link", "pipe", "twice"):
        store.put(name, b"ours!")
        (home.path / name).unlink()
    (home.path / "link").symlink_to(tmp_path / "precious")
    os.mkfifo(home.path / "pipe")
    os.link(tmp_path / "precious", home.path / "twice")
    for name in ("link", "pipe", "twice"):
        with pytest.raises(StagingForeign):
            store.read(name, 0, 5)
        with pytest.raises(StagingForeign):
            store.joint(name, 5)
    with pytest.raises(StagingForeign):
        store.remove("link")
    with pytest.raises(StagingForeign):
        store.list()
    assert (tmp_path / "precious").read_text() == "years"


def test_a_folder_behind_a_link_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to("real")
    with pytest.raises(StagingForeign, match="must be a folder"):
        SealedFolder(tmp_path / "home").open(make=True)


def test_a_folder_with_strange_names_is_refused(tmp_path: Path) -> None:
    def foreign(path: Path, names: Names) -> None:
        refuse_odd(path, [name for name in names if name != "ours"])

    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "ours").touch()
    assert SealedFolder(tmp_path / "home", foreign=foreign).open() is not None
    (tmp_path / "home" / "theirs").touch()
    with pytest.raises(StagingForeign, match="theirs"):
        SealedFolder(tmp_path / "home", foreign=foreign).open()


def test_a_removed_folder_is_gone_at_once(home: SealedFolder) -> None:
    SealedStore(home, "files").put("a", b"x")
    with home.beside() as (_, names):
        assert names == ["home"]
    home.remove(".gone")
    assert list(home.path.parent.iterdir()) == []
    home.remove(".gone")  # nothing is held: fine


def test_a_store_in_a_store(tmp_path: Path) -> None:
    """A subfolder is read as if it were the whole, and what was read of it is noted."""
    store = LocalStore(tmp_path)
    store.put("outer", b"o")
    store.put("sub/a", b"abc")
    below, ledger = SubStore(store, "sub/"), ByteLedger()
    assert below.list() == {"a": 3}
    assert (below.size("a"), below.size("outer")) == (3, None)
    assert below.url == f"{tmp_path}/sub"
    assert below.stamp("a") == store.stamp("sub/a")
    noting = RecordingStore(below, ledger)
    assert noting.size("a") == 3
    assert ledger.read == set(), "looking is not reading"
    into = bytearray(2)
    noting.read_into("a", 1, memoryview(into))
    assert bytes(into) == noting.read("a", 1, 2) == b"bc"
    assert ledger.read == {"a"}
    below.close()
    assert store.read("outer", 0, 1) == b"o"
