"""Describe the values of libraries that a checkpoint may hold: a closed set of kinds, each with one form.

`ckptcore.core.object_tree.Named` is a kind and a value. `normal` checks the value of a kind, and returns it
in the form that can be hashed and compared; `restated` returns the plain value that has the same content.
Nothing here looks up a class by a name: a form from a file is data, however it is spelled. Numbers and texts
are bounded, because libraries take quadratic time to convert long ones.
"""

from __future__ import annotations

import datetime
import re
import uuid
from collections.abc import Callable
from math import gcd
from typing import Any

import numpy as np

from ckptcore.core.dtype import BY_NAME, DTYPES, UNSUPPORTED, UNSUPPORTED_STORAGES

# Integers of a value, as in the unpickler: 64 bytes. Digits of a Decimal: what CPython converts at once.
_WIDEST, _MAX_DIGITS = 1 << 511, 4300
_DECIMAL = re.compile(
    r"[-+]?(?:[0-9]+(?:\.[0-9]*)?(?:E[-+]?[0-9]{1,18})?|Infinity|s?NaN[0-9]*)", re.ASCII | re.IGNORECASE
)
# numpy dtypes of plain numbers and of fixed-width text.
NUMPY_CODE = re.compile(r"(?:b1|i[1248]|u[1248]|f[248]|c8|c16|[SU][0-9]{1,6})", re.ASCII)
NUMPY_CLASSES = frozenset(
    {"ndarray", "generic", "number", "integer", "floating", "complexfloating"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
    | {"float16", "float32", "float64", "complex64", "complex128", "bool", "bool_", "str_", "bytes_"}
)
QSCHEMES = (
    "per_tensor_affine",
    "per_tensor_symmetric",
    "per_channel_affine",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)
TORCH_CLASSES = ("torch.Tensor", "torch.nn.Parameter")
# What a defaultdict may call for a missing key: name -> module as pickle protocol 2 spells it.
FACTORIES = {
    **dict.fromkeys(("dict", "list", "set", "int", "float", "str", "bool", "tuple"), "__builtin__"),
    "OrderedDict": "collections",
    "Counter": "collections",
    "deque": "collections",
}
# Kinds that hold other values, tensors among them: kind -> key of the dict or list in its value ("": itself).
CONTAINERS = {"defaultdict": "items", "deque": "items", "counter": "", "namespace": "", "simplenamespace": ""}


def normal(kind: str, value: Any) -> Any:
    """Return the value of a kind in its one form; a kind that is not known keeps its value.

    >>> normal("range", [0, 10, 2])
    (0, 10, 2)

    Raises:
        ValueError: The value is none of this kind.
    """
    check = _CHECKS.get(kind)
    # A kind of a later version stays as it is, so that a reader of today carries it along unchanged.
    if check is None:
        return value
    try:
        return check(value)
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"a {kind} must not be {str(value)[:60]!r}") from error


def restated(kind: str, value: Any) -> Any:
    """Return the plain value with the content of a named one: what a reader without its class gets.

    >>> restated("uuid", ("12345678-1234-5678-1234-567812345678", None)), restated("fraction", (1, 3))
    ('12345678-1234-5678-1234-567812345678', '1/3')
    """
    plain = _PLAIN.get(kind)
    return value if plain is None else plain(value)


def content_of(kind: str, value: Any) -> Any:
    """Return the dict or list of values inside a container of `CONTAINERS`."""
    key = CONTAINERS[kind]
    return value[key] if key else value


def with_content(kind: str, value: Any, inside: Any) -> Any:
    """Return a container's value with another dict or list inside."""
    key = CONTAINERS[kind]
    return {**value, key: inside} if key else inside


def number_of(value: tuple[str, bytes]) -> Any:
    """Return a numpy scalar's value as Python's own number or text."""
    spelled, data = value
    if "U" in spelled:
        # numpy pads text with NUL characters, and cuts them off when it returns one.
        # Not with numpy, which raises SystemError for a number beyond the last character.
        return data.decode("utf-32-be" if spelled[0] == ">" else "utf-32-le", "surrogatepass").rstrip("\0")
    # An empty fixed-width text has no bytes, and `frombuffer` refuses to read none.
    return np.frombuffer(data, spelled)[0].item() if len(data) else b""


