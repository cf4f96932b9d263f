"""Check that the chunks of every tensor hold each element exactly once.

1. Tensors cut along one dim only (nearly all of them) are checked all at once, in sorted columns.
2. The others are checked one by one: chunks are in bounds, identical boxes are replicas and count once, the
   volumes add up to the tensor's, and no two boxes share an element.
3. To check that no two boxes share an element, the set is cut wherever a plane separates it (a grid, or
   any guillotine partition, falls apart in n log n). What no plane cuts is compared pairwise.

The exact hole is computed for a report, only where something is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.manifest import Ints, Manifest, TensorSpec, dims_table
from ckptcore.errors import Finding, finding
from ckptcore.utils.distinct_values import unique
from ckptcore.utils.row_wise import all_rows, prod_rows
from ckptcore.utils.text import count

_MAX_PAIRWISE = 4096
_MAX_EXPLAINED = 1000  # tensors with an exact explanation; later ones are reported as not tiled
_MAX_LISTED = 3  # holes or overlaps listed per tensor; the count in the message is always exact


def coverage(manifest: Manifest) -> list[Finding]:
    """Return findings ``hole``, ``overlap`` and ``out-of-bounds`` for every tensor of a manifest.

    A computed tensor is complete when its inputs are.
    Peak memory: a few int64 columns as long as the number of chunks.
    """
    chunks, tensors = manifest.chunks, manifest.tensors
    below = coverage(manifest.inputs) if manifest.inputs is not None else []
    if not tensors:
        return below
    rank = chunks.lo.shape[1]
    # Filled with 1: dims behind a tensor's own rank have extent 1 in every chunk, too, so they always fit.
    want = dims_table([t.shape for t in tensors], rank, 1)
    complete = _strips(manifest, want)
    # They have no chunks of their own; `below` has the findings of their inputs.
    complete[list(manifest.derived)] = True
    suspects = np.flatnonzero(~complete)
    findings: list[Finding] = below
    explained = 0
    for t in suspects.tolist():
        a, b = int(chunks.first[t]), int(chunks.first[t + 1])
        lo, shape = chunks.lo[a:b], chunks.shape[a:b]
        # Without any chunk there is nothing to explain: the hole is the tensor.
        if a == b and tensors[t].numel:
            findings.append(_hole(tensors[t], tensors[t].numel, _show(Box.full(tensors[t].shape))))
        elif not _covers(lo, shape, want[t]):
            explained += 1
            # An explanation compares boxes pairwise: of a damaged checkpoint all tensors may need one.
            close = explained <= _MAX_EXPLAINED
            findings += _explain(manifest, t, lo, shape) if close else [_untiled(tensors[t], lo, shape)]
    return findings


def is_tiled(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Report whether boxes hold each element of a tensor exactly once; equal boxes count once.

    >>> is_tiled((4, 2), [Box((0, 0), (3, 2)), Box((3, 0), (1, 2))]), is_tiled((4,), [Box((0,), (3,))])
    (True, False)
    """
    if not boxes:
        return 0 in shape
    # A leading dim of one index lets tensors of rank 0 take the same
    # way: a table of no columns has no maximum.
    lo, sizes = (
        np.array([(first, *of) for of in rows], np.int64)
        for first, rows in ((0, [box.offset for box in boxes]), (1, [box.shape for box in boxes]))
    )
    return _covers(lo, sizes, np.array((1, *shape), np.int64))


def replicas(manifest: Manifest) -> list[tuple[int, int]]:
    """Return (first, copy) chunk rows of one tensor with equal boxes in different items."""
    chunks = manifest.chunks
    return [(first, row) for first, row in equal_boxes(manifest) if chunks.item[row] != chunks.item[first]]


def repeated(manifest: Manifest) -> list[int]:
    """Return the chunk rows that repeat the box and the item of an earlier row."""
    chunks = manifest.chunks
    return [row for first, row in equal_boxes(manifest) if chunks.item[row] == chunks.item[first]]


