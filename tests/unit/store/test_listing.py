"""Listing: every file is seen once, and whatever is written shows in the stamps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import fault_s3
import fsspec
import pytest

from ckptcore.errors import SourceUnreadable, StorageTrouble, UsageError
from ckptcore.store import open_source_store, open_store
from ckptcore.store.file_status import FileStatus, NameKind, difference
from ckptcore.store.listing import (
    contents,
    folder_at,
    list_destination,
    names_at,
    newest,
    nothing_at,
    stamp_of,
    survey,
    survey_around,
)
from ckptcore.store.local_listing import look


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
    assert {name: status for name, status in contents(place).items() if not name.endswith("/")} == found
    assert list(contents(f"{place}/a")) == [""]
    assert newest(found) is not None
    assert newest({}) is None
    with pytest.raises(UsageError, match="more than 2 files"):
        survey(place, max_files=2)
    with pytest.raises(SourceUnreadable):
        contents(f"{place}/nothing")


def test_what_came_went_or_was_written_is_named(place: str) -> None:
    store, before = open_store(place), survey(place)
    assert difference(before, survey(place)) is None
    store.put("b", b"B")
    written = survey(place)
    assert difference(before, written) == "b"
    assert stamp_of(written) != stamp_of(before)
    store.put("aa", b"")
    assert difference(written, survey(place)) == "aa"
    store.remove("aa")
    store.remove("deep/c")
    assert difference(written, survey(place)) == "deep/c"


def test_an_inventory_tells_one_place_from_another(place: str) -> None:
    before = list_destination(place)
    files = [name for name, status in before.items() if status.kind is NameKind.FILE]
    assert files == ["a", "b", "deep/c"]
    assert difference(before, list_destination(place)) is None
    open_store(place).put("b", b"BB")
    assert difference(before, list_destination(place)) == "b"
    assert list_destination(f"{place}/nothing") == {}


def test_an_inventory_names_each_kind_and_follows_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("x")
    (tmp_path / "link").symlink_to("folder")
    os.mkfifo(tmp_path / "pipe")
    kinds = {name: status.kind.value for name, status in list_destination(str(tmp_path)).items()}
    assert kinds == {"": "folder", "folder": "folder", "folder/file": "file", "link": "link", "pipe": "FIFO"}
    assert look(str(tmp_path / "link")) == list_destination(str(tmp_path))["link"]
    assert look(str(tmp_path / "nothing")) is None
    assert look(str(tmp_path / "folder" / "file" / "below")) is None


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
    assert list(contents(f"memory://{name}")) == ["file"]
    assert list(contents(f"memory://{name}/file")) == [""]
    fs.rm(f"/{name}", recursive=True)


def test_a_status_keeps_its_json_form(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for status in list_destination(str(tmp_path)).values():
        assert FileStatus.of_list(status.as_list()) == status
    with pytest.raises(ValueError, match="nothing"):
        FileStatus.of_list(["nothing", 1, "", None, None, None, None, None])


LISTINGS = {
    "a conversion's source": lambda url: open_source_store(url).stamped(),
    "a conversion's destination": list_destination,
    "what an interrupted run removed": nothing_at,
    "a root of a sweep": survey,
    "a root of a sweep with known steps": lambda url: survey_around(url, {"step-1"}),
    "the config of an export": folder_at,
    "records beside a place": names_at,
    "everything that a deletion removes": contents,
}


@pytest.mark.parametrize("entry", LISTINGS)
def test_every_listing_of_s3_ends_with_the_one_deadline(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that refuses every listing: one layer repeats the requests, and stops in time."""
    monkeypatch.setenv("CKPTCORE_REQUEST_DEADLINE", "0.5")
    with fault_s3.serving() as server:
        server.fault("ListObjectsV2", times=10**6)
        # On a busy machine the first answer may come as late as the deadline, and nothing is repeated.
        with pytest.raises(StorageTrouble, match="the store answered 503") as raised:
            LISTINGS[entry]("s3://bucket/run")
        asked = [row for row in server.log if row[-1] == "ListObjectsV2"]
        assert len(asked) == raised.value.values["attempts"]


def test_a_level_of_a_bucket_is_listed_by_itself() -> None:
    with fault_s3.serving():
        store = open_store("s3://bucket/run")
        for name in ("a", "deep/b", "deep/er/c", "step-1/d"):
            store.put(name, b"1")
        assert folder_at("s3://bucket/run").folders == ("deep", "step-1")
        assert list(folder_at("s3://bucket/run").files) == ["a"]
        assert names_at("s3://bucket/run/deep") == ("b", "er")
        files, left_out = survey_around("s3://bucket/run", {"step-1", "gone"})
        assert (list(files), left_out) == (["a", "deep/b", "deep/er/c"], {"step-1"})
        assert list(contents("s3://bucket/run/deep/b")) == [""]
        assert names_at("s3://bucket/nothing") == ()
        assert nothing_at("s3://bucket/nothing")