def zone_of(value: tuple[int, int, int, str | None]) -> datetime.timezone:
    """Return the time zone of a ``timezone``."""
    *offset, name = value
    delta = datetime.timedelta(*offset)
    return datetime.timezone(delta) if name is None else datetime.timezone(delta, name)


def moment_of(cls: type[Any], value: tuple[Any, ...]) -> Any:
    """Return the ``datetime.datetime`` or ``datetime.time`` of a value."""
    text, fold, zone = value
    return cls.fromisoformat(text).replace(fold=fold, tzinfo=None if zone is None else zone_of(zone))


def uuid_of(value: tuple[str, int | None]) -> uuid.UUID:
    """Return the UUID of a ``uuid``."""
    return uuid.UUID(value[0], is_safe=uuid.SafeUUID(value[1]))


# --- checks ---------------------------------------------------------------------------------------


def _require(condition: object, kind: str, value: Any) -> None:
    if not condition:
        raise ValueError(f"a {kind} must not be {str(value)[:60]!r}")


def _is_int(value: Any) -> bool:
    return type(value) is int and -_WIDEST < value < _WIDEST


def _range(value: Any) -> tuple[int, int, int]:
    start, stop, step = value
    # Python has no range with a step of 0.
    _require(all(map(_is_int, (start, stop, step))) and step, "range", value)
    return start, stop, step


def _slice(value: Any) -> tuple[int | None, ...]:
    parts = tuple(value)
    _require(len(parts) == 3 and all(v is None or _is_int(v) for v in parts), "slice", value)
    return parts


def _timedelta(value: Any) -> tuple[int, int, int]:
    days, seconds, microseconds = value
    _require(all(map(_is_int, value)), "timedelta", value)
    # `timedelta` has one normal form (seconds and microseconds not negative): equal spans get equal forms.
    delta = datetime.timedelta(days, seconds, microseconds)
    return delta.days, delta.seconds, delta.microseconds


def _timezone(value: Any) -> tuple[int, int, int, str | None]:
    *offset, name = value
    _require(name is None or type(name) is str, "timezone", value)
    form = (*_timedelta(offset), name)
    zone_of(form)  # must be less than a day
    return form


def _date(value: Any) -> str:
    return datetime.date.fromisoformat(value).isoformat()


