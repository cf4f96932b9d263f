"""Add second copies of a checkpoint's elements to its manifest, to compare them.

Some writers store the same elements twice: in shards per rank, and in full files made of them. One of the
two is read. The other is added to the manifest box by box, as replicas. Replicas are compared at level
``bytes``, during a conversion, and by every reader of the manifest. A manifest's digest ignores copies: a
checkpoint is the same with and without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import (
    Chunks,
    Ints,
    Manifest,
    StoredFile,
    TensorSpec,
    items_table,
    joined_items,
    row_major,
)


@dataclass(frozen=True, slots=True)
class FullTensor:
    """A full tensor, row-major in one file; ``start`` is its first byte there."""

    path: str
    start: int


def with_copies(manifest: Manifest, copies: Mapping[str, FullTensor], sizes: Mapping[str, int]) -> Manifest:
    """Return the manifest with a copy of every chunk of some tensors, stored in a full tensor.

    Args:
        manifest: Its chunks are inside their tensors.
        copies: FQN -> the tensor in another file, of equal dtype and shape.
        sizes: Path -> bytes of those files.
    """
    chunks, tensors = manifest.chunks, manifest.tensors
    copied = [t for t, spec in enumerate(tensors) if spec.fqn in copies and spec.nbytes]
    if not copied:
        return manifest
    # One generation of copies only: `own` records a single end of the checkpoint's own items.
    assert manifest.own is None
    assert manifest.inputs is None
    places = [copies[tensors[t].fqn] for t in copied]
    paths = list(dict.fromkeys(place.path for place in places))
    number = {path: len(manifest.files) + n for n, path in enumerate(paths)}
    # A raw item for each tensor, as all of its copied chunks are boxes of one item.
    added = items_table(
        [(number[p.path], p.start, tensors[t].nbytes, 0, 0, -1) for p, t in zip(places, copied, strict=True)]
    )
    return replace(
        manifest,
        chunks=_with_rows(chunks, *_copied_rows(chunks, tensors, copied, len(manifest.items))),
        items=replace(manifest.items, **joined_items((manifest.items, added))),
        files=(*manifest.files, *(StoredFile(path, sizes[path]) for path in paths)),
        own=(len(manifest.items), len(manifest.files)),
    )


def _copied_rows(
    chunks: Chunks, tensors: Sequence[TensorSpec], copied: Sequence[int], items: int
) -> tuple[Ints, Ints, Ints]:
    """Return (row, item, view) of the copies: the copied chunk, and its full tensor's item and view."""
    rank = chunks.lo.shape[1]
    item = np.full(len(tensors), -1, np.int64)
    item[copied] = items + np.arange(len(copied))
    width, strides = np.zeros(len(tensors), np.int64), np.zeros((len(tensors), rank), np.int64)
    for t in copied:
        strides[t, : len(tensors[t].shape)] = row_major(tensors[t].shape)
        width[t] = BY_NAME[tensors[t].dtype].itemsize
    # An empty chunk has no element that could be compared.
    rows = np.flatnonzero((item[chunks.tensor] >= 0) & (chunks.shape > 0).all(axis=1))
    boxes = np.concatenate([chunks.tensor[rows, None], chunks.lo[rows], chunks.shape[rows]], axis=1)
    rows = rows[np.sort(np.unique(boxes, axis=0, return_index=True)[1])]  # replicas are compared once
    owner = chunks.tensor[rows]
    # The first byte of a box in the full tensor follows from the strides of
    # that tensor, so a copy needs no resolving.
    start = width[owner] * (chunks.lo[rows] * strides[owner]).sum(axis=1)
    view = np.concatenate([start[:, None], np.zeros((len(rows), 1), np.int64), strides[owner]], axis=1)
    return rows, item[owner], view


def _with_rows(chunks: Chunks, rows: Ints, item: Ints, view: Ints) -> Chunks:
    """Return the chunks, with copies of some of them behind all chunks of the same tensor."""
    owner = np.concatenate([chunks.tensor, chunks.tensor[rows]])
    # Stable: the checkpoint's own chunks stay before their copies.
    order = np.argsort(owner, kind="stable")
    count = np.bincount(owner, minlength=len(chunks.first) - 1)
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(count)]).astype(np.int64)
    return Chunks(
        first,
        np.concatenate([chunks.lo, chunks.lo[rows]])[order],
        np.concatenate([chunks.shape, chunks.shape[rows]])[order],
        np.concatenate([chunks.item, item])[order],
        np.concatenate([chunks.views, view])[order],
    )
