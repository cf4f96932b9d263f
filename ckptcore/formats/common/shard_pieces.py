"""Describe where a rank's shard of a tensor is in the logical tensor: boxes of the one and of the other.

Trainers cut one dim over tensor-parallel ranks. A fused tensor is cut part by part: each rank has its rows of
every part behind each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptcore.core.box import Box

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a rank's shard, and where it begins in the logical parameter."""

    local: Box
    offset: Shape


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """Where one rank's shard is in a parameter.

    Attributes:
        shape: Of the logical parameter, elements.
        pieces: Boxes of the shard that are part of it; what no piece covers is padding.
        shard: Shape of the shard that was placed.
    """

    shape: Shape
    pieces: tuple[Piece, ...]
    shard: Shape


class Unmerged(ValueError):
    """A parameter that nothing says how to join."""


def same(shape: Shape) -> ShardPlacement:
    """Return the placement of a parameter that the rank has as it is."""
    return ShardPlacement(shape, (Piece(Box.full(shape), (0,) * len(shape)),), shape)


def cut_parts(
    shape: Shape, dim: int, parts: Sequence[tuple[int, int]], degree: int, rank: int
) -> ShardPlacement:
    """Place parts that are each cut over the ranks along ``dim``: (rows here, rows in all) of each."""
    pieces, local, full_at = [], 0, 0
    for rank_rows, all_rows in parts:
        if rank_rows * degree != all_rows:
            raise Unmerged(f"{all_rows} elements along dim {dim} for {degree} ranks of {rank_rows}")
        local_offset = tuple(local if d == dim else 0 for d in range(len(shape)))
        size = tuple(rank_rows if d == dim else n for d, n in enumerate(shape))
        offset = tuple(full_at + rank * rank_rows if d == dim else 0 for d in range(len(shape)))
        pieces.append(Piece(Box(local_offset, size), offset))
        local, full_at = local + rank_rows, full_at + all_rows
    if local != shape[dim]:
        raise Unmerged(f"its parts have {local} elements along dim {dim}, the shard has {shape[dim]}")
    return ShardPlacement(
        tuple(full_at if d == dim else n for d, n in enumerate(shape)), tuple(pieces), shape
    )
