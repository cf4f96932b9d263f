"""Parts: which rank of a mesh writes which box of each tensor, so that everything is written once?

What several ranks have is written by one of them, and always by one that has it: the rank with the fewest
bytes so far, the lowest of these. That is torch's own rule (torch/distributed/checkpoint/
_dedup_save_plans.py), with names in natural order instead of the order of the saved dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptcore.box import Box
from ckptcore.dtype import BY_NAME
from ckptcore.formats.base import natural
from ckptcore.manifest import TensorSpec
from ckptcore.sharding import Layout, Topology

Part = tuple[int, Box]  # position of a tensor, what is written of it


def in_order(tensors: Sequence[TensorSpec]) -> list[int]:
    """Positions of tensors in natural order of their names."""
    return sorted(range(len(tensors)), key=lambda i: natural(tensors[i].fqn))


def by_rank(
    tensors: Sequence[TensorSpec], order: Iterable[int], topology: Topology | None
) -> list[list[Part]]:
    """Per rank, what it writes, in the order given.

    order: positions into ``tensors``. topology: None for a mesh of one.
    An empty part of a tensor is not written: no loader asks for it, and torch's planner for
    ShardedTensors leaves it out, too. A tensor without elements is one whole part.
    """
    if topology is None:
        return [[(i, Box.whole(tensors[i].shape)) for i in order]]
    mine: list[list[Part]] = [[] for _ in range(topology.mesh.size)]
    load = [0] * topology.mesh.size
    known: dict[tuple[tuple[int, ...], Layout], list[tuple[Box, list[int]]]] = {}
    for i in order:
        spec = tensors[i]
        key = spec.shape, topology.layout(spec.fqn)
        if key not in known:
            known[key] = _holders(topology, spec)
        width = BY_NAME[spec.dtype].itemsize
        for box, ranks in known[key]:
            rank = ranks[0] if len(ranks) == 1 else min(ranks, key=load.__getitem__)
            load[rank] += box.numel * width or 1
            mine[rank].append((i, box))
    return mine


def _holders(topology: Topology, spec: TensorSpec) -> list[tuple[Box, list[int]]]:
    """The distinct parts of a tensor, each with the ranks that have it."""
    held = topology.held(spec.fqn, spec.shape)
    if 0 in spec.shape:
        return [(Box.whole(spec.shape), [r for r, box in enumerate(held) if box is not None])]
    found: dict[Box, list[int]] = {}
    for rank, box in enumerate(held):
        if box is not None and 0 not in box.shape:
            found.setdefault(box, []).append(rank)
    return list(found.items())
