"""Lay out optimizer state as Megatron-Core's `fully_sharded_model_space` stores it (0.11 to 0.15).

A job whose common state names that sharding type asks for slices of flattened local shards. Its loader finds
them only in a tensor of shape ``(cells of each dim..., elements of a cell)``, whose original shape is under
``mcore_data`` of `.metadata` (megatron/core/dist_checkpointing/strategies/resharding.py). The bytes of a cell
are those of its box. `flattened` reads the same form.

Layers, and experts, that share one tensor are a cell each, as the loader requires. The cells of the other
dims are the cuts of the mesh where they are even. An uneven cut of the outermost dim is a range of the
flattened cell; an uneven cut of a further dim takes cells of the greatest common divisor. The two halves of a
gated ``linear_fc1`` are never in one cell: a rank asks for a shard of each, and torch refuses one cell twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import Any

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec
from ckptcore.formats.common.write_assignment import WriteItem
from ckptcore.formats.megatron.flattened import ORIGINAL
from ckptcore.formats.megatron.parameter_space import MODEL_SPACE, sharding_types
from ckptcore.topology.layout import Topology

_STATE = re.compile(r"(?:chained_(?P<chained>\d+)\.)?optimizer\.state\.[^.]+\.(?P<key>.+)")
_GATED = re.compile(r"\.linear_fc1\.(?:weight|bias)\d*$")
_STACKED = (re.compile(r"(?:^|\.)layers\.(?!\d)"), re.compile(r"\.experts\.experts\.(?!\d)"))


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of one tensor.

    Attributes:
        shape: The tensor's own shape, elements.
        grid: Number of cells along each dim.
    """

    shape: tuple[int, ...]
    grid: tuple[int, ...]

    @property
    def cell(self) -> tuple[int, ...]:
        """Return the shape of one cell."""
        return tuple(n // g for n, g in zip(self.shape, self.grid, strict=True))

    @property
    def stored(self) -> tuple[int, ...]:
        """Return the shape of the tensor as it is stored."""
        return (*self.grid, prod(self.cell))

    def cut(self, box: Box, dtype: str) -> Iterator[WriteItem]:
        """Yield the items that store a box of the tensor, each a range of one cell."""
        # A box may touch several cells, and each is an item of its own: no item spans cells.
        cell = self.cell
        first = [o // c for o, c in zip(box.offset, cell, strict=True)]
        last = [(o + n - 1) // c for o, n, c in zip(box.offset, box.shape, cell, strict=True)]
        for index in product(*(range(a, b + 1) for a, b in zip(first, last, strict=True))):
            start = tuple(max(o, k * c) for o, k, c in zip(box.offset, index, cell, strict=True))
            stop = tuple(
                min(o + n, (k + 1) * c) for o, n, k, c in zip(box.offset, box.shape, index, cell, strict=True)
            )
            part = Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))
            inside = 0  # row-major place of the part's first element in the cell
            for a, k, c in zip(start, index, cell, strict=True):
                inside = inside * c + a - k * c
            shape = (*(1 for _ in index), part.numel)
            nbytes = part.numel * BY_NAME[dtype].itemsize
            yield WriteItem(part, (dtype, shape), nbytes, ((*index, inside), shape))


def flattened_tensors(
    tensors: Sequence[TensorSpec], common: Mapping[str, Any], topology: Topology | None
) -> dict[int, Cells]:
    """Return the cells of the tensors that the job of this common state asks for flattened.

    Args:
        tensors: All tensors of the output.
        common: The common state, by key.
        topology: Which rank has which box; None for a mesh of one.

    Returns:
        Position of a tensor -> its cells. Empty unless the common state names `fully_sharded_model_space`.
    """
    types = sharding_types(common.get("optimizer"))
    if MODEL_SPACE not in types.values():
        return {}
    shapes = {t.fqn: t.shape for t in tensors}
    cells = {}
    for i, spec in enumerate(tensors):
        match = _STATE.fullmatch(spec.fqn)
        if match is None or not spec.shape or 0 in spec.shape:
            continue
        chained = match["chained"]
        number = None if chained is None else int(chained)
        if types.get(number, MODEL_SPACE) != MODEL_SPACE:
            continue
        boxes = [Box.full(spec.shape)] if topology is None else topology.boxes(spec.fqn, spec.shape)
        stacked = min(sum(bool(p.search(match["key"])) for p in _STACKED), len(spec.shape))
        halves: tuple[int, ...] = ()
        if _GATED.search(match["key"]):
            # GroupedMLP keeps its state as [in, out], and its weight as [out, in].
            turned = shapes.get(match["key"], spec.shape) != spec.shape
            halves = (len(spec.shape) - 1,) if turned else (stacked,)
        grid = cell_grid(spec.shape, stacked, halves, [b for b in boxes if b is not None])
        cells[i] = Cells(spec.shape, grid)
    return cells


def mcore_data(tensors: Sequence[TensorSpec], cells: Mapping[int, Cells]) -> dict[str, Any]:
    """Return the entry ``mcore_data`` of `.metadata`: key -> original shape of a flattened tensor."""
    return {tensors[i].fqn: {ORIGINAL: c.shape} for i, c in cells.items()}


def cell_grid(
    shape: tuple[int, ...], stacked: int, halves: Sequence[int], boxes: Iterable[Box]
) -> tuple[int, ...]:
    """Return the number of cells along each dim.

    Args:
        shape: Shape of the tensor.
        stacked: How many leading dims count layers and experts.
        halves: Dims of a gate and an up projection.
        boxes: The boxes of the ranks.
    """
    non_empty = [b for b in boxes if b.numel]
    grid = []
    for dim, n in enumerate(shape):
        edges = {edge for b in non_empty for edge in (b.offset[dim], b.offset[dim] + b.shape[dim])} | {n}
        parts = 2 if dim in halves and n % 2 == 0 else 1
        even = len({b.shape[dim] for b in non_empty}) == 1
        if dim < stacked:
            grid.append(n)
        elif dim == stacked and not even:
            grid.append(parts)
        else:
            uncut = parts == 1 or any(edge % 2 for edge in edges)
            grid.append(n // gcd(*edges, *({n // parts} if uncut else {edge // 2 for edge in edges})))
    return tuple(grid)
