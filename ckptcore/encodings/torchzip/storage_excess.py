"""Find elements of storages that no tensor of a pickle has.

``torch.save`` writes the complete storage of a slice: the elements outside of it are in the file, and no
tensor shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import numpy as np

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Ints, is_row_major
from ckptcore.core.object_tree import RefusedTensor
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.utils.dataclass import dataclass

_MAX_RUNS = 1 << 20  # contiguous ranges of one tensor that are kept apart


@dataclass(frozen=True, slots=True)
class Excess:
    """Bytes of a storage that no tensor has.

    Attributes:
        key: Key of the storage.
        start: First byte in the storage.
        end: The byte behind the last.
    """

    key: str
    start: int
    end: int


def excess(tensors: Iterable[StoredView | RefusedTensor]) -> tuple[Excess, ...]:
    """Return what the tensors leave of each storage that one of them has, in the order of storages.

    A tensor that cannot be read may have all of its storages.
    """
    several: dict[str, list[StoredView] | None] = {}  # None: one of them has, or may have, all of it
    sizes: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}  # kind -> bytes, -1 if there are gaps
    for one in tensors:
        if isinstance(one, RefusedTensor):
            several |= dict.fromkeys(one.storages)
            continue
        kind = one.dtype, one.shape, one.strides
        nbytes = sizes.get(kind)
        if nbytes is None:
            nbytes = prod(one.shape) * BY_NAME[one.dtype].itemsize
            nbytes = sizes[kind] = nbytes if is_row_major(one.shape, one.strides) else -1
        if nbytes == one.storage_bytes and not one.offset:
            several[one.key] = None
        elif (views := several.setdefault(one.key, [])) is not None:
            views.append(one)
    return tuple(one for key, views in several.items() if views for one in _between(key, views))


def _between(key: str, views: list[StoredView]) -> Iterator[Excess]:
    size = views[0].storage_bytes
    ranges = np.concatenate([*map(_ranges, views), np.array([[size, size]], np.int64)])
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    reach = np.maximum.accumulate(np.insert(ranges[:, 1], 0, 0))
    for n in np.flatnonzero(ranges[:, 0] > reach[:-1]).tolist():
        yield Excess(key, int(reach[n]), int(ranges[n, 0]))


def _ranges(view: StoredView) -> Ints:
    """Return the bytes of a tensor in its storage: int64 [n, 2]; very many ranges count as one."""
    width = BY_NAME[view.dtype].itemsize
    if 0 in view.shape:
        return np.empty((0, 2), np.int64)
    first, length = np.array([view.offset], np.int64), 1
    for stride, extent in sorted(zip(view.strides, view.shape, strict=True)):
        if stride <= length:  # what a smaller stride covers goes on, or repeats
            length = max(length, stride * (extent - 1) + length)
        elif len(first) * extent <= _MAX_RUNS:
            first = np.add.outer(np.arange(extent, dtype=np.int64) * stride, first).ravel()
        else:
            length += int(first.max() - first.min()) + stride * (extent - 1)
            first = first[:1]
    return np.stack([first, first + length], axis=1) * width
