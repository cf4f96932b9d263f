"""Torch files whose pickles or zips are not what torch writes: refused by what is wrong."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import old_pickles as old
import pytest
import torch
import torch.distributed.checkpoint as dcp
from old_pickles import Called, Global

import ckptcore
from ckptcore.core.object_tree import Named, decode
from ckptcore.errors import CkptError, MalformedCheckpoint, UnsafeContent

MAKE, NDARRAY = "numpy.core.multiarray._reconstruct", Global("numpy.ndarray")  # as before numpy 2
V2, V3 = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
HOOKS = Called(Global("collections.OrderedDict"))
TENSOR = torch.arange(6.0)


def opened(value: Any, path: Path) -> ckptcore.Manifest:
    old.save({"kept": TENSOR, "odd": value}, path / "x.pt")
    return ckptcore.open(str(path / "x.pt"))


def call(name: str, *args: Any, state: Any = None) -> Called:
    return Called(Global(name), args, state)


# --- values that protocol 2 spells as calls -------------------------------------------------------

VALUES: dict[str, tuple[Any, Any]] = {
    "a set": (call("__builtin__.set", [3, 1]), {1, 3}),
    "a complex number": (call("__builtin__.complex", 1.0, -2.0), complex(1, -2)),
    "no bytes": (call("__builtin__.bytes"), b""),
    "bytes": (call("_codecs.encode", "a\xff", "latin1"), b"a\xff"),
    "a path": (call("pathlib.PosixPath", "/", "data", "x"), Named("path", "/data/x")),
    "a path of Windows": (call("pathlib.WindowsPath", "C:\\\\", "data"), Named("windowspath", "C:\\data")),
    "a device": (call("torch.device", "cuda", 3), Named("device", ["cuda", "3"])),
    "a size": (call("torch.Size", (2, 3)), Named("size", (2, 3))),
    "a layout": (call("torch.serialization._get_layout", "torch.strided"), Named("layout", "torch.strided")),
}


@pytest.mark.parametrize("name", VALUES)
def test_plain_values(name: str, tmp_path: Path) -> None:
    value, wanted = VALUES[name]
    manifest = opened(value, tmp_path)
    assert {b.key: decode(b.tree) for b in manifest.blobs} == {"odd": wanted}
    assert torch.equal(ckptcore.read(manifest, "kept"), TENSOR)


ODD: dict[str, tuple[Any, str]] = {
    "a set of one number": (call("__builtin__.set", 5), "set of 5"),
    "a complex number of text": (call("__builtin__.complex", "1", 2.0), "complex number of something"),
    "bytes of arguments": (call("__builtin__.bytes", [1, 2]), "bytes with arguments"),
    "bytes in another encoding": (call("_codecs.encode", "a", "rot13"), "else than latin-1"),
    "a dict with arguments": (call("collections.OrderedDict", [1]), "OrderedDict with arguments"),
    "a layout that is none": (call("torch.serialization._get_layout", 5), "layout 5"),
    "a device that is none": (call("torch.device", [1]), r"device \(\[1\],\)"),
    "a size that is none": (call("torch.Size", (-1,)), r"torch.Size \(-1,\)"),
    "a parameter without a tensor": (
        call("torch._utils._rebuild_parameter", 5, True, None),
        "without a tensor",
    ),
    "a tensor without a storage": (call(V2, 5, 0, (1,), (1,), False, None), "without a typed storage"),
    "a tensor of a dtype that is none": (
        call(V3, 5, 0, (1,), (1,), False, None, 7),
        "without a storage or dtype",
    ),
    "numpy's dtype by another state": (
        call("numpy.dtype", "f8", False, True, state=(3, "!")),
        "with the state",
    ),
    "an array of no class": (call(MAKE, 5, (0,), b"b"), "numpy array made from"),
    "an array of a length": (call(MAKE, NDARRAY, (1,), b"b"), "numpy array made from"),
    "an array with another state": (call(MAKE, NDARRAY, (0,), "b", state=(1, 2)), "with the state"),
    "a scalar without a dtype": (call("numpy.core.multiarray.scalar", 5, "x"), "without a dtype"),
}


def array(*state: Any, dtype: Any = None) -> Called:
    """An array as pickled by numpy, with another state."""
    kind = call("numpy.dtype", "i4", False, True, state=(3, "<", None, None, None, -1, -1, 0))
    shape, order, data = state
    return call(MAKE, NDARRAY, (0,), "b", state=(1, shape, kind if dtype is None else dtype, order, data))


def latin(data: bytes) -> Called:
    return call("_codecs.encode", data.decode("latin1"), "latin1")


ODD |= {
    "an array whose shape is none": (array("x", False, latin(b"")), "of shape 'x'"),
    "an array of a negative extent": (array((-1,), False, latin(b"")), r"of shape \(-1,\)"),
    "an array of 10^12 elements": (array((1 << 20, 1 << 21), False, latin(b"")), "of shape"),
    "an array of too few bytes": (array((3,), False, latin(b"1234")), "with the wrong bytes"),
    "an array without bytes": (array((1,), False, [0, 0, 0, 0]), "with the wrong bytes"),
    "an array without a dtype": (array((0,), False, latin(b""), dtype=5), "without a dtype: 5"),
    "a buffer in another order": (
        call("numpy.core.numeric._frombuffer", latin(b""), 5, (0,), "K"),
        "in order 'K'",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_malformed_values(name: str, tmp_path: Path) -> None:
    value, message = ODD[name]
    with pytest.raises(MalformedCheckpoint, match=message) as caught:
        opened(value, tmp_path)
    assert "x.pt" in caught.value.message


def test_arrays_of_classes_are_refused_by_name(tmp_path: Path) -> None:
    """A subclass of ndarray may give its bytes another meaning; dates have no plain form."""
    dates = call("numpy.dtype", "M8", False, True)
    for value, message in (
        (call(MAKE, Global("numpy.matrix"), (0,), "b"), "numpy.matrix"),
        (call("numpy.core.numeric._frombuffer", latin(b""), dates, (0,), "C"), "numpy.dtype('M8')"),
        (array((0,), False, latin(b""), dtype=dates), "numpy.dtype('M8')"),
    ):
        manifest = opened(value, tmp_path)
        assert [(b.key, b.known) for b in manifest.blobs] == [("odd", False)]
        assert any(message in f.message for f in manifest.findings if f.code == "refused-global")
        assert torch.equal(ckptcore.read(manifest, "kept"), TENSOR)


# --- storages -------------------------------------------------------------------------------------


class _Pickler(old.Pickler):
    """Writes the given persistent id."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Persistent):
            self.save(obj.value)
            self.write(pickle.BINPERSID)
        else:
            super().save(obj, save_persistent_id)


