"""Describe regions of n-d tensors as boxes.

A `Box` is a half-open n-d interval in the index space of one tensor: dim ``d`` covers
``[offset[d], offset[d] + shape[d])``. Every other module describes regions of tensors with boxes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import sub


@dataclass(frozen=True, slots=True)
class Box:
    """Half-open n-d interval of one tensor's index space; rank 0 is ``Box((), ())``.

    Attributes:
        offset: First index per dim, elements.
        shape: Extent per dim, elements.

    >>> Box((2, 0), (4, 8)).intersect(Box((4, 4), (4, 8)))
    Box(offset=(4, 4), shape=(2, 4))
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise ValueError(f"box offset {self.offset} and shape {self.shape} must have the same rank")
        # min() of a tuple: a generator here would be a tenth of the cost of moving a small tensor.
        if self.offset and (min(self.offset) < 0 or min(self.shape) < 0):
            raise ValueError(f"box offset {self.offset} and shape {self.shape} must not be negative")

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that covers a whole tensor of ``shape``."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Count the elements; 1 for rank 0."""
        return prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """Return one past the last index, per dim."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def intersect(self, box: Box) -> Box | None:
        """Return the common elements, or None where there are none.

        >>> Box((0,), (2,)).intersect(Box((2,), (2,))) is None
        True
        """
        # Equal boxes are the usual case (a chunk that a rank reads as it was saved), and need no new box.
        if self.offset == box.offset and self.shape == box.shape:
            return None if 0 in self.shape else self
        lo, shape = list[int](), list[int]()  # one loop: this is done for every chunk of every tile
        for a, n, b, m in zip(self.offset, self.shape, box.offset, box.shape, strict=True):
            begin, end = max(a, b), min(a + n, b + m)
            if end <= begin:
                # One dim without a common index is enough: then the boxes share nothing.
                return None
            lo.append(begin)
            shape.append(end - begin)
        return Box(tuple(lo), tuple(shape))

    def contains(self, inner: Box) -> bool:
        """Report whether every index of ``inner`` is in this box."""
        return all(
            a <= b and y <= x
            for a, b, x, y in zip(self.offset, inner.offset, self.end, inner.end, strict=True)
        )

    def translate(self, by: tuple[int, ...]) -> Box:
        """Return the box moved by ``by`` elements per dim.

        >>> Box((4, 4), (2, 2)).translate((-4, 0))
        Box(offset=(0, 4), shape=(2, 2))
        """
        return Box(tuple(o + b for o, b in zip(self.offset, by, strict=True)), self.shape)

    def within(self, outer: Box) -> Box:
        """Return this box in the coordinates of ``outer``, which must contain it."""
        # A box of a complete tensor, nearly every outer box: nothing has to be subtracted.
        if not any(outer.offset):
            return self
        return Box(tuple(map(sub, self.offset, outer.offset)), self.shape)

    def subtract(self, box: Box) -> list[Box]:
        """Return disjoint boxes that cover exactly the elements of this box that are not in ``box``.

        >>> Box((0, 0), (2, 4)).subtract(Box((0, 1), (2, 2)))
        [Box(offset=(0, 0), shape=(2, 1)), Box(offset=(0, 3), shape=(2, 1))]
        """
        common = self.intersect(box)
        if common is None:
            return [self] if self.numel else []
        out: list[Box] = []
        # Dim by dim: what is before and behind the common part is cut off over the full extent of the dims
        # that are not yet done, so no two parts share an element, and there are at most two for each dim.
        lo, shape = list(self.offset), list(self.shape)
        for d in range(len(lo)):
            below = common.offset[d] - lo[d]
            above = lo[d] + shape[d] - common.end[d]
            if below:
                out.append(Box(tuple(lo), (*shape[:d], below, *shape[d + 1 :])))
            if above:
                start = (*lo[:d], common.end[d], *lo[d + 1 :])
                out.append(Box(start, (*shape[:d], above, *shape[d + 1 :])))
            # What is left to cut is a slab as wide as the common part in this dim.
            lo[d], shape[d] = common.offset[d], common.shape[d]
        return out

    def tiles(self, max_elements: int) -> Iterator[Box]:
        """Cut into boxes that are each one run of this box's row-major order, in that order.

        A tile holds as many complete rows as fit into ``max_elements`` (at least one element). The last
        tile of a run may hold fewer.

        >>> [t.shape for t in Box((0, 0), (3, 4)).tiles(8)]
        [(2, 4), (1, 4)]
        >>> [t.offset for t in Box((0, 0), (2, 4)).tiles(3)]
        [(0, 0), (0, 3), (1, 0), (1, 3)]
        """
        if self.numel == 0:
            return
        limit = max(1, max_elements)
        if self.numel <= limit:
            yield self
            return
        # The cut is at the first dim whose rows (all dims after it) fit.
        cut = next(d for d in range(len(self.shape)) if prod(self.shape[d + 1 :]) <= limit)
        step = limit // prod(self.shape[cut + 1 :])
        # Rows of dims before the cut do not fit: each of their indices begins runs of its own.
        for lead in product(*map(range, self.shape[:cut])):
            row_offset = tuple(o + i for o, i in zip(self.offset, lead, strict=False))
            for first in range(0, self.shape[cut], step):
                count = min(step, self.shape[cut] - first)
                yield Box(
                    (*row_offset, self.offset[cut] + first, *self.offset[cut + 1 :]),
                    ((1,) * cut + (count,) + self.shape[cut + 1 :]),
                )


def from_flat_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return the boxes, in order, of the row-major elements ``[start, stop)`` of ``shape``.

    A flat range of an n-d tensor is at most ``2n - 1`` boxes.

    >>> from_flat_range((3, 4), 2, 9)
    [Box(offset=(0, 2), shape=(1, 2)), Box(offset=(1, 0), shape=(1, 4)), Box(offset=(2, 0), shape=(1, 1))]
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"flat range must be inside a tensor of shape {shape} (got [{start}, {stop}))")
    if start == stop:
        return []
    if len(shape) <= 1:
        return [Box((start,), (stop - start,))] if shape else [Box((), ())]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    # All in one row: the range is a shorter one of a tensor with one
    # dim less, so the recursion ends at rank 1.
    if first == last:
        return _under_row(first, from_flat_range(shape[1:], start - first * row, stop - first * row))
    # Otherwise: the end of a first row, rows that are complete, and the beginning of a last row. Only the two
    # ends are cut further, which is why there are at most 2n - 1 boxes.
    out: list[Box] = []
    if start % row:
        out += _under_row(first, from_flat_range(shape[1:], start % row, row))
        first += 1
    rows = stop // row - first
    if rows:
        out.append(Box((first, *(0,) * (len(shape) - 1)), (rows, *shape[1:])))
    if stop % row:
        out += _under_row(stop // row, from_flat_range(shape[1:], 0, stop % row))
    return out


def flat_start(shape: tuple[int, ...], offset: tuple[int, ...]) -> int:
    """Return the row-major element number of index ``offset`` in a tensor of ``shape``.

    >>> flat_start((3, 4), (1, 2))
    6
    """
    element = 0
    for n, o in zip(shape, offset, strict=True):
        element = element * n + o
    return element


def is_run(shape: tuple[int, ...], inner: tuple[int, ...]) -> bool:
    """Report whether a box of shape ``inner`` inside a row-major tensor of ``shape`` is one run of bytes.

    >>> is_run((3, 4), (2, 4)), is_run((3, 4), (2, 3)), is_run((3, 4), (1, 3))
    (True, False, True)
    """
    d = len(shape)
    # Trailing dims that are taken completely do not interrupt a run; of the dim before them any range does
    # not, either, but all dims before that one must have a single index.
    while d and inner[d - 1] == shape[d - 1]:
        d -= 1
    return all(n == 1 for n in inner[: max(d - 1, 0)])


def _under_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *b.offset), (1, *b.shape)) for b in boxes]
