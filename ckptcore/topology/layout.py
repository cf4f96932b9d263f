"""Compute which box of a tensor each rank of a mesh holds.

Placements have the names and fields of torch/distributed/tensor/placement_types.py, so callers may pass
torch's own. Importing torch.distributed.tensor alone would take longer than planning for 512
ranks. The arithmetic is torch's, too: uneven and strided shards are cut where torch cuts them
(`ckptcore.topology.torch_chunk`), and refused where torch contradicts itself. torch's own function is not
called: it makes an index of every element. A mesh without axes is a mesh of one: its only rank holds
everything, which is a consolidated checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from ckptcore.core.box import Box, flat_start
from ckptcore.errors import NameMismatch, UsageError
from ckptcore.topology import torch_chunk as cuts

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Shard:
    """A mesh axis that cuts this dim, like torch.chunk."""

    dim: int


@dataclass(frozen=True, slots=True)
class _StridedShard:
    """A mesh axis that cuts each of the ``split_factor`` pieces that axes to its right have made of a dim."""

    dim: int
    split_factor: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """A mesh axis along which every rank has the same."""


Placement = Shard | _StridedShard | Replicate | Any  # Any: torch's own


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a grid.

    Attributes:
        axes: (name, size) per axis, the slowest first; rank r has the row-major coordinate r.
        device: Device type of the ranks' tensors, a torch name; it changes no box.
        called: What the job calls each axis; empty for the names in ``axes``. It changes no box.

    >>> Mesh((("dp", 2), ("tp", 2))).size, MESH_OF_ONE.size
    (4, 1)
    """

    axes: tuple[tuple[str, int], ...] = ()
    device: str = "cpu"
    called: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if any(n < 1 for _, n in self.axes) or len({a for a, _ in self.axes}) != len(self.axes):
            raise UsageError(f"mesh axes must have different names and 1 rank or more (got {self.axes})")

    @property
    def size(self) -> int:
        """Count the ranks."""
        return prod(n for _, n in self.axes)

    def name_in_job(self, axis: str) -> str:
        """Return what the job calls an axis; neighbours that shard as one have the name torch gives them.

        >>> Mesh((("dp_replicate", 2), ("fsdp", 4)), called=("ddp", "fsdp")).name_in_job("dp_replicate+fsdp")
        'ddp_fsdp'
        """
        names = [a for a, _ in self.axes]
        called = dict(zip(names, self.called or names, strict=True))
        return "_".join(called[part] for part in axis.split("+"))

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Yield the coordinate of each rank, in rank order."""
        return product(*(range(n) for _, n in self.axes))

    def rank(self, coordinate: Sequence[int]) -> int:
        """Return the rank at a coordinate.

        >>> Mesh((("fsdp", 2), ("tp", 4))).rank((1, 2))
        6
        """
        return flat_start(tuple(n for _, n in self.axes), tuple(coordinate))

    def along(self, axes: Sequence[str]) -> Mesh:
        """Return the mesh of some of its axes, in mesh order; ``fsdp+ep`` flattens neighbours, like torch.

        >>> Mesh((("fsdp", 2), ("ep", 4), ("tp", 2))).along(["fsdp+ep", "tp"]).axes
        (('fsdp+ep', 8), ('tp', 2))

        Raises:
            UsageError: The mesh does not have these axes in this order.
        """
        sizes = [n for _, n in self.axes]
        return Mesh(tuple((a, prod(sizes[k] for k in numbers)) for a, numbers in self._places(axes).items()))

    def ranks_along(self, axes: Sequence[str]) -> list[int]:
        """Return for each rank, in rank order, its rank in ``along(axes)``.

        >>> Mesh((("fsdp", 2), ("tp", 2))).ranks_along(["tp"])
        [0, 1, 0, 1]
        """
        used = [k for numbers in self._places(axes).values() for k in numbers]
        # Flattened neighbours count ranks like separate axes.
        sub = Mesh(tuple(self.axes[k] for k in used))
        return [sub.rank([coordinate[k] for k in used]) for coordinate in self.coordinates()]

    def _places(self, axes: Sequence[str]) -> dict[str, list[int]]:
        number = {a: n for n, (a, _) in enumerate(self.axes)}
        numbers_by_axis = {a: [number.get(part, -1) for part in a.split("+")] for a in axes}
        flat = [k for numbers in numbers_by_axis.values() for k in numbers]
        together = all(numbers[-1] - numbers[0] == len(numbers) - 1 for numbers in numbers_by_axis.values())
        if -1 in flat or flat != sorted(set(flat)) or not together:
            raise UsageError(f"axes must be those of the mesh {self.axes}, in its order (got {list(axes)})")
        return numbers_by_axis


MESH_OF_ONE = Mesh()


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How one tensor is distributed over a mesh.

    Attributes:
        axes: The mesh axes it is distributed over, in mesh order; ``fsdp+ep`` is two neighbours that cut as
            one (`Mesh.along`). Along the others every rank has the same.
        placements: torch's placements, one per axis.
        coordinates: (axis, coordinates on it): only ranks with such a coordinate have the tensor at all
            (pipeline stages, experts by name).
    """

    axes: tuple[str, ...] = ()
    placements: tuple[Placement, ...] = ()
    coordinates: tuple[tuple[str, tuple[int, ...]], ...] = ()


