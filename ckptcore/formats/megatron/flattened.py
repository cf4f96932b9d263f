"""Reshape flattened shards of Megatron-Core's distributed optimizer to their parameters' shapes.

Until 0.15 `fully_sharded_model_space` stored each data-parallel rank's slice of a flattened local
shard. A tensor of global shape [X, Y], split into local shards [x, y], is stored as [X/x, Y/y, x*y],
and chunks split its last dim (megatron/core/dist_checkpointing/strategies/resharding.py). `.metadata`
records the shape under ``mcore_data``, which torch 2.9 dropped while it saved (Megatron-LM issue
2345). Without it, the shape is that of the weight which the state belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ckptcore.core.box import from_flat_range
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Chunks, Ints, Manifest, TensorSpec, row_major
from ckptcore.errors import Finding, MalformedCheckpoint, finding
from ckptcore.formats.dcp.metadata import dims
from ckptcore.utils.text import count

ORIGINAL = "nd_reformulated_orig_global_shape"
_STATE = re.compile(r"(?:^|\.)state\.[^.]+\.(?P<key>.+)$")
_MODULE = "module."
_Row = tuple[tuple[int, ...], tuple[int, ...], int, int]  # offset, shape, item, first byte in the item


def restore_shapes(manifest: Manifest, mcore_data: Any) -> Manifest:
    """Return the manifest with every flattened tensor in its parameter's shape.

    Args:
        manifest: The manifest to change.
        mcore_data: Key -> Megatron-Core's entry in `.metadata`, or None.

    Raises:
        MalformedCheckpoint: ``mcore_data`` contradicts the stored shapes.
    """
    original = _original_shapes(mcore_data)
    specs = {t.fqn: t for t in manifest.tensors}
    target_shapes: dict[int, tuple[int, ...]] = {}
    for n, spec in enumerate(manifest.tensors):
        shape = original.get(spec.fqn)
        if shape is not None:
            if _local_shape(spec.shape, shape) is None:
                raise MalformedCheckpoint(
                    f"{spec.fqn} must be {list(shape)} with flattened shards (got {list(spec.shape)})",
                    file=".metadata",
                )
            target_shapes[n] = shape
        elif spec.fqn not in original:
            owner = _owner(spec.fqn, specs)
            if owner is not None and spec.shape != owner.shape and _local_shape(spec.shape, owner.shape):
                target_shapes[n] = owner.shape
    return _recut(manifest, target_shapes) if target_shapes else manifest


def shape_findings(manifest: Manifest, mcore_data: Any) -> Iterator[Finding]:
    """Yield a finding when optimizer state is flattened and the parameters' shapes are unknown."""
    if isinstance(mcore_data, dict):
        return
    specs = {t.fqn: t for t in manifest.tensors}
    states = [t for t in manifest.tensors if _STATE.search(t.fqn) and _owner(t.fqn, specs) is None]
    # State of a weight that is missing: [1, ..., n] with several chunks along the last dim only.
    odd = [t for t in states if len(t.shape) > 1 and _cut_in_cells(manifest, manifest.index[t.fqn])]
    if odd and len(odd) == len(states):
        names = ", ".join(t.fqn for t in odd[:4])
        yield finding(
            "shape-lost",
            "coverage",
            f"cannot reshape {count(len(odd), 'flattened optimizer tensor')}: "
            f"neither mcore_data nor the weights give the shapes: {names}",
        )


def _original_shapes(mcore_data: Any) -> dict[str, tuple[int, ...] | None]:
    """Return key -> original shape, or None where the tensor is stored in its own shape."""
    if not isinstance(mcore_data, Mapping):
        return {}
    shapes: dict[str, tuple[int, ...] | None] = {}
    for key, entry in mcore_data.items():
        shape = entry.get(ORIGINAL) if isinstance(entry, Mapping) else None
        shapes[key] = None if shape is None else dims(shape, ".metadata")
    return shapes


def _owner(fqn: str, specs: Mapping[str, TensorSpec]) -> TensorSpec | None:
    """Return the weight that an optimizer state belongs to."""
    m = _STATE.search(fqn)
    if m is None:
        return None
    key = m["key"]
    for name in (key, _MODULE + key, key.removeprefix(_MODULE)):
        if name in specs and name != fqn:
            return specs[name]
    return None


