"""Files of torch.save before 1.6: equal to `torch.load`, every byte counted, nothing executed."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import shutil
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import old_pickles as old
import pytest
import torch
from old_pickles import Called, Global
from paths import FIXTURES
from samples import tensors_of, value

import ckptcore
from ckptcore.core.object_tree import decode
from ckptcore.encodings.pickle import extent
from ckptcore.encodings.pickle.extent import pickle_end
from ckptcore.errors import CkptError, MalformedCheckpoint, UnsupportedFormat

MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001
HOST = {"protocol_version": VERSION, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
BOTH = torch.arange(32.0).reshape(8, 4)
V1, V2 = "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"


def save(tree: Any, path: Path, protocol: int = 2) -> Path:
    torch.save(tree, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    return path


def equal(path: Path) -> ckptcore.Manifest:
    """The manifest of a file, whose tensors are those of torch.load."""
    manifest = ckptcore.open(str(path))
    read = {t.fqn: value(ckptcore.read(manifest, t.fqn)) for t in manifest.tensors}
    assert read == tensors_of(torch.load(path, weights_only=False))
    return manifest


def codes(manifest: ckptcore.Manifest, level: str = "bytes") -> set[str]:
    return {f.code for f in ckptcore.check(manifest, level, workers=1).findings}


TREES: dict[str, Any] = {
    "dtypes": {
        str(kind): torch.tensor([0, 1, 1]).to(kind)
        for kind in (
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.int32,
            torch.int16,
            torch.int8,
            torch.uint8,
            torch.bool,
            torch.complex128,
            torch.complex64,
        )
    },
    "views": {"all": BOTH, "rows": BOTH[2:4], "turned": BOTH.t(), "steps": BOTH[::2, 1::2], "none": BOTH[:0]},
    "flags": {"conj": torch.complex(BOTH, -BOTH).conj(), "neg": torch._neg_view(BOTH.clone())},
    "expanded": {"mask": torch.ones(1, 4).expand(3, 4)},
    "parameters": torch.nn.Linear(3, 2).state_dict(keep_vars=True),
    "values": {"w": torch.ones(2), "epoch": 3, "args": {"lr": 0.1, "names": ["a", "b"]}, "none": None},
    "no tensor at all": {"epoch": 3},
}


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("name", TREES)
def test_as_torch_loads_it(name: str, protocol: int, tmp_path: Path) -> None:
    manifest = equal(save(TREES[name], tmp_path / "model.pt", protocol))
    assert codes(manifest) <= {"no-checksum", "unproven"}
    objects = {b.key: decode(b.tree) for b in manifest.blobs}
    assert name != "values" or objects == {"epoch": 3, "args": {"lr": 0.1, "names": ["a", "b"]}, "none": None}


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_optimizer(protocol: int, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    adam.step()
    path = save({"model": model.state_dict(), "optimizer": adam.state_dict()}, tmp_path / "m.pt", protocol)
    assert "optimizer.state.0.exp_avg" in equal(path).index


def test_a_slice_leaves_elements_that_no_tensor_has(tmp_path: Path) -> None:
    manifest = equal(save({"w": torch.arange(20.0)[5:9]}, tmp_path / "m.pt"))
    assert "unused-bytes" in codes(manifest)


@pytest.mark.parametrize("kind", [torch.uint16, torch.uint64, torch.float8_e4m3fn])
def test_dtypes_that_torch_saves_and_cannot_load(kind: torch.dtype, tmp_path: Path) -> None:
    """Their storages are bytes in the pickle, of which `torch.load` of this format has no dtype."""
    tensor = torch.tensor([0, 1, 3]).to(kind)
    path = save({"w": tensor}, tmp_path / "m.pt")
    with pytest.raises(AttributeError):
        torch.load(path, weights_only=False)
    assert value(ckptcore.read(ckptcore.open(str(path)), "w")) == value(tensor)


# --- files of older torch and of Python 2, by form ------------------------------------------------


class Pickler(old.Pickler):
    """A pickle of protocol 2, in which a storage is `Stored`."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Stored):
            self.save(("storage", Global("torch.FloatStorage"), obj.key, "cpu", obj.numel, obj.view))
            self.write(pickle.BINPERSID)
        elif isinstance(obj, bytes):  # the text of Python 2
            self.write(pickle.SHORT_BINSTRING + bytes([len(obj)]) + obj)
        else:
            super().save(obj, save_persistent_id)


class Stored:
    """A storage, or a part of one: (key, first element, elements)."""

    def __init__(self, numel: int, view: Any = None, key: str = "7") -> None:
        self.numel, self.view, self.key = numel, view, key


