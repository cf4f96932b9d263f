"""Compare the first elements of a weight with those of its master copy, which another file has.

A trainer casts each float32 master to its weight after every step. Where a file of masters is in the place of
another rank's, sizes fit, and the values have nothing to do with each other. No exact cast is asked for: some
trainers keep weights in 8 bits, and store them again in more.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import numpy.typing as npt

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import is_row_major
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.formats.base import Source
from ckptcore.utils.dataclass import dataclass

_COMPARED = 256  # elements
_FEWEST = 8  # elements that prove something
_NEAR = 1 / 8  # relative; 8-bit floats have 3 bits behind the first
_TINY = 1e-7  # absolute
Storages = Mapping[str, tuple[int, int, int | None]]  # key -> (first byte, length, checksum)


@dataclass(frozen=True, slots=True)
class StoredElements:
    """Where a tensor is.

    Attributes:
        path: Its file.
        storages: Of the file.
        value: The tensor.
        start: Its first element in the row-major elements of ``value``.
    """

    path: str
    storages: Storages
    value: StoredView
    start: int = 0


def contradict(source: Source, master: StoredElements, weight: StoredElements) -> bool:
    """Return whether most of the first elements of a weight are far from their masters.

    Args:
        source: The folder.
        master: A master copy, alone or in a flat buffer.
        weight: The weight of the same shape.
    """
    count = min(_COMPARED, prod(weight.value.shape), prod(master.value.shape) - master.start)
    if count < _FEWEST or master.value.dtype != "float32":
        return False
    one, other = _elements(source, master, count), _elements(source, weight, count)
    if one is None or other is None:
        return False
    known = np.isfinite(one) & np.isfinite(other)
    near = np.abs(one[known] - other[known]) <= _NEAR * np.abs(one[known]) + _TINY
    return int(near.sum()) * 2 < len(near)


def _elements(source: Source, stored: StoredElements, count: int) -> npt.NDArray[np.float64] | None:
    """Return the first elements; None for a form that is not compared."""
    value, storage = stored.value, stored.storages.get(stored.value.key)
    if storage is None or value.flags or not is_row_major(value.shape, value.strides):
        return None
    if value.dtype not in ("float32", "float16", "bfloat16"):
        return None
    width = BY_NAME[value.dtype].itemsize
    at = (value.offset + stored.start) * width
    if at + count * width > storage[1]:
        return None
    raw = source.store.read(stored.path, storage[0] + at, count * width)
    if value.dtype == "bfloat16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return np.frombuffer(raw, "<f4" if width == 4 else "<f2").astype(np.float64)
