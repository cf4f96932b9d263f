"""Write a tree of plain values as the data.pkl of `torch.save`.

Protocol 2, like torch/serialization.py. By default it holds only what ``torch.load(weights_only=True)``
permits, except for numpy arrays. With ``classes``, paths, namespaces and frozen sets keep their classes, like
with Python's own pickler.
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec, row_major
from ckptcore.core.object_tree import Named, TensorRef


class Pickled:
    """Builds one protocol 2 pickle."""

    def __init__(self, tensor: Callable[[str], tuple[str, TensorSpec]], *, classes: bool = False) -> None:
        """Begin a pickle; ``tensor`` maps FQN -> (storage key, spec), ``classes`` keeps library classes."""
        self.tensor, self.classes = tensor, classes
        self.out = bytearray(b"\x80\x02")
        self._memo: dict[str, int] = {}

    def finish(self) -> bytes:
        """Return the complete pickle."""
        return bytes(self.out + b".")

    def value(self, value: Any) -> None:
        """Append one value of a tree from `ckptcore.core.object_tree.decode`; raises TypeError."""
        emit = _VALUES.get(type(value))
        if emit is None:
            raise TypeError(f"cannot pickle a {type(value).__name__}")
        emit(self, value)

    def call(self, module: str, name: str, *args: Any) -> None:
        """Append ``name(*args)``."""
        self.name(module, name)
        self.all(args)
        self.out += b"R"

    def all(self, values: tuple[Any, ...]) -> None:
        """Append a tuple."""
        self.out += b"("
        for v in values:
            self.value(v)
        self.out += b"t"

    def name(self, module: str, name: str) -> None:
        """Append a global."""
        full = f"{module}.{name}"
        seen = self._memo.get(full)
        if seen is not None:
            self.out += b"h" + bytes([seen])
            return
        self.out += f"c{module}\n{name}\n".encode()
        if len(self._memo) < 256:
            self._memo[full] = len(self._memo)
            self.out += b"q" + bytes([self._memo[full]])


# --- plain values ---------------------------------------------------------------------------------


def _int(p: Pickled, value: int) -> None:
    if 0 <= value < 256:
        p.out += b"K" + bytes([value])
    elif -(1 << 31) <= value < 1 << 31:
        p.out += b"J" + value.to_bytes(4, "little", signed=True)
    else:
        n = value.bit_length() // 8 + 1
        p.out += b"\x8a" + bytes([n]) + value.to_bytes(n, "little", signed=True)


def _text(p: Pickled, value: str) -> None:
    raw = value.encode("utf-8", "surrogatepass")
    p.out += b"X" + len(raw).to_bytes(4, "little") + raw


def _raw(p: Pickled, value: bytes) -> None:
    p.call("_codecs", "encode", value.decode("latin1"), "latin1")


def _list(p: Pickled, value: list[Any]) -> None:
    p.out += b"]("
    for v in value:
        p.value(v)
    p.out += b"e"


def _items(p: Pickled, value: dict[Any, Any]) -> None:
    p.out += b"("
    for k, v in value.items():
        p.value(k)
        p.value(v)
    p.out += b"u"


def _dict(p: Pickled, value: dict[Any, Any]) -> None:
    p.out += b"}"
    _items(p, value)


def _odict(p: Pickled, value: OrderedDict[Any, Any]) -> None:
    p.call("collections", "OrderedDict")
    _items(p, value)


def _set(p: Pickled, value: set[Any] | frozenset[Any]) -> None:
    kind = "frozenset" if p.classes and isinstance(value, frozenset) else "set"
    p.call("__builtin__", kind, sorted(value, key=repr))


def _tensor(p: Pickled, ref: TensorRef) -> None:
    """Write a tensor like torch/_utils.py: `_rebuild_tensor_v2`, or v3 for dtypes without a storage class."""
    key, spec = p.tensor(ref.fqn)
    dtype = BY_NAME[spec.dtype]
    p.name("torch._utils", "_rebuild_tensor_v2" if dtype.storage else "_rebuild_tensor_v3")
    p.out += b"(("
    p.value("storage")
    if dtype.storage:
        p.name("torch", dtype.storage)
    else:
        p.name("torch.storage", "UntypedStorage")
    p.value(key)
    p.value("cpu")
    p.value(spec.numel if dtype.storage else spec.nbytes)
    p.out += b"tQ"  # the persistent id: a storage
    p.value(0)
    p.value(spec.shape)
    p.value(row_major(spec.shape))
    p.out += b"\x89"  # requires_grad
    p.call("collections", "OrderedDict")  # backward hooks: none
    if not dtype.storage:
        p.name("torch", dtype.name)
    p.out += b"tR"


# --- values with a name in torch, numpy or the standard library ---------------------------------------


def _device(p: Pickled, value: Any) -> None:
    parts = [int(v) if i and _NUMBER.fullmatch(str(v)) else v for i, v in enumerate(value)]
    p.call("torch", "device", *parts)


def _array(p: Pickled, array: Any) -> None:
    """Write an array like array_reduce in numpy/_core/src/multiarray/methods.c."""
    p.name("numpy._core.multiarray", "_reconstruct")
    p.out += b"("
    p.name("numpy", "ndarray")
    p.value((0,))
    p.value(b"b")
    p.out += b"tR(K\x01"
    p.value(tuple(array["shape"]))
    _array_dtype(p, np.dtype(array["dtype"]))
    p.value(array.get("order") == "F")
    p.value(array["data"])
    p.out += b"tb"


def _array_dtype(p: Pickled, dtype: np.dtype[Any]) -> None:
    """Write a dtype of numbers or fixed-width text like arraydescr_reduce in descriptor.c."""
    p.call("numpy", "dtype", dtype.str[1:], False, True)
    text = dtype.kind in "SU"
    sizes = (dtype.itemsize, dtype.alignment, 8 if dtype.kind == "U" else 0) if text else (-1, -1, 0)
    p.value((3, dtype.str[0], None, None, None, *sizes))
    p.out += b"b"


def _class(module: str, name: str) -> Callable[[Pickled, Any], None]:
    """Return a writer of values made from one text; without classes it writes the text."""

    def emit(p: Pickled, value: Any) -> None:
        if p.classes:
            p.call(module, name, value)
        else:
            p.value(value)

    return emit


def _namespace(module: str, name: str, make: bytes) -> Callable[[Pickled, Any], None]:
    """Return a writer of attributes; without classes it writes a dict. ``make`` builds the empty object."""

    def emit(p: Pickled, value: Any) -> None:
        if p.classes:
            p.name(module, name)
            p.out += make
        p.value(value)
        if p.classes:
            p.out += b"b"

    return emit


def _bytes_io(p: Pickled, value: bytes) -> None:
    """Write a buffer like bytesio_getstate in Modules/_io/bytesio.c; without classes, its bytes."""
    if not p.classes:
        p.value(value)
        return
    p.name("_io", "BytesIO")
    p.out += b")\x81"
    p.value((value, 0, None))
    p.out += b"b"


def _enum(p: Pickled, value: list[Any]) -> None:
    """Write [class, value] like a member pickled by Lib/enum.py; without classes, its value."""
    module, _, name = value[0].rpartition(".")
    if p.classes:
        p.call(module, name, value[1])
    else:
        p.value(value[1])


def _record(p: Pickled, value: list[Any]) -> None:
    """Write [class, attributes] like an object without its own reduction; without classes, a dict."""
    module, _, name = value[0].rpartition(".")
    _namespace(module, name, b")\x81")(p, value[1])


def _named(p: Pickled, value: Named) -> None:
    emit = _NAMED.get(value.kind)
    if emit is None:  # another format's reader built it from its own classes
        p.value(value.value)
    else:
        emit(p, value.value)


_NUMBER = re.compile(r"[0-9]{1,9}")
_NAMED: dict[str, Callable[[Pickled, Any], None]] = {
    "size": lambda p, v: p.call("torch", "Size", tuple(v)),
    "dtype": lambda p, v: p.name("torch", v),
    "device": _device,
    "layout": lambda p, v: p.call("torch.serialization", "_get_layout", v),
    "ndarray": _array,
    "npdtype": lambda p, v: _array_dtype(p, np.dtype("".join(reversed(v)))),
    "npclass": lambda p, v: p.name("numpy", v),
    "path": _class("pathlib", "PosixPath"),
    "winpath": _class("pathlib", "PureWindowsPath"),
    "namespace": _namespace("argparse", "Namespace", b")\x81"),
    "bytesio": _bytes_io,
    "enum": _enum,
    "record": _record,
    "simplenamespace": _namespace("types", "SimpleNamespace", b")R"),
}
_VALUES: dict[type, Callable[[Pickled, Any], None]] = {
    type(None): lambda p, _: p.out.extend(b"N"),
    bool: lambda p, v: p.out.extend(b"\x88" if v else b"\x89"),
    int: _int,
    float: lambda p, v: p.out.extend(b"G" + struct.pack(">d", v)),
    complex: lambda p, v: p.call("__builtin__", "complex", v.real, v.imag),
    str: _text,
    bytes: _raw,
    list: _list,
    tuple: lambda p, v: p.all(v),
    dict: _dict,
    OrderedDict: _odict,
    set: _set,
    frozenset: _set,
    TensorRef: _tensor,
    Named: _named,
}
