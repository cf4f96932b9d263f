"""Assign each box of each tensor to the rank of a mesh that writes it, so that each box is written once.

Of the ranks that have a box, the one with the fewest bytes so far writes it; on a tie, the lowest rank. That
is torch's own rule (torch/distributed/checkpoint/_dedup_save_plans.py), with names in natural order instead
of the order of the saved dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec
from ckptcore.errors import UsageError
from ckptcore.formats.base import natural
from ckptcore.topology.layout import TensorLayout, Topology
from ckptcore.utils.ordering import stable_order

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
    load = np.zeros(size, np.int64)
    # Most tensors of a model share dtype, shape and layout with others.
    pieces_by_layout: dict[tuple[str, tuple[int, ...], TensorLayout], _Pieces] = {}
    writes: list[tuple[int, _Pieces, Ints]] = []  # a tensor, its pieces, and the rank that writes each
    for i in order:
        spec = tensors[i]
        key = spec.dtype, spec.shape, topology.layout(spec.fqn)
        pieces = pieces_by_layout.get(key)
        if pieces is None:
            box_ranks = [(_piece(spec, box), ranks) for box, ranks in _holders(topology, spec)]
            pieces = pieces_by_layout[key] = _Pieces.of(box_ranks)
        if pieces.alone is not None:  # no rank is twice among them: their order does not matter
            load[pieces.alone] += pieces.nbytes
            writes.append((i, pieces, pieces.alone))
            continue
        writers = np.empty(len(pieces.items), np.int64)
        for n, (nbytes, ranks) in enumerate(zip(pieces.nbytes.tolist(), pieces.ranks, strict=True)):
            rank = int(ranks[0] if len(ranks) == 1 else ranks[load[ranks].argmin()])
            load[rank] += nbytes
            writers[n] = rank
        writes.append((i, pieces, writers))
    return _shares(writes, size)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The distinct boxes of tensors of one shape and layout, by the first rank that has each.

    Attributes:
        items: One for each box.
        nbytes: What each counts, int64 [n].
        ranks: The ranks that have each, int64 arrays.
        alone: The only rank that has each, int64 [n], each rank once; None where ranks are to be chosen.
    """

    items: list[WriteItem]
    nbytes: Ints
    ranks: list[Ints]
    alone: Ints | None

    @classmethod
    def of(cls, rows: Sequence[tuple[WriteItem, list[int]]]) -> _Pieces:
        items = [piece for piece, _ in rows]
        # An empty box counts as one byte, as in torch's rule.
        nbytes = np.array([piece.nbytes or 1 for piece in items], np.int64)
        alone = None
        if all(len(ranks) == 1 for _, ranks in rows) and len({ranks[0] for _, ranks in rows}) == len(rows):
            alone = np.array([ranks[0] for _, ranks in rows], np.int64)
        return cls(items, nbytes, [np.array(ranks, np.int64) for _, ranks in rows], alone)


def _shares(writes: Sequence[tuple[int, _Pieces, Ints]], size: int) -> list[Share]:
    """Return what each rank writes, in the order of the tensors."""
    counts = [len(writers) for _, _, writers in writes]
    ranks = np.concatenate([np.zeros(0, np.int64), *(writers for _, _, writers in writes)])
    order = stable_order(ranks)
    stops = np.cumsum(np.bincount(ranks, minlength=size))[:-1]
    tensors = np.repeat(np.array([i for i, _, _ in writes], np.int64), counts)[order]
    first: dict[int, int] = {}  # number of the first item of each set of pieces
    items: list[WriteItem] = []
    for _, pieces, _ in writes:
        if id(pieces) not in first:
            first[id(pieces)] = len(items)
            items += pieces.items
    begin = np.array([first[id(pieces)] for _, pieces, _ in writes], np.int64)
    ends = np.cumsum(np.array(counts, np.int64))
    number = np.arange(len(ranks)) + np.repeat(begin - (ends - counts), counts)
    mine = zip(np.split(tensors, stops), np.split(number[order], stops), strict=True)
    return [
        Share(rank_tensors.tolist(), [items[n] for n in numbers.tolist()]) for rank_tensors, numbers in mine
    ]


def _piece(spec: TensorSpec, box: Box) -> WriteItem:
    return WriteItem(box, (spec.dtype, box.shape), box.numel * BY_NAME[spec.dtype].itemsize)


def _holders(topology: Topology, spec: TensorSpec) -> list[tuple[Box, list[int]]]:
    """Return the distinct boxes of a tensor, each with the ranks that have it; require all elements."""
    boxes = topology.boxes(spec.fqn, spec.shape)
    box_ranks: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        if 0 in spec.shape and box is not None:
            box_ranks.setdefault(Box.full(spec.shape), []).append(rank)
        elif box is not None and 0 not in box.shape:
            box_ranks.setdefault(box, []).append(rank)
    numel = sum(box.numel for box in box_ranks)
    if not box_ranks or numel != spec.numel:
        raise UsageError(
            f"the ranks of the mesh must have all {spec.numel} elements of {spec.fqn} (got {numel})",
            hint="check its rule: stages and coordinates are counted from 0",
        )
    return list(box_ranks.items())
