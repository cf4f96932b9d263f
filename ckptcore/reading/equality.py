"""Compare two runs of elements bit for bit, and locate differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.errors import DamagedCheckpoint, Finding, finding

Bytes = npt.NDArray[np.uint8]
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def differing(left: Bytes, right: Bytes, itemsize: int) -> tuple[int, int] | None:
    """Return (first element whose bits differ, how many do) of two runs of equal length, or None.

    Bits, not values: NaN equals itself, 0.0 is not -0.0.
    """
    aligned = len(left) // 8 * 8
    if np.array_equal(left[:aligned].view(np.uint64), right[:aligned].view(np.uint64)) and np.array_equal(
        left[aligned:], right[aligned:]
    ):
        return None
    if itemsize in _UNITS:
        mask = left.view(_UNITS[itemsize]) != right.view(_UNITS[itemsize])
    else:
        parts = left.view(np.uint64) != right.view(np.uint64)
        mask = parts.reshape(-1, itemsize // 8).any(axis=1)
    return int(mask.argmax()), int(np.count_nonzero(mask))


def mismatch(fqn: str, paths: tuple[str, str], index: tuple[int, ...], count: int, of: int) -> Finding:
    """Return the finding for copies that differ.

    Args:
        fqn: Name of the tensor.
        paths: Their files, the one that is read first.
        index: Index of the first element that differs.
        count: How many elements differ.
        of: How many were compared.
    """
    where = f"its copies in {paths[0]} and {paths[1]} differ"
    message = f"{fqn}: {where} in {count} of {of} elements, first at {list(index)}"
    return finding("replica-mismatch", "bytes", message, fqn=fqn, file=paths[1])


def require_equal(
    mine: npt.NDArray[Any], copy: npt.NDArray[Any], box: Box, fqn: str, paths: Callable[[], tuple[str, str]]
) -> None:
    """Raise `DamagedCheckpoint` unless two tiles over ``box``, from `tile_view`, are equal.

    Args:
        mine: The tile that was read.
        copy: The tile of its copy.
        box: Box of both.
        fqn: Name of the tensor.
        paths: Returns the files of both, for the message.
    """
    if np.array_equal(_bits(mine), _bits(copy)):
        return
    tile_bytes, copy_bytes = (np.ascontiguousarray(tile).reshape(-1).view(np.uint8) for tile in (mine, copy))
    position, count = differing(tile_bytes, copy_bytes, mine.dtype.itemsize) or (0, 0)
    replica_finding = mismatch(fqn, paths(), index_in(box, position), count, box.numel)
    raise DamagedCheckpoint(
        replica_finding.message,
        hint=replica_finding.hint,
        findings=(replica_finding,),
        fqn=fqn,
        file=replica_finding.file,
    )


def index_in(box: Box, element: int) -> tuple[int, ...]:
    """Return the tensor's index of an element of a box, counted in row-major order.

    >>> index_in(Box((4, 2), (2, 3)), 4)
    (5, 3)
    """
    inside = np.unravel_index(element, box.shape) if box.shape else ()
    return tuple(int(n) + o for n, o in zip(inside, box.offset, strict=True))


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.itemsize == 16:
        return np.ascontiguousarray(array).view(np.uint64)
    return array
