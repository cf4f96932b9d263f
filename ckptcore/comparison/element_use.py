"""Prove that every stored element of a source is in the mapped tensors exactly once.

A mapped tensor consists of boxes of views into stored items (`ckptcore.core.manifest.Chunks`). For each item,
both sides are sets of addresses: the elements of the source's tensors, and those of the mapped tensors. They
are compared exactly, whatever a map splits, merges, permutes or reshapes:

1. A run of an item that both sides contain is accounted for: without a map, that is all of them.
2. The rest is marked element by element, in windows: +1 for the source, -1 for the mapped tensors.

Peak memory: a few int64 columns as long as the number of chunks, and 64 MiB; 128 MiB where an element may be
in more than 32,767 places, as those of expanded views.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.coverage import equal_boxes
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Ints, Manifest, with_dims
from ckptcore.utils.distinct_values import isin

_WINDOW = 1 << 23  # elements that are marked at a time
_TILE = 1 << 20  # elements whose addresses are computed at a time
_MANY = 1 << 15  # marks of one element that int16 cannot count
Marks = npt.NDArray[Any]  # int16 or int64


@dataclass(frozen=True, slots=True)
class Use:
    """Stored elements that are not in exactly one mapped tensor.

    Attributes:
        unused: Stored tensor -> number of its stored elements that are in no mapped tensor.
        repeated: Mapped tensor -> number of its elements that another one has, too, or that belong to no kept
            tensor.
        once: As ``unused``, where elements of which several copies are stored count once.
    """

    unused: dict[str, int]
    repeated: dict[str, int]
    once: dict[str, int] = field(default_factory=dict, compare=False)


def element_use(source: Manifest, mapped: Manifest, source_fqns: Set[str]) -> Use:
    """Compare the stored elements with the mapped ones.

    Args:
        source: The checkpoint.
        mapped: The mapped tensors, over the same items.
        source_fqns: Names of the source's tensors that the map keeps.
    """
    have, want = _uses(source, source_fqns.__contains__), _uses(mapped, lambda _: True)
    left_have, left_want = _cancelled(have, want)
    unused, once, repeated = Counter[str](), Counter[str](), Counter[str]()
    for item in sorted({*have.item[left_have].tolist(), *want.item[left_want].tolist()}):
        mine = left_have[have.item[left_have] == item]
        theirs = left_want[want.item[left_want] == item]
        _mark_leftover(_tiles(have, mine), _tiles(want, theirs), unused, once, repeated)
    return Use(dict(unused), dict(repeated), dict(once))


@dataclass(frozen=True)
class _Uses:
    """Runs of elements: row n is the elements start + sum(index * stride) of an item, owned by names[owner].

    Attributes:
        names: Names of tensors.
        owner: int64 [n], index into ``names``.
        item: int64 [n], the stored item.
        start: int64 [n], in elements.
        shape: int64 [n, R], dims by stride, the largest first.
        stride: int64 [n, R], in elements.
        run: bool [n], whether the row is one run without gaps.
        copy: bool [n], whether an earlier row of the owner is the same box.
    """

    names: list[str]
    owner: Ints
    item: Ints
    start: Ints
    shape: Ints
    stride: Ints
    run: npt.NDArray[np.bool_]
    copy: npt.NDArray[np.bool_]

    @property
    def numel(self) -> Ints:
        sizes: Ints = np.prod(self.shape, axis=1)
        return sizes


def _uses(manifest: Manifest, includes: Callable[[str], bool]) -> _Uses:
    """Return the stored elements of some tensors; for a computed tensor, those of its inputs."""
    rows = [t for t, spec in enumerate(manifest.tensors) if includes(spec.fqn)]
    tables = [_of(manifest, [t for t in rows if t not in manifest.derived])]
    if manifest.inputs is not None:
        below = {i for t in rows if t in manifest.derived for i in manifest.derived[t].inputs}
        tables.append(_of(manifest.inputs, sorted(below)))
    rank = max(t.shape.shape[1] for t in tables)
    first, names = 0, list[str]()
    owners = []
    for table in tables:
        owners.append(table.owner + first)
        first, names = first + len(table.names), names + table.names
    return _Uses(
        names,
        np.concatenate(owners),
        np.concatenate([t.item for t in tables]),
        np.concatenate([t.start for t in tables]),
        np.concatenate([with_dims(t.shape, rank, 1) for t in tables]),
        np.concatenate([with_dims(t.stride, rank, 0) for t in tables]),
        np.concatenate([t.run for t in tables]),
        np.concatenate([t.copy for t in tables]),
    )


def _of(manifest: Manifest, tensors: list[int]) -> _Uses:
    chunks = manifest.chunks
    chosen = np.zeros(len(manifest.tensors), np.bool_)
    chosen[tensors] = True
    rows = np.flatnonzero(chosen[chunks.tensor] & (chunks.item >= 0) & (chunks.shape > 0).all(axis=1))
    owner, shape = chunks.tensor[rows], chunks.shape[rows]
    behind = np.cumprod(shape[:, ::-1], axis=1)[:, ::-1]
    stride = np.hstack([behind[:, 1:], np.ones((len(rows), min(1, shape.shape[1])), np.int64)])
    start = np.zeros(len(rows), np.int64)
    if chunks.view is not None:
        resolved = chunks.view[rows, 0] >= 0
        width = np.array([BY_NAME[t.dtype].itemsize for t in manifest.tensors], np.int64)[owner]
        start = np.where(resolved, chunks.view[rows, 0] // width, 0)
        stride = np.where(resolved[:, None], chunks.view[rows, 2:], stride)
    stride = np.where(shape == 1, 0, stride)
    order = np.argsort(-stride, axis=1, kind="stable")
    shape, stride = np.take_along_axis(shape, order, 1), np.take_along_axis(stride, order, 1)
    expected, run = np.ones(len(rows), np.int64), np.ones(len(rows), np.bool_)
    for d in reversed(range(shape.shape[1])):
        run &= (shape[:, d] == 1) | (stride[:, d] == expected)
        expected = expected * shape[:, d]
    names = [t.fqn for t in manifest.tensors]
    copies = isin(rows, np.array([later for _, later in equal_boxes(manifest)], np.int64))
    return _Uses(names, owner, chunks.item[rows], start, shape, stride, run, copies)


def _cancelled(have: _Uses, want: _Uses) -> tuple[Ints, Ints]:
    """Return the rows of both sides, without runs that both sides contain."""
    # -1: a row with gaps never has the key of a run.
    keys = [np.stack([u.item, u.start, np.where(u.run, u.numel, -1)], axis=1) for u in (have, want)]
    _, which = np.unique(np.concatenate(keys), axis=0, return_inverse=True)
    which = which.reshape(-1)
    have_ids, want_ids = which[: len(have.item)], which[len(have.item) :]
    count = int(which.max()) + 1 if len(which) else 0
    have_counts = np.bincount(have_ids[have.run], minlength=count)
    equal = have_counts == np.bincount(want_ids[want.run], minlength=count)
    return np.flatnonzero(~(have.run & equal[have_ids])), np.flatnonzero(~(want.run & equal[want_ids]))


@dataclass(frozen=True, slots=True)
class _Tile:
    """Addresses of one row, few enough to compute at once.

    Attributes:
        simple: Whether all are distinct.
        copy: See `_Uses`.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    simple: bool
    copy: bool

    @property
    def most(self) -> int:
        """Return how many of the elements can have one address."""
        return 1 if self.simple else prod(self.shape)

    @property
    def last(self) -> int:
        return self.start + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    def addresses(self) -> Ints:
        """Return every address, in the order of the elements."""
        grid = np.full((1,) * len(self.shape), self.start, np.int64)
        for d, (n, s) in enumerate(zip(self.shape, self.stride, strict=True)):
            grid = grid + (np.arange(n) * s).reshape((-1,) + (1,) * (len(self.shape) - 1 - d))
        return grid.reshape(-1)

    def inside(self, marks: Marks, begin: int) -> Marks | None:
        """Return the marks of this tile as a view, or None unless the window contains the entire tile."""
        if not self.simple or self.start < begin or self.last >= begin + len(marks):
            return None
        width = marks.itemsize
        return np.lib.stride_tricks.as_strided(
            marks[self.start - begin :], self.shape, tuple(s * width for s in self.stride)
        )


