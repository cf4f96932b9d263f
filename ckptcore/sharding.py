"""Sharding: which box of a tensor does each rank of a mesh hold?

Placements are torch's own (`torch.distributed.tensor`), and so is the arithmetic: uneven and strided
shards are cut where torch cuts them. A mesh without axes is a mesh of one: its only rank holds
everything, which is what consolidating is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from ckptcore.box import Box
from ckptcore.errors import NameMismatch, UsageError

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a grid.

    axes: (name, size) per axis, the slowest first; rank r has the row-major coordinate r.

    >>> Mesh((("dp", 2), ("tp", 2))).size, MESH_OF_ONE.size
    (4, 1)
    """

    axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if any(n < 1 for _, n in self.axes) or len({a for a, _ in self.axes}) != len(self.axes):
            raise UsageError(f"{self.axes} is no mesh: axes have different names and at least one rank")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(n for _, n in self.axes)

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """The coordinate of each rank, in rank order."""
        return product(*(range(n) for _, n in self.axes))


MESH_OF_ONE = Mesh()


def boxes(shape: tuple[int, ...], mesh: Mesh, placements: Sequence[Placement]) -> list[Box]:
    """The box of each rank, in rank order; a rank without elements has an empty box.

    shape: global shape, elements. placements: one per mesh axis.
    Raises `UsageError` when there is not one placement per axis.
    """
    if len(placements) != len(mesh.axes):
        raise UsageError(f"{len(placements)} placements for a mesh of {len(mesh.axes)} axes")
    if not mesh.axes:
        return [Box.whole(shape)]
    import torch
    from torch.distributed.tensor import _utils

    # torch's own rule, without a process group; what its checkpoint planner asks, too.
    cut: Any = _utils._compute_local_shape_and_global_offset
    sizes = tuple(n for _, n in mesh.axes)
    found = []
    for at in mesh.coordinates():
        local, offset = cut(torch.Size(shape), sizes, list(at), placements)
        found.append(_box(tuple(local), tuple(offset)))
    return found


def local_box(tensor: torch.Tensor | DTensor) -> tuple[torch.Tensor, tuple[int, ...], Box]:
    """(the memory of this rank, the global shape, the box it holds) of a tensor or DTensor.

    Raises `NameMismatch` when a DTensor's memory is not the shard that its placements say.
    """
    from torch.distributed.tensor import DTensor

    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return tensor.detach(), shape, Box.whole(shape)
    from torch.distributed.tensor import _utils

    find: Any = _utils.compute_local_shape_and_global_offset
    extent, offset = find(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local().detach()
    if tuple(local.shape) != tuple(extent):
        raise NameMismatch(f"a DTensor of {list(shape)} holds {list(local.shape)}, not {list(extent)}")
    return local, shape, _box(tuple(extent), tuple(offset))


def _box(extent: tuple[int, ...], offset: tuple[int, ...]) -> Box:
    # torch places an empty shard behind the end, where a box of the tensor cannot begin.
    return Box((0,) * len(extent) if 0 in extent else offset, extent)
