"""Local writers: a file appears completely or not at all, and several processes share one."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptcore.errors import Busy, DestinationUnwritable, DiskFull
from ckptcore.store import local_writer
from ckptcore.store.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_a_file_has_its_name_from_the_commit_on(store: LocalStore) -> None:
    writer = store.writer("deep/file", 6)
    writer.write(3, b"def")
    writer.write(0, b"abc")
    assert store.size("deep/file") is None
    (part,) = (name for name in store.list() if name != "deep/file")
    assert part.startswith("deep/.file.")
    assert part.endswith(".part")
    writer.commit()
    assert store.list() == {"deep/file": 6}
    assert store.read("deep/file", 0, 6) == b"abcdef"


def test_what_is_aborted_leaves_what_was_there(store: LocalStore) -> None:
    store.put("file", b"old")
    writer = store.writer("file", 3)
    writer.write(0, b"new")
    writer.abort()
    writer.abort()  # once is enough, twice does no harm
    assert store.list() == {"file": 3}
    assert store.read("file", 0, 3) == b"old"


def test_threads_write_their_ranges(store: LocalStore) -> None:
    pieces = {at: bytes([at % 251]) * 999 for at in range(0, 999 * 64, 999)}
    writer = store.writer("file", 999 * 64)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: writer.write(at, pieces[at]), reversed(pieces)))
    writer.commit()
    assert store.read("file", 0, 999 * 64) == b"".join(pieces.values())


def test_a_range_of_another_file_is_copied(store: LocalStore, tmp_path: Path) -> None:
    source = LocalStore(tmp_path / "source")
    source.put("a", bytes(range(256)) * 64)
    writer = store.writer("b", 100)
    if not writer.copy(source, "a", 7, 100, 0):  # a kernel or file system without the call
        writer.write(0, source.read("a", 7, 100))
    writer.commit()
    assert store.read("b", 0, 100) == (bytes(range(256)) * 64)[7:107]


def test_more_than_there_is_room_for_is_refused_at_once(store: LocalStore) -> None:
    with pytest.raises(DiskFull) as caught:
        store.writer("file", 1 << 61)
    assert caught.value.values["path"].endswith("file")
    assert store.list() == {}


def test_a_folder_that_cannot_be_made_is_an_error(store: LocalStore) -> None:
    store.put("file", b"x")
    with pytest.raises(DestinationUnwritable, match="cannot write"):
        store.put("file/below", b"y")


def test_several_write_one_file_and_one_gives_it_its_name(store: LocalStore) -> None:
    one, other = store.joint("part", 4), store.joint("part", 4)
    assert one is not None
    assert other is not None
    one.write(0, b"ab")
    other.write(2, b"cd")
    with pytest.raises(Busy):
        store.joint("part", 4, alone=True)
    one.commit()
    other.commit()
    last = store.joint("part", 4, alone=True)
    assert last is not None
    last.name("whole")
    assert store.list() == {"whole": 4}
    assert store.read("whole", 0, 4) == b"abcd"


def test_a_link_is_not_written_through(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"kept")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "part").symlink_to(tmp_path / "precious")
    with pytest.raises(DestinationUnwritable):
        store.joint("part", 4)
    store.put("part", b"ours")  # a rename replaces the link itself
    assert (tmp_path / "precious").read_bytes() == b"kept"
    assert not (tmp_path / "store" / "part").is_symlink()


def test_a_file_has_the_mode_that_the_umask_leaves(store: LocalStore) -> None:
    before = os.umask(0o027)
    try:
        store.put("file", b"x")
    finally:
        os.umask(before)
    assert (Path(store.url) / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("number", "lacks", "step"),
    [
        (errno.ENOSPC, None, "free space there"),
        (errno.EDQUOT, "quota", "free space of this user's quota"),
        (errno.EFBIG, "size", "raise `ulimit -f`"),
    ],
)
def test_what_a_full_disk_lacks(number: int, lacks: str | None, step: str, tmp_path: Path) -> None:
    error = local_writer.unwritable(str(tmp_path / "no" / "file"), OSError(number, os.strerror(number)), 10)
    assert (error.code, error.exit_code) == ("disk-full", 10)
    assert error.values.get("lacks") == lacks
    assert error.hint.startswith(step)
    assert ("free" in error.values) == (lacks is None)


def test_a_file_system_without_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_writer, "free_room", lambda folder: (1 << 30, 0))
    error = local_writer.unwritable(str(tmp_path / "file"), OSError(errno.ENOSPC, "No space left"), 10)
    assert error.message.endswith("has no inode left for another file")
    assert error.hint.startswith("remove files there, however small")
    assert error.values["lacks"] == "inodes"
