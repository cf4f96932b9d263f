"""Count NaN and Inf in the bytes of elements, without torch and without a copy of another dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.core.dtype import BY_NAME
from ckptcore.reading.gather import Bytes

Counts = tuple[int, int]  # NaN, Inf
_BLOCK = 1 << 16  # elements that fit into a core's cache
# dtype -> (unit, mask without the sign bit, bits of Inf): greater values are NaN.
_IEEE: dict[str, tuple[Any, int, int]] = {
    "float64": (np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    "float32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "float16": (np.uint16, 0x7FFF, 0x7C00),
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
    "float8_e5m2": (np.uint8, 0x7F, 0x7C),
}
# dtype -> (mask, bits of NaN); these have no Inf.
_NO_INF: dict[str, tuple[int, int]] = {
    "float8_e4m3fn": (0x7F, 0x7F),
    "float8_e4m3fnuz": (0xFF, 0x80),
    "float8_e5m2fnuz": (0xFF, 0x80),
    "float8_e8m0fnu": (0xFF, 0xFF),
}
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}


def not_finite(data: Bytes, dtype: str) -> Counts:
    """Return the number of NaN and the number of Inf; each part of a complex number counts.

    >>> not_finite(np.array([1, np.nan, -np.inf], np.float32).view(np.uint8), "float32")
    (1, 1)
    """
    dtype = _PARTS.get(dtype, dtype)
    if dtype in _NO_INF:
        return int(np.count_nonzero(is_nan(data, dtype))), 0
    if dtype not in _IEEE:
        return 0, 0
    unit, mask, top = _IEEE[dtype]
    values = data.view(unit)
    room = np.empty(min(_BLOCK, len(values)), unit)
    nan = inf = 0
    for at in range(0, len(values), _BLOCK):
        block = values[at : at + _BLOCK]
        bare = np.bitwise_and(block, unit(mask), out=room[: len(block)])
        if bare.max() >= top:
            nan += int(np.count_nonzero(bare > unit(top)))
            inf += int(np.count_nonzero(bare == unit(top)))
    return nan, inf


def is_nan(data: Bytes, dtype: str) -> npt.NDArray[np.bool_]:
    """Return bool [n]: which elements of a real dtype are NaN."""
    found: npt.NDArray[np.bool_]
    if dtype in _NO_INF:
        mask, nan = _NO_INF[dtype]
        found = (data & np.uint8(mask)) == nan
        return found
    if BY_NAME[dtype].kind != "f":
        return np.zeros(len(data) // BY_NAME[dtype].itemsize, np.bool_)
    unit, mask, top = _IEEE[dtype]
    found = (data.view(unit) & unit(mask)) > unit(top)
    return found
