"""Compute which elements of one dim a rank holds when axes of a mesh cut that dim.

Every cut is torch.chunk's: ceil(n / parts) elements each, the last ones fewer or none. Axes cut from
the left to the right, unless a `_StridedShard` records that its axis came after others: its split
factor is the number of pieces that the dim was in already (torch/distributed/tensor:
placement_types.py, `_StridedShard`; _dtensor_spec.py, `_maybe_convert_StridedShard_to_shard_order`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ckptcore.core.box import Box

Run = tuple[int, int]  # half-open range of indices


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh axis that cuts the dim.

    Attributes:
        axis: Its number, left to right.
        parts: Its size.
        index: The rank's coordinate on it.
        factor: Split factor of a strided shard; 1 for a plain one.
    """

    axis: int
    parts: int
    index: int
    factor: int = 1


def local_runs(n: int, cuts: Sequence[Cut], order: Sequence[int] | None = None) -> list[tuple[Run, ...]]:
    """Return the runs of ``[0, n)`` that the rank holds, in the order of its memory.

    Args:
        n: Elements of the dim.
        cuts: The axes that cut it.
        order: Axes in the order in which they cut, where the writer recorded it.

    Returns:
        One answer per rule of torch. There are two for a strided shard that no order explains: torch changed
        its rule for uneven ones after 2.9, and the newer rule's answer comes first.

    >>> local_runs(8, [Cut(0, 2, 1, factor=2), Cut(1, 2, 0)])
    [((2, 4),)]
    >>> local_runs(9, [Cut(0, 4, 0, factor=2)])
    [((0, 2), (5, 6)), ((0, 2), (8, 9))]
    """
    plain = all(c.factor == 1 for c in cuts)  # a split factor is stronger than a recorded order
    if order is not None and plain and sorted(order) == sorted(c.axis for c in cuts):
        ordered: list[Cut] | None = sorted(cuts, key=lambda c: list(order).index(c.axis))
    else:
        ordered = _in_order(cuts)
    if ordered is not None:
        mine: list[Run] = [(0, n)]
        for cut in ordered:
            mine = _chunk(mine, cut.parts, cut.index)
        return [_joined_runs(mine)]
    answers = [_left_to_right(n, cuts, newer) for newer in (True, False)]
    return list(dict.fromkeys(answers))


def placed(n: int, cuts: Sequence[Cut]) -> tuple[int, int]:
    """Return (first, count) of the rank's part of ``[0, n)``, as torch's checkpoint planner computes it.

    The planner computes it from the placements (torch/distributed/tensor/_utils.py,
    `_compute_local_shape_and_global_offset`); an empty part is at the end. It records only the start of a
    part, so a rank would not load strided parts that `local_runs` has elsewhere, or in pieces.

    >>> cuts = [Cut(0, 4, 0, factor=2), Cut(1, 2, 0)]
    >>> placed(9, cuts), local_runs(9, cuts)
    ((0, 2), [((0, 2),)])
    """
    runs = _left_to_right(n, cuts, newer=True)
    count = sum(b - a for a, b in runs)
    return (runs[0][0], count) if count else (n, 0)


def boxes(runs: Sequence[Sequence[Run]]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yield the boxes of one run per dim, each with its first index in the rank's own memory."""
    starts = []
    for dim in runs:
        position, row = 0, []
        for a, b in dim:
            row.append(position)
            position += b - a
        starts.append(row)
    for chosen in product(*(range(len(dim)) for dim in runs)):
        picked = [dim[k] for dim, k in zip(runs, chosen, strict=True)]
        local_offset = tuple(row[k] for row, k in zip(starts, chosen, strict=True))
        yield Box(tuple(a for a, _ in picked), tuple(b - a for a, b in picked)), local_offset


def _in_order(cuts: Sequence[Cut]) -> list[Cut] | None:
    """Return the order in which the axes cut, or None when the split factors fit no order."""
    order: list[Cut] = []
    # From the right: the split factor of an axis counts the pieces that axes to its right have made.
    for cut in sorted(cuts, key=lambda c: -c.axis):
        pieces = 1
        for position in range(len(order) + 1):
            if pieces == cut.factor:
                order.insert(position, cut)
                break
            if position < len(order):
                pieces *= order[position].parts
        else:
            return None
    return order


def _left_to_right(n: int, cuts: Sequence[Cut], newer: bool) -> tuple[Run, ...]:
    mine: list[Run] = [(0, n)]
    for cut in sorted(cuts, key=lambda c: c.axis):
        parts, index = cut.parts, cut.index
        if cut.factor == 1:
            mine = _chunk(mine, parts, index)
        elif newer:  # each of the pieces is cut separately
            pieces = [_chunk(mine, cut.factor, k) for k in range(cut.factor)]
            mine = [run for piece in pieces for run in _chunk(piece, parts, index)]
        else:  # every ``parts``-th of all small pieces
            small = parts * cut.factor
            mine = [run for k in range(cut.factor) for run in _chunk(mine, small, k * parts + index)]
    return _joined_runs(mine)


def _chunk(runs: list[Run], parts: int, index: int) -> list[Run]:
    """Return chunk ``index`` of the elements of ``runs``, cut like torch.chunk."""
    total = sum(b - a for a, b in runs)
    step = -(-total // parts)
    first, last = min(index * step, total), min((index + 1) * step, total)
    chunk, position = [], 0
    for a, b in runs:
        lo, hi = max(first - position, 0), min(last - position, b - a)
        if lo < hi:
            chunk.append((a + lo, a + hi))
        position += b - a
    return chunk


def _joined_runs(runs: list[Run]) -> tuple[Run, ...]:
    out: list[Run] = []
    for a, b in runs:
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return tuple(out)
