"""What is at a URL: a folder, one file, nothing; and a folder below another one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.errors import SourceUnreadable, UnknownFormat
from ckptcore.formats import open_source
from ckptcore.store import open_store

TENSORS = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder with a checkpoint in a folder and one in a file, on a disk and in an object store."""
    (tmp_path / "here" / "deep").mkdir(parents=True)
    save_file(TENSORS, tmp_path / "here" / "deep" / "model.safetensors")
    shutil.copy(tmp_path / "here" / "deep" / "model.safetensors", tmp_path / "here" / "alone.safetensors")
    if request.param == "local":
        yield str(tmp_path / "here")
        return
    place = f"memory://{tmp_path.name}"
    fs, path = fsspec.url_to_fs(f"{place}/here")
    fs.put(str(tmp_path / "here"), path, recursive=True)
    yield f"{place}/here"
    open_store(place).remove_all()


def test_folders_and_files(root: str) -> None:
    for url in (f"{root}/deep", f"{root}/deep/", f"{root}/alone.safetensors"):
        manifest = ckptcore.open(url)
        for name, value in TENSORS.items():
            assert torch.equal(ckptcore.read(manifest, name), value), url
    source = open_source(f"{root}/alone.safetensors")
    assert (source.name, list(source.listing)) == ("alone.safetensors", ["alone.safetensors"])
    assert sorted(open_source(root).listing) == ["alone.safetensors", "deep/model.safetensors"]


def test_a_folder_below_another(root: str) -> None:
    """The same files under shorter names: sizes, stamps and bytes are those of the outer store."""
    full = open_source(root)
    below = full.below("deep")
    name, inside = "model.safetensors", "deep/model.safetensors"
    assert below.listing == below.store.list() == {name: full.listing[inside]}
    assert below.store.size(name) == full.store.size(inside) == full.listing[inside]
    assert below.store.size("alone.safetensors") is None
    assert below.store.stamp(name) == full.store.stamp(inside) is not None
    into = bytearray(16)
    below.store.read_into(name, 8, memoryview(into))
    assert bytes(into) == below.store.read(name, 8, 16) == full.store.read(inside, 8, 16)
    assert below.store.url == f"{full.store.url.rstrip('/')}/deep"
    below.store.close()  # type: ignore[attr-defined]
    assert full.store.size(inside)  # what it reads from stays open


def test_missing_sources(root: str) -> None:
    with pytest.raises((SourceUnreadable, UnknownFormat)) as caught:
        ckptcore.open(f"{root}/nothing.safetensors")
    assert "nothing" in caught.value.message
    assert caught.value.hint


def test_names_that_are_too_long(tmp_path: Path) -> None:
    with pytest.raises(SourceUnreadable, match="cannot open"):
        open_source(str(tmp_path / ("n" * 300)))


def test_special_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(SourceUnreadable, match=r"is neither a folder nor a regular file$"):
        open_source(str(tmp_path / "pipe.pt"))


@pytest.mark.parametrize("name", ["none", "none.pt", "none/step-3", "dangling"])
def test_what_does_not_exist_is_called_so(tmp_path: Path, name: str) -> None:
    (tmp_path / "dangling").symlink_to("none")
    with pytest.raises(SourceUnreadable, match=f"{name} does not exist$"):
        open_source(str(tmp_path / name))