def equal_boxes(manifest: Manifest) -> list[tuple[int, int]]:
    """Return (first, later) rows of one tensor with equal, non-empty boxes; all tensors at once."""
    chunks = manifest.chunks
    if not len(chunks):
        return []
    # Only tensors whose chunks are not in ascending order can have
    # equal ones: the sort is of their rows alone.
    several = np.flatnonzero(_unordered(manifest)[chunks.tensor])
    if not len(several):
        return []
    keys = np.concatenate(
        [chunks.tensor[several, None], chunks.lo.take(several, axis=0), chunks.shape.take(several, axis=0)],
        axis=1,
    )
    order = np.lexsort(keys.T[::-1])  # stable: equal keys stay in stored order
    keys, rows = keys.take(order, axis=0), several[order]
    same = np.zeros(len(rows), np.bool_)
    same[1:] = all_rows(keys[1:] == keys[:-1])
    same &= all_rows(chunks.shape.take(rows, axis=0) > 0)
    if not same.any():
        return []
    # The first row of each group of equal ones: positions of later ones are 0
    # there, so the maximum so far is the last first.
    head = np.maximum.accumulate(np.where(same, 0, np.arange(len(rows))))
    return [(int(rows[head[i]]), int(rows[i])) for i in np.flatnonzero(same).tolist()]


def _unordered(manifest: Manifest) -> npt.NDArray[np.bool_]:
    """Mark tensors with a chunk that does not begin behind the one before it; only there two can be equal."""
    chunks = manifest.chunks
    later = np.zeros(max(len(chunks) - 1, 0), np.bool_)
    level = ~later
    # Dim by dim, as texts are compared: a dim decides where all dims before it are equal.
    for d in range(chunks.lo.shape[1]):
        step = np.diff(chunks.lo[:, d])
        later |= level & (step > 0)
        level &= step == 0
    unordered = np.zeros(len(chunks.first) - 1, np.bool_)
    owner = chunks.tensor
    unordered[owner[1:][~later & (owner[1:] == owner[:-1])]] = True
    return unordered


def _strips(manifest: Manifest, want: Ints) -> npt.NDArray[np.bool_]:
    """Mark the tensors whose chunks are cut in at most one dim and follow each other there."""
    chunks = manifest.chunks
    owner = chunks.tensor
    proven = np.zeros(len(want), np.bool_)
    if not len(owner):
        return proven
    # A chunk is partial in a dim if it does not reach from 0 to the tensor's end there.
    partial = (chunks.lo != 0) | (chunks.shape != want.take(owner, axis=0))
    present = np.flatnonzero(np.diff(chunks.first))
    cut = np.zeros(want.shape, np.bool_)
    # Of tensors with chunks alone: `reduceat` has no empty groups, it would return the row of the next one.
    cut[present] = np.logical_or.reduceat(partial, chunks.first[present], axis=0)
    simple = np.zeros(len(want), np.bool_)
    # At most one dim in which any chunk is partial: then chunks are intervals of that dim.
    simple[present] = cut[present].sum(axis=1) <= 1
    if want.shape[1] == 0:  # only rank 0 tensors: a chunk is the complete tensor
        return simple
    # Where no dim is cut this is dim 0: complete copies are intervals from 0 to the end of it.
    dim = np.argmax(cut, axis=1)
    rows = np.flatnonzero(simple[owner])
    owner, dims = owner[rows], dim[owner[rows]]
    start, count = chunks.lo[rows, dims], chunks.shape[rows, dims]
    # Empty chunks hold nothing; replicas count once.
    filled = np.flatnonzero(count > 0)
    if not ((np.diff(owner[filled]) > 0) | (np.diff(start[filled]) > 0)).all():  # as ranks save them
        filled = filled[np.lexsort((count[filled], start[filled], owner[filled]))]
    owner, start, count = owner[filled], start[filled], count[filled]
    if len(owner):
        fresh = np.ones(len(owner), np.bool_)
        # A row equal to the one before it is a replica; they are adjacent,
        # because the rows are sorted by all three.
        fresh[1:] = (np.diff(owner) != 0) | (np.diff(start) != 0) | (np.diff(count) != 0)
        owner, start, count = owner[fresh], start[fresh], count[fresh]
        head = np.ones(len(owner), np.bool_)
        head[1:] = np.diff(owner) != 0
        tail = np.append(head[1:], True)
        # The intervals tile the dim if the first begins at 0, each begins where the one before it
        # ends, and the last one ends at the tensor's.
        follows = np.where(head, start == 0, True)
        follows[1:] &= head[1:] | (start[1:] == (start + count)[:-1])
        follows &= np.where(tail, start + count == want[owner, dim[owner]], True)
        proven[owner[head]] = np.logical_and.reduceat(follows, np.flatnonzero(head))
    return proven & (want > 0).all(axis=1)  # empty tensors are checked separately


