"""Owners and folder trees: only trusted users' files are used, and nothing else is walked into or removed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptcore.errors import StagingForeign, UsageError
from ckptcore.store.below import open_above, open_below
from ckptcore.store.folder_tree import FOLDER, closing_fd, enter, look, remove_tree, walk
from ckptcore.store.owners import VARIABLE, Owners, kind_of

US = Owners(os.geteuid())
THEM = Owners(os.geteuid() + 1)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A descriptor of a folder: ``tree`` with a file, a folder and a link out of it; ``precious``."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").write_text("years of work")
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep" / "file").write_text("12")
    (tmp_path / "tree" / "file").write_text("1")
    with closing_fd(os.open(tmp_path, FOLDER)) as opened:
        yield opened


def test_who_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, " 4711,65534 ")
    found = Owners.of_process()
    assert os.geteuid() in found
    assert 4711 in found
    assert 4712 not in found
    assert (found.folder_mode, US.folder_mode) == (0o775, 0o700)
    assert US.strangers_may_write(0o720)
    assert not found.strangers_may_write(0o770)
    assert found.strangers_may_write(0o772)
    monkeypatch.setenv(VARIABLE, "nobody")
    with pytest.raises(UsageError, match="must be a list of user ids"):
        Owners.of_process()


def test_only_what_it_should_be_and_whose(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    seen = {path.name: path.lstat() for path in tmp_path.iterdir()}
    assert {name: kind_of(stat) for name, stat in seen.items()} == {
        "file": "a regular file",
        "folder": "a folder",
        "link": "a link",
        "pipe": "a FIFO",
    }
    US.require_file(seen["file"], "f")
    US.require_folder(seen["folder"], "f")
    US.require_only_name(seen["file"], "f")
    for name in ("folder", "link", "pipe"):
        with pytest.raises(StagingForeign, match="must be a regular file"):
            US.require_file(seen[name], name)
    with pytest.raises(StagingForeign, match="belongs to another user") as caught:
        THEM.require_file(seen["file"], "f")
    assert caught.value.values["uid"] == os.geteuid()
    os.link(tmp_path / "file", tmp_path / "twice")
    with pytest.raises(StagingForeign, match="2 links"):
        US.require_only_name((tmp_path / "file").stat(), "f")


def test_a_tree_is_walked_in_order(fd: int) -> None:
    with closing_fd(os.open("tree", FOLDER, dir_fd=fd)) as tree:
        assert [path for path, _ in walk(tree, "", "tree", US)] == ["deep/", "deep/file", "file"]
        os.symlink("../precious", "link", dir_fd=tree)
        with pytest.raises(StagingForeign, match="a link"):
            list(walk(tree, "", "tree", US))


def test_a_folder_is_entered_by_its_own_name_alone(fd: int) -> None:
    assert enter(fd, "none", "none", US) is None
    made = enter(fd, "none", "none", US, make=True)
    assert made is not None
    os.close(made)
    os.symlink("precious", "link", dir_fd=fd)
    with pytest.raises(StagingForeign, match="must be a folder"):
        enter(fd, "link", "link", US)
    with pytest.raises(StagingForeign, match="another user"):
        enter(fd, "tree", "tree", THEM)
    seen = look(fd, "link")
    assert seen is not None
    assert kind_of(seen) == "a link"
    assert look(fd, "nothing") is None


def test_a_tree_is_removed_and_no_link_in_it_followed(fd: int, tmp_path: Path) -> None:
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "tree" / "deep" / "thesis").symlink_to(tmp_path / "precious" / "thesis")
    with pytest.raises(StagingForeign):
        remove_tree(fd, "tree", "tree", THEM)
    assert (tmp_path / "tree" / "deep" / "file").exists()
    remove_tree(fd, "tree", "tree", US)
    remove_tree(fd, "tree", "tree", US)  # nothing is there: fine
    assert not (tmp_path / "tree").exists()
    assert (tmp_path / "precious" / "thesis").read_text() == "years of work"


def test_below_a_root_means_below_it(fd: int, tmp_path: Path) -> None:
    root = str(tmp_path)
    for uri, parent in ((f"{root}/tree", ""), (f"{root}/tree/deep", "tree"), (f"{root}/tree/file", "tree")):
        with closing_fd(open_above(root, uri)) as at:
            assert os.path.samestat(os.fstat(at), os.stat(tmp_path / parent)), uri
    (tmp_path / "link").symlink_to("tree")
    os.mkfifo(tmp_path / "pipe")
    wrong = {
        f"{root}/tree/../precious/thesis": "is not below",
        f"{root}x/y": "is not below",
        f"{root}/link/deep": "not a folder, or a link",
        f"{root}/pipe": "FIFO",
        f"{root}/link": "link",
        f"{root}/nothing": "No such file",
    }
    for uri, message in wrong.items():
        with pytest.raises(UsageError, match=message):
            open_above(root, uri)
    with pytest.raises(UsageError, match="reached through a link"):
        open_below(f"{root}/link", f"{root}/link/deep", "x")
