"""Assign each box of each tensor to the rank of a mesh that writes it, so that each box is written once.

Of the ranks that have a box, the one with the fewest bytes so far writes it; on a tie, the lowest rank. That
is torch's own rule (torch/distributed/checkpoint/_dedup_save_plans.py), with names in natural order instead
of the order of the saved dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec
from ckptcore.errors import UsageError
from ckptcore.formats.base import natural
from ckptcore.topology.layout import TensorLayout, Topology
from ckptcore.utils.dataclass import dataclass

Ints = npt.NDArray[np.int64]
Kind = tuple[str, tuple[int, ...]]  # dtype, shape


@dataclass(frozen=True, slots=True)
class WriteItem:
    """A box of any tensor of one dtype.

    Attributes:
        box: The box.
        kind: dtype and shape of the bytes.
        nbytes: Number of bytes.
        stored: (offset, shape) in the tensor as the file describes it, where that is not the box.
    """

    box: Box
    kind: Kind
    nbytes: int
    stored: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank writes: positions of tensors, and an item of each. There are millions, so in columns."""

    tensors: list[int] = field(default_factory=list)
    pieces: list[WriteItem] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[int, Box]]:
        return zip(self.tensors, (p.box for p in self.pieces), strict=True)


def in_order(tensors: Sequence[TensorSpec]) -> list[int]:
    """Return the positions of tensors in natural order of their names."""
    return sorted(range(len(tensors)), key=lambda i: natural(tensors[i].fqn))


def by_rank(tensors: Sequence[TensorSpec], order: Iterable[int], topology: Topology | None) -> list[Share]:
    """Return what each rank writes, in the given order.

    An empty box of a tensor is not written: no loader asks for it, and torch's planner for ShardedTensors
    leaves it out, too. A tensor without elements is written as one box.

    Args:
        tensors: All tensors.
        order: Positions in ``tensors``.
        topology: Which rank has which box; None for a mesh of one.

    Raises:
        UsageError: The ranks together do not have all elements of a tensor.
    """
    if topology is None:
        places = list(order)
        return [Share(places, [_piece(tensors[i], Box.full(tensors[i].shape)) for i in places])]
    size = topology.mesh.size
    mine = [Share() for _ in range(size)]
    load = np.zeros(size, np.int64)
    known: dict[tuple[str, tuple[int, ...], TensorLayout], _Pieces] = {}
    even: list[
        tuple[int, list[WriteItem]]
    ] = []  # tensors of which each rank has one piece, not yet shared out
    for i in order:
        spec = tensors[i]
        key = spec.dtype, spec.shape, topology.layout(spec.fqn)
        if key not in known:
            known[key] = _Pieces.of([(_piece(spec, box), ranks) for box, ranks in _holders(topology, spec)])
        pieces = known[key]
        if pieces.is_even(size):
            even.append((i, pieces.items))
            load += pieces.nbytes
            continue
        _share_out(even, mine)
        for piece, nbytes, ranks in zip(pieces.items, pieces.nbytes.tolist(), pieces.ranks, strict=True):
            rank = int(ranks[0] if len(ranks) == 1 else ranks[load[ranks].argmin()])
            load[rank] += nbytes
            share = mine[rank]
            share.tensors.append(i)
            share.pieces.append(piece)
    _share_out(even, mine)
    return mine


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The distinct boxes of tensors of one shape and layout, by the first rank that has each.

    items: one for each box. nbytes: int64 [n], what each counts. ranks: int64 arrays, the ranks that have it.
    """

    items: list[WriteItem]
    nbytes: Ints
    ranks: list[Ints]

    @classmethod
    def of(cls, found: Sequence[tuple[WriteItem, list[int]]]) -> _Pieces:
        items = [piece for piece, _ in found]
        nbytes = np.array([piece.nbytes or 1 for piece in items], np.int64)
        return cls(items, nbytes, [np.array(ranks, np.int64) for _, ranks in found])

    def is_even(self, size: int) -> bool:
        """Return whether each of the mesh's ranks has exactly one box, which no other rank has."""
        return len(self.items) == size and all(len(ranks) == 1 for ranks in self.ranks)


def _share_out(even: list[tuple[int, list[WriteItem]]], mine: Sequence[Share]) -> None:
    """Give each rank its piece of every tensor, and empty the list."""
    if even:
        tensors = [i for i, _ in even]
        for share, pieces in zip(mine, zip(*(items for _, items in even), strict=True), strict=True):
            share.tensors.extend(tensors)
            share.pieces.extend(pieces)
        even.clear()


def _piece(spec: TensorSpec, box: Box) -> WriteItem:
    return WriteItem(box, (spec.dtype, box.shape), box.numel * BY_NAME[spec.dtype].itemsize)


def _holders(topology: Topology, spec: TensorSpec) -> list[tuple[Box, list[int]]]:
    """Return the distinct boxes of a tensor, each with the ranks that have it; require all elements."""
    boxes = topology.boxes(spec.fqn, spec.shape)
    found: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        if 0 in spec.shape and box is not None:
            found.setdefault(Box.full(spec.shape), []).append(rank)
        elif box is not None and 0 not in box.shape:
            found.setdefault(box, []).append(rank)
    there = sum(box.numel for box in found)
    if not found or there != spec.numel:
        raise UsageError(
            f"the ranks of the mesh must have all {spec.numel} elements of {spec.fqn} (got {there})",
            hint="check its rule: stages and coordinates are counted from 0",
        )
    return list(found.items())