def _covers(lo: Ints, shape: Ints, want: Ints) -> bool:
    if 0 in want.tolist():  # an empty tensor: its chunks, if any, must reach exactly as far as its shape
        return not len(lo) or bool(((lo + shape).max(axis=0) == want).all())
    filled = (shape > 0).all(axis=1)  # an empty chunk holds nothing, whatever its offset
    # Before the volumes: a box that is partly outside could make up for a hole in the sum of volumes.
    if (lo[filled] < 0).any() or (lo[filled] + shape[filled] > want).any():
        return False
    # Replicas count once; a partial overlap stays, and is what `_disjoint` looks for.
    boxes = unique(np.concatenate([lo[filled], shape[filled]], axis=1))
    lo, shape = boxes[:, : lo.shape[1]], boxes[:, lo.shape[1] :]
    # Python integers: a false header could make int64 volumes wrap around.
    volume = _volume(shape)
    total = 1
    for n in want.tolist():
        total *= n
    # Boxes within bounds, of the right volume together, that share nothing: they cover everything.
    return volume == total and _disjoint(lo, lo + shape)


def _volume(shape: Ints) -> int:
    if not len(shape):
        return 0
    # float64 rounds, but its error is far below the distance from 2**62 to 2**63, where int64 wraps around.
    if float(prod_rows(shape.astype(np.float64)).sum()) < 2**62:
        return int(prod_rows(shape).sum())
    return sum(int(np.prod(row.astype(object))) for row in shape)


def _disjoint(lo: Ints, hi: Ints) -> bool:
    """Report whether no two of the non-empty boxes [lo, hi) share an element."""
    # Not a recursion: a checkpoint decides how often its boxes can be cut.
    queue = [np.arange(len(lo))]
    while queue:
        rows = queue.pop()
        if len(rows) < 2:
            continue
        # First the dim with most different offsets: it is most likely to be cut there.
        for d in _dims_by_variety(lo[rows]):
            parts = _separated(rows, lo[:, d], hi[:, d])
            if len(parts) > 1:
                queue += parts
                break
        # No plane separates these boxes in any dim: only pairs can show whether two overlap.
        else:
            if not _pairwise_disjoint(lo[rows], hi[rows]):
                return False
    return True


def _dims_by_variety(lo: Ints) -> list[int]:
    spread = [len(unique(lo[:, d])) for d in range(lo.shape[1])]
    return sorted(range(lo.shape[1]), key=lambda d: -spread[d])


def _separated(rows: Ints, lo: Ints, hi: Ints) -> list[Ints]:
    """Group the rows so that a plane separates each two groups: no interval of a group reaches the next."""
    # In the order of their beginnings, a gap is where a box begins behind all ends so far:
    # no box before it reaches any box behind it.
    order = rows[np.argsort(lo[rows], kind="stable")]
    reach = np.maximum.accumulate(hi[order])
    gaps = np.flatnonzero(lo[order][1:] >= reach[:-1]) + 1
    return np.split(order, gaps)


def _pairwise_disjoint(lo: Ints, hi: Ints) -> bool:
    for begin in range(0, len(lo), _MAX_PAIRWISE):
        a_lo, a_hi = lo[begin : begin + _MAX_PAIRWISE], hi[begin : begin + _MAX_PAIRWISE]
        # One row against all later ones: a table of all pairs would take memory in the square of the chunks.
        for row in range(len(a_lo)):
            rest_lo, rest_hi = lo[begin + row + 1 :], hi[begin + row + 1 :]
            if all_rows((a_lo[row] < rest_hi) & (rest_lo < a_hi[row])).any():
                return False
    return True