def _local_shape(stored: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the local shard's shape when ``stored`` is ``shape`` with flattened shards, else None."""
    grid = stored[:-1]
    if len(grid) != len(shape) or any(g < 1 or n % g for g, n in zip(grid, shape, strict=True)):
        return None
    local = tuple(n // g for g, n in zip(grid, shape, strict=True))
    return local if prod(local) == stored[-1] else None


def _cut_in_cells(manifest: Manifest, tensor: int) -> bool:
    """Return whether every chunk is one cell in all dims but the last, and several share that dim."""
    c = manifest.chunks
    a, b = int(c.first[tensor]), int(c.first[tensor + 1])
    rank = len(manifest.tensors[tensor].shape)
    cells = bool((c.shape[a:b, : rank - 1] == 1).all())
    return cells and bool((c.shape[a:b, rank - 1] < manifest.tensors[tensor].shape[-1]).any())


def _recut(manifest: Manifest, target_shapes: Mapping[int, tuple[int, ...]]) -> Manifest:
    chunks = manifest.chunks
    tensors = list(manifest.tensors)
    old_rank = chunks.lo.shape[1]
    pieces: list[tuple[Ints, Ints, Ints, Ints]] = []  # lo, shape, item, view of one tensor's chunks
    for n, spec in enumerate(manifest.tensors):
        a, b = int(chunks.first[n]), int(chunks.first[n + 1])
        shape = target_shapes.get(n)
        if shape is None:
            view = np.full((b - a, 2 + old_rank), -1, np.int64) if chunks.view is None else chunks.view[a:b]
            pieces.append((chunks.lo[a:b], chunks.shape[a:b], chunks.item[a:b], view))
            continue
        if chunks.view is not None and bool((chunks.view[a:b, 0] >= 0).any()):
            raise MalformedCheckpoint(f"cannot reshape {spec.fqn}: a flattened tensor is itself a view")
        rows = [row for c in range(a, b) for row in _boxes(manifest, n, c, shape)]
        pieces.append(_columns(rows, old_rank))
        tensors[n] = replace(spec, shape=shape)
    first = np.concatenate([[0], np.cumsum([len(p[2]) for p in pieces])]).astype(np.int64)
    lo, extent, item, view = (np.concatenate([p[k] for p in pieces]) for k in range(4))
    rank = max((len(t.shape) for t in tensors), default=0)
    cut = Chunks(first, lo[:, :rank], extent[:, :rank], item, view[:, : 2 + rank])
    return replace(manifest, tensors=tuple(tensors), chunks=cut)


def _boxes(manifest: Manifest, tensor: int, row: int, shape: tuple[int, ...]) -> Iterator[_Row]:
    """Yield the boxes of one stored chunk, which is a slice of one flattened local shard."""
    stored, c = manifest.tensors[tensor], manifest.chunks
    rank = len(stored.shape)
    cell, extent = c.lo[row, :rank].tolist(), c.shape[row, :rank].tolist()
    local = _local_shape(stored.shape, shape)
    assert local is not None  # `restore_shapes` checked it
    if 0 in extent:
        return
    start, stop = cell[-1], cell[-1] + extent[-1]
    inside = all(i < g for i, g in zip(cell[:-1], stored.shape[:-1], strict=True))
    if any(n != 1 for n in extent[:-1]) or stop > stored.shape[-1] or not inside:
        raise MalformedCheckpoint(
            f"the chunk of {stored.fqn} at {cell} must be a slice of one local shard (got shape {extent})",
            file=".metadata",
        )
    base = tuple(i * n for i, n in zip(cell[:-1], local, strict=True))
    first_element = 0
    for box in from_flat_range(local, start, stop):
        moved = box.translate(base)
        yield moved.offset, moved.shape, int(c.item[row]), first_element * BY_NAME[stored.dtype].itemsize
        first_element += box.numel


def _columns(rows: list[_Row], rank: int) -> tuple[Ints, Ints, Ints, Ints]:
    lo, shape = np.zeros((len(rows), rank), np.int64), np.ones((len(rows), rank), np.int64)
    view = np.zeros((len(rows), 2 + rank), np.int64)
    for n, (offset, extent, _, start) in enumerate(rows):
        lo[n, : len(offset)], shape[n, : len(extent)] = offset, extent
        view[n, 0] = start
        view[n, 2 : 2 + len(extent)] = row_major(extent)
    return lo, shape, np.array([r[2] for r in rows], np.int64), view
