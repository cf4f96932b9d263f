"""Permit the globals of Python's libraries that users keep in their state, and build a plain value for each.

Every entry names the class, and its `__reduce__` tells what it is called with. Nothing here is imported or
called by name: a builder checks the arguments and returns a `Named`, or a built-in value. A value that is not
as its class pickles it, or is over a bound, is refused by the name of its class; everything else in the file
is read.

Of numpy, arrays of plain numbers, scalars and dtypes are read. An array is pickled as
``_reconstruct(ndarray, (0,), b"b")`` with the state (version, shape, dtype, fortran, bytes)
(numpy/_core/src/multiarray/methods.c, array_reduce), or with protocol 5 as
``_frombuffer(bytes, dtype, shape, order)`` (numpy/_core/numeric.py). A dtype is ``dtype("f8", False, True)``
with the state (version, byte order, ...) (descriptor.c, arraydescr_reduce). Before numpy 2 the package was
called ``numpy.core``.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from pathlib import PureWindowsPath
from typing import Any

import numpy as np

from ckptcore.core.named_values import FACTORIES, NUMPY_CLASSES, NUMPY_CODE, normal
from ckptcore.core.object_tree import Named, Refused
from ckptcore.encodings.pickle.container_items import LargeKeys, keys
from ckptcore.encodings.pickle.unpickler import MEMBERS, Call
from ckptcore.utils.text import short_repr

# Of a Fraction: the digits of an integer of 64 bytes.
_FRACTION = re.compile(r"(-?[0-9]{1,155})(?:/([0-9]{1,155}))?", re.ASCII)
_KEYS = frozenset({int, str, float, bool, bytes, type(None)})
_MAX_NESTING = 4
_MAX_VERSION = 256  # characters
_MAX_ELEMENTS = 1 << 40  # of a numpy array
_SCALAR = "numpy._core.multiarray.scalar"


def _call(name: str, build: Callable[..., Any]) -> Call:
    """Return a table entry; arguments that no such value has refuse the value alone."""

    def guarded(*args: Any) -> Any:
        refused = next((a for a in args if isinstance(a, Refused)), None)
        if refused is not None:
            return refused
        try:
            return build(*args)
        except (ValueError, TypeError, OverflowError):
            return Refused(name)

    return Call(name, guarded)


def _make_named(kind: str, value: Any) -> Named:
    return Named(kind, normal(kind, value))


# --- dates ----------------------------------------------------------------------------------------


def _timedelta(days: Any = 0, seconds: Any = 0, microseconds: Any = 0) -> Named:
    return _make_named("timedelta", (days, seconds, microseconds))


def _timezone(offset: Any, name: Any = None) -> Named:
    if type(offset) is not Named or offset.kind != "timedelta":
        raise ValueError("a time zone without an offset")
    return _make_named("timezone", (*offset.value, name))


def _zone(value: Any) -> Any:
    if value is not None and (type(value) is not Named or value.kind != "timezone"):
        raise ValueError(f"a time zone of {short_repr(value, 40)}")
    return None if value is None else value.value


def _packed_fields(data: Any, length: int) -> bytes:
    """Return the packed fields of a date or time (Modules/_datetimemodule.c)."""
    if type(data) is not bytes or len(data) != length:
        raise ValueError(f"a date or time of {short_repr(data, 40)}")
    return data


def _date(data: Any) -> Named:
    year, month, day = int.from_bytes(_packed_fields(data, 4)[:2], "big"), data[2], data[3]
    return _make_named("date", datetime.date(year, month, day).isoformat())


def _datetime(data: Any, zone: Any = None) -> Named:
    year = int.from_bytes(_packed_fields(data, 10)[:2], "big")
    # The highest bit of the month is the fold, of a time that of the hour.
    day, hour, minute, second = data[3:7]
    parts = year, data[2] & 0x7F, day, hour, minute, second, int.from_bytes(data[7:10], "big")
    moment = datetime.datetime(*parts)
    return _make_named("datetime", (moment.isoformat(), data[2] >> 7, _zone(zone)))


def _time(data: Any, zone: Any = None) -> Named:
    moment = datetime.time(
        _packed_fields(data, 6)[0] & 0x7F, data[1], data[2], int.from_bytes(data[3:6], "big")
    )
    return _make_named("time", (moment.isoformat(), data[0] >> 7, _zone(zone)))


# --- numbers, identifiers -------------------------------------------------------------------------


def _fraction(over: Any = 0, under: Any = 1) -> Named:
    if type(over) is str:  # before CPython 3.11
        parts = _FRACTION.fullmatch(over)
        if parts is None:
            raise ValueError("a fraction of many digits")
        over, under = int(parts[1]), int(parts[2] or 1)
    return _make_named("fraction", (over, under))


def _version_text(text: Any) -> str:
    if type(text) is not str or len(text) > _MAX_VERSION:
        raise ValueError("a version that is no text")
    return text


def _require_first(target: Named) -> None:
    # In Python the second state would count, for a value that may be a key by then.
    if type(target.value) is not Refused:
        raise ValueError(f"the state of a {target.kind} is set twice")


def _uuid() -> Named:
    return Named("uuid", Refused("uuid.UUID"))  # until it has its state


def _set_uuid(target: Named, state: Any) -> None:
    # Lib/uuid.py, UUID.__getstate__
    _require_first(target)
    if type(state) is dict and type(state.get("int")) is int:
        number = state["int"]
        if 0 <= number < 1 << 128 and state.get("is_safe") in (None, 0, -1):
            digits = f"{number:032x}"
            text = "-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))
            object.__setattr__(target, "value", (text, state.get("is_safe")))


# --- bytes ----------------------------------------------------------------------------------------


def _no_bytes(*args: Any) -> bytes:
    # Protocol 2 encodes b"" like this.
    if args:
        raise ValueError("bytes with arguments")
    return b""


def _latin1(text: Any, encoding: Any) -> bytes:
    # Protocol 2 encodes bytes like this: _codecs.encode(text, "latin1").
    if type(text) is not str or encoding != "latin1":
        raise ValueError("encode of something else than latin-1 text")
    return text.encode("latin1")


def _bytearray(data: Any = b"", encoding: Any = None) -> Named:
    # Objects/bytearrayobject.c: of a text below protocol 3, then of bytes.
    if type(data) is str and encoding == "latin-1":
        data = data.encode("latin1")
    return _make_named("bytearray", data)


def _bytes_io() -> Named:
    return Named("bytesio", Refused("io.BytesIO"))  # until it has its state


def _set_bytes_io(target: Named, state: Any) -> None:
    # Modules/_io/bytesio.c: (bytes, position, attributes)
    _require_first(target)
    if type(state) is not tuple or len(state) != 3 or state[2]:
        return
    data, position = state[:2]
    if type(data) is not bytes or type(position) is not int or not 0 <= position < 1 << 62:
        return
    if position:
        object.__setattr__(target, "kind", "bytesioat")
    object.__setattr__(target, "value", (data, position) if position else data)


# --- containers -----------------------------------------------------------------------------------


def _is_key(value: Any, depth: int = 0) -> bool:
    """Report whether a value can be hashed, and stays equal to itself when it is written and read."""
    if type(value) is Named:
        return depth <= _MAX_NESTING and _is_key(value.value, depth + 1)
    if type(value) is tuple or type(value) is frozenset:
        return depth <= _MAX_NESTING and all(_is_key(v, depth + 1) for v in value)
    return type(value) in _KEYS


def _set(values: Any = ()) -> Any:
    if type(values) not in (list, tuple):
        raise ValueError(f"set of {short_repr(values, 40)}")
    refused = next((v for v in values if type(v) is Refused), None)
    if refused is None and not all(map(_is_key, values)):
        refused = Refused("builtins.set")  # of tensors, for example: only this value is lost
    # Protocols before 4 call `set` with a list: a builder does not know the keys of the rest of the pickle.
    return refused or set(keys(list(values), LargeKeys(100), "a set"))


def _frozenset(values: Any = ()) -> Any:
    members = _set(values)
    return frozenset(members) if type(members) is set else members


def _complex(real: Any, imag: Any) -> complex:
    if type(real) is not float or type(imag) is not float:
        raise ValueError("complex number of something else than floats")
    return complex(real, imag)


def _defaultdict(factory: Any = None) -> Named:
    name = "" if factory is not None else None
    if type(factory) is Call:
        name = factory.name.rpartition(".")[2]
    if name is not None and name not in FACTORIES:
        raise ValueError("a defaultdict that calls something else than a container")
    return Named("defaultdict", {"factory": name, "items": {}})


def _counter(items: Any = None) -> Named:
    return _make_named("counter", {} if items is None else items)


def _deque(items: Any = (), longest: Any = None) -> Named:
    if type(items) not in (tuple, list) or type(longest) not in (int, type(None)):
        raise ValueError("a deque of something else than a sequence")
    return _make_named("deque", {"items": list(items), "maxlen": longest})


def _attributes(kind: str) -> Call:
    def build(*args: Any) -> Named:
        if args:
            raise ValueError(f"{kind} with arguments")
        return Named(kind, {})

    return Call(kind, build)


def _set_attributes(target: Named, state: Any) -> None:
    if state is None:
        return
    if type(state) is not dict or any(type(k) is not str for k in state):
        raise ValueError(f"{target.kind} with attributes that are not text")
    target.value.update(state)


def _factory(name: str) -> Call:
    """Return the entry of a built-in class that is named, as what a defaultdict calls, and never called."""

    def build(*args: Any) -> Refused:
        return Refused(f"builtins.{name}")

    return Call(f"builtins.{name}", build)


# --- paths ----------------------------------------------------------------------------------------


def _path(kind: str) -> Callable[..., Named]:
    def build(*parts: Any) -> Named:
        if not all(type(p) is str for p in parts):
            raise ValueError("path of something else than text")
        if not parts:
            return Named(kind, ".")
        # A path is pickled as its parts, the root being one: ("/", "data", "run").
        return Named(kind, ("/" if parts[0] == "/" else "") + "/".join(parts[parts[0] == "/" :]))

    return build


def _windows_path(kind: str) -> Callable[..., Named]:
    def build(*parts: Any) -> Named:
        if not parts or not all(type(p) is str for p in parts):
            raise ValueError("path of something else than text")
        return Named(kind, str(PureWindowsPath(*parts)))

    return build


# pathlib's module moved in CPython 3.13 (pathlib._local) and moved back in 3.14.
PATHS = {
    f"{module}.{cls}": _call(f"pathlib.{cls}", build)
    for module in ("pathlib", "pathlib._local")
    for cls, build in (
        ("PosixPath", _path("path")),
        ("Path", _path("path")),
        ("PurePosixPath", _path("purepath")),
        ("PurePath", _path("purepath")),
        ("WindowsPath", _windows_path("windowspath")),
        ("PureWindowsPath", _windows_path("winpath")),
    )
}
# Module and name as protocols 3 to 5 spell them -> builder. Python 2, and therefore protocol 2, has other
# names for some of them (Lib/_compat_pickle.py).
_CLASSES: dict[str, Callable[..., Any]] = {
    "builtins.bytearray": _bytearray,
    "builtins.range": lambda *v: _make_named("range", v),
    "builtins.slice": lambda *v: _make_named("slice", v),
    "collections.Counter": _counter,
    "collections.defaultdict": _defaultdict,
    "collections.deque": _deque,
    "datetime.date": _date,
    "datetime.datetime": _datetime,
    "datetime.time": _time,
    "datetime.timedelta": _timedelta,
    "datetime.timezone": _timezone,
    "decimal.Decimal": lambda text: _make_named("decimal", text),
    "fractions.Fraction": _fraction,
    # Of trainers that record `torch.__version__` as it is: a text, of a class that compares versions.
    "torch.torch_version.TorchVersion": _version_text,
    "uuid.UUID": _uuid,
}
_CALLS = {name: _call(name, build) for name, build in _CLASSES.items()}
_BUILTINS = {
    "set": Call("set", _set),
    "frozenset": Call("frozenset", _frozenset),
    "complex": Call("complex", _complex),
    "bytes": Call("bytes", _no_bytes),
    "Ellipsis": Named("ellipsis", None),
    "bytearray": _CALLS["builtins.bytearray"],
    "slice": _CALLS["builtins.slice"],
    **{name: _factory(name) for name in ("dict", "list", "int", "float", "str", "bool", "tuple")},
}
# The key of a state setter has no dot, so that no pickle can name it.
LIBRARY_TABLE: dict[str, Any] = {
    **PATHS,
    **_CALLS,
    **MEMBERS,
    **{f"builtins.{name}": entry for name, entry in _BUILTINS.items()},
    **{f"__builtin__.{name}": entry for name, entry in _BUILTINS.items()},
    "__builtin__.xrange": _CALLS["builtins.range"],
    "__builtin__.unicode": _factory("str"),
    "__builtin__.long": _factory("int"),
    "io.BytesIO": Call("io.BytesIO", _bytes_io),
    "_io.BytesIO": Call("io.BytesIO", _bytes_io),
    "argparse.Namespace": _attributes("namespace"),
    "types.SimpleNamespace": _attributes("simplenamespace"),
    "_codecs.encode": Call("_codecs.encode", _latin1),
    "BUILD bytesio": _set_bytes_io,
    "BUILD namespace": _set_attributes,
    "BUILD simplenamespace": _set_attributes,
    "BUILD uuid": _set_uuid,
}


def array_value(dtype: str, shape: tuple[int, ...], data: bytes, order: str = "C") -> dict[str, Any]:
    """Return the value of ``Named("ndarray", ...)``.

    Args:
        dtype: As numpy spells it, with its byte order.
        shape: Elements.
        data: The elements' bytes.
        order: Order of the bytes, which is recorded if it is not C.
    """
    form: dict[str, Any] = {"dtype": dtype, "shape": list(shape), "data": data}
    return form if order == "C" else {**form, "order": order}


def _dtype(spelled: Any = "", align: Any = False, copy: Any = True) -> Named | Refused:
    if type(spelled) is not str or not NUMPY_CODE.fullmatch(spelled):
        return Refused(f"numpy.dtype({short_repr(spelled, 40)})")
    return Named("npdtype", [spelled, "="])


def _set_dtype(target: Named, state: Any) -> None:
    # (version, byte order, subdtype, names, fields, itemsize, alignment, flags[, metadata])
    if type(state) is not tuple or len(state) < 5 or any(state[2:5]) or state[1] not in ("<", ">", "=", "|"):
        raise ValueError(f"numpy dtype {target.value[0]} with the state {short_repr(state)}")
    if target.value[1] != "=":  # values may have been made with it
        raise ValueError(f"numpy dtype {target.value[0]} whose state is set twice")
    target.value[1] = state[1]


def _dtype_string(dtype: Any) -> str:
    if type(dtype) is not Named or dtype.kind != "npdtype":
        raise ValueError(f"numpy value without a dtype: {short_repr(dtype)}")
    kind, order = dtype.value
    return str(np.dtype(kind if order == "|" else order + kind).str)


def _fits(shape: Any, dtype: str, data: Any) -> tuple[int, ...]:
    if type(shape) is not tuple or len(shape) > 64 or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"numpy array of shape {short_repr(shape)}")
    count = 1
    for n in shape:
        count *= n
        if count > _MAX_ELEMENTS:
            raise ValueError(f"numpy array of shape {short_repr(shape)}")
    if type(data) is not bytes or len(data) != count * np.dtype(dtype).itemsize:
        raise ValueError(f"numpy array of shape {short_repr(shape)} and dtype {dtype} with the wrong bytes")
    return shape


def _reconstruct(subtype: Any, shape: Any, kind: Any) -> Named | Refused:
    if isinstance(subtype, Refused):  # a subclass of ndarray
        return subtype
    if subtype != Named("npclass", "ndarray") or shape != (0,):
        raise ValueError(f"numpy array made from {short_repr(subtype)}")
    return Named("ndarray", array_value("|i1", (0,), b""))


def _set_array(target: Named, state: Any) -> None:
    if type(state) is not tuple or len(state) != 5:
        raise ValueError(f"numpy array with the state {short_repr(state)}")
    _, shape, dtype, fortran, data = state
    target.value.clear()
    if isinstance(dtype, Refused):  # an array of objects, dates or records: nothing is kept
        target.value["refused"] = dtype.name
        return
    spelled = _dtype_string(dtype)
    order = "F" if fortran and len(shape) > 1 else "C"
    target.value.update(array_value(spelled, _fits(shape, spelled, data), data, order))


def _frombuffer(data: Any, dtype: Any, shape: Any, order: Any) -> Named | Refused:
    if isinstance(dtype, Refused):
        return dtype
    if type(data) is Named and data.kind == "bytearray":  # of protocol 5, for an array that can be written to
        data = data.value
    if order not in ("C", "F"):
        raise ValueError(f"numpy array in order {short_repr(order, 20)}")
    spelled = _dtype_string(dtype)
    return Named("ndarray", array_value(spelled, _fits(shape, spelled, data), data, order))


def _scalar(dtype: Any, data: Any = None) -> Named | Refused:
    """Return a scalar as the spelling of its dtype and its bytes."""
    if isinstance(dtype, Refused):
        return Refused(f"{_SCALAR} of {dtype.name}")
    spelled = _dtype_string(dtype)
    _fits((), spelled, data)
    return Named("npscalar", normal("npscalar", (spelled, data)))


# The key of a state setter has no dot, so that no pickle can name it.
NUMPY_TABLE: dict[str, Any] = {
    **{f"numpy.{name}": Named("npclass", name) for name in sorted(NUMPY_CLASSES)},
    "numpy.dtype": Call("numpy.dtype", _dtype),
    **{
        f"numpy.{core}.{name}": Call(name, build)
        for core in ("_core", "core")
        for name, build in (
            ("multiarray._reconstruct", _reconstruct),
            ("multiarray.scalar", _scalar),
            ("numeric._frombuffer", _frombuffer),
        )
    },
    "BUILD npdtype": _set_dtype,
    "BUILD ndarray": _set_array,
}
