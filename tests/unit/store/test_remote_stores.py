"""Remote stores: reading, staging and publishing work through every fsspec file system alike."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from unittest import mock

import fsspec
import pytest
from paths import FIXTURES

import ckptcore
from ckptcore.errors import DestinationExists, SourceUnreadable, StorageTrouble, UsageError
from ckptcore.store import open_store

SAMPLE = FIXTURES / "torch" / "dcp_torchtitan_like_4r" / "ckpt"


def names(url: str) -> list[str]:
    return list(open_store(url).list())


def content(url: str) -> dict[str, bytes]:
    store = open_store(url)
    return {name: store.read(name, 0, size) for name, size in store.list().items()}


def test_at_the_top_of_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name right behind the scheme has the scheme as its parent, not a local folder of that name."""
    monkeypatch.chdir(tmp_path)
    for name in ("top", "top.safetensors"):
        ckptcore.convert(str(SAMPLE), f"memory://{name}")
        try:
            assert ckptcore.open(f"memory://{name}").tensors, name
        finally:
            fsspec.filesystem("memory").rm(f"/{name}", recursive=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.alike(1)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # aiobotocore leaves its session to the exit
def test_export_equals_the_local_one(root: str, tmp_path: Path) -> None:
    options = {"verb": "export", "max_file_size": 2_000}
    ckptcore.convert(f"{root}/source/step-3", f"{root}/out", **options)
    ckptcore.convert(str(SAMPLE), str(tmp_path / "out"), **options)
    far, near = content(f"{root}/out"), content(str(tmp_path / "out"))
    assert sorted(far) == sorted(near)
    assert len(far) > 3
    far.pop("README.md"), near.pop("README.md")  # it names the source
    assert far == near
    kept = [n for n in names(root) if not n.startswith("source/")]
    assert kept == ["out/README.md", *(f"out/{n}" for n in sorted(far))]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_versions_are_those_of_the_listing(s3: str, tmp_path: Path) -> None:
    """What a listing and a look at one object call its version is one text: a source is inspected once."""
    url = f"{s3}/versions"
    fs, path = fsspec.url_to_fs(url)
    for file in SAMPLE.iterdir():
        fs.pipe_file(f"{path}/{file.name}", file.read_bytes())
    store = open_store(url)
    assert {p: seen.stamp for p, seen in store.stamped().items()} == {p: store.stamp(p) for p in store.list()}
    module = import_module("ckptcore.checking.examine")
    with mock.patch.object(module, "read_manifest", wraps=module.read_manifest) as read:
        ckptcore.convert(url, str(tmp_path / "out"))
    assert read.call_count == 1


@pytest.mark.alike(1)
def test_existing_output_is_refused_and_replaced_completely(root: str) -> None:
    source = f"{root}/source/step-3"
    ckptcore.convert(source, f"{root}/out", verb="export", max_file_size=2_000)
    before = content(f"{root}/out")
    with pytest.raises(DestinationExists):
        ckptcore.convert(source, f"{root}/out", verb="export")
    assert content(f"{root}/out") == before
    ckptcore.convert(source, f"{root}/out", verb="export", overwrite=True, overwrite_in_place=True)
    assert names(f"{root}/out") == ["README.md", "model.safetensors"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_single_file_and_deep_check(root: str) -> None:
    result = ckptcore.convert(f"{root}/source/step-3", f"{root}/whole.pt")
    report = ckptcore.check(ckptcore.open(result.destination), "bytes")
    assert report.ok
    assert report.unverified == 0


def test_a_missing_folder_is_an_error_with_a_message(root: str) -> None:
    with pytest.raises(SourceUnreadable, match="does not exist"):
        ckptcore.open(f"{root}/nothing")


@pytest.mark.parametrize("url", ["s3://bucket/key::part", "s3a://bucket/key::file:///tmp"])
def test_s3_first_in_a_chain_is_refused_before_a_request(url: str) -> None:
    with pytest.raises(UsageError, match="S3 cannot come first in a chain"):
        open_store(url)


def test_reads_are_exact_or_an_error(root: str) -> None:
    store = open_store(f"{root}/source/step-3")
    size = store.size(".metadata")
    assert size
    assert len(store.read(".metadata", size - 3, 3)) == 3
    with pytest.raises((SourceUnreadable, StorageTrouble)):
        store.read(".metadata", size - 3, 4)


def test_transient_errors_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/flaky/file", b"0123456789")
    calls = []
    real = type(fs).cat_file

    def flaky(self: object, *args: object, **kwargs: object) -> bytes:
        calls.append(1)
        if len(calls) < 3:
            raise OSError("connection reset")
        done: bytes = real(self, *args, **kwargs)
        return done

    monkeypatch.setattr(type(fs), "cat_file", flaky)
    assert open_store("memory://flaky").read("file", 2, 3) == b"234"
    assert len(calls) == 3
