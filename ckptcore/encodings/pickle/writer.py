"""Write a tree of plain values as the data.pkl of `torch.save`.

Protocol 2, like torch/serialization.py. By default it holds only what ``torch.load(weights_only=True)``
permits, except for numpy arrays; other values are written in the plain form of
`ckptcore.core.named_values.restated`. `Classes` says which keep their classes, like with Python's own
pickler.

Values of Python's libraries and numpy are written as the classes themselves pickle them: each function writes
one kind of `ckptcore.core.named_values`, whose value has been checked. Names are those of protocol 2, which
spells those of Python 2 (Lib/_compat_pickle.py). `ckptcore.encodings.pickle.library_globals` is the way back.
"""

from __future__ import annotations

import datetime
import enum
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec, row_major
from ckptcore.core.named_values import FACTORIES, moment_of, normal, restated, uuid_of
from ckptcore.core.object_tree import Named, TensorRef, encode
from ckptcore.encodings.pickle.trainer_classes import require_class

_NUMBER = re.compile(r"[0-9]{1,9}")


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

    def appended(self, values: Iterable[Any]) -> None:
        """Append values to the list before them."""
        self.out += b"("
        for v in values:
            self.value(v)
        self.out += b"e"

    def name(self, module: str, name: str) -> None:
        """Append a global."""
        full = f"{module}.{name}"
        memo_number = self._memo.get(full)
        if memo_number is not None:
            self.out += b"h" + bytes([memo_number])
            return
        self.out += f"c{module}\n{name}\n".encode()
        # BINPUT has one byte for the number. Names beyond are spelled each time.
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
    p.out += b"]"
    p.appended(value)


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


def _enum_member(p: Pickled, value: list[Any]) -> None:
    """Write [class, name] as CPython 3.11.0 to 3.11.3 pickle a member: its value is not known here."""
    p.name("__builtin__", "getattr")
    p.out += b"("
    p.name(*require_class("enummember", value))
    p.value(value[1])
    p.out += b"tR"


def _record(p: Pickled, value: list[Any]) -> None:
    """Write [class, attributes] like an object without its own reduction."""
    _attributes(*require_class("record", value), b")\x81")(p, value[1])


Emit = Callable[[Pickled, Any], None]


def _call(module: str, name: str) -> Emit:
    """Return a writer of values that are made from one argument."""
    return lambda p, value: p.call(module, name, value)


def _spread(module: str, name: str) -> Emit:
    """Return a writer of values that are made from several arguments."""
    return lambda p, value: p.call(module, name, *value)


def _attributes(module: str, name: str, make: bytes) -> Emit:
    """Return a writer of attributes; ``make`` builds the empty object."""

    def emit(p: Pickled, value: Any) -> None:
        p.name(module, name)
        p.out += make
        p.value(value)
        p.out += b"b"

    return emit


# --- dates ----------------------------------------------------------------------------------------


def _date(p: Pickled, value: str) -> None:
    day = datetime.date.fromisoformat(value)
    p.call("datetime", "date", day.year.to_bytes(2, "big") + bytes([day.month, day.day]))


def _with_zone(p: Pickled, name: str, packed: bytes, zone: Any) -> None:
    p.call("datetime", name, packed, *([] if zone is None else [Named("timezone", zone)]))


def _datetime(p: Pickled, value: Any) -> None:
    """Write a moment like datetime_getstate in Modules/_datetimemodule.c; the fold is a bit of the month."""
    moment = moment_of(datetime.datetime, value)
    fields = bytes([moment.month | moment.fold << 7, moment.day, moment.hour, moment.minute, moment.second])
    packed = moment.year.to_bytes(2, "big") + fields + moment.microsecond.to_bytes(3, "big")
    _with_zone(p, "datetime", packed, value[2])


def _time(p: Pickled, value: Any) -> None:
    moment = moment_of(datetime.time, value)
    fields = bytes([moment.hour | moment.fold << 7, moment.minute, moment.second])
    _with_zone(p, "time", fields + moment.microsecond.to_bytes(3, "big"), value[2])


def _timezone(p: Pickled, value: Any) -> None:
    *offset, name = value
    p.call("datetime", "timezone", Named("timedelta", tuple(offset)), *([] if name is None else [name]))


def _uuid(p: Pickled, value: Any) -> None:
    identifier = uuid_of(value)
    state = {"int": identifier.int} | ({} if value[1] is None else {"is_safe": value[1]})
    _attributes("uuid", "UUID", b")\x81")(p, state)


# --- bytes and containers -------------------------------------------------------------------------


def _bytearray(p: Pickled, value: bytes) -> None:
    p.call("__builtin__", "bytearray", value.decode("latin1"), "latin-1")


def _bytes_io(p: Pickled, value: bytes, position: int = 0) -> None:
    """Write a buffer like bytesio_getstate in Modules/_io/bytesio.c."""
    _attributes("_io", "BytesIO", b")\x81")(p, (value, position, None))


