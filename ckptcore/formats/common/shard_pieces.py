"""Place a rank's shard of a tensor in the logical tensor: boxes of the one and of the other.

Trainers cut one dim over tensor-parallel ranks. A fused tensor is cut part by part: each rank has its rows of
every part behind each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec, View, row_major
from ckptcore.core.manifest_builder import Builder

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


def cut_parts(shape: Shape, dim: int, parts: Sequence[int], degree: int, rank: int) -> ShardPlacement:
    """Place parts, of so many rows here, that are each cut alike over the ranks along ``dim``."""
    pieces, local = [], 0
    for rows in parts:
        local_offset = tuple(local if d == dim else 0 for d in range(len(shape)))
        size = tuple(rows if d == dim else n for d, n in enumerate(shape))
        offset = tuple(local * degree + rank * rows if d == dim else 0 for d in range(len(shape)))
        pieces.append(Piece(Box(local_offset, size), offset))
        local += rows
    return ShardPlacement(
        tuple(local * degree if d == dim else n for d, n in enumerate(shape)), tuple(pieces), shape
    )


class PlacedTensors:
    """Add the ranks' shards of tensors to a builder."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._tensors: dict[str, tuple[int, TensorSpec]] = {}

    def add(
        self, spec: TensorSpec, placement: ShardPlacement, item: int, path: str, view: View | None = None
    ) -> bool:
        """Add a shard of a file; return False, with a finding, where another rank's tensor has another form.

        Without a view the item is the shard's row-major elements.
        """
        if spec.fqn not in self._tensors:
            self._tensors[spec.fqn] = self._builder.tensor(spec, path), spec
        tensor, first = self._tensors[spec.fqn]
        if spec != first:
            form, first_form = (f"{s.dtype} {list(s.shape)}" for s in (spec, first))
            message = f"{spec.fqn} is {form} by {path}, and {first_form} by other ranks"
            self._builder.report("item-mismatch", "files", message, fqn=spec.fqn, file=path)
            return False
        if spec.dtype not in BY_NAME:
            return True  # a part that is not read
        stored = View() if view is None else view
        strides, width = stored.strides or row_major(placement.shard), BY_NAME[spec.dtype].itemsize
        for piece in placement.pieces:
            element = sum(i * s for i, s in zip(piece.local.offset, strides, strict=True))
            cut = piece.local.shape != placement.shard
            place = View(stored.start + element * width, strides if cut else stored.strides, stored.flags)
            of_all = view is None and place == View()
            self._builder.chunk(tensor, piece.offset, piece.local.shape, item, None if of_all else place)
        return True
