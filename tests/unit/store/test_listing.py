"""Listing: every file is seen once, and whatever is written shows in the stamps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from ckptcore.errors import SourceUnreadable, UsageError
from ckptcore.store import open_store
from ckptcore.store.inventory import FILE, FOLDER, LINK, SPECIAL, differs, take
from ckptcore.store.inventory import look as look_at
from ckptcore.store.listing import changed, everything_at, newest, stamp_of, survey


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder with three files, here or in an object store."""
    url = str(tmp_path / "place") if request.param == "local" else f"memory://{uuid4().hex}"
    store = open_store(url)
    for name in ("b", "a", "deep/c"):
        store.put(name, name.encode())
    yield url
    store.remove_all()


def test_every_file_is_seen(place: str) -> None:
    found = survey(place)
    assert [(name, seen.nbytes) for name, seen in found.items()] == [("a", 1), ("b", 1), ("deep/c", 6)]
    assert everything_at(place) == found
    assert list(everything_at(f"{place}/a")) == [""]
    assert newest(found) is not None
    assert newest({}) is None
    with pytest.raises(UsageError, match="more than 2 files"):
        survey(place, max_files=2)
    with pytest.raises(SourceUnreadable):
        everything_at(f"{place}/nothing")


def test_what_came_went_or_was_written_is_named(place: str) -> None:
    store, before = open_store(place), survey(place)
    assert changed(before, survey(place)) is None
    store.put("b", b"B")
    written = survey(place)
    assert changed(before, written) == "b"
    assert stamp_of(written) != stamp_of(before)
    store.put("aa", b"")
    assert changed(written, survey(place)) == "aa"
    store.remove("aa")
    store.remove("deep/c")
    assert changed(written, survey(place)) == "deep/c"


def test_an_inventory_tells_one_place_from_another(place: str) -> None:
    before = take(place)
    assert [name for name, entry in before.items() if entry.kind == FILE] == ["a", "b", "deep/c"]
    assert differs(before, take(place)) is None
    open_store(place).put("b", b"BB")
    assert differs(before, take(place)) == "b"
    assert take(f"{place}/nothing") == {}


def test_an_inventory_names_each_kind_and_follows_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("x")
    (tmp_path / "link").symlink_to("folder")
    os.mkfifo(tmp_path / "pipe")
    found = {name: entry.kind for name, entry in take(str(tmp_path)).items()}
    assert found == {"": FOLDER, "folder": FOLDER, "folder/file": FILE, "link": LINK, "pipe": SPECIAL}
    assert look_at(str(tmp_path / "link")) == take(str(tmp_path))["link"]
    assert look_at(str(tmp_path / "nothing")) is None
    assert look_at(str(tmp_path / "folder" / "file" / "below")) is None


def test_a_listing_follows_links_to_files_alone(tmp_path: Path) -> None:
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "file").write_text("12345")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").symlink_to("../away/file")
    (folder / "deep").symlink_to("../away")
    (folder / "dangling").symlink_to("nowhere")
    assert {name: seen.nbytes for name, seen in survey(str(folder)).items()} == {"file": 5}


def test_an_object_in_a_folder_s_name_is_no_file_of_it() -> None:
    """Some tools leave one; a checkpoint that is one object is its own only file."""
    fs, name = fsspec.filesystem("memory"), uuid4().hex
    fs.pipe_file(f"/{name}/file", b"1")
    assert list(everything_at(f"memory://{name}")) == ["file"]
    assert list(everything_at(f"memory://{name}/file")) == [""]
    fs.rm(f"/{name}", recursive=True)
