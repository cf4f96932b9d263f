"""Write values of Python's libraries and numpy into a pickle, as the classes themselves pickle them.

Each function writes one kind of `ckptcore.core.named_values`, whose value has been checked. Names are those
of protocol 2, which spells those of Python 2 (Lib/_compat_pickle.py).
`ckptcore.encodings.pickle.library_globals` is the way back.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptcore.core.named_values import FACTORIES, moment_of, uuid_of
from ckptcore.core.object_tree import Named
from ckptcore.utils.late_pattern import late_pattern

if TYPE_CHECKING:
    from ckptcore.encodings.pickle.writer import Pickled

Emit = Callable[["Pickled", Any], None]
_NUMBER = late_pattern(r"[0-9]{1,9}")


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
    at = moment_of(datetime.datetime, value)
    fields = bytes([at.month | at.fold << 7, at.day, at.hour, at.minute, at.second])
    packed = at.year.to_bytes(2, "big") + fields + at.microsecond.to_bytes(3, "big")
    _with_zone(p, "datetime", packed, value[2])


def _time(p: Pickled, value: Any) -> None:
    at = moment_of(datetime.time, value)
    fields = bytes([at.hour | at.fold << 7, at.minute, at.second])
    _with_zone(p, "time", fields + at.microsecond.to_bytes(3, "big"), value[2])


def _timezone(p: Pickled, value: Any) -> None:
    *offset, name = value
    p.call("datetime", "timezone", Named("timedelta", tuple(offset)), *([] if name is None else [name]))


def _uuid(p: Pickled, value: Any) -> None:
    made = uuid_of(value)
    state = {"int": made.int} | ({} if value[1] is None else {"is_safe": value[1]})
    _attributes("uuid", "UUID", b")\x81")(p, state)


# --- bytes and containers -------------------------------------------------------------------------


def _bytearray(p: Pickled, value: bytes) -> None:
    p.call("__builtin__", "bytearray", value.decode("latin1"), "latin-1")


def _bytes_io(p: Pickled, value: bytes, position: int = 0) -> None:
    """Write a buffer like bytesio_getstate in Modules/_io/bytesio.c."""
    p.name("_io", "BytesIO")
    p.out += b")\x81"
    p.value((value, position, None))
    p.out += b"b"


def _defaultdict(p: Pickled, value: Any) -> None:
    p.name("collections", "defaultdict")
    p.out += b"("
    if value["factory"] is not None:
        p.name(FACTORIES[value["factory"]], value["factory"])
    p.out += b"tR"
    p.items(value["items"])


def _deque(p: Pickled, value: Any) -> None:
    p.call("collections", "deque", *([] if value["maxlen"] is None else [(), value["maxlen"]]))
    p.out += b"("
    for v in value["items"]:
        p.value(v)
    p.out += b"e"


# --- numpy and torch ------------------------------------------------------------------------------


def array(p: Pickled, value: Any) -> None:
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