def _defaultdict(p: Pickled, value: Any) -> None:
    p.name("collections", "defaultdict")
    p.out += b"("
    if value["factory"] is not None:
        p.name(FACTORIES[value["factory"]], value["factory"])
    p.out += b"tR"
    p.items(value["items"])


def _deque(p: Pickled, value: Any) -> None:
    p.call("collections", "deque", *([] if value["maxlen"] is None else [(), value["maxlen"]]))
    p.appended(value["items"])


# --- numpy and torch ------------------------------------------------------------------------------


def _array(p: Pickled, value: Any) -> None:
    """Write an array like array_reduce in numpy/_core/src/multiarray/methods.c."""
    p.name("numpy._core.multiarray", "_reconstruct")
    p.out += b"("
    p.name("numpy", "ndarray")
    p.value((0,))
    p.value(b"b")
    p.out += b"tR(K\x01"
    p.value(tuple(value["shape"]))
    _dtype(p, np.dtype(value["dtype"]))
    p.value(value.get("order") == "F")
    p.value(value["data"])
    p.out += b"tb"


def _dtype(p: Pickled, dtype: np.dtype[Any]) -> None:
    """Write a dtype of numbers or fixed-width text like arraydescr_reduce in descriptor.c."""
    p.call("numpy", "dtype", dtype.str[1:], False, True)
    text = dtype.kind in "SU"
    sizes = (dtype.itemsize, dtype.alignment, 8 if dtype.kind == "U" else 0) if text else (-1, -1, 0)
    p.value((3, dtype.str[0], None, None, None, *sizes))
    p.out += b"b"


def _scalar(p: Pickled, value: Any) -> None:
    """Write a scalar like gentype_reduce in numpy/_core/src/multiarray/scalartypes.c.src."""
    spelled, data = value
    p.name("numpy._core.multiarray", "scalar")
    p.out += b"("
    _dtype(p, np.dtype(spelled))
    p.value(data)
    p.out += b"tR"


def _device(p: Pickled, value: Any) -> None:
    parts = [int(v) if i and _NUMBER.fullmatch(str(v)) else v for i, v in enumerate(value)]
    p.call("torch", "device", *parts)


# Kinds that torch.load(weights_only=True) opens: torch/_weights_only_unpickler.py, _get_allowed_globals.
OF_TORCH: dict[str, Emit] = {
    "size": lambda p, v: p.call("torch", "Size", tuple(v)),
    "dtype": lambda p, v: p.name("torch", v),
    "device": _device,
    "layout": lambda p, v: p.call("torch.serialization", "_get_layout", v),
    "bytearray": _bytearray,
    "counter": _call("collections", "Counter"),
}
# Kinds that need weights_only=False; without it they are written as their plain form. An array has none here.
OF_LIBRARIES: dict[str, Emit] = {
    "range": _spread("__builtin__", "xrange"),
    "slice": _spread("__builtin__", "slice"),
    "ellipsis": lambda p, _: p.name("__builtin__", "Ellipsis"),
    "bytesio": _bytes_io,
    "bytesioat": lambda p, v: _bytes_io(p, *v),
    "deque": _deque,
    "defaultdict": _defaultdict,
    "date": _date,
    "time": _time,
    "datetime": _datetime,
    "timedelta": _spread("datetime", "timedelta"),
    "timezone": _timezone,
    "decimal": _call("decimal", "Decimal"),
    "fraction": lambda p, v: p.call("fractions", "Fraction", f"{v[0]}/{v[1]}"),
    "uuid": _uuid,
    "path": _call("pathlib", "PosixPath"),
    "purepath": _call("pathlib", "PurePosixPath"),
    "winpath": _call("pathlib", "PureWindowsPath"),
    "windowspath": _call("pathlib", "PureWindowsPath"),  # a WindowsPath opens on Windows only
    "namespace": _attributes("argparse", "Namespace", b")\x81"),
    "simplenamespace": _attributes("types", "SimpleNamespace", b")R"),
    "npscalar": _scalar,
    "npdtype": lambda p, v: _dtype(p, np.dtype("".join(reversed(v)))),
    "npclass": lambda p, v: p.name("numpy", v),
    "qscheme": lambda p, v: p.name("torch", v),
    "storage": lambda p, v: p.name("torch.storage" if v == "UntypedStorage" else "torch", v),
}
_BY_CLASSES: tuple[tuple[Classes, dict[str, Emit]], ...] = (
    (Classes.PLAIN, {**OF_TORCH, "ndarray": _array}),
    (Classes.LIBRARIES, OF_LIBRARIES),
    (Classes.TRAINERS, {"enum": _enum, "enummember": _enum_member, "record": _record}),
)


def keeps_class(kind: str, classes: Classes) -> bool:
    """Report whether a pickle keeps the class of a kind of value; arrays are the format's own matter."""
    if kind == "frozenset":
        return classes >= Classes.LIBRARIES
    return any(kind in kinds and classes >= needed for needed, kinds in _BY_CLASSES)


def _write_named(p: Pickled, value: Named) -> None:
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


_VALUES: dict[type, Emit] = {
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
    Named: _write_named,
}