def _tiles(uses: _Uses, rows: Ints) -> list[_Tile]:
    tiles = []
    for row in rows.tolist():
        start, name = int(uses.start[row]), uses.names[int(uses.owner[row])]
        shape, stride = tuple(uses.shape[row].tolist()), tuple(uses.stride[row].tolist())
        dims = list(zip(shape, stride, strict=True))
        reach = 1  # dims by stride: none may overlap the next larger one
        simple = True
        for n, s in reversed(dims):
            simple &= n == 1 or s >= reach
            reach += (n - 1) * s
        for box in Box.full(shape).tiles(_TILE):
            address = start + sum(o * s for o, s in zip(box.offset, stride, strict=True))
            tiles.append(_Tile(name, address, box.shape, stride, simple, bool(uses.copy[row])))
    return tiles


def _mark_leftover(
    have: list[_Tile], want: list[_Tile], unused: Counter[str], once: Counter[str], repeated: Counter[str]
) -> None:
    """Count the elements of one item's tiles that the two sides do not share."""
    for begin in sorted({w for t in (*have, *want) for w in _windows(t)}):
        mine = [t for t in have if begin in _windows(t)]
        theirs = [t for t in want if begin in _windows(t)]
        most = max(sum(tile.most for tile in tiles) for tiles in (mine, theirs))
        marks: Marks = np.zeros(_WINDOW, np.int16 if most < _MANY else np.int64)
        for tiles, by in ((mine, 1), (theirs, -1)):
            for tile in tiles:
                _add(marks, begin, tile, by)
        if not marks.any():
            continue
        for tile in mine:
            count = int((_marks_of(marks, begin, tile) > 0).sum())
            unused[tile.name] += count
            once[tile.name] += 0 if tile.copy else count
        for tile in theirs:
            repeated[tile.name] += int((_marks_of(marks, begin, tile) < 0).sum())
    for counter in (unused, once, repeated):
        for name in [n for n, count in counter.items() if not count]:
            del counter[name]


def _windows(tile: _Tile) -> range:
    """Return the first addresses of the windows that a tile overlaps."""
    return range(tile.start // _WINDOW * _WINDOW, tile.last + 1, _WINDOW)


def _add(marks: Marks, begin: int, tile: _Tile, by: int) -> None:
    view = tile.inside(marks, begin)
    if view is not None:
        view += by
        return
    # `marks[places] += by` would count an address that the tile has twice only once.
    for places in _addresses_in_window(tile, begin):
        np.add.at(marks, places, marks.dtype.type(by))


def _marks_of(marks: Marks, begin: int, tile: _Tile) -> Marks:
    """Return the marks of a tile's elements in the window."""
    view = tile.inside(marks, begin)
    return view if view is not None else np.concatenate([marks[p] for p in _addresses_in_window(tile, begin)])


def _addresses_in_window(tile: _Tile, begin: int) -> Iterator[Ints]:
    """Yield the positions of a tile's elements in a window."""
    addresses = tile.addresses() - begin
    yield addresses[(addresses >= 0) & (addresses < _WINDOW)]
