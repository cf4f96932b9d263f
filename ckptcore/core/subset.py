"""Select some of a manifest's tensors, or replace some by tensors computed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ckptcore.core.manifest import Chunks, Derived, Ints, Manifest, TensorSpec, with_dims


def select(manifest: Manifest, rows: Sequence[int], names: Sequence[str] | None = None) -> Manifest:
    """Return the manifest of some tensors; items stay shared.

    Args:
        manifest: Holds the tensors.
        rows: Indices of the tensors, in the new order.
        names: Their new names, or None to keep them.
    """
    tensors = tuple(
        manifest.tensors[t]
        if names is None
        else TensorSpec(names[i], manifest.tensors[t].dtype, manifest.tensors[t].shape)
        for i, t in enumerate(rows)
    )
    origin = {k: v for k, v in manifest.origin.items() if k != "paths"}  # paths are by position
    selected = replace(
        manifest,
        tensors=tensors,
        chunks=chunks_of_rows(manifest.chunks, rows),
        origin=origin,
        derived={},
        inputs=None,
    )
    nodes = {n: manifest.derived[t] for n, t in enumerate(rows) if t in manifest.derived}
    # Inputs that no selected tensor needs go, so that nothing reads them.
    if manifest.inputs is None or not nodes:
        return selected
    used = sorted({i for node in nodes.values() for i in node.inputs})
    # Positions among the inputs that are left; nodes refer to inputs by position.
    place = {old: new for new, old in enumerate(used)}
    nodes = {t: replace(d, inputs=tuple(place[i] for i in d.inputs)) for t, d in nodes.items()}
    specs = tuple(manifest.inputs.tensors[i] for i in used)
    return selected.deriving(nodes, specs, chunks_of_rows(manifest.inputs.chunks, used))


def derive(
    manifest: Manifest, computed: Mapping[str, tuple[TensorSpec, str, Sequence[str], tuple[int, ...]]]
) -> Manifest:
    """Return the manifest with tensors computed from others, which are no longer tensors of it.

    Args:
        manifest: Holds the inputs.
        computed: Name of the tensor whose position it takes -> (its spec, function, names of its
            inputs, params).
    """
    index = manifest.index
    gone = {name for _, _, names, _ in computed.values() for name in names}
    inputs = sorted({index[n] for n in gone})
    place = {manifest.tensors[t].fqn: n for n, t in enumerate(inputs)}
    tensors: list[TensorSpec] = []
    spans: list[int | None] = []
    nodes: dict[int, Derived] = {}
    for row, spec in enumerate(manifest.tensors):
        if spec.fqn in computed:
            new, fn, names, params = computed[spec.fqn]
            nodes[len(tensors)] = Derived(fn, tuple(place[n] for n in names), params)
            tensors.append(new)
            spans.append(None)
        elif spec.fqn not in gone:
            tensors.append(spec)
            spans.append(row)
    rank = max((len(t.shape) for t in tensors), default=0)  # a plan has the chunks of both in one table
    chunks = _of_rank(chunks_of_rows(manifest.chunks, spans), rank)
    selected = replace(manifest, tensors=tuple(tensors), chunks=chunks)
    specs = tuple(manifest.tensors[t] for t in inputs)
    return selected.deriving(nodes, specs, _of_rank(chunks_of_rows(manifest.chunks, inputs), rank))


def describe_derived(manifest: Manifest, tensor: int) -> str:
    """Return the function and the inputs of a derived tensor, for people."""
    node = manifest.derived[tensor]
    assert manifest.inputs is not None  # a manifest with derived tensors has inputs
    inputs = ", ".join(manifest.inputs.tensors[i].fqn for i in node.inputs)
    return f"{node.fn} of {inputs}" if inputs else node.fn


def _of_rank(chunks: Chunks, rank: int) -> Chunks:
    """Return the chunks with columns for ``rank`` dims: a computed tensor may have more than all inputs."""
    if rank <= chunks.lo.shape[1]:
        return chunks
    view = None if chunks.view is None else with_dims(chunks.view, 2 + rank, 0)
    return replace(
        chunks, lo=with_dims(chunks.lo, rank, 0), shape=with_dims(chunks.shape, rank, 1), view=view
    )


# All tensors at once: the rows of each are a range, and the ranges are joined without a loop.
def chunks_of_rows(chunks: Chunks, rows: Sequence[int | None]) -> Chunks:
    """Return the chunks of some tensors; None is a tensor without any."""
    row = np.array([-1 if t is None else t for t in rows], np.int64)
    begin = np.where(row < 0, 0, chunks.first[row])
    count = np.where(row < 0, 0, chunks.first[row + 1] - begin)
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(count)])
    # For each row: how far the rows of its tensor are from their new place.
    picked: Ints = np.repeat(begin - first[:-1], count)
    picked += np.arange(len(picked))
    view = None if chunks.view is None else chunks.view[picked]
    return Chunks(
        first, chunks.lo.take(picked, axis=0), chunks.shape.take(picked, axis=0), chunks.item[picked], view
    )