REPLICATED = TensorLayout()


@dataclass(frozen=True)
class Topology:
    """A mesh, and how each tensor is distributed over it.

    Attributes:
        mesh: The ranks.
        layouts: By FQN, as written; a tensor without one is replicated.
    """

    mesh: Mesh
    layouts: Mapping[str, TensorLayout]
    _by_rank: dict[tuple[tuple[int, ...], TensorLayout], tuple[Box | None, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _owners: dict[tuple[tuple[int, ...], TensorLayout], tuple[tuple[int, Box], ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _parts: dict[tuple[Any, ...], list[Box]] = field(default_factory=dict, compare=False, repr=False)

    def layout(self, fqn: str) -> TensorLayout:
        """Return how a tensor is distributed over the mesh."""
        return self.layouts.get(fqn, REPLICATED)

    def boxes(self, fqn: str, shape: tuple[int, ...]) -> tuple[Box | None, ...]:
        """Return the box of each rank, in rank order.

        The box is empty for a rank whose part is empty, and None for a rank that does not have the tensor.
        Raises like the function `boxes`.
        """
        layout = self.layout(fqn)
        key = shape, layout
        rank_boxes = self._by_rank.get(key)
        if rank_boxes is None:
            rank_boxes = self._by_rank[key] = tuple(self._boxes(shape, layout))
        return rank_boxes

    def owners(self, fqn: str, shape: tuple[int, ...]) -> Iterator[tuple[int, Box]]:
        """Yield (rank, box) of the parts to write once: of equal boxes the lowest rank's."""
        key = shape, self.layout(fqn)
        parts = self._owners.get(key)
        if parts is None:
            first: dict[Box, int] = {}
            for rank, box in enumerate(self.boxes(fqn, shape)):
                # An empty box is written only of an empty tensor, which must be in some file.
                if box is not None and (box.numel or not prod(shape)):
                    first.setdefault(box, rank)
            parts = self._owners[key] = tuple((rank, box) for box, rank in first.items())
        return iter(parts)

    def _boxes(self, shape: tuple[int, ...], layout: TensorLayout) -> Iterator[Box | None]:
        key = shape, layout.axes, layout.placements  # stages differ in ``coordinates`` alone
        if key not in self._parts:
            mine = boxes(shape, self.mesh.along(layout.axes), layout.placements)
            self._parts[key] = [mine[r] for r in self.mesh.ranks_along(layout.axes)]
        names = [a for a, _ in self.mesh.axes]
        only = [(names.index(a), set(c)) for a, c in layout.coordinates]
        for box, coordinate in zip(self._parts[key], self.mesh.coordinates(), strict=True):
            yield box if all(coordinate[n] in allowed for n, allowed in only) else None


def boxes(shape: tuple[int, ...], mesh: Mesh, placements: Sequence[Placement]) -> list[Box]:
    """Return the box of each rank, in rank order; a rank without elements has an empty box.

    Args:
        shape: Global shape, elements.
        mesh: The ranks.
        placements: One per mesh axis.

    Raises:
        UsageError: There is not one placement per axis, the tensor has no such dim, or torch places uneven
            strided shards elsewhere than in the memory that it makes for them.
    """
    if len(placements) != len(mesh.axes):
        names = [name for name, _ in mesh.axes]
        raise UsageError(f"a mesh needs one placement per axis (got {len(placements)} for the axes {names})")
    if any(not 0 <= getattr(p, "dim", 0) < max(len(shape), 1) for p in placements):
        raise UsageError(
            f"placements must cut dims of the tensor {list(shape)} (got {list(map(str, placements))})"
        )
    if not mesh.axes:
        return [Box.full(shape)]
    sizes = [n for _, n in mesh.axes]
    dims = []  # per dim: which axes cut it, and (first, count) by their coordinates
    for dim, n in enumerate(shape):
        cutting = [k for k, p in enumerate(placements) if getattr(p, "dim", None) == dim]
        by = tuple((sizes[k], getattr(placements[k], "split_factor", 1)) for k in cutting)
        dims.append((cutting, _parts_of(n, by, empty=0 in shape)))
    box_by_key: dict[tuple[int, ...], Box] = {}
    apart = sorted({k for cutting, _ in dims for k in cutting})
    rank_boxes = []
    for coordinate in mesh.coordinates():
        key = tuple(coordinate[k] for k in apart)
        if key not in box_by_key:
            runs = [parts[tuple(coordinate[k] for k in cutting)] for cutting, parts in dims]
            extent = tuple(n for _, n in runs)
            # torch places an empty shard behind the end, where a box of the tensor cannot begin.
            offset = (0,) * len(runs) if 0 in extent else tuple(first for first, _ in runs)
            box_by_key[key] = Box(offset, extent)
        rank_boxes.append(box_by_key[key])
    return rank_boxes


@lru_cache(maxsize=4096)
def _parts_of(
    n: int, by: tuple[tuple[int, int], ...], *, empty: bool
) -> dict[tuple[int, ...], tuple[int, int]]:
    """Return (first, count) of one dim of n elements, by the coordinates on the axes that cut it.

    Args:
        n: Elements of the dim.
        by: (size, split factor) of each of those axes, left to right.
        empty: Whether the tensor has no element, so that none can be in a wrong place.
    """
    parts = {}
    for coordinate in product(*(range(size) for size, _ in by)):
        mine = [cuts.Cut(k, size, coordinate[k], factor) for k, (size, factor) in enumerate(by)]
        runs = cuts.local_runs(n, mine)[0]
        part = (runs[0][0], runs[0][1] - runs[0][0]) if runs else (n, 0)
        if not empty and (len(runs) > 1 or cuts.placed(n, mine) != part):
            raise UsageError(
                f"cannot cut a dim of {n} elements for {' and '.join(str(size) for size, _ in by)} ranks "
                "with a strided shard: torch would load other elements than it saved",
                hint="use sizes that divide the dim, or fewer ranks on one of the axes",
            )
        parts[coordinate] = part
    return parts


def local_parts(tensor: torch.Tensor | DTensor) -> list[tuple[torch.Tensor, Box]]:
    """Return this rank's memory in pieces, each with its box of the global tensor.

    A plain tensor and an ordinary shard are one piece; a strided shard is one per run of its dim.

    Raises:
        NameMismatch: A DTensor's memory is not the shard of its placements.
        UsageError: There is no memory of its values: meta tensors, partial sums.
    """
    from torch.distributed.tensor import DTensor

    shape = tuple(tensor.shape)
    if tensor.is_meta:
        raise UsageError(f"a tensor of {list(shape)} has no memory: it is on the meta device")
    if not isinstance(tensor, DTensor):
        return [(tensor.detach(), Box.full(shape))]
    places = [p for p in tensor.placements if not p.is_replicate()]
    if any(p.is_partial() for p in places):
        raise UsageError("a DTensor with a Partial placement holds a summand, not its values")
    coordinate = tensor.device_mesh.get_coordinate()
    local = tensor.to_local().detach()
    if coordinate is None:  # this rank is outside the mesh
        return []
    runs = [_runs(n, d, tensor, coordinate) for d, n in enumerate(shape)]
    expected = [sum(b - a for a, b in dim) for dim in runs]
    if expected != list(local.shape):
        raise NameMismatch(
            f"a DTensor of {list(shape)} must have the local shape {expected} (got {list(local.shape)})"
        )
    return [(_narrow(local, local_offset, box), box) for box, local_offset in cuts.boxes(runs)]


def _runs(n: int, dim: int, tensor: DTensor, coordinate: Sequence[int]) -> tuple[cuts.Run, ...]:
    """Return the ranges of one dim that this rank holds, in the order of its memory."""
    sizes = tensor.device_mesh.shape
    mine = [
        cuts.Cut(axis, sizes[axis], coordinate[axis], getattr(p, "split_factor", 1))
        for axis, p in enumerate(tensor.placements)
        if getattr(p, "dim", None) == dim
    ]
    # torch 2.10 and later: where axes cut in another order than from left to right.
    order: Any = getattr(tensor._spec, "shard_order", None) or ()
    order = next((e.mesh_dims for e in order if e.tensor_dim == dim), None)
    return cuts.local_runs(n, mine, order)[0]


def _narrow(local: torch.Tensor, local_offset: tuple[int, ...], box: Box) -> torch.Tensor:
    for dim, (first, count) in enumerate(zip(local_offset, box.shape, strict=True)):
        local = local.narrow(dim, first, count)
    return local
