"""Write a tree of plain values as the data.pkl of `torch.save`.

Protocol 2, like torch/serialization.py. By default it holds only what ``torch.load(weights_only=True)``
permits, except for numpy arrays; other values are written in the plain form of
`ckptcore.core.named_values.restated`. `Classes` says which keep their classes, like with Python's own
pickler.
"""

from __future__ import annotations

import enum
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec, row_major
from ckptcore.core.named_values import normal, restated
from ckptcore.core.object_tree import Named, TensorRef, encode
from ckptcore.encodings.pickle.library_values import OF_LIBRARIES, OF_TORCH, array
from ckptcore.encodings.pickle.trainer_classes import require_class


class Classes(enum.IntEnum):
    """Whose classes a pickle may name: torch's own, those of Python's libraries, those of trainers, too."""

    PLAIN = 0
    LIBRARIES = 1
    TRAINERS = 2


class Pickled:
    """Builds one protocol 2 pickle."""

    def __init__(
        self, tensor: Callable[[str], tuple[str, TensorSpec]], *, classes: Classes = Classes.PLAIN
    ) -> None:
        """Begin a pickle; ``tensor`` maps FQN -> (storage key, spec)."""
        self.tensor, self.classes = tensor, classes
        self.out = bytearray(b"\x80\x02")
        self._memo: dict[str, int] = {}
        self._keys = 0  # how many keys and sets are around the value

    def finish(self) -> bytes:
        """Return the complete pickle."""
        return bytes(self.out + b".")

    def value(self, value: Any) -> None:
        """Append one value of a tree from `ckptcore.core.object_tree.decode`; raises TypeError."""
        emit = _VALUES.get(type(value))
        if emit is None:
            raise TypeError(f"cannot pickle a {type(value).__name__}")
        emit(self, value)

    def key(self, value: Any) -> None:
        """Append a key of a dict or a value of a set, which can be hashed."""
        self._keys += 1
        self.value(value)
        self._keys -= 1

    @property
    def in_key(self) -> bool:
        """Whether the value must be one that can be hashed."""
        return self._keys > 0

    def items(self, value: dict[Any, Any]) -> None:
        """Append the items of the dict before them."""
        self.out += b"("
        for k, v in value.items():
            self.key(k) if type(k) is not str else self.value(k)
            self.value(v)
        self.out += b"u"

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


def _dict(p: Pickled, value: dict[Any, Any]) -> None:
    p.out += b"}"
    p.items(value)


def _odict(p: Pickled, value: OrderedDict[Any, Any]) -> None:
    p.call("collections", "OrderedDict")
    p.items(value)


def _set(p: Pickled, value: set[Any] | frozenset[Any]) -> None:
    values = sorted(value, key=lambda v: repr(encode(v)) if p.in_key else repr(v))
    frozen = isinstance(value, frozenset)
    if frozen and not p.classes and p.in_key:  # a set has no place there
        p.all(tuple(values))
        return
    p.name("__builtin__", "frozenset" if frozen and p.classes else "set")
    p.out += b"(]("
    for v in values:
        p.key(v)
    p.out += b"etR"


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


# --- values with a name in torch, numpy, the standard library or a trainer --------------------------


def _enum(p: Pickled, value: list[Any]) -> None:
    """Write [class, value] like a member pickled by Lib/enum.py."""
    p.call(*require_class("enum", value), value[1])


def _record(p: Pickled, value: list[Any]) -> None:
    """Write [class, attributes] like an object without its own reduction."""
    p.name(*require_class("record", value))
    p.out += b")\x81"
    p.value(value[1])
    p.out += b"b"


_BY_CLASSES: tuple[tuple[Classes, dict[str, Callable[[Pickled, Any], None]]], ...] = (
    (Classes.PLAIN, {**OF_TORCH, "ndarray": array}),
    (Classes.LIBRARIES, OF_LIBRARIES),
    (Classes.TRAINERS, {"enum": _enum, "record": _record}),
)


def keeps_class(kind: str, classes: Classes) -> bool:
    """Report whether a pickle keeps the class of a kind of value; arrays are the format's own matter."""
    if kind == "frozenset":
        return classes >= Classes.LIBRARIES
    return any(kind in kinds and classes >= needed for needed, kinds in _BY_CLASSES)


def _named(p: Pickled, value: Named) -> None:
    try:
        content = normal(value.kind, value.value)
    except ValueError as error:
        raise TypeError(f"cannot pickle a value: {error}") from error
    for needed, kinds in _BY_CLASSES:
        if value.kind in kinds and p.classes >= needed:
            kinds[value.kind](p, content)
            return
    # A kind of another format's own classes is written as its value.
    p.value(restated(value.kind, content))


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
