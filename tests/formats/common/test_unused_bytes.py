"""Bytes of a file that belong to no tensor, object or structure are a finding on that file."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from damaging import Folder
from olmo_samples import sample
from safetensors.torch import save_file
from samples import SAMPLES

import ckptcore
from ckptcore.core.manifest import Manifest
from ckptcore.core.unused_bytes import accounted_files, unused_bytes
from ckptcore.errors import Finding
from ckptcore.reading.unused_in_items import unused_in_items
from ckptcore.store import open_store

STATE = {"w": torch.arange(6.0), "b": torch.ones(3), "step": 7}


def unused(path: Path, level: str = "coverage") -> list[Finding]:
    """The findings about unused bytes, which are no error: everything else can be read."""
    report = ckptcore.check(ckptcore.open(str(path)), level)
    assert report.ok, report.findings
    return [f for f in report.findings if f.code == "unused-bytes"]


def ranges(path: Path) -> list[tuple[int, int, str]]:
    found = unused_bytes(ckptcore.open(str(path)))
    assert found is not None
    return [(one.start, one.end, one.description) for one in found]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A DCP folder of one rank."""
    path = tmp_path / "ckpt"
    dcp.save(dict(STATE), checkpoint_id=path, no_dist=True)
    assert ranges(path) == []
    return path


def moved(folder: Path, gaps: dict[int, bytes], tmp_path: Path) -> Path:
    """Put bytes before the n-th item of the data file; the metadata places the items behind them."""
    opened = Folder(folder, tmp_path / "never")
    meta, out = opened.load(), bytearray()
    for n, place in enumerate(opened.places()):
        item = opened.read(place)
        out += gaps.get(n, b"")
        meta.storage_data[place.key].offset = len(out)
        out += item
        data = place.file
    data.write_bytes(out)
    opened.dump(meta)
    return data


# --------------------------------------------------------------------------------------- DCP files


@pytest.mark.parametrize("at", [0, 1, 2])
def test_bytes_before_a_listed_item(folder: Path, at: int, tmp_path: Path) -> None:
    """Nobody's bytes in a data file: `retire` would delete them."""
    data = moved(folder, {at: b"precious" * 64}, tmp_path)
    (found,) = unused(folder)
    assert (found.file, found.severity) == (data.name, "warning")
    assert found.message.startswith(f"{data.name}: 512 bytes at [")
    ((start, end, what),) = ranges(folder)
    assert data.read_bytes()[start:end] == b"precious" * 64
    assert not what


def test_an_item_that_lost_its_entry(folder: Path) -> None:
    """All of a tensor's entries are gone from the metadata, and its bytes are still there."""
    opened = Folder(folder, folder / "never")
    meta = opened.load()
    first = min(opened.places(), key=lambda p: p.start)
    del meta.state_dict_metadata[first.key.fqn], meta.storage_data[first.key]
    (meta.planner_data or {}).pop(first.key.fqn, None)
    opened.dump(meta)
    assert ranges(folder) == [(first.start, first.stop, "")]


def test_the_end_of_a_data_file_is_reported_once(folder: Path) -> None:
    data = next(folder.glob("*.distcp"))
    data.write_bytes(data.read_bytes() + bytes(9))
    codes = [f.code for f in ckptcore.check(ckptcore.open(str(folder))).findings]
    assert codes == ["oversized-file"]


def test_bytes_behind_the_metadata(folder: Path) -> None:
    path = folder / ".metadata"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"more")
    assert ranges(folder) == [(size, size + 4, "")]


class _LastFirst:
    """A pool of threads of which the last is the first."""

    def __init__(self, **_: object) -> None:
        pass

    def __enter__(self) -> _LastFirst:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, call: Callable[[Any], Any], given: Iterable[Any]) -> list[Any]:
        return [call(one) for one in [*given][::-1]][::-1]