class Persistent:
    def __init__(self, *value: Any) -> None:
        self.value = value


def view(storage: Persistent, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Called:
    return call(V2, storage, offset, shape, strides, False, HOOKS)


FLOATS = Global("torch.FloatStorage")
STORAGES: dict[str, tuple[tuple[Any, ...], str]] = {
    "another kind": (("module", FLOATS, "0", "cpu", 6), "unknown persistent id"),
    "a key that is no text": (("storage", FLOATS, 0, "cpu", 6), "unknown persistent id"),
    "a class that is none": (("storage", Global("torch.float32"), "0", "cpu", 6), "unknown persistent id"),
    "fewer than none": (("storage", FLOATS, "0", "cpu", -1), "claims -1 elements"),
    "more than there can be": (("storage", FLOATS, "0", "cpu", 1 << 60), "claims 1152921504606846976"),
    "a key that is not there": (("storage", FLOATS, "7", "cpu", 6), "has no storage '7'"),
    "another length": (("storage", FLOATS, "0", "cpu", 5), r"must have 20 bytes \(got 24\)"),
}


@pytest.mark.parametrize("name", STORAGES)
def test_malformed_storages(name: str, tmp_path: Path) -> None:
    pid, message = STORAGES[name]
    with pytest.raises(MalformedCheckpoint, match=message):
        ckptcore.open(str(torch_file(tmp_path / "x.pt", view(Persistent(*pid), 0, (5,), (1,)))))


def test_a_view_beyond_its_storage(tmp_path: Path) -> None:
    pid = Persistent("storage", FLOATS, "0", "cpu", 6)
    for offset, shape, strides in ((1, (6,), (1,)), (0, (2, 2), (5, 1)), (0, (2,), (6,))):
        value = view(pid, offset, shape, strides)
        with pytest.raises(MalformedCheckpoint, match="reaches outside"):
            ckptcore.open(str(torch_file(tmp_path / "x.pt", value)))


def torch_file(path: Path, value: Any, **records: bytes) -> Path:
    """A torch zip with one storage of six floats and additional records."""
    raw = io.BytesIO()
    _Pickler(raw).dump({"w": value})
    writer = torch._C.PyTorchFileWriter(str(path))
    data = TENSOR.numpy().tobytes()
    for name, record in {"data.pkl": raw.getvalue(), "data/0": data, **records}.items():
        writer.write_record(name, record, len(record))
    writer.write_end_of_file()
    return path


# --- zips -----------------------------------------------------------------------------------------


def by_hand(
    path: Path,
    *,
    zip64: bool = False,
    name: str = "x/data.pkl",
    extra: bytes | None = None,
    pickled: bytes | None = None,
) -> Path:
    """A zip of one record and a directory, with the sizes in zip64 fields on request."""
    body = pickle.dumps({"a": 5}, 2) if pickled is None else pickled
    crc, spelled = zlib.crc32(body), name.encode()
    local = struct.pack(
        "<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 0, crc, len(body), len(body), len(spelled), 0
    )
    head = local + spelled + body
    if extra is None:
        extra = struct.pack("<HHQQQ", 1, 24, len(body), len(body), 0) if zip64 else b""
    none = 0xFFFFFFFF
    sizes = (none, none, none) if zip64 else (len(body), len(body), 0)
    entry = (
        struct.pack(
            "<4s6H3I5H2I",
            b"PK\x01\x02",
            20,
            20,
            0,
            0,
            0,
            0,
            crc,
            sizes[0],
            sizes[1],
            len(spelled),
            len(extra),
            0,
            0,
            0,
            0,
            sizes[2],
        )
        + spelled
        + extra
    )
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, len(entry), len(head), 0)
    path.write_bytes(head + entry + end)
    return path