def part(first: int, numel: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> Called:
    return Called(Global(V1), (Stored(32, ("9", first, numel)), offset, shape, strides))


def full(numel: int = 32, key: str = "7") -> Called:
    return Called(Global(V1), (Stored(numel, None, key), 0, (numel,), (1,)))


def pickled(obj: Any) -> bytes:
    raw = io.BytesIO()
    Pickler(raw).dump(obj)
    return raw.getvalue()


def written(
    tree: Any,
    path: Path,
    *,
    magic: Any = MAGIC,
    version: Any = VERSION,
    host: Any = HOST,
    keys: Any = ("7",),
    count: int = 32,
    behind: bytes = b"",
) -> Path:
    keys = list(keys) if isinstance(keys, tuple) else keys
    storage = count.to_bytes(8, "little") + BOTH.numpy().tobytes()
    path.write_bytes(b"".join(map(pickled, (magic, version, host, tree, keys))) + storage + behind)
    return path


def test_parts_of_storages_as_torch_wrote_them_until_04(tmp_path: Path) -> None:
    tree = {"all": full(), "rows": part(8, 8, (2, 4), (4, 1)), "odd": part(8, 8, (2, 2), (4, 1), 1)}
    path = written(tree, tmp_path / "m.pt")
    manifest = equal(path)
    assert torch.equal(ckptcore.read(manifest, "rows"), BOTH[2:4])
    assert codes(manifest) <= {"no-checksum", "unproven"}


@pytest.mark.parametrize(
    "tensor",
    [
        part(8, 8, (3, 4), (4, 1)),
        part(8, 8, (2, 4), (4, 1), 1),
        part(30, 8, (2,), (1,)),
        part(-1, 8, (2,), (1,)),
        part(8, -1, (0,), (1,)),
    ],
    ids=["behind", "shifted", "outside", "before", "negative"],
)
def test_a_part_that_does_not_hold_its_tensor(tensor: Called, tmp_path: Path) -> None:
    with pytest.raises(MalformedCheckpoint, match="part"):
        ckptcore.open(str(written({"all": full(), "w": tensor}, tmp_path / "m.pt")))


def test_a_state_dict_of_python_2(tmp_path: Path) -> None:
    tree = Called(Global("collections.OrderedDict"), ([[b"w", full()]],))
    manifest = equal(written(tree, tmp_path / "m.pt"))
    assert [t.fqn for t in manifest.tensors] == ["w"]


# --- what is not as torch writes it ---------------------------------------------------------------

ODD: dict[str, tuple[dict[str, Any], str]] = {
    "another version": ({"version": 1002}, "must begin with 1001"),
    "no list of storages": ({"keys": {"7": 1}}, "must list its storages"),
    "keys that are no text": ({"keys": (7,)}, "must list its storages"),
    "a storage twice": ({"keys": ("7", "7")}, "lists a storage twice"),
    "a storage of no tensor": ({"keys": ("6", "7")}, "storage '6' is not in its tree"),
    "a tensor without a storage": ({"keys": ()}, "storage '7' is not in the list of storages"),
    "more elements": ({"count": 33}, r"must have 32 elements \(got 33\)"),
    "fewer elements": ({"count": 31}, r"must have 32 elements \(got 31\)"),
    "a negative number of elements": ({"count": 1 << 63}, "must have 32 elements"),
}


@pytest.mark.parametrize("name", ODD)
def test_malformed(name: str, tmp_path: Path) -> None:
    odd, message = ODD[name]
    with pytest.raises(MalformedCheckpoint, match=message):
        ckptcore.open(str(written({"w": full()}, tmp_path / "m.pt", **odd)))


def test_one_storage_of_two_lengths(tmp_path: Path) -> None:
    tree = {"a": full(), "b": full(16)}
    with pytest.raises(MalformedCheckpoint, match="has 128 bytes, and 64"):
        ckptcore.open(str(written(tree, tmp_path / "m.pt")))


@pytest.mark.parametrize(
    "host", [HOST | {"note": 1}, HOST | {"little_endian": 1}, HOST | {"type_sizes": {}}, []]
)
def test_another_host_is_reported(host: Any, tmp_path: Path) -> None:
    assert "unused-bytes" in codes(equal(written({"w": full()}, tmp_path / "m.pt", host=host)))


def test_a_big_endian_host_writes_little_endian_elements(tmp_path: Path) -> None:
    manifest = equal(written({"w": full()}, tmp_path / "m.pt", host=HOST | {"little_endian": False}))
    assert codes(manifest) <= {"no-checksum", "unproven"}


def test_bytes_behind_the_storages_are_reported(tmp_path: Path) -> None:
    assert "unused-bytes" in codes(equal(written({"w": full()}, tmp_path / "m.pt", behind=b"\x00" * 8)))


def test_a_file_cut_anywhere(tmp_path: Path) -> None:
    source = (FIXTURES / "torch" / "before_zip" / "ckpt" / "model.pt").read_bytes()
    path = tmp_path / "m.pt"
    for length in (*range(0, 200, 3), *range(200, len(source), 23), len(source) - 1):
        path.write_bytes(source[:length])
        with pytest.raises(CkptError):
            ckptcore.open(str(path))


def test_nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, ("executed",))

    manifest = ckptcore.open(str(save({"w": BOTH, "odd": Hostile()}, tmp_path / "model.pt")))
    assert "refused-global" in codes(manifest, "coverage")
    assert torch.equal(ckptcore.read(manifest, "w"), BOTH)
    with pytest.raises(CkptError):  # in the pickles around the tree, too
        ckptcore.open(str(written({"w": full()}, tmp_path / "m.pt", host=Called(Global("os.mkdir"), ("x",)))))
    assert not (tmp_path / "executed").exists()


