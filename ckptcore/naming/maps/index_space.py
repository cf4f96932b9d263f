"""Move boxes of stored chunks through index spaces: split, cut, permuted, merged, in columns.

`Pieces` are boxes, each with the place of its first element and the strides of its dims in storage. A layout
opens the dims of stored tensors into axes (`opened`), and another closes these axes into the dims of the
tensors that are made (`closed`). No byte is looked at, and the work grows with the number of boxes that come
out: a box whose elements are no longer a box in the new space becomes several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from ckptcore.core.manifest import Ints, row_major
from ckptcore.errors import MetadataTooLarge
from ckptcore.naming.maps.layout import UNIT, Axis, AxisLayout, Node, Product, Sum, axes_of, size_of
from ckptcore.utils.distinct_values import isin

Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]
MOST = 50_000_000  # boxes: beyond what a plan of any checkpoint can hold


@dataclass(frozen=True)
class Pieces:
    """Boxes over named columns.

    Attributes:
        names: Of the columns.
        row: int64 [n], whose boxes these are: a number that the caller gives.
        start: int64 [n], bytes from where the chunk begins to the first element.
        width: int64 [n], bytes of an element.
        lo, ext: int64 [n, k], first index and extent.
        step: int64 [n, k], strides, elements.
        dim: int64 [n, k], the stored dim of a column; -1 for none.
        loose: bool [n], whether only the item says its strides: then no stride leads from one stored dim to
            another.
        twin: int64 [n], a number that copies of one stored box share: they are cut alike; -1 without copies.
    """

    names: tuple[str, ...]
    row: Ints
    start: Ints
    width: Ints
    lo: Ints
    ext: Ints
    step: Ints
    dim: Ints
    loose: Bools
    twin: Ints

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, rows: Ints) -> Pieces:
        return Pieces(self.names, *(getattr(self, column)[rows] for column in _COLUMNS))


_COLUMNS = tuple(column.name for column in fields(Pieces))[1:]


def pieces_of(
    row: Ints, width: Ints, lo: Ints, shape: Ints, view: Ints | None, loose: Bools, twin: Ints
) -> Pieces:
    """Return the boxes of a manifest, without empty ones.

    Args:
        row: int64 [n], kept with each.
        width: int64 [n], bytes of an element.
        lo: int64 [n, r], offsets of the boxes.
        shape: int64 [n, r], extents of the boxes.
        view: int64 [n, 2 + r], see `Chunks`; a chunk that is not resolved is row-major.
        loose: bool [n], whether an item may have strides of its own where a chunk is not resolved.
        twin: int64 [n], see `Pieces`.
    """
    step = _row_major(shape)
    start = np.zeros(len(row), np.int64)
    if view is not None:
        is_resolved = view[:, 0] >= 0
        loose = loose & ~is_resolved
        start = np.where(is_resolved, view[:, 0], 0)
        step = np.where(is_resolved[:, None], view[:, 2 : 2 + shape.shape[1]], step)
    names = tuple(f"{n}" for n in range(shape.shape[1]))
    pieces = Pieces(names, row, start, width, lo, shape, step, _own_dims(shape), loose, twin)
    filled = (shape > 0).all(axis=1)
    return pieces if filled.all() else pieces[np.flatnonzero(filled)]


def full_boxes(row: Ints, width: Ints, shape: Sequence[int]) -> Pieces:
    """Return one box for each tensor of one shape."""
    n, k = len(row), len(shape)
    extent = np.broadcast_to(np.array(shape, np.int64), (n, k)).copy()
    steps = np.broadcast_to(np.array(row_major(tuple(shape)), np.int64), (n, k)).copy()
    names = tuple(f"{n}" for n in range(k))
    zero = np.zeros(n, np.int64)
    none = np.zeros(n, np.bool_)
    return Pieces(
        names, row, zero, width, np.zeros((n, k), np.int64), extent, steps, _own_dims(extent), none, zero - 1
    )


def with_index(pieces: Pieces, name: str, first: Ints | int, count: int = 1) -> Pieces:
    """Append a column in which each box has some indices of the same elements."""
    zero = np.zeros((len(pieces), 1), np.int64)
    return replace(
        pieces,
        names=(*pieces.names, name),
        lo=np.hstack([pieces.lo, zero + np.reshape(first, (-1, 1))]),
        ext=np.hstack([pieces.ext, zero + count]),
        step=np.hstack([pieces.step, zero]),
        dim=np.hstack([pieces.dim, zero - 1]),
    )


def opened(pieces: Pieces, layout: AxisLayout, sizes: Mapping[str, int]) -> list[Pieces]:
    """Return the boxes over the layout's axes, block by block; further columns stay.

    Args:
        pieces: Whose first columns are the layout's dims.
        layout: Without an ellipsis.
        sizes: Of every axis.
    """
    blocks = [pieces]
    for column in reversed(range(len(layout.dims))):  # columns before it stay where they are
        blocks = [q for p in blocks for q in _open(p, column, layout.dims[column], sizes)]
    return blocks


def closed(pieces: Pieces, layout: AxisLayout, sizes: Mapping[str, int]) -> Pieces:
    """Return the boxes of one block over the dims of a layout that has this block; further columns stay.

    An axis of the layout that the block lacks is one along which its elements are repeated.
    """
    block = frozenset(pieces.names)
    for n, node in enumerate(layout.dims):
        pieces = _close(pieces, node, block, sizes, f"-{n}")
    dims = [f"-{n}" for n in range(len(layout.dims))]
    return _ordered(pieces, (*dims, *(x for x in pieces.names if x not in dims)))


def single(pieces: Pieces, name: str) -> Pieces:
    """Cut every box into boxes of one index along a column."""
    return _exploded(pieces, pieces.names.index(name), pieces.ext[:, pieces.names.index(name)] > 1)


def joined(parts: Sequence[Pieces]) -> Pieces:
    """Join the boxes of parts with the same columns."""
    if len(parts) == 1:
        return parts[0]
    columns = (np.concatenate([getattr(p, column) for p in parts]) for column in _COLUMNS)
    return Pieces(parts[0].names, *columns)


def _open(p: Pieces, column: int, node: Node, sizes: Mapping[str, int]) -> list[Pieces]:
    if isinstance(node, Axis):
        if node == UNIT:
            return [_without_column(p, column)]
        return [replace(p, names=(*p.names[:column], node.name, *p.names[column + 1 :]))]
    if isinstance(node, Sum):
        out: list[Pieces] = []
        begin = 0
        for part in node.parts:
            size = _sized(part, sizes)
            cut = _restricted(p, column, begin, size)
            if len(cut):
                out += _open(cut, column, part, sizes)
            begin += size
        return out
    outer, *rest = node.factors
    inner: Node = rest[0] if len(rest) == 1 else Product(tuple(rest))
    halves = _open(_split_column(p, column, _sized(inner, sizes)), column + 1, inner, sizes)
    return [q for half in halves for q in _open(half, column, outer, sizes)]


def _close(p: Pieces, node: Node, block: frozenset[str], sizes: Mapping[str, int], name: str) -> Pieces:
    """Merge the columns of a dim's axes."""
    if isinstance(node, Axis):
        if node == UNIT or node.name not in block:
            return with_index(p, name, 0, _sized(node, sizes))
        return replace(p, names=tuple(name if n == node.name else n for n in p.names))
    if isinstance(node, Sum):
        part, begin = _part_of(node, block, sizes)
        p = _close(p, part, block, sizes, name)
        lo = p.lo.copy()
        lo[:, p.names.index(name)] += begin
        return replace(p, lo=lo)
    for n, factor in enumerate(node.factors):
        p = _close(p, factor, block, sizes, f"{name}.{n}")
    last, inner = len(node.factors) - 1, 1
    for n in reversed(range(last)):
        inner *= _sized(node.factors[n + 1], sizes)
        p = _merged(p, f"{name}.{n}", f"{name}.{n + 1}", inner)
    return replace(p, names=tuple(name if n == f"{name}.0" else n for n in p.names))


