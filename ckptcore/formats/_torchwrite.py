"""Writing torch pickles: which bytes does `torch.save` put into data.pkl, and around a record?

The pickle is protocol 2, as torch/serialization.py writes it, with nothing in it that
``torch.load(weights_only=True)`` does not know. Zip records are stored, carry a data descriptor
behind their payload (flag bit 3, as caffe2/serialize/inline_container.cc writes them), and their
payloads start at multiples of 64, so that ``mmap=True`` works.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ckptcore.dtype import BY_NAME
from ckptcore.manifest import TensorSpec, row_major
from ckptcore.objects import Named, TensorRef

ALIGN = 64
_NONE32 = 0xFFFFFFFF
_FLAGS = 0x0808  # bit 3: sizes and CRC follow the payload; bit 11: UTF-8 names


class Pickled:
    """Builds one protocol 2 pickle."""

    def __init__(self, tensor: Callable[[str], tuple[str, TensorSpec]]) -> None:
        self._tensor = tensor  # FQN -> (storage key, spec)
        self._out = bytearray(b"\x80\x02")
        self._memo: dict[str, int] = {}

    def finish(self) -> bytes:
        """The whole pickle."""
        return bytes(self._out + b".")

    def value(self, value: Any) -> None:
        """Appends one value of a tree as `ckptcore.objects.decode` gives it."""
        out = self._out
        if value is None:
            out += b"N"
        elif value is True or value is False:
            out += b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            self._int(value)
        elif isinstance(value, float):
            out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            self._text(value)
        elif isinstance(value, TensorRef):
            self._tensor_value(*self._tensor(value.fqn))
        elif isinstance(value, bytes):
            self._call("_codecs", "encode", value.decode("latin1"), "latin1")
        elif isinstance(value, complex):
            self._call("__builtin__", "complex", value.real, value.imag)
        elif isinstance(value, (set, frozenset)):
            self._call("__builtin__", "set", sorted(value, key=repr))
        elif isinstance(value, list):
            out += b"]("
            for v in value:
                self.value(v)
            out += b"e"
        elif isinstance(value, tuple):
            out += b"("
            for v in value:
                self.value(v)
            out += b"t"
        elif isinstance(value, dict):
            if type(value) is dict:
                out += b"}"
            else:
                self._global("collections", "OrderedDict")
                out += b")R"
            out += b"("
            for k, v in value.items():
                self.value(k)
                self.value(v)
            out += b"u"
        elif isinstance(value, Named):
            self._named(value)
        else:
            raise TypeError(f"{type(value).__name__} cannot be pickled")

    def _named(self, value: Named) -> None:
        if value.kind == "size":
            self._call("torch", "Size", tuple(value.value))
        elif value.kind == "dtype":
            self._global("torch", value.value)
        elif value.kind == "device":
            parts = [int(p) if i and str(p).isdigit() else p for i, p in enumerate(value.value)]
            self._call("torch", "device", *parts)
        elif value.kind == "layout":
            self._call("torch.serialization", "_get_layout", value.value)
        elif value.kind == "ndarray":
            self._array(value.value)
        elif value.kind == "npdtype":
            self._array_dtype(np.dtype("".join(reversed(value.value))))
        elif value.kind == "npclass":
            self._global("numpy", value.value)
        else:  # a path: `weights_only` knows no path class, and its text is all it says
            self.value(value.value)

    def _array(self, array: dict[str, Any]) -> None:
        """As numpy/_core/src/multiarray/methods.c, array_reduce, has it."""
        self._global("numpy._core.multiarray", "_reconstruct")
        self._out += b"("
        self._global("numpy", "ndarray")
        self.value((0,))
        self.value(b"b")
        self._out += b"tR(K\x01"
        self.value(tuple(array["shape"]))
        self._array_dtype(np.dtype(array["dtype"]))
        self.value(array.get("order") == "F")
        self.value(array["data"])
        self._out += b"tb"

    def _array_dtype(self, dtype: np.dtype[Any]) -> None:
        """As descriptor.c, arraydescr_reduce, has it, for numbers and fixed-width text."""
        self._call("numpy", "dtype", dtype.str[1:], False, True)
        text = dtype.kind in "SU"
        sizes = (dtype.itemsize, dtype.alignment, 8 if dtype.kind == "U" else 0) if text else (-1, -1, 0)
        self.value((3, dtype.str[0], None, None, None, *sizes))
        self._out += b"b"

    def _tensor_value(self, key: str, spec: TensorSpec) -> None:
        dtype = BY_NAME[spec.dtype]
        out = self._out
        self._global("torch._utils", "_rebuild_tensor_v2" if dtype.storage else "_rebuild_tensor_v3")
        out += b"((" + b""
        self._text("storage")
        if dtype.storage:
            self._global("torch", dtype.storage)
        else:
            self._global("torch.storage", "UntypedStorage")
        self._text(key)
        self._text("cpu")
        self._int(spec.numel if dtype.storage else spec.nbytes)
        out += b"tQ"  # the persistent id: a storage
        self._int(0)
        self.value(spec.shape)
        self.value(row_major(spec.shape))
        out += b"\x89"  # requires_grad
        self._global("collections", "OrderedDict")  # backward hooks: none
        out += b")R"
        if not dtype.storage:
            self._global("torch", dtype.name)
        out += b"tR"

    def _call(self, module: str, name: str, *args: Any) -> None:
        self._global(module, name)
        self._out += b"("
        for a in args:
            self.value(a)
        self._out += b"tR"

    def _global(self, module: str, name: str) -> None:
        full = f"{module}.{name}"
        seen = self._memo.get(full)
        if seen is not None:
            self._out += b"h" + bytes([seen])
            return
        self._out += f"c{module}\n{name}\n".encode()
        if len(self._memo) < 256:
            self._memo[full] = len(self._memo)
            self._out += b"q" + bytes([self._memo[full]])

    def _int(self, value: int) -> None:
        if 0 <= value < 256:
            self._out += b"K" + bytes([value])
        elif -(1 << 31) <= value < 1 << 31:
            self._out += b"J" + value.to_bytes(4, "little", signed=True)
        else:
            n = value.bit_length() // 8 + 1
            self._out += b"\x8a" + bytes([n]) + value.to_bytes(n, "little", signed=True)

    def _text(self, value: str) -> None:
        raw = value.encode("utf-8", "surrogatepass")
        self._out += b"X" + len(raw).to_bytes(4, "little") + raw


def local_header(name: str, at: int) -> bytes:
    """The header of a record that begins at byte ``at``, padded so that its payload is aligned."""
    raw = name.encode()
    fixed = 30 + len(raw) + 4
    pad = -(at + fixed) % ALIGN
    # Extra field "FB" is torch's own padding.
    extra = b"FB" + pad.to_bytes(2, "little") + b"Z" * pad
    return (
        struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(raw), len(extra))
        + raw
        + extra
    )


def descriptor(crc: int, length: int) -> bytes:
    """What follows a payload: its CRC-32 and sizes. The CRC stands at byte 4."""
    wide = "Q" if length >= _NONE32 else "I"
    return struct.pack(f"<4sI2{wide}", b"PK\x07\x08", crc, length, length)


def central_entry(name: str, at: int, crc: int, length: int) -> bytes:
    """One row of the central directory. The CRC stands at byte 16."""
    raw = name.encode()
    wide_size, wide_at = length >= _NONE32, at >= _NONE32
    values = ([length, length] if wide_size else []) + ([at] if wide_at else [])
    extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
    shown = _NONE32 if wide_size else length
    return (
        struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 0, 0, _FLAGS, 0, 0, 0, crc, shown, shown,
                    len(raw), len(extra), 0, 0, 0, 0, _NONE32 if wide_at else at)
        + raw + extra
    )  # fmt: skip


def end_records(count: int, at: int, size: int) -> bytes:
    """zip64 end record, its locator, and the classic end record: what torch always writes."""
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, at)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, at + size, 1)
    few = min(count, 0xFFFF)
    return end64 + locator + struct.pack(
        "<4s4H2IH", b"PK\x05\x06", 0, 0, few, few, min(size, _NONE32), min(at, _NONE32), 0
    )  # fmt: skip


def small_record(name: str, at: int, data: bytes) -> tuple[bytes, bytes]:
    """(header + payload + descriptor, directory row) of a record whose bytes are known."""
    crc = zlib.crc32(data)
    whole = local_header(name, at) + data + descriptor(crc, len(data))
    return whole, central_entry(name, at, crc, len(data))
