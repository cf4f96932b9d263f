"""Equality: are two runs of elements the same bit for bit, and where are they not?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.errors import DamagedCheckpoint, Finding, finding

Bytes = npt.NDArray[np.uint8]
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def differing(one: Bytes, two: Bytes, itemsize: int) -> tuple[int, int] | None:
    """(first element whose bits differ, how many do) of two runs of as many bytes, or None.

    Bits, not values: NaN equals itself, 0.0 is not -0.0.
    """
    words = len(one) // 8 * 8
    if np.array_equal(one[:words].view(np.uint64), two[:words].view(np.uint64)) and np.array_equal(
        one[words:], two[words:]
    ):
        return None
    if itemsize in _UNITS:
        mask = one.view(_UNITS[itemsize]) != two.view(_UNITS[itemsize])
    else:
        parts = one.view(np.uint64) != two.view(np.uint64)
        mask = parts.reshape(-1, itemsize // 8).any(axis=1)
    return int(mask.argmax()), int(np.count_nonzero(mask))


def mismatch(fqn: str, paths: tuple[str, str], index: tuple[int, ...], count: int, of: int) -> Finding:
    """The finding of copies that are not equal.

    paths: the files they lie in, the one that is read first. index: of the first element that differs.
    count: how many do. of: how many were compared.
    """
    where = f"its copies in {paths[0]} and {paths[1]} differ"
    message = f"{fqn}: {where} in {count} of {of} elements, first at {list(index)}"
    return finding("replica-mismatch", "bytes", message, fqn=fqn, file=paths[1])


def require_equal(
    mine: npt.NDArray[Any], other: npt.NDArray[Any], box: Box, fqn: str, paths: Callable[[], tuple[str, str]]
) -> None:
    """Raises `DamagedCheckpoint` unless two tiles over ``box``, as `tile_view` makes them, are equal.

    paths: gives the files that they were read from.
    """
    if np.array_equal(_bits(mine), _bits(other)):
        return
    one, two = (np.ascontiguousarray(tile).reshape(-1).view(np.uint8) for tile in (mine, other))
    at, count = differing(one, two, mine.dtype.itemsize) or (0, 0)
    found = mismatch(fqn, paths(), index_in(box, at), count, box.numel)
    raise DamagedCheckpoint(found.message, hint=found.hint, findings=(found,), fqn=fqn, file=found.file)


def index_in(box: Box, at: int) -> tuple[int, ...]:
    """The tensor's index of an element of a box, counted row by row.

    >>> index_in(Box((4, 2), (2, 3)), 4)
    (5, 3)
    """
    inside = np.unravel_index(at, box.shape) if box.shape else ()
    return tuple(int(n) + o for n, o in zip(inside, box.offset, strict=True))


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.itemsize == 16:
        return np.ascontiguousarray(array).view(np.uint64)
    return array
