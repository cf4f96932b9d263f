"""Find parameters in the flat buffers that ZeRO partitions over data-parallel ranks.

ZeRO-1, ZeRO-2 and BF16_Optimizer: the parameters of a group follow each other in a flat buffer, which is
cut into equal partitions, one a rank. A parameter may span ranks, and cuts ignore rows (deepspeed/runtime/
zero/stage_1_and_2.py, runtime/bf16_optimizer.py). ZeRO-3: each parameter is cut by itself into
``ceil(numel / ranks)`` elements a rank, and a rank's pieces follow each other (zero/stage3.py). The order is
that of ``param_shapes``. The module's order and ``param_slice_mappings`` differ from it under
``round_robin_gradients``. Elements behind the last parameter are padding: uninitialised memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]
_ALIGNED = 2  # `nccl_start_alignment_factor`: a group is filled up to a multiple of this many elements a rank


@dataclass(frozen=True, slots=True)
class FlatParameter:
    """A parameter of a group.

    Attributes:
        name: FQN.
        shape: Of what one model-parallel rank has, elements.
        padding: Elements of alignment behind it (``param_alignment_paddings``).
    """

    name: str
    shape: Shape
    padding: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A run of a parameter's elements in one rank's flat buffer.

    Attributes:
        parameter: Whose elements.
        rank: Data-parallel rank, by its place in the group.
        start, stop: Row-major elements of the parameter.
        buffer_start: The first of them in the rank's buffer, elements.
    """

    parameter: FlatParameter
    rank: int
    start: int
    stop: int
    buffer_start: int


class UnfitPartition(ValueError):
    """Sizes of buffers that the parameters of their group do not have."""


def cut_together(
    parameters: Sequence[FlatParameter], ranks: int, lengths: Mapping[int, int]
) -> Iterator[Fragment]:
    """Yield the fragments of a group that is cut as one buffer (ZeRO-1, ZeRO-2, BF16_Optimizer).

    Args:
        parameters: Of the group, in the order of ``param_shapes``.
        ranks: How many partitions the buffer has.
        lengths: Rank -> elements in its buffer, of the ranks whose file is there. Padding at the end of the
            last ranks is stripped from masters, and not from moments.

    Raises:
        UnfitPartition: The buffers have not the size that the parameters need.
    """
    total = sum(p.numel + p.padding for p in parameters)
    size = max(lengths.values(), default=0)
    if 0 not in lengths:  # the others may be stripped: only a full partition tells the size
        size = max(size, -(-total // (ranks * _ALIGNED)) * _ALIGNED)
    # Behind the last parameter there is only padding: a longer rest is a parameter of another save.
    limit = ranks * max([_ALIGNED, *(p.padding + 1 for p in parameters)])
    for rank, length in lengths.items():
        real = min(max(total - rank * size, 0), size)
        if length < real or length > size:
            raise UnfitPartition(f"rank {rank} holds {length} elements where its part of {total} has {real}")
    if not 0 <= ranks * size - total <= max(limit, ranks * _ALIGNED):
        raise UnfitPartition(f"{ranks} partitions of {size} elements for parameters of {total} elements")
    position, present_ranks = 0, sorted(lengths)
    for parameter in parameters:
        begin, end = position, position + parameter.numel
        # Ranks by their files: a file may record a job of far more ranks.
        first, last = (
            (bisect_left(present_ranks, n) for n in (begin // size, -(-end // size)))
            if end > begin
            else (0, 0)
        )
        for rank in present_ranks[first:last]:
            low, high = max(begin, rank * size), min(end, (rank + 1) * size)
            yield Fragment(parameter, rank, low - begin, high - begin, low - rank * size)
        position = end + parameter.padding


def cut_each(
    parameters: Sequence[FlatParameter], ranks: int, lengths: Mapping[int, int]
) -> Iterator[Fragment]:
    """Yield the fragments of a group whose parameters are cut one by one (ZeRO-3).

    Args:
        parameters: Of the (sub-)group, in the order of ``param_shapes``.
        ranks: How many data-parallel ranks there are.
        lengths: Rank -> elements in its buffer, of the ranks whose file is there.

    Raises:
        UnfitPartition: A buffer has not the size that the parameters need.
    """
    total = sum(-(-p.numel // ranks) for p in parameters)
    for rank, length in lengths.items():
        if length != total:
            raise UnfitPartition(f"rank {rank} holds {length} elements where its parts are {total}")
    position, present_ranks = 0, sorted(lengths)
    for parameter in parameters:
        size = -(-parameter.numel // ranks)
        for rank in present_ranks:
            start, stop = min(rank * size, parameter.numel), min((rank + 1) * size, parameter.numel)
            if stop > start:
                yield Fragment(parameter, rank, start, stop, position)
        position += size
