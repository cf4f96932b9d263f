"""Weights with a low-rank adapter (LoRA) merged into them: a computed tensor beside weighted sums.

``adapted_float32`` and ``adapted_float64``: inputs weight [R, C], A and B; params: the bits of the float64
scale, the rank, and 1 where the update is transposed, else 0. A is [rank, C] and B is [R, rank]; of a
transposed update (embeddings, and layers that store their weight as [in, out]) A is [rank, R] and B is
[C, rank].

out = weight + (((B1 * A1) + (B2 * A2)) + ...) * scale, over the columns of B and the rows of A in their
order. Each input is widened to the function's dtype, and each product and each sum is rounded to it. A matrix
product would be faster, but its order is up to the library, and to the size of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import ADAPTED, Derived, Manifest, TensorSpec
from ckptcore.core.subset import chunks_of_rows
from ckptcore.core.weighted_sums import SUMMED, packed_weights, pieces_at_once, stacked_chunks, weights_of

Shape = tuple[int, ...]
_PIECE = 1 << 16  # elements of an update that stay in a core's cache
_ON_DEVICE = 64  # bytes of an element of all pieces that an accelerator computes at once


def adapted_node(dtype: str, scale: float, rank: int, *, transposed: bool) -> Derived:
    """Return the node of a weight with an adapter, without its inputs.

    Args:
        dtype: Dtype of the sum.
        scale: Factor of the update.
        rank: Rows of A.
        transposed: Whether the weight's rows are those of A's columns.
    """
    return Derived(f"{ADAPTED}{dtype}", (), (*packed_weights([scale]), rank, int(transposed)))


def adapted_shape(inputs: Sequence[TensorSpec], params: Shape) -> Shape | None:
    """Return the shape of an adapted weight; None where the inputs or params do not fit."""
    if len(inputs) != 3 or len(params) != 3 or any(t.dtype not in SUMMED for t in inputs):
        return None
    weight, first, second = (t.shape for t in inputs)
    _, rank, transposed = params
    size = weight[::-1] if transposed else weight
    return weight if len(size) == 2 and (first, second) == ((rank, size[1]), (size[0], rank)) else None


def adapted_needs(box: Box, params: Shape) -> tuple[Box, ...]:
    """Return the boxes of weight, A and B that a box of an adapted weight needs."""
    _, rank, transposed = params
    rows, columns = zip(box.offset, box.shape, strict=True)
    if transposed:
        rows, columns = columns, rows
    return (box, Box((0, columns[0]), (rank, columns[1])), Box((rows[0], 0), (rows[1], rank)))


def most_adapted(room: int, shape: Shape, itemsize: int, dtypes: Sequence[str], params: Shape) -> int:
    """Return the most elements of a box that fit so many bytes, with their inputs; see `Function.most`.

    >>> most_adapted(1 << 20, (1000, 1000), 4, ("bfloat16", "float32", "float32"), (0, 8, 0))
    168000
    """
    weight, *pair = (BY_NAME[dtype].itemsize for dtype in dtypes)
    # A and B are widened as a whole where they are narrower than the sum.
    widened = 0 if min(pair) >= itemsize else itemsize
    per_element, vector, columns = itemsize + weight, params[1] * (max(pair) + widened), shape[1]
    # A tile is complete rows, which need all of one matrix, or a part of one row.
    rows = (room - vector * columns) // (per_element * columns + vector)
    return rows * columns if rows > 0 else min((room - vector) // (per_element + vector), columns)


def fill_adapted(torch: Any, box: Box, inputs: Sequence[Any], params: Shape, out: Any) -> None:
    """Compute a box, some rows at a time; see `ckptcore.core.dequantize.Function`."""
    (scale,), transposed = weights_of(params[:1]), params[2]
    # Rounded to the dtype of the sum here, as the weights of a sum are.
    scale = torch.tensor(scale, dtype=out.dtype).item()
    weight, first, second = inputs
    first, second = first.to(out.dtype), second.to(out.dtype)
    # By rows of the weight, and by columns of it: one vector for each part of the rank.
    down, across = (first, second.t()) if transposed else (second.t(), first)
    step = max(1, _PIECE * pieces_at_once(out, _ON_DEVICE // out.element_size()) // max(1, box.shape[1]))
    room = torch.empty((2, min(step, box.shape[0]), box.shape[1]), dtype=out.dtype, device=out.device)
    for begin in range(0, box.shape[0], step):
        piece = out[begin : begin + step]
        update, product = room[:, : len(piece)]
        for place, (column, row) in enumerate(zip(down[:, begin : begin + step], across, strict=True)):
            # Two roundings: a fused multiply-add rounds once, and not every device or end of a loop has one.
            torch.mul(column[:, None], row[None, :], out=product if place else update)
            if place:
                update.add_(product)
        piece.copy_(weight[begin : begin + step]).add_(update.mul_(scale))


def adapted(
    base: Manifest,
    adapter: Manifest,
    nodes: Mapping[str, tuple[Derived, Sequence[str]]],
    replaced: Mapping[str, str],
) -> Manifest:
    """Return the manifest of a model with an adapter merged into it.

    Args:
        base: The model.
        adapter: The adapter's tensors, over the same items.
        nodes: Name of a weight -> its node, and the adapter's names of A and B.
        replaced: Name of a tensor of which the adapter has all elements -> the adapter's name of it.
    """
    tables, shift = stacked_chunks((base.chunks, adapter.chunks)), len(base.tensors)
    tensors, stored_rows = list(base.tensors), list[int | None](range(shift))
    for name, stored in replaced.items():
        row, number = base.index[name], adapter.index[stored]
        tensors[row] = replace(tensors[row], dtype=adapter.tensors[number].dtype)
        stored_rows[row] = shift + number
    derived: dict[int, Derived] = {}
    inputs: list[TensorSpec] = []
    rows: list[int | None] = []
    for name, (node, pair) in nodes.items():
        row = base.index[name]
        derived[row] = replace(node, inputs=tuple(range(len(inputs), len(inputs) + 1 + len(pair))))
        inputs += [tensors[row], *(replace(adapter.tensors[adapter.index[n]], fqn=f"@1/{n}") for n in pair)]
        rows += [stored_rows[row], *(shift + adapter.index[n] for n in pair)]
        tensors[row] = replace(tensors[row], dtype=node.fn.removeprefix(ADAPTED))
        stored_rows[row] = None
    stored_tensors = replace(base, tensors=tuple(tensors), chunks=chunks_of_rows(tables, stored_rows))
    if not derived:
        return stored_tensors
    return stored_tensors.deriving(derived, tuple(inputs), chunks_of_rows(tables, rows))