def test_sizes_in_zip64_fields(tmp_path: Path) -> None:
    """Records beyond 4 GiB have their sizes in an extra field, after any others."""
    plain = ckptcore.open(str(by_hand(tmp_path / "a.pt")))
    other = struct.pack("<HHI", 0x5455, 4, 7)
    length = len(pickle.dumps({"a": 5}, 2))
    fields = struct.pack("<HHQQQ", 1, 24, length, length, 0)
    for n, extra in enumerate((None, other + fields)):
        manifest = ckptcore.open(str(by_hand(tmp_path / f"{n}.pt", zip64=True, extra=extra)))
        assert [b.tree for b in manifest.blobs] == [b.tree for b in plain.blobs] == [5]


FIELDS = {
    "none": b"",
    "one of three": struct.pack("<HHQ", 1, 8, 5),
    "cut": struct.pack("<HH", 1, 24),
    "no field": b"\x01\x00\x18",
}


@pytest.mark.parametrize("extra", FIELDS.values(), ids=FIELDS)
def test_missing_zip64_fields(extra: bytes, tmp_path: Path) -> None:
    with pytest.raises(MalformedCheckpoint, match="zip64 sizes are missing"):
        ckptcore.open(str(by_hand(tmp_path / "x.pt", zip64=True, extra=extra)))


def test_torch_reads_the_zip_of_this_test(tmp_path: Path) -> None:
    with zipfile.ZipFile(by_hand(tmp_path / "x.pt", zip64=True)) as made:
        assert pickle.loads(made.read("x/data.pkl")) == {"a": 5}


def test_code_is_unsafe(tmp_path: Path) -> None:
    """A TorchScript archive looks like a checkpoint and is a program."""
    with pytest.raises(UnsafeContent, match="TorchScript"):
        ckptcore.open(str(torch_file(tmp_path / "x.pt", 5, **{"constants.pkl": b"\x80\x02N."})))


@pytest.mark.parametrize("order", ["little", "big"])
def test_byte_orders(order: str, tmp_path: Path) -> None:
    data = TENSOR.numpy().astype(f"{'<' if order == 'little' else '>'}f4").tobytes()
    path, raw = tmp_path / "x.pt", io.BytesIO()
    pid = Persistent("storage", FLOATS, "0", "cpu", 6)
    _Pickler(raw).dump({"w": view(pid, 0, (6,), (1,))})
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, record in {"data.pkl": raw.getvalue(), "byteorder": order.encode(), "data/0": data}.items():
        writer.write_record(name, record, len(record))
    writer.write_end_of_file()
    assert torch.equal(ckptcore.read(ckptcore.open(str(path)), "w"), TENSOR)


