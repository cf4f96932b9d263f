"""Recut chunks of flat tensors into boxes of the parameters whose elements they hold."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckptcore.core.box import flat_start, from_flat_range
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Chunks, Manifest, TensorSpec, row_major
from ckptcore.core.object_tree import references
from ckptcore.errors import UnsupportedFormat, finding
from ckptcore.formats.megatron.partition_rules import Placement
from ckptcore.utils.text import count

_Row = tuple[tuple[int, ...], tuple[int, ...], int, int, tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class FlatRange:
    """A parameter's elements in a flat tensor of a manifest.

    Attributes:
        tensor: Position of the flat tensor in the manifest.
        fqn: Name for the tensor that the elements become.
        start: First element.
        count: Number of elements.
        placement: Where the parameter, in row-major order, belongs in the global tensor.
    """

    tensor: int
    fqn: str
    start: int
    count: int
    placement: Placement


def recut(manifest: Manifest, flat: set[int], pieces: Sequence[FlatRange]) -> Manifest:
    """Return the manifest with the flat tensors replaced by the parameters in them.

    Elements outside all pieces are left out, and counted in a finding. Objects that refer to flat
    tensors are left out, too.

    Args:
        manifest: The manifest to change.
        flat: Positions of the flat tensors.
        pieces: Every parameter's range of a flat tensor.

    Raises:
        UnsupportedFormat: A flat tensor is stored with strides.
    """
    specs: dict[str, TensorSpec] = {}
    rows: dict[str, list[_Row]] = {}
    used: dict[int, int] = {}
    for p in pieces:
        dtype = manifest.tensors[p.tensor].dtype
        itemsize = BY_NAME[dtype].itemsize
        specs.setdefault(p.fqn, TensorSpec(p.fqn, dtype, p.placement.shape))
        into = rows.setdefault(p.fqn, [])
        for low, high, item, start, flags in _stored_runs(manifest, p.tensor, p.start, p.count):
            for offset, shape, begin, steps in flat_boxes(p.placement, low, high):
                into.append((offset, shape, item, start + begin * itemsize, steps, flags))
        used[p.tensor] = used.get(p.tensor, 0) + p.count
    gaps = sum(manifest.tensors[n].shape[0] - used.get(n, 0) for n in flat)
    findings = list(manifest.findings)
    if gaps:
        message = (
            f"left out {count(gaps, 'element')} between the parameters of "
            f"{count(len(flat), 'flat optimizer buffer')}"
        )
        findings.append(finding("alignment-gap", "coverage", message))
    unchanged = [n for n in range(manifest.num_tensors) if n not in flat]
    tensors = tuple(manifest.tensors[n] for n in unchanged) + tuple(specs.values())
    gone = {manifest.tensors[n].fqn for n in flat}
    origin = {k: v for k, v in manifest.origin.items() if k != "paths"}
    return replace(
        manifest,
        tensors=tensors,
        chunks=_chunk_table(manifest, unchanged, list(rows.values()), tensors),
        blobs=tuple(b for b in manifest.blobs if gone.isdisjoint(references(b.tree))),
        findings=tuple(findings),
        origin={**origin, "flat_buffers": len(flat), "alignment_gaps": gaps},
    )


def flat_boxes(
    placement: Placement, low: int, high: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]]:
    """Yield the boxes of the global tensor that a range of a rank's flattened tensor covers.

    Args:
        placement: Where the rank's tensor belongs.
        low: First element of the range.
        high: Last element of the range + 1.

    Yields:
        (offset and shape in the global tensor, first element counted from ``low``, element strides).
    """
    steps = row_major(placement.source)
    for run in from_flat_range(placement.source, low, high):
        for part in placement.parts:
            box = run.intersect(part.inner)
            if box is None:
                continue
            offset = tuple(
                a if d is None else a + box.offset[d] - part.inner.offset[d]
                for a, d in zip(part.offset, part.dims, strict=True)
            )
            shape = tuple(1 if d is None else box.shape[d] for d in part.dims)
            strides = tuple(0 if d is None else steps[d] for d in part.dims)
            yield offset, shape, flat_start(placement.source, box.offset) - low, strides


def _stored_runs(
    manifest: Manifest, tensor: int, start: int, count: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the stored runs of a flat range of a tensor.

    Yields:
        (first element and last + 1 counted from ``start``, item, first byte in the item, flags).
    """
    c = manifest.chunks
    first, last = int(c.first[tensor]), int(c.first[tensor + 1])
    # Sorted, so that the first chunk of a range is found by bisection: a buffer may have one per parameter.
    order = first + np.argsort(c.lo[first:last, 0], kind="stable")
    starts = c.lo[order, 0].tolist()
    itemsize = BY_NAME[manifest.tensors[tensor].dtype].itemsize
    for k in range(max(bisect_right(starts, start) - 1, 0), len(starts)):
        row = int(order[k])
        begin, end = starts[k], starts[k] + int(c.shape[row, 0])
        if begin >= start + count:
            return
        low, high = max(begin, start), min(end, start + count)
        if low >= high:
            continue
        byte, flags = (low - begin) * itemsize, 0
        if c.view is not None and c.view[row, 0] >= 0:
            if end - begin > 1 and c.view[row, 2] != 1:
                raise UnsupportedFormat(
                    f"cannot split flat buffer {manifest.tensors[tensor].fqn}: it is stored with strides"
                )
            byte, flags = byte + int(c.view[row, 0]), int(c.view[row, 1])
        yield low - start, high - start, int(c.item[row]), byte, flags


def _chunk_table(
    manifest: Manifest,
    unchanged: Sequence[int],
    new_rows: Sequence[list[_Row]],
    tensors: Sequence[TensorSpec],
) -> Chunks:
    c = manifest.chunks
    rank = max((len(t.shape) for t in tensors), default=0)
    old = np.concatenate([np.zeros(0, np.int64), *(np.arange(c.first[n], c.first[n + 1]) for n in unchanged)])
    new = [row for rows in new_rows for row in rows]
    n = len(old)
    lo, shape = np.zeros((n + len(new), rank), np.int64), np.ones((n + len(new), rank), np.int64)
    view = np.full((n + len(new), 2 + rank), -1, np.int64)
    item = np.concatenate([c.item[old], np.array([r[2] for r in new], np.int64)])
    width = min(rank, c.lo.shape[1])
    lo[:n, :width], shape[:n, :width] = c.lo[old, :width], c.shape[old, :width]
    if c.view is not None:
        view[:n, 2 + width :] = np.where(c.view[old, :1] < 0, -1, 0)
        view[:n, : 2 + width] = c.view[old, : 2 + width]
    for index, (offset, extent, _, start, steps, flags) in enumerate(new, n):
        lo[index, : len(offset)], shape[index, : len(extent)] = offset, extent
        view[index, :2], view[index, 2:] = (start, flags), 0
        view[index, 2 : 2 + len(steps)] = steps
    counts = [int(c.first[t + 1] - c.first[t]) for t in unchanged] + [len(rows) for rows in new_rows]
    first = np.concatenate([[0], np.cumsum(np.array(counts, np.int64))]).astype(np.int64)
    return Chunks(first, lo, shape, item, view)
