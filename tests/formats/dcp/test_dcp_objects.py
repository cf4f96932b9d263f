"""Objects of DCP folders: compressed, large, refused in part, damaged; and codecs by themselves."""

from __future__ import annotations

import ast
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard

import ckptcore
from ckptcore.core.manifest import Envelope, Item
from ckptcore.core.object_tree import TensorRef, decode
from ckptcore.encodings import codecs as _codecs
from ckptcore.errors import MalformedCheckpoint
from ckptcore.formats.dcp import objects as _dcpobjects
from ckptcore.store import open_store
from ckptcore.store.local import LocalStore


def saved(folder: Path, state: dict[str, Any], *, zstd: bool = False) -> Path:
    """A DCP folder whose values below the top level are objects."""
    writer = FileSystemWriter(folder, _extensions=[ZStandard()] if zstd else None)
    dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    return folder


def blob(manifest: ckptcore.Manifest, key: str) -> Any:
    return next(decode(b.tree) for b in manifest.blobs if b.key == key)


# --- objects --------------------------------------------------------------------------------------


@pytest.mark.parametrize("zstd", [False, True], ids=["plain", "zstd"])
def test_tensors_inside_objects(zstd: bool, tmp_path: Path) -> None:
    """A tensor in an object is a tensor of the checkpoint, also where the object is compressed."""
    shared = torch.arange(40.0).view(5, 8)
    optim = {
        "state": {0: {"exp_avg": torch.randn(300, 7), "view": shared[1:4, ::2]}},
        "lr": 0.1,
        "list": [shared, (torch.tensor(3), None)],
        "int8": torch.arange(5, dtype=torch.int8),
    }
    manifest = ckptcore.open(str(saved(tmp_path / "x", {"w": torch.ones(2, 2), "optim": optim}, zstd=zstd)))
    assert ckptcore.check(manifest, "bytes").ok
    tree = blob(manifest, "optim")
    assert tree["lr"] == 0.1
    assert tree["list"][0] == TensorRef("optim.list.0")
    want = {
        "optim.state.0.exp_avg": optim["state"][0]["exp_avg"],
        "optim.state.0.view": shared[1:4, ::2],
        "optim.list.0": shared,
        "optim.list.1.0": torch.tensor(3),
        "optim.int8": optim["int8"],
        "w": torch.ones(2, 2),
    }
    assert {t.fqn for t in manifest.tensors} == want.keys()
    for name, value in want.items():
        found = ckptcore.read(manifest, name)
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert torch.equal(found, value), name


