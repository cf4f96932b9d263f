"""Parts: which rank of a mesh writes which box of each tensor, so that everything is written once?

What several ranks have is written by one of them, and always by one that has it: the rank with the fewest
bytes so far, the lowest of these. That is torch's own rule (torch/distributed/checkpoint/
_dedup_save_plans.py), with names in natural order instead of the order of the saved dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec
from ckptcore.errors import UsageError
from ckptcore.formats.base import natural
from ckptcore.topology.layout import TensorLayout, Topology

Kind = tuple[str, tuple[int, ...]]  # dtype, shape


@dataclass(frozen=True, slots=True)
class WriteItem:
    """A box of any tensor of one dtype. kind: what its bytes are. nbytes: how many."""

    box: Box
    kind: Kind
    nbytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank writes: positions of tensors, and a piece of each. Millions, so in columns."""

    tensors: list[int] = field(default_factory=list)
    pieces: list[WriteItem] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[int, Box]]:
        return zip(self.tensors, (p.box for p in self.pieces), strict=True)


def in_order(tensors: Sequence[TensorSpec]) -> list[int]:
    """Positions of tensors in natural order of their names."""
    return sorted(range(len(tensors)), key=lambda i: natural(tensors[i].fqn))


def by_rank(tensors: Sequence[TensorSpec], order: Iterable[int], topology: Topology | None) -> list[Share]:
    """Per rank, what it writes, in the order given.

    order: positions into ``tensors``. topology: None for a mesh of one.
    An empty part of a tensor is not written: no loader asks for it, and torch's planner for
    ShardedTensors leaves it out, too. A tensor without elements is one whole part.
    Raises `UsageError` for a tensor that the ranks do not have all of.
    """
    if topology is None:
        places = list(order)
        return [Share(places, [_piece(tensors[i], Box.full(tensors[i].shape)) for i in places])]
    mine = [Share() for _ in range(topology.mesh.size)]
    load = [0] * topology.mesh.size
    known: dict[tuple[str, tuple[int, ...], TensorLayout], list[tuple[WriteItem, list[int]]]] = {}
    for i in order:
        spec = tensors[i]
        key = spec.dtype, spec.shape, topology.layout(spec.fqn)
        if key not in known:
            known[key] = [(_piece(spec, box), ranks) for box, ranks in _holders(topology, spec)]
        for piece, ranks in known[key]:
            rank = ranks[0] if len(ranks) == 1 else min(ranks, key=load.__getitem__)
            load[rank] += piece.nbytes or 1
            share = mine[rank]
            share.tensors.append(i)
            share.pieces.append(piece)
    return mine


def _piece(spec: TensorSpec, box: Box) -> WriteItem:
    return WriteItem(box, (spec.dtype, box.shape), box.numel * BY_NAME[spec.dtype].itemsize)


def _holders(topology: Topology, spec: TensorSpec) -> list[tuple[Box, list[int]]]:
    """The distinct parts of a tensor, each with the ranks that have it; nothing may be missing."""
    held = topology.boxes(spec.fqn, spec.shape)
    found: dict[Box, list[int]] = {}
    for rank, box in enumerate(held):
        if 0 in spec.shape and box is not None:
            found.setdefault(Box.full(spec.shape), []).append(rank)
        elif box is not None and 0 not in box.shape:
            found.setdefault(box, []).append(rank)
    there = sum(box.numel for box in found)
    if not found or there != spec.numel:
        raise UsageError(
            f"the ranks of the mesh have {there} elements of {spec.fqn}, which has {spec.numel}",
            hint="look at its rule: stages and coordinates are counted from 0",
        )
    return list(found.items())