def _explain(manifest: Manifest, tensor: int, lo: Ints, shape: Ints) -> list[Finding]:
    """Return findings about a tensor that its chunks do not tile: bounds, overlaps and holes."""
    spec = manifest.tensors[tensor]
    rank = len(spec.shape)
    full = Box.full(spec.shape)
    boxes = sorted(
        {Box(tuple(a[:rank]), tuple(n[:rank])) for a, n in zip(lo.tolist(), shape.tolist(), strict=True)},
        key=lambda b: (b.offset, b.shape),
    )
    findings: list[Finding] = []
    outside = [b for b in boxes if not full.contains(b)]
    findings += [
        finding(
            "out-of-bounds",
            "coverage",
            f"{spec.fqn}: chunk {_show(b)} exceeds the tensor's shape {list(spec.shape)}",
            fqn=spec.fqn,
        )
        for b in outside[:_MAX_LISTED]
    ]
    # Only boxes that are inside: one beyond the bounds has a finding of its own, and counts for no hole.
    inside = [b for b in boxes if b.numel and full.contains(b)]
    shared = _overlaps(inside)
    findings += [
        finding("overlap", "coverage", f"{spec.fqn}: chunks {_show(a)} and {_show(b)} overlap", fqn=spec.fqn)
        for a, b in shared[:_MAX_LISTED]
    ]
    holes = _holes(full, inside)
    missing = sum(h.numel for h in holes)
    if missing:
        listed = ", ".join(_show(h) for h in holes[:_MAX_LISTED])
        rest = f" and {len(holes) - _MAX_LISTED} more" if len(holes) > _MAX_LISTED else ""
        findings.append(_hole(spec, missing, f"{listed}{rest}"))
    if not findings:  # too many boxes to find the wrong one, but the volumes do not add up
        findings.append(_untiled(spec, lo, shape))
    return findings


def _hole(spec: TensorSpec, missing: int, where: str) -> Finding:
    message = f"{spec.fqn} {list(spec.shape)}: {missing} of {spec.numel} elements are in no file: {where}"
    return finding("hole", "coverage", message, fqn=spec.fqn)


def _untiled(spec: TensorSpec, lo: Ints, shape: Ints) -> Finding:
    """Return the finding on chunks that do not tile a tensor, without their places."""
    boxes = unique(np.concatenate([lo, shape], axis=1)[all_rows(shape > 0)])
    volume = _volume(boxes[:, lo.shape[1] :])
    if volume < spec.numel:  # no fewer are missing, wherever the chunks are
        return _hole(spec, spec.numel - volume, f"its {count(len(boxes), 'chunk')} have {volume}")
    message = f"{spec.fqn}: {count(len(boxes), 'chunk')} cannot tile {list(spec.shape)}"
    return finding("overlap", "coverage", message, fqn=spec.fqn)


def _overlaps(boxes: list[Box]) -> list[tuple[Box, Box]]:
    pairs: list[tuple[Box, Box]] = []
    # Bounded: the pairs of a damaged checkpoint with millions of chunks
    # would take hours, for three that are listed.
    for i, a in enumerate(boxes[:_MAX_PAIRWISE]):
        for b in boxes[i + 1 : _MAX_PAIRWISE]:
            if b.offset and b.offset[0] >= a.end[0]:
                break  # sorted by first dim: no later box reaches back
            if a.intersect(b):
                pairs.append((a, b))
                if len(pairs) >= _MAX_LISTED:
                    return pairs
    return pairs


def _holes(full: Box, boxes: list[Box]) -> list[Box]:
    # Each box cuts every part that is left; without a bound that is a square of the chunks, too.
    if len(boxes) > _MAX_PAIRWISE:
        return []
    left = [full] if full.numel else []
    for box in boxes:
        left = [part for piece in left for part in piece.subtract(box)]
    return left


def _show(box: Box) -> str:
    """Format a box as slices.

    >>> _show(Box((0, 4), (2, 4)))
    '[0:2, 4:8]'
    """
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.offset, box.end, strict=True)) + "]"