@pytest.mark.parametrize("zstd", [False, True], ids=["plain", "zstd"])
def test_objects_larger_than_a_range(zstd: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small objects are read together; one larger than a range is read in place."""
    monkeypatch.setattr(_dcpobjects, "_RANGE", 4096)
    state: dict[str, Any] = {f"o{n}": {"n": n, "raw": os.urandom(20 if n % 3 else 9000)} for n in range(9)}
    state["o9"] = {"tensor": torch.randn(4000), "n": 9}
    manifest = ckptcore.open(str(saved(tmp_path / "x", state, zstd=zstd)))
    for n in range(9):
        assert blob(manifest, f"o{n}") == state[f"o{n}"]
    assert torch.equal(ckptcore.read(manifest, "o9.tensor"), state["o9"]["tensor"])
    assert not manifest.findings


@pytest.mark.parametrize("inside", ["small", "large"])
def test_tensors_inside_objects_that_ranks_share(inside: str, tmp_path: Path) -> None:
    """Each rank wrote its own metadata: equal trees whose tensors have other elements are other values."""
    size = 4 if inside == "small" else 1 << 20

    def codes(value: float, damage: bytes = b"") -> set[str]:
        folder = tmp_path / f"{value}{len(damage)}"
        folder.mkdir()
        for rank in range(2):
            optim = {"step": torch.full((size,), value if rank else 1.0), "lr": 0.5}
            alone = saved(tmp_path / f"{folder.name}-{rank}", {f"w{rank}": torch.ones(2), "optim": optim})
            metadata = pickle.loads((alone / ".metadata").read_bytes())
            for place in metadata.storage_data.values():
                place.relative_path = f"__{rank}_0.distcp"
            (alone / "__0_0.distcp").rename(folder / f"__{rank}_0.distcp")
            (folder / f"__{rank}.metadata").write_bytes(pickle.dumps(metadata))
        if damage:  # of the second rank's object, which the manifest does not hold
            item = metadata.storage_data[next(i for i in metadata.storage_data if i.fqn == "optim")]
            path = folder / "__1_0.distcp"
            raw = bytearray(path.read_bytes())
            raw[item.offset : item.offset + len(damage)] = damage
            path.write_bytes(raw)
        return {f.code for f in ckptcore.open(str(folder)).findings}

    assert "rank-object" not in codes(1.0)
    assert "rank-object" in codes(2.0)
    assert "rank-object" in codes(1.0, b"none")


def test_tensors_inside_a_class_are_a_finding(tmp_path: Path) -> None:
    """Tensors inside a class cannot be read: their bytes are counted, and the rest is read."""
    layer = ast.Constant(torch.randn(10, 10))
    folder = saved(tmp_path / "x", {"w": torch.ones(3), "layer": layer, "plain": {"a": 1}})
    manifest = ckptcore.open(str(folder))
    findings = {f.code: f for f in manifest.findings}
    assert "ast.Constant" in findings["refused-global"].message
    assert "400 bytes" in findings["refused-tensors"].message
    assert (findings["refused-tensors"].severity, findings["refused-tensors"].fqn) == ("error", "layer")
    assert torch.equal(ckptcore.read(manifest, "w"), torch.ones(3))


def _deep() -> Any:
    value: Any = 5
    for _ in range(230):
        value = [value]
    return value


DAMAGE: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a tree that is too deep": (_deep, "malformed-item", "nests deeper"),
    "a function": (lambda: [torch._utils._rebuild_tensor_v2], "malformed-item", "object odd"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_objects_without_a_json_form(name: str, tmp_path: Path) -> None:
    make, code, message = DAMAGE[name]
    manifest = ckptcore.open(str(saved(tmp_path / "x", {"w": torch.ones(3), "odd": make()})))
    (found,) = (f for f in manifest.findings if f.fqn == "odd")
    assert found.code == code
    assert message in found.message
    assert [(b.key, b.known) for b in manifest.blobs] == [("odd", False)]
    assert torch.equal(ckptcore.read(manifest, "w"), torch.ones(3))


def test_a_file_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    """A data file that is a link to elsewhere is a finding for each of its objects."""
    folder = saved(tmp_path / "x", {"a": {"n": 1}, "b": {"n": 2}})
    (data,) = folder.glob("*.distcp")
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    manifest = ckptcore.open(str(folder))
    assert {(f.code, f.fqn) for f in manifest.findings} == {("bad-path", "a"), ("bad-path", "b")}
    assert not any(b.known for b in manifest.blobs)
    assert not ckptcore.check(manifest, "coverage").ok


def test_a_cut_compressed_object(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", {"a": {"raw": os.urandom(4000)}}, zstd=True)
    (data,) = folder.glob("*.distcp")
    torn = bytearray(data.read_bytes())
    torn[200:1200] = bytes(1000)
    data.write_bytes(torn)
    manifest = ckptcore.open(str(folder))
    assert [f.fqn for f in manifest.findings if f.severity == "error"] == ["a"]


# --- codecs ---------------------------------------------------------------------------------------

PLAIN = bytes(range(256)) * 3000  # more than a block of zstd's


def packed(data: bytes = PLAIN, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def both(data: bytes, limit: int, folder: Path, codec: str = "zstd") -> set[bytes]:
    """The results of both ways of decoding."""
    (folder / "x").write_bytes(b"before" + data + b"behind")
    store = open_store(str(folder))
    out, length = _codecs.decode_to_file(codec, store, "x", 6, len(data), limit, str(folder))
    with out:
        out.seek(0)
        plain = out.read()
    assert length == len(plain)
    return {plain, _codecs.decode_small(codec, data, limit, "x")}


OPTIONS = [{}, {"level": 19}, {"write_checksum": True}, {"write_content_size": False}]


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize("data", [b"", b"a", PLAIN], ids=["nothing", "a byte", "blocks"])
def test_zstd(data: bytes, options: dict[str, Any], tmp_path: Path) -> None:
    assert both(packed(data, **options), len(PLAIN), tmp_path) == {data}


BROKEN = {
    "cut": (packed()[:-5], len(PLAIN), "does not end"),
    "something behind": (packed() + b"x", len(PLAIN), "does not end"),
    "two frames": (packed(b"a") + packed(b"b"), 10, "does not end"),
    "nothing": (b"", 10, "does not end"),
    "no zstd": (b"PK\x03\x04 and more of a zip", 100, "cannot decode the zstd stream"),
    "a checksum that is wrong": (
        packed(write_checksum=True)[:-4] + b"\0\0\0\0",
        len(PLAIN),
        "cannot decode the zstd stream",
    ),
    "more than there should be": (packed(), len(PLAIN) - 1, "unpacks to more than"),
    "a bomb": (packed(bytes(50 << 20)), 1 << 20, "unpacks to more than 1048576 bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_zstd_that_is_damaged(name: str, tmp_path: Path) -> None:
    data, limit, message = BROKEN[name]
    with pytest.raises(MalformedCheckpoint, match=message):
        _codecs.decode_small("zstd", data, limit, "x")
    with pytest.raises(MalformedCheckpoint, match=message):
        both(data, limit, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_an_unknown_codec(tmp_path: Path) -> None:
    with pytest.raises(MalformedCheckpoint, match="unknown codec 'lz4'"):
        _codecs.decode_small("lz4", b"x", 10, "x")
    with pytest.raises(MalformedCheckpoint, match="unknown codec 'lz4'"):
        both(b"x", 10, tmp_path, "lz4")


@pytest.mark.parametrize("seed", range(5))
def test_objects_apart_or_beside_each_other(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read at once ends at a gap, and where it would be too long."""
    monkeypatch.setattr(_dcpobjects, "_GAP", 10)
    monkeypatch.setattr(_dcpobjects, "_RANGE", 100)
    rng, names, items = random.Random(seed), ["a", "b"], dict[str, Item]()
    raw = {name: bytes(rng.randrange(256) for _ in range(2000)) for name in names}
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(raw[name])
        at = 0
        while at < 1800:
            length = rng.choice((0, 5, 30, 60, 100, 101, 150))
            items[f"{name}.{at}.{len(items)}"] = Item(number, at, length, Envelope.RAW)
            at += max(length + rng.choice((-20, 0, 0, 9, 10, 11, 40)), 1)
    reads: list[tuple[str, int, int]] = []

    class Noted(LocalStore):
        def read(self, path: str, start: int, length: int) -> bytes:
            reads.append((path, start, length))
            return super().read(path, start, length)

    found = list(_dcpobjects._read_all(Noted(tmp_path), names, items))
    assert sorted(key for key, _, _ in found) == sorted(items)
    for key, item, data in found:
        assert item == items[key]
        assert (data is None) == (item.length > 100)
        if data is not None:
            assert data == raw[names[item.file]][item.start : item.start + item.length]
    assert max(length for _, _, length in reads) <= 100
    assert len(reads) < len(items)
    used = {(names[i.file], at) for i in items.values() for at in range(i.start, i.start + i.length)}
    for path, start, length in reads:
        marks = "".join("x" if (path, at) in used else "." for at in range(start, start + length))
        assert "." * 11 not in marks