def _part_of(node: Sum, block: frozenset[str], sizes: Mapping[str, int]) -> tuple[Node, int]:
    """Return the part of a sum that has a block, and its start: lacking fewest axes, then sharing most."""
    begin, best, best_part = 0, (1 << 30, 0), (node.parts[0], 0)
    for part in node.parts:
        fits = min((len(c - {"1"} - block), -len(c & block)) for c in axes_of(part))
        if fits < best:
            best, best_part = fits, (part, begin)
        begin += _sized(part, sizes)
    return best_part


def _sized(node: Node, sizes: Mapping[str, int]) -> int:
    size = size_of(node, sizes)
    assert size is not None  # `matching` looks for axes without a size
    return size


def _split_column(p: Pieces, column: int, inner: int) -> Pieces:
    """Split a column n in (n // inner, n % inner): a box becomes up to three, the middle one of full rows."""
    inner = max(inner, 1)
    lo, end = p.lo[:, column], p.lo[:, column] + p.ext[:, column]
    first, last = lo // inner, (end - 1) // inner
    is_one_row = first == last
    body_begin, body_end = -(-lo // inner), end // inner
    # One row of the outer index; full rows; the rest before these, and after.
    cases = (
        (is_one_row, lo, end, first, np.ones_like(lo)),
        (~is_one_row & (body_end > body_begin), body_begin * inner, body_end * inner, body_begin, None),
        (~is_one_row & (lo % inner != 0), lo, body_begin * inner, first, np.ones_like(lo)),
        (~is_one_row & (end % inner != 0), body_end * inner, end, last, np.ones_like(lo)),
    )
    parts = []
    for mask, begin, stop, outer, count in cases:
        rows = np.flatnonzero(mask)
        if not len(rows):
            continue
        q = p[rows]
        begin, stop, outer = begin[rows], stop[rows], outer[rows]
        step = q.step[:, column]
        row_count = (stop - begin) // inner if count is None else count[rows]
        width = np.full_like(begin, inner) if count is None else stop - begin
        inside = np.zeros_like(begin) if count is None else begin - outer * inner
        parts.append(
            replace(
                q,
                names=(*q.names[:column], "outer", "inner", *q.names[column + 1 :]),
                start=q.start + (begin - q.lo[:, column]) * step * q.width,
                lo=_two(q.lo, column, outer, inside),
                ext=_two(q.ext, column, row_count, width),
                step=_two(q.step, column, step * inner, step),
                dim=_two(q.dim, column, q.dim[:, column], q.dim[:, column]),
            )
        )
    return joined(parts) if parts else _two_columns(p, column)


def _restricted(p: Pieces, column: int, begin: int, size: int) -> Pieces:
    """Return the parts of boxes in [begin, begin + size) of a column, counted from ``begin``."""
    lo = np.maximum(p.lo[:, column], begin)
    end = np.minimum(p.lo[:, column] + p.ext[:, column], begin + size)
    rows = np.flatnonzero(end > lo)
    q = p[rows]
    new_lo, new_ext = q.lo.copy(), q.ext.copy()
    new_lo[:, column], new_ext[:, column] = lo[rows] - begin, (end - lo)[rows]
    start = q.start + (lo[rows] - q.lo[:, column]) * q.step[:, column] * q.width
    return replace(q, lo=new_lo, ext=new_ext, start=start)


def _merged(p: Pieces, outer: str, inner: str, size: int) -> Pieces:
    """Merge two columns in one with the outer name: index outer * size + inner.

    size: of the inner one. Boxes that have no single stride there are cut along the outer one.
    """
    a, b = p.names.index(outer), p.names.index(inner)
    fits = (p.ext[:, a] == 1) | (
        (p.ext[:, b] == size) & ((size == 1) | (p.step[:, a] == size * p.step[:, b]))
    )
    fits &= ~p.loose | (p.ext[:, a] == 1) | (p.ext[:, b] == 1) | (p.dim[:, a] == p.dim[:, b])
    # A box is cut where one of its copies is: copies are recognised by equal boxes.
    if (p.twin >= 0).any():
        fits &= (p.twin < 0) | ~isin(p.twin, p.twin[~fits])
    p = _exploded(p, a, ~fits)
    lo, ext, step, dim = p.lo.copy(), p.ext.copy(), p.step.copy(), p.dim.copy()
    lo[:, a] = p.lo[:, a] * size + p.lo[:, b]
    ext[:, a] = p.ext[:, a] * p.ext[:, b]
    single = p.ext[:, b] == 1
    step[:, a] = np.where(single, p.step[:, a], p.step[:, b])
    dim[:, a] = np.where(single, p.dim[:, a], p.dim[:, b])
    return _without_column(replace(p, lo=lo, ext=ext, step=step, dim=dim), b)


def _exploded(p: Pieces, column: int, which: Bools) -> Pieces:
    """Cut the boxes ``which`` into boxes of one index along a column."""
    if not which.any():
        return p
    count = np.where(which, p.ext[:, column], 1)
    if int(count.sum()) > MOST:
        raise MetadataTooLarge(
            f"cannot map names: the result would have {int(count.sum())} pieces (limit {MOST})",
            hint="try --names stored",
        )
    rows = np.repeat(np.arange(len(p)), count)
    offsets = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
    q = p[rows]
    lo, ext = q.lo.copy(), q.ext.copy()
    lo[:, column] += offsets
    ext[:, column] = np.where(which[rows], 1, ext[:, column])
    return replace(q, lo=lo, ext=ext, start=q.start + offsets * q.step[:, column] * q.width)


def _without_column(p: Pieces, column: int) -> Pieces:
    return _picked(p, [n for n in range(len(p.names)) if n != column])


def _ordered(p: Pieces, names: tuple[str, ...]) -> Pieces:
    return _picked(p, [p.names.index(n) for n in names])


def _picked(p: Pieces, columns: list[int]) -> Pieces:
    lo, ext, step, dim = (c[:, columns] for c in (p.lo, p.ext, p.step, p.dim))
    return replace(p, names=tuple(p.names[n] for n in columns), lo=lo, ext=ext, step=step, dim=dim)


def _two(columns: Ints, column: int, first: Ints, second: Ints) -> Ints:
    return np.hstack([columns[:, :column], first[:, None], second[:, None], columns[:, column + 1 :]])


def _two_columns(p: Pieces, column: int) -> Pieces:
    names = (*p.names[:column], "outer", "inner", *p.names[column + 1 :])
    none = np.zeros((0, len(names)), np.int64)
    return replace(p[np.zeros(0, np.int64)], names=names, lo=none, ext=none, step=none, dim=none)


def _own_dims(shape: Ints) -> Ints:
    return np.broadcast_to(np.arange(shape.shape[1], dtype=np.int64), shape.shape).copy()


def _row_major(shape: Ints) -> Ints:
    """Return strides of contiguous boxes, elements."""
    steps = np.ones_like(shape)
    for d in reversed(range(shape.shape[1] - 1)):
        steps[:, d] = steps[:, d + 1] * np.maximum(shape[:, d + 1], 1)
    return steps