def test_other_records_of_items(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor's item only a reading shows them, of an object's the metadata's reading does."""
    opened = Folder(folder, tmp_path / "never")
    meta, out, sizes = opened.load(), bytearray(), {}
    for place in opened.places():
        item = with_record(opened.read(place), "data/9" if place.tensor else "data/7", b"hidden" * 5)
        meta.storage_data[place.key].offset, meta.storage_data[place.key].length = len(out), len(item)
        sizes[len(out)] = len(item)
        out += item
        data = place.file
    data.write_bytes(out)
    opened.dump(meta)
    manifest = ckptcore.open(str(folder))
    of_object = unused_bytes(manifest)
    assert of_object is not None
    assert [one.description for one in of_object] == ["storage 7 of a torch zip"]
    of_tensors = unused_in_items(manifest, open_store(str(folder)))
    assert [one.description for one in of_tensors] == ["zip record archive/data/9"] * 2
    for one in (*of_object, *of_tensors):
        assert data.read_bytes()[one.start : one.end] == b"hidden" * 5
    at_bytes = unused(folder, "bytes")
    (of_records,) = [f.message for f in at_bytes if "zip record archive/data/9" in f.message]
    assert "60 bytes" in of_records
    # Threads read items as they come, and say the same of them.
    monkeypatch.setattr("ckptcore.checking.scan.ThreadPoolExecutor", _LastFirst)
    assert unused(folder, "bytes") == at_bytes


def test_a_member_of_a_blob_that_is_not_listed(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The metadata of a file with a safetensors blob lacks one of its tensors."""
    source = sample(request, "dcp_safetensors_fmt_2r") / "ckpt"
    folder = Path(shutil.copytree(source, tmp_path / "ckpt"))
    opened = Folder(folder, tmp_path / "never")
    meta = opened.load()
    place = next(p for p in opened.places() if opened.kind(p) == "safetensors" and p.nbytes)
    others = [k for k in meta.storage_data if k.fqn == place.key.fqn]
    del meta.state_dict_metadata[place.key.fqn]
    for key in others:
        del meta.storage_data[key]
    (meta.planner_data or {}).pop(place.key.fqn, None)
    opened.dump(meta)
    found = unused_in_items(ckptcore.open(str(folder)), open_store(str(folder)))
    assert place.file.name in {one.file for one in found}
    assert {one.description for one in found} == {f"tensor {place.key.fqn}, which the metadata does not list"}
    assert {f.file for f in unused(folder, "bytes")} == {one.file for one in found}


# --------------------------------------------------------------------------------------- torch zips


def with_record(data: bytes, name: str, content: bytes) -> bytes:
    """The same torch zip with one more record, which its pickle does not name."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            new.writestr(zipfile.ZipInfo(info.filename), old.read(info))
        top = old.infolist()[0].filename.partition("/")[0]
        new.writestr(zipfile.ZipInfo(f"{top}/{name}"), content)
    return out.getvalue()


def rezipped(data: bytes, change: Any) -> bytes:
    """The same records in a zip of Python's, each through ``change``: (info, content) -> content."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            made = zipfile.ZipInfo(info.filename)
            new.writestr(made, change(made, old.read(info)))
    return out.getvalue()


def _pickle_tail(info: zipfile.ZipInfo, content: bytes) -> bytes:
    return content + b"tail" if info.filename.endswith("data.pkl") else content


def _comment(info: zipfile.ZipInfo, content: bytes) -> bytes:
    info.comment = b"note" if info.filename.endswith("/version") else b""
    return content


def _extra(info: zipfile.ZipInfo, content: bytes) -> bytes:
    info.extra = b"\x75\x70\x04\x00utf8" if info.filename.endswith("/version") else b""
    return content


def _gap(data: bytes) -> bytes:
    """Bytes between two records."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            new.writestr(zipfile.ZipInfo(info.filename), old.read(info))
            if info.filename.endswith("data.pkl"):
                new.start_dir += out.write(b"between")
    return out.getvalue()


ZIPS = {
    "a record": (lambda d: with_record(d, "notes.txt", b"mine"), "zip record {top}/notes.txt", b"mine"),
    "a storage": (lambda d: with_record(d, "data/9", b"lost"), "", b"lost"),
    "behind the pickle": (lambda d: rezipped(d, _pickle_tail), "behind the pickle in data.pkl", b"tail"),
    "a comment": (lambda d: rezipped(d, _comment), "comment of the zip record {top}/version", b"note"),
    "a gap": (_gap, "", b"between"),
}


@pytest.mark.parametrize("kind", ZIPS)
def test_a_torch_zip(kind: str, tmp_path: Path) -> None:
    change, what, content = ZIPS[kind]
    torch.save(STATE, tmp_path / "model.pt")
    assert ranges(tmp_path / "model.pt") == []
    data = change((tmp_path / "model.pt").read_bytes())
    (tmp_path / "model.pt").write_bytes(data)
    assert torch.load(tmp_path / "model.pt").keys() == STATE.keys(), "torch reads past it"
    (found,) = unused(tmp_path / "model.pt")
    assert found.file == "model.pt"
    ((start, end, text),) = ranges(tmp_path / "model.pt")
    assert data[start:end] == content
    assert text == what.format(top="model")


def test_an_extra_field_is_named_in_header_and_directory(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "model.pt")
    data = rezipped((tmp_path / "model.pt").read_bytes(), _extra)
    (tmp_path / "model.pt").write_bytes(data)
    found = ranges(tmp_path / "model.pt")
    assert [data[a:b] for a, b, _ in found] == [b"\x75\x70\x04\x00utf8"] * 2
    assert {what for *_, what in found} == {"extra field of the zip record model/version"}


def test_the_padding_of_torch_is_none(tmp_path: Path) -> None:
    """Torch fills up with Z before a payload: anything else there is a finding."""
    torch.save(STATE, tmp_path / "model.pt")
    data = bytearray((tmp_path / "model.pt").read_bytes())
    at = data.index(b"ZZZZ", data.index(b"version")) + 1
    data[at] = ord("!")
    (tmp_path / "model.pt").write_bytes(data)
    ((start, end, what),) = ranges(tmp_path / "model.pt")
    assert start <= at < end
    assert what.startswith("extra field of the zip record model/")


def test_elements_of_a_storage_that_no_tensor_has(tmp_path: Path) -> None:
    """`torch.save` writes the storage of a slice. Zeros are padding, which only reading shows."""
    complete = torch.arange(1.0, 13.0)
    torch.save({"w": complete[2:5], "v": complete[8:]}, tmp_path / "model.pt")
    assert unused(tmp_path / "model.pt") == []
    (found,) = unused(tmp_path / "model.pt", "bytes")
    assert found.message.startswith("model.pt: 20 bytes at [")
    assert found.message.endswith("elements of storages that no tensor has")
    padded = torch.zeros(12)
    padded[2:5] = 7
    torch.save({"w": padded[2:5]}, tmp_path / "padded.pt")
    assert unused(tmp_path / "padded.pt", "bytes") == []


@pytest.mark.parametrize("zero", [False, True])
def test_elements_of_a_storage_in_an_item(folder: Path, zero: bool, tmp_path: Path) -> None:
    """Megatron-Core 0.9 saved views so."""
    complete = torch.zeros(9) if zero else torch.ones(9)
    saved = io.BytesIO()
    torch.save(complete[2:5], saved)
    opened = Folder(folder, tmp_path / "never")
    meta, out = opened.load(), bytearray()
    for place in opened.places():
        item = saved.getvalue() if place.key.fqn == "b" else opened.read(place)
        meta.storage_data[place.key].offset, meta.storage_data[place.key].length = len(out), len(item)
        out += item
        data = place.file
    data.write_bytes(out)
    opened.dump(meta)
    assert unused(folder) == []
    expected = [] if zero else [f"{data.name}: 24 bytes"]
    assert [f.message[: len(data.name) + 10] for f in unused(folder, "bytes")] == expected


def test_every_family_reads_its_zips_so(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """One more record in each kind of torch file of every sample of 1 MiB or less."""
    tried = set()
    for one in request.config.stash[SAMPLES]:
        for source in one.checkpoints if not one.corpus else ():
            files = [p for p in ([source] if source.is_file() else sorted(source.rglob("*"))) if p.is_file()]
            kinds = {(one.name.split("_")[0], p.suffix, p.name[:5]): p for p in files}
            for kind, path in kinds.items():
                if kind in tried or path.suffix == ".distcp" or path.read_bytes()[:4] != b"PK\x03\x04":
                    continue
                tried.add(kind)
                _require_named(source, path, tmp_path / "-".join(kind))
    assert len(tried) > 12


def _require_named(source: Path, path: Path, place: Path) -> None:
    inner = path.relative_to(source.parent)
    copy = place / source.name
    if source.is_dir():
        shutil.copytree(source, copy)
    else:
        place.mkdir()
        shutil.copy(source, copy)
    try:
        before = unused_bytes(ckptcore.open(str(copy)))
    except ckptcore.CkptError:
        return  # an aborted save
    (place / inner).write_bytes(with_record(path.read_bytes(), "notes.txt", b"mine"))
    manifest = ckptcore.open(str(copy))
    if not any((place / inner).match(file) for file in accounted_files(manifest)):
        return  # beside the checkpoint
    found = unused_bytes(manifest)
    assert found is not None
    assert before is not None
    assert sum(one.description.startswith("zip record") for one in found) == 1, inner


# ------------------------------------------------------------------------------------------ account


def test_a_safetensors_file_is_accounted_for(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "notes.txt").write_text("mine")
    manifest = ckptcore.open(str(tmp_path))
    assert unused_bytes(manifest) == ()
    assert accounted_files(manifest) == {"model.safetensors"}


def test_a_manifest_that_was_not_read_knows_nothing(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    loaded = Manifest.load(ckptcore.open(str(tmp_path)).dump())
    assert unused_bytes(loaded) is None
    assert accounted_files(loaded) == frozenset()