def test_an_invalid_byte_order(tmp_path: Path) -> None:
    with pytest.raises(MalformedCheckpoint, match="byte order b'middle'"):
        ckptcore.open(str(torch_file(tmp_path / "x.pt", 5, byteorder=b"middle")))


CUTS: dict[str, Callable[[bytes], bytes]] = {
    "a few bytes": lambda d: d[:20],
    "another end": lambda d: d[:-4] + b"xxxx",
    "a comment": lambda d: d[:-2] + b"\x01\x00",
    "more records than the directory has": lambda d: d[:-14] + b"\x63\x00\x63\x00" + d[-10:],
    "a directory elsewhere": lambda d: d[:-6] + struct.pack("<I", 1 << 30) + d[-2:],
    "a directory of other bytes": lambda d: d.replace(b"PK\x01\x02", b"PK\x01\x03"),
    "a name that is no text": lambda d: d.replace(b"x/data.pkl", b"x/\xff\xfe\xfd.pkl"),
    "a header of other bytes": lambda d: d.replace(b"PK\x03\x04", b"PK\x03\x05"),
}


@pytest.mark.parametrize("name", CUTS)
def test_damaged_zips(name: str, tmp_path: Path) -> None:
    path = by_hand(tmp_path / "x.pt")
    path.write_bytes(CUTS[name](path.read_bytes()))
    with pytest.raises(CkptError) as caught:
        ckptcore.open(str(path))
    assert caught.value.code in {"malformed", "unknown-format"}


def test_a_record_that_reaches_into_the_directory(tmp_path: Path) -> None:
    """The directory claims more bytes than the file has before it."""
    path = by_hand(tmp_path / "x.pt")
    data = path.read_bytes()
    length = len(pickle.dumps({"a": 5}, 2))
    at = data.index(b"PK\x01\x02")
    sizes = struct.pack("<II", length, length)
    path.write_bytes(data[:at] + data[at:].replace(sizes, struct.pack("<II", length + 40, length + 40)))
    with pytest.raises(MalformedCheckpoint, match="after the directory"):
        ckptcore.open(str(path))


# --- zips whose payloads are not what their bytes say ------------------------------------------------

_HEADERS = {"directory": (b"PK\x01\x02", 8), "local header": (b"PK\x03\x04", 6)}  # and where their flags are


def flagged(raw: bytes, bit: int, header: str) -> bytes:
    """Return a zip with a bit set in the flags of each record."""
    data = bytearray(raw)
    signature, offset = _HEADERS[header]
    at = data.find(signature)
    while at >= 0:
        (flags,) = struct.unpack_from("<H", data, at + offset)
        struct.pack_into("<H", data, at + offset, flags | 1 << bit)
        at = data.find(signature, at + 4)
    return bytes(data)


@pytest.mark.parametrize("header", _HEADERS)
@pytest.mark.parametrize(
    ("bit", "message"), [(0, "is encrypted"), (6, "is encrypted"), (13, "is encrypted"), (5, "is a patch")]
)
def test_an_encrypted_zip(bit: int, message: str, header: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"kept": TENSOR}, path)
    path.write_bytes(flagged(path.read_bytes(), bit, header))
    if header == "directory":  # torch does not look at the other
        with pytest.raises(RuntimeError, match=r"unsupported (encryption|feature)"):
            torch.load(path)
    with pytest.raises(MalformedCheckpoint, match=message):
        ckptcore.open(str(path))


@pytest.mark.parametrize("header", _HEADERS)
def test_an_encrypted_item_of_dcp(header: str, tmp_path: Path) -> None:
    """The second of two like items, which is recognised by the first, and not parsed again."""
    dcp.save({"a": torch.ones(64), "b": torch.zeros(64)}, checkpoint_id=tmp_path / "c", no_dist=True)
    (file,) = (tmp_path / "c").glob("*.distcp")
    raw = file.read_bytes()
    second = raw.rindex(b"PK\x03\x04", 0, raw.rindex(b"data.pkl", 0, raw.rindex(b"PK\x01\x02")))
    file.write_bytes(raw[:second] + flagged(raw[second:], 0, header))
    report = ckptcore.check(ckptcore.open(str(tmp_path / "c")), level="bytes")
    assert [f.fqn for f in report.findings if f.severity == "error"] in (["a"], ["b"])
    assert "is encrypted" in report.findings[0].message