def _moment(cls: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    def check(value: Any) -> tuple[Any, ...]:
        text, fold, zone = value
        _require(fold in (0, 1) and type(fold) is int, cls.__name__, value)
        moment = cls.fromisoformat(text)
        # The zone is beside the text: `isoformat` writes only its offset, not its name.
        _require(moment.tzinfo is None, cls.__name__, value)
        return moment.isoformat(), fold, None if zone is None else _timezone(zone)

    return check


def _fraction(value: Any) -> tuple[int, int]:
    over, under = value
    _require(_is_int(over) and _is_int(under) and under > 0, "fraction", value)
    common = gcd(over, under)
    # In lowest terms, as `Fraction` keeps it: equal numbers must have equal forms.
    return over // common, under // common


def _uuid(value: Any) -> tuple[str, int | None]:
    text, safe = value
    # Through `uuid.UUID` and back: it accepts braces, hyphens at any
    # place and upper case for the same number.
    return str(uuid_of((text, safe))), safe


def _checked(kind: str, holds: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Return the check of a kind whose values have one form already."""

    def check(value: Any) -> Any:
        _require(holds(value), kind, value)
        return value

    return check


def _is_text(value: Any) -> bool:
    return type(value) is str


def _one_of(*choices: str) -> Callable[[Any], bool]:
    return lambda value: type(value) is str and value in choices


def _bytes_at(value: Any) -> tuple[bytes, int]:
    data, position = value
    _require(type(data) is bytes and _is_int(position) and 0 <= position < 1 << 62, "bytesioat", value)
    return data, position


def _deque(value: Any) -> dict[str, Any]:
    items, longest = value["items"], value["maxlen"]
    _require(type(items) is list, "deque", value)
    # A longer list would lose its beginning when it is built.
    fits = longest is None or (_is_int(longest) and len(items) <= longest < 1 << 62)
    _require(fits, "deque", longest)
    return {"items": items, "maxlen": longest}


def _defaultdict(value: Any) -> dict[str, Any]:
    items, factory = value["items"], value["factory"]
    _require(type(items) is dict, "defaultdict", value)
    _require(factory is None or factory in FACTORIES, "defaultdict", factory)
    return {"factory": factory, "items": items}


def _numpy_dtype(value: Any) -> list[str]:
    code, order = value
    _require(order in ("<", ">", "=", "|") and NUMPY_CODE.fullmatch(code), "npdtype", value)
    return [code, order]


def _numpy_scalar(value: Any) -> tuple[str, bytes]:
    spelled, data = value
    _require(spelled[:1] in ("<", ">", "|") and NUMPY_CODE.fullmatch(spelled[1:]), "npscalar", spelled)
    # Before it is decoded: numpy would read another number of elements without an error.
    _require(type(data) is bytes and len(data) == np.dtype(spelled).itemsize, "npscalar", spelled)
    number_of((spelled, data))  # text must be text
    return spelled, data


def _array(value: Any) -> dict[str, Any]:
    form: dict[str, Any] = value
    # An array whose elements were refused has only what is known of it, which needs no check.
    if "refused" not in form:
        spelled, shape = form["dtype"], form["shape"]
        _require(NUMPY_CODE.fullmatch(spelled.lstrip("<>|=")), "ndarray", spelled)
        _require(all(_is_int(n) and n >= 0 for n in shape) and len(shape) <= 64, "ndarray", shape)
        _require(type(form["data"]) is bytes and form.get("order", "C") in ("C", "F"), "ndarray", spelled)
        # Not numpy's product: sizes from a file may exceed 64 bits,
        # where that wraps around to a size that fits.
        nbytes = np.dtype(spelled).itemsize
        for n in shape:
            nbytes *= n
        _require(nbytes == len(form["data"]), "ndarray", shape)
    return form


def _dims(value: Any) -> tuple[int, ...]:
    dims = tuple(value)
    _require(len(dims) <= 64 and all(_is_int(n) and n >= 0 for n in dims), "size", value)
    return dims


# What the values of a kind are that has one form only.
_OF_ONE_FORM: dict[str, Callable[[Any], object]] = {
    "ellipsis": lambda value: value is None,
    **dict.fromkeys(("bytearray", "bytesio", "bytetensor"), lambda value: type(value) is bytes),
    "counter": lambda value: type(value) is dict,
    "decimal": lambda value: _is_text(value) and len(value) <= _MAX_DIGITS and _DECIMAL.fullmatch(value),
    **dict.fromkeys(("path", "purepath", "winpath", "windowspath", "layout"), _is_text),
    **dict.fromkeys(
        ("namespace", "simplenamespace"), lambda value: isinstance(value, dict) and all(map(_is_text, value))
    ),
    "npclass": _one_of(*NUMPY_CLASSES),
    "dtype": _one_of(*BY_NAME, *UNSUPPORTED),
    "device": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "qscheme": _one_of(*QSCHEMES),
    "storage": _one_of("UntypedStorage", *(d.storage for d in DTYPES if d.storage), *UNSUPPORTED_STORAGES),
    "class": _one_of(*TORCH_CLASSES),
}
_CHECKS: dict[str, Callable[[Any], Any]] = {
    **{kind: _checked(kind, holds) for kind, holds in _OF_ONE_FORM.items()},
    # Python
    "range": _range,
    "slice": _slice,
    "bytesioat": _bytes_at,
    "deque": _deque,
    "defaultdict": _defaultdict,
    "date": _date,
    "time": _moment(datetime.time),
    "datetime": _moment(datetime.datetime),
    "timedelta": _timedelta,
    "timezone": _timezone,
    "fraction": _fraction,
    "uuid": _uuid,
    # numpy
    "npscalar": _numpy_scalar,
    "npdtype": _numpy_dtype,
    "ndarray": _array,
    # torch
    "size": _dims,
}
_PLAIN: dict[str, Callable[[Any], Any]] = {
    "ellipsis": lambda _: "...",
    "bytesioat": lambda v: v[0],
    "deque": lambda v: v["items"],
    "defaultdict": lambda v: v["items"],
    "time": lambda v: moment_of(datetime.time, v).isoformat(),
    "datetime": lambda v: moment_of(datetime.datetime, v).isoformat(),
    "timezone": lambda v: str(zone_of(v)),
    "fraction": lambda v: f"{v[0]}/{v[1]}",
    "uuid": lambda v: v[0],
    "npscalar": number_of,
    "npdtype": lambda v: "".join(reversed(v)),
    "npclass": lambda v: f"numpy.{v}",
    "enum": lambda v: v[1],
    "enummember": lambda v: v[1],
    "record": lambda v: v[1],
}
