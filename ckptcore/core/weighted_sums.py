"""Weighted sums of tensors: the one kind of computed tensor that every map of names may also cut and permute.

``weighted_float32`` and ``weighted_float64``: K inputs of one shape; params: the bits of K float64 weights.
An element is ``((x1 * w1) + (x2 * w2)) + (x3 * w3)`` and so on, in the order of the inputs: each input is
widened to the function's dtype, and each product and each sum is rounded to it. An element depends on nothing
beside it, so the bits depend neither on tiles, nor on workers, nor on the device.

A sum whose inputs are all cut or permuted alike is the sum, cut or permuted. So a map of names is applied to
each of the *layers* of a manifest, the tensors of the first inputs, of the second ones and so on, and what it
makes of them is summed (`layers`, `summed`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptcore.core.manifest import Chunks, Derived, Manifest, TensorSpec, with_dims
from ckptcore.core.subset import chunks_of_rows

if TYPE_CHECKING:
    from ckptcore.core.box import Box

Shape = tuple[int, ...]
# Dtype of an input -> the dtype of the sum; the wider of several counts.
SUMMED = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
_PIECE = 1 << 16  # elements of a sum that stay in a core's cache
_ON_DEVICE = 16  # pieces


def packed_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the params of a sum with these weights.

    >>> weights_of(packed_weights([0.25, 0.75]))
    (0.25, 0.75)
    """
    # By their bits, as params are integers of a plan's JSON, and digests need one spelling of a number.
    return tuple(struct.unpack("<Q", struct.pack("<d", weight))[0] for weight in weights)


def weights_of(params: Shape) -> tuple[float, ...]:
    """Return the weights of a sum."""
    return tuple(struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in params)


def sum_shape(inputs: Sequence[TensorSpec], params: Shape) -> Shape | None:
    """Return the shape of a sum; None where shapes differ, a dtype is not summed, or weights do not fit."""
    alike = len({t.shape for t in inputs}) == 1 and all(t.dtype in SUMMED for t in inputs)
    return inputs[0].shape if alike and len(inputs) == len(params) else None


def fill_sum(torch: Any, box: Box, inputs: Sequence[Any], params: Shape, out: Any) -> None:
    """Compute a box, piece by piece; see `ckptcore.core.dequantize.Function`."""
    # Rounded to the dtype of the sum here: how precise a Python number is
    # when it multiplies would be up to each device.
    weights = [torch.tensor(weight, dtype=out.dtype).item() for weight in weights_of(params)]
    total, parts = out.view(-1), [part.reshape(-1) for part in inputs]
    step = _PIECE * pieces_at_once(out, _ON_DEVICE)
    room = torch.empty(min(step, total.numel()), dtype=out.dtype, device=out.device)
    for begin in range(0, total.numel(), step):
        piece = total[begin : begin + step]
        for place, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            # The first product goes directly into the sum: adding it to zero would turn -0.0 into 0.0.
            product = room[: len(piece)] if place else piece
            # Two roundings: a fused multiply-add rounds once, and not every device or end of a loop has one.
            product.copy_(part[begin : begin + step]).mul_(weight)
            if place:
                piece.add_(product)


def pieces_at_once(out: Any, on_device: int) -> int:
    """Return how many pieces of a result are computed together.

    A piece fits a core's cache. On an accelerator a call for each would cost more than the memory that it
    saves: there it is ``on_device``, of at most 16 MiB with all temporaries.
    """
    return 1 if out.device.type == "cpu" else on_device


def layers(manifest: Manifest) -> tuple[Manifest, ...]:
    """Return the tensors of the first inputs of all sums, of the second ones and so on, each as a manifest.

    A tensor that is stored is in each layer. Nothing where no tensor is a sum.
    """
    below, sums = manifest.inputs, {t: node for t, node in manifest.derived.items() if node.is_sum}
    if below is None or not sums:
        return ()
    (count,) = {len(node.inputs) for node in sums.values()}
    stored_count, all_chunks = len(manifest.tensors), stacked_chunks((manifest.chunks, below.chunks))
    parts = []
    for place in range(count):
        # Rows of both tables in one, the inputs behind the tensors: a layer takes from either.
        rows = [stored_count + sums[t].inputs[place] if t in sums else t for t in range(stored_count)]
        tensors = tuple(
            replace(spec, dtype=below.tensors[row - stored_count].dtype) if row >= stored_count else spec
            for spec, row in zip(manifest.tensors, rows, strict=True)
        )
        chunks = chunks_of_rows(all_chunks, rows)
        parts.append(replace(manifest, tensors=tensors, chunks=chunks, derived={}, inputs=None))
    return tuple(parts)


def summed(parts: Sequence[Manifest], nodes: Mapping[str, Derived], dtypes: Mapping[str, str]) -> Manifest:
    """Return the manifest of the sums of layers; stored tensors are those of the last one.

    Args:
        parts: The layers. Tensors that are summed have equal names and shapes in all of them.
        nodes: Name of a tensor that is summed -> the function and its params.
        dtypes: Name of such a tensor -> its dtype.
    """
    last, names = parts[-1], [spec.fqn for spec in parts[-1].tensors if spec.fqn in nodes]
    tables = stacked_chunks([part.chunks for part in parts])
    shifts = [0, *accumulate(len(part.tensors) for part in parts)]
    inputs: list[TensorSpec] = []
    rows: list[int] = []
    for name in names:
        for place, part in enumerate(parts):
            number = part.index[name]
            rows.append(shifts[place] + number)
            # Names must be unique among inputs; only the last layer keeps the
            # names that the checkpoint's items have.
            called = name if part is last else f"@{place + 1}/{name}"
            inputs.append(replace(part.tensors[number], fqn=called))
    count, first = len(parts), {name: n * len(parts) for n, name in enumerate(names)}
    derived = {
        last.index[name]: replace(nodes[name], inputs=tuple(range(start, start + count)))
        for name, start in first.items()
    }
    stored_rows = [None if spec.fqn in first else shifts[-2] + n for n, spec in enumerate(last.tensors)]
    tensors = tuple(replace(s, dtype=dtypes[s.fqn]) if s.fqn in first else s for s in last.tensors)
    stored = replace(last, tensors=tensors, chunks=chunks_of_rows(tables, stored_rows))
    return stored.deriving(derived, tuple(inputs), chunks_of_rows(tables, rows))


def stacked_chunks(tables: Sequence[Chunks]) -> Chunks:
    """Return the chunks of several tables of tensors as one table."""
    rank = max(table.lo.shape[1] for table in tables)
    # Each table's rows begin where those of the tables before it end.
    ends = [0, *accumulate(len(table) for table in tables)]
    first = [table.first[:-1] + end for table, end in zip(tables, ends, strict=False)]
    views = None
    if any(table.view is not None for table in tables):
        views = np.concatenate([with_dims(table.views, 2 + rank, 0) for table in tables])
    return Chunks(
        np.concatenate([*first, np.array(ends[-1:], np.int64)]),
        np.concatenate([with_dims(table.lo, rank, 0) for table in tables]),
        np.concatenate([with_dims(table.shape, rank, 1) for table in tables]),
        np.concatenate([table.item for table in tables]),
        views,
    )