class Own(torch.nn.Linear):
    """A class whose source torch saves."""


def test_a_pickled_module(tmp_path: Path) -> None:
    save(Own(2, 2), tmp_path / "m.pt")
    assert b"A class whose source torch saves." in (tmp_path / "m.pt").read_bytes()
    with pytest.raises(UnsupportedFormat, match=r"test_before_zip\.Own") as caught:
        ckptcore.open(str(tmp_path / "m.pt"))
    assert "state_dict()" in caught.value.hint


# --- refused by name ------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [0, 1])
@pytest.mark.parametrize("alone", [True, False])
def test_pickles_of_text(protocol: int, alone: bool, tmp_path: Path) -> None:
    path = save({"w": torch.ones(2)}, tmp_path / "model.pt", protocol)
    with pytest.raises(UnsupportedFormat, match="protocol 0 or 1") as caught:
        ckptcore.open(str(path if alone else tmp_path))
    assert caught.value.values["format"] == "torch-text-pickle"


@pytest.mark.parametrize("alone", [True, False])
def test_the_tar_of_torch_01(alone: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(UnsupportedFormat, match="a tar with pickle, storages, sys_info, tensors") as caught:
        ckptcore.open(str(path if alone else tmp_path))
    assert caught.value.values["format"] == "torch-tar"
    assert caught.value.hint == "load it with torch and save it again"


# --- other formats with torch files ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pattern"), [("meta/meta_llama3_tp2", "*.pth"), ("torch/verl_fsdp2_4r", "**/*.pt")]
)
def test_formats_of_several_files(name: str, pattern: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / name / "ckpt", tmp_path / "ckpt")
    zipped = ckptcore.open(str(FIXTURES / name / "ckpt"))
    files = sorted(folder.glob(pattern))
    for path in files:
        save(torch.load(path, weights_only=False), path)
    manifest = ckptcore.open(str(folder))
    assert manifest.format == zipped.format
    assert {t.fqn for t in manifest.tensors} == {t.fqn for t in zipped.tensors} != set()
    for spec in manifest.tensors:
        assert value(ckptcore.read(manifest, spec.fqn)) == value(ckptcore.read(zipped, spec.fqn))
    files[-1].write_bytes(files[-1].read_bytes()[:-1])
    with pytest.raises(CkptError):
        ckptcore.open(str(folder))


# --- the end of a pickle --------------------------------------------------------------------------


def test_operands_are_those_of_pickletools() -> None:
    """The tables have every opcode that `loads` knows, with the bytes behind it."""
    counted = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4}
    counted |= {pickletools.TAKEN_FROM_ARGUMENT4U: 4, pickletools.TAKEN_FROM_ARGUMENT8U: 8}
    stated = {ord(op.code): 0 if op.arg is None else op.arg.n for op in pickletools.opcodes}
    assert {code: stated[code] for code in extent._OPERANDS} == extent._OPERANDS
    assert {code: counted[stated[code]] for code in extent._COUNTED} == extent._COUNTED


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickles_behind_each_other(protocol: int) -> None:
    values = [
        5,
        OrderedDict(a=[1.5, None, True], b=("x" * 300, b"y" * 70_000)),
        {f"name {n}": n << 40 for n in range(5000)},
        {1, 2} if protocol > 3 else [],
    ]
    raw = b"".join(pickle.dumps(v, protocol) for v in values)
    position = 0
    for v in values:
        end = pickle_end(lambda start, n: raw[start : start + n], position, len(raw), "x")
        assert pickle.loads(raw[position:end]) == v
        position = end
    assert position == len(raw)
