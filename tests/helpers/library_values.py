"""Values of Python's libraries and numpy as users keep them in state, and an exact comparison of two."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import math
import pathlib
import types
import uuid
from typing import Any

import numpy as np

_CET = datetime.timezone(datetime.timedelta(hours=1), "CET")


def values() -> dict[str, Any]:
    """One value of each kind, and the odd ones of some."""
    buffer = io.BytesIO(b"abc\x00\xff")
    buffer.seek(2)
    counted = collections.defaultdict(list, {"a": [1, 2], 3: [None]})
    return {
        "bytearray": bytearray(b"\x00\xff\x80"),
        "no bytearray": bytearray(),
        "bytesio": io.BytesIO(b"\x00\x01\xff"),
        "bytesio read": buffer,
        "bytes": b"\xff",
        "range": range(2, 10**30, 7),
        "slice": slice(None, -1, 2),
        "ellipsis": ...,
        "date": datetime.date(2026, 11, 23),
        "time": datetime.time(23, 59, 58, 7),
        "time zone": datetime.time(1, 2, tzinfo=_CET),
        "moment": datetime.datetime(2026, 11, 23, 15, 1, 2, 345678),
        "moment utc": datetime.datetime(1, 1, 1, tzinfo=datetime.UTC),
        "moment zone": datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=_CET),
        "delta": datetime.timedelta(days=-3, microseconds=5),
        "zone": _CET,
        "utc": datetime.UTC,
        "decimal": decimal.Decimal("-0.10E+5"),
        "decimals": [decimal.Decimal("NaN"), decimal.Decimal("-Infinity"), decimal.Decimal("sNaN12")],
        "uuid": uuid.UUID(int=3 << 120),
        "uuid1": uuid.UUID(int=7, is_safe=uuid.SafeUUID.safe),
        "fraction": fractions.Fraction(-22, 7),
        "deque": collections.deque([1, (2, 3), "x"], maxlen=5),
        "deque free": collections.deque([{"a": 1.5}]),
        "defaultdict": counted,
        "defaultdict none": collections.defaultdict(None, {"x": 1}),
        "defaultdict dict": collections.defaultdict(dict, {0: {"step": 1}}),
        "counter": collections.Counter("abca"),
        "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
        "set": {1, "a", (2, 3), None, frozenset([4]), uuid.UUID(int=5)},
        "frozenset": frozenset({b"x", 1.5, datetime.date(2020, 1, 1)}),
        "keys": {datetime.date(2020, 1, 1): 1, (1, 2): 2, frozenset([3]): 3, uuid.UUID(int=9): 4},
        "complex": complex(1.5, -0.0),
        "path": pathlib.PosixPath("/data/run 1"),
        "path here": pathlib.Path(),
        "pure": pathlib.PurePosixPath("a/b"),
        "windows": pathlib.PureWindowsPath("C:\\run\\x"),
        "namespace": argparse.Namespace(lr=0.1, path=pathlib.PosixPath("/x")),
        "simple": types.SimpleNamespace(a=(1, 2)),
        "np.float32": np.float32(0.1),
        "np.float64": np.float64(0.1),
        "np.int64": np.int64(-7),
        "np.bool": np.bool_(True),
        "np.str": np.str_("ä"),
        "np.complex64": np.complex64(1 + 2j),
        "np.float16 nan": np.float16("nan"),
        "np dtype": np.dtype(">f4"),
        "np class": np.float32,
        "np array": np.asfortranarray(np.arange(6, dtype="<i2").reshape(2, 3)),
    }


def same(a: Any, b: Any) -> bool:
    """Whether two values have one class and one content, bit for bit; sequences and dicts in their order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, io.BytesIO):
        return (a.getvalue(), a.tell()) == (b.getvalue(), b.tell())
    if isinstance(a, dict):
        made = getattr(a, "default_factory", 0) == getattr(b, "default_factory", 0)
        return made and len(a) == len(b) and all(map(_pairs, a.items(), b.items()))
    if isinstance(a, (list, tuple, collections.deque)):
        longest = getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
        return longest and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (argparse.Namespace, types.SimpleNamespace)):
        return same(vars(a), vars(b))
    if isinstance(a, (np.generic, np.ndarray)):
        return (a.dtype.str, a.shape, a.tobytes()) == (b.dtype.str, b.shape, b.tobytes())
    if isinstance(a, (float, complex, decimal.Decimal)):
        return repr(a) == repr(b)
    if isinstance(a, uuid.UUID):
        return a == b and a.is_safe is b.is_safe
    if isinstance(a, datetime.datetime | datetime.time):
        return a.isoformat() == b.isoformat() and a.fold == b.fold and repr(a.tzinfo) == repr(b.tzinfo)
    if isinstance(a, datetime.timezone):
        return repr(a) == repr(b)
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def _pairs(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    return same(a[0], b[0]) and same(a[1], b[1])
