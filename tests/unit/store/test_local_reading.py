"""Reading local files: exact or an error, never out of the folder, and a write is always detected."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from ckptcore.errors import SourceUnreadable, UnsafeContent, UsageError
from ckptcore.store import inner_path, local_path, open_store
from ckptcore.store.file_status import YOUNG
from ckptcore.store.local import LocalStore, linked_folder


def test_reads_are_exact_or_an_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("file", b"0123456789")
    into = bytearray(4)
    store.read_into("file", 3, memoryview(into))
    assert bytes(into) == store.read("file", 3, 4) == b"3456"
    assert store.read("file", 10, 0) == b""
    for read in (lambda: store.read("file", 7, 4), lambda: store.read_into("file", 7, memoryview(into))):
        with pytest.raises(
            SourceUnreadable, match=r"ends early: 4 bytes needed at offset 7 \(got 3\)"
        ) as caught:
            read()
        assert caught.value.values["file"] == "file"


def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store._max_open = 3
    for number in range(9):
        store.put(str(number), bytes([number]))
    for _ in range(2):
        assert [store.read(str(n), 0, 1)[0] for n in range(9)] == list(range(9))
    assert open_below(tmp_path) == 3
    store.close()
    assert open_below(tmp_path) == 0


def open_below(folder: Path) -> int:
    """How many files of a folder this process has open."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found += os.readlink(f"/proc/self/fd/{fd}").startswith(f"{folder}/")
    return found


def test_links_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret")
    (folder / "file").write_text("ours")
    (folder / "inside").symlink_to("file")
    (folder / "outside").symlink_to(tmp_path / "secret")
    store = LocalStore(folder)
    assert store.read("inside", 0, 4) == b"ours"
    with pytest.raises(UnsafeContent, match="leaves the checkpoint's folder"):
        store.read("outside", 0, 6)


def test_the_hub_s_cache_keeps_its_files_beside_the_snapshots(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a" / "snapshots" / "cafe", tmp_path / "models--a" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "beef").write_text("weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/beef")
    (snapshot / "other").symlink_to("../../elsewhere")
    (tmp_path / "models--a" / "elsewhere").write_text("no blob")
    (snapshot / "step-10").mkdir()
    (snapshot / "step-10" / ".metadata").symlink_to("../../../blobs/beef")
    assert LocalStore(snapshot / "step-10").read(".metadata", 0, 7) == b"weights"
    store = LocalStore(snapshot)
    assert store.read("model.safetensors", 0, 7) == b"weights"
    with pytest.raises(UnsafeContent):
        store.read("other", 0, 2)


def linked(folder: Path, view: Path) -> None:
    """Make a view of a folder, of links alone."""
    for path in folder.rglob("*"):
        if path.is_file():
            name = view / path.relative_to(folder)
            name.parent.mkdir(parents=True, exist_ok=True)
            name.symlink_to(path)


def test_a_folder_of_links_alone_is_the_folder_that_they_lead_to(tmp_path: Path) -> None:
    step, view = tmp_path / "step_10", tmp_path / "view"
    (step / "below").mkdir(parents=True)
    (step / ".metadata").write_text("metadata")
    (step / "below" / "data").write_text("values")
    linked(step, view)
    store = LocalStore(view)
    assert store.list() == {".metadata": 8, "below/data": 6}
    assert store.read("below/data", 0, 6) == b"values"
    assert linked_folder(str(view)) == str(step)
    assert linked_folder(str(step)) is None
    assert linked_folder(str(tmp_path / "nothing")) is None


@pytest.mark.parametrize("odd", ["a file", "another name", "two folders", "an outer link", "another's link"])
def test_a_folder_with_anything_but_such_links_is_refused(odd: str, tmp_path: Path) -> None:
    """Each of these lets who made the folder choose what is read from this machine."""
    step, view = tmp_path / "step_10", tmp_path / "view"
    step.mkdir()
    (step / ".metadata").write_text("metadata")
    (step / "data").write_text("values")
    linked(step, view)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secret").write_text("secret")
    if odd == "a file":
        (view / "config.json").write_text("{}")
    elif odd == "another name":
        (view / "named").symlink_to(step / "data")
    elif odd == "two folders":
        (view / "secret").symlink_to(tmp_path / "other" / "secret")
    elif odd == "an outer link":
        (step / "data").unlink()
        (step / "data").symlink_to(tmp_path / "other" / "secret")
    elif os.geteuid():
        pytest.skip("only root gives a link to another user")
    else:
        os.chown(view / "data", 65534, 65534, follow_symlinks=False)
    with pytest.raises(UnsafeContent, match="leaves the checkpoint's folder"):
        LocalStore(view).read("data", 0, 6)


def test_what_is_no_file_does_not_hang_a_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    store = LocalStore(tmp_path)
    assert store.size("pipe") is None
    assert store.look("pipe") is None
    with pytest.raises(SourceUnreadable, match="not a regular file"):
        store.read("pipe", 0, 1)


def test_a_file_that_was_just_written_has_no_time_yet(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("file", b"one")
    assert store.ctime("file") == YOUNG
    before = store.stamp("file")
    os.utime(tmp_path / "file", ns=(0, 1_000_000_000))
    assert store.stamp("file") != before
    assert store.stamp("nothing") is None
    assert store.ctime("nothing") is None


def test_a_listing_is_sorted_and_of_a_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for name in ("b", "a/z", "a/b/c"):
        store.put(name, name.encode())
    (tmp_path / "dangling").symlink_to("nowhere")
    assert store.list() == {"a/b/c": 5, "a/z": 3, "b": 1}
    for path, message in ((tmp_path / "b", "is a file, not a folder"), (tmp_path / "c", "does not exist")):
        with pytest.raises(SourceUnreadable, match=message):
            LocalStore(path).list()


def test_files_are_copied_between_stores(tmp_path: Path) -> None:
    store, other = LocalStore(tmp_path / "one"), LocalStore(tmp_path / "other")
    store.put("file", bytes(100_000))
    store.copy_to("file", other, "deep/copy")
    assert other.list() == {"deep/copy": 100_000}
    assert (other.free_bytes() or 0) > 0
    store.remove_all()
    assert not (tmp_path / "one").exists()
    store.remove_all()  # nothing is there: fine


@pytest.mark.parametrize("path", ["", "/a", "a/../b", "./a", "a//b", "a\\b", "a\0b", "s3://a"])
def test_paths_from_a_checkpoint_are_plain(path: str) -> None:
    with pytest.raises(UnsafeContent):
        inner_path(path, origin="the index")


def test_urls_of_this_machine() -> None:
    for url in ("/a/b", "file:///a/b", "local:///a/b", "file://localhost/a/b"):
        assert local_path(url) == Path("/a/b"), url
    assert local_path("s3://a/b") is None
    assert local_path("zip://x::/a") is None
    with pytest.raises(UsageError):
        open_store("no-such-scheme://a")
