"""Compute the layout of one tensor from a rule, a shape and a mesh, like FSDP2 over TP.

Axes cut in the order in which trainers apply them: pp, ep and tp first, then `fully_shard` cuts the rest.
Where axes to the right of fsdp have already cut its dim, its placement is a strided one (torch:
distributed/fsdp/_fully_shard/_fsdp_param.py, `_init_sharding_spec_tp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from ckptcore.errors import UsageError
from ckptcore.topology.layout import Mesh, Placement, Replicate, Shard, TensorLayout, _StridedShard
from ckptcore.utils.text import short_repr

if TYPE_CHECKING:
    from ckptcore.topology.rules import ShardingRule

Coordinates = tuple[tuple[str, tuple[int, ...]], ...]


def place(
    fqn: str,
    shape: tuple[int, ...],
    mesh: Mesh,
    rule: ShardingRule | None,
    coordinates: Coordinates = (),
    stacked: bool = False,
) -> TensorLayout:
    """Return the layout of a parameter.

    Args:
        fqn: Its name, for messages.
        shape: Global shape, elements.
        mesh: The mesh.
        rule: Its rule; None for FSDP's default.
        coordinates: Coordinates of the ranks that have it at all; axes named there do not cut it.
        stacked: Whether dim 0 counts layers, which pp cuts.

    Raises:
        UsageError: The rule does not fit the shape, or FSDP2 cannot shard it.
    """
    if not shape:  # fully_shard does not shard scalars
        return TensorLayout(coordinates=coordinates)
    sizes = dict(mesh.axes)
    fixed = {axis for axis, _ in coordinates}
    cut: dict[str, int | None] = {}  # axis -> dim or None, without fsdp
    for axis in ("pp", "ep", "tp"):
        if axis in sizes and axis not in fixed and rule is not None and rule.names(axis):
            cut[axis] = _dim(fqn, shape, axis, getattr(rule, axis))
    if stacked and "pp" in sizes:
        cut["pp"] = 0
    pieces = [prod(sizes[a] for a, d in cut.items() if d == dim) for dim in range(len(shape))]
    # Without a rule of its own, ep is flattened with fsdp: both cut what the others leave.
    data = "+".join(a for a in ("fsdp", "ep") if a in sizes and a not in cut and a not in fixed)
    placements: dict[str, Placement] = {}
    for axis in ("pp", "dp_replicate", data, "ep", "tp"):
        if axis == "dp_replicate" and axis in sizes and data:  # HSDP; plain DDP has no mesh
            placements[axis] = Replicate()
        elif axis and axis == data:
            parts = prod(sizes[a] for a in data.split("+"))
            by = _fsdp_dim(fqn, shape, (0,) if rule is None else rule.fsdp, parts, pieces)
            right = prod(sizes[a] for a, d in cut.items() if d == by and a != "pp")
            strided = by is not None and right > 1
            placements[axis] = (
                Replicate() if by is None else _StridedShard(by, split_factor=right) if strided else Shard(by)
            )
        elif axis in cut:
            to = cut[axis]
            placements[axis] = Replicate() if to is None else Shard(to)
    return TensorLayout(tuple(placements), tuple(placements.values()), coordinates)


def _fsdp_dim(
    fqn: str, shape: tuple[int, ...], choices: Sequence[int | None], parts: int, pieces: Sequence[int]
) -> int | None:
    """Return the first dim long enough for another cut, else the last choice."""
    dims = [_dim(fqn, shape, "fsdp", c) for c in choices]
    fits = (d for d in dims if d is None or pieces[d] == 1 or shape[d] >= pieces[d] * parts)
    dim = next(fits, dims[-1])
    if dim and parts > 1 and shape[dim] % (pieces[dim] * parts):
        raise UsageError(
            f"cannot shard {short_repr(fqn)} {list(shape)}: FSDP cuts dim {dim} only evenly, "
            f"and {shape[dim]} is not a multiple of {pieces[dim] * parts}",
            hint="let fsdp cut dim 0, or use sizes that divide it",
        )
    return dim


def _dim(fqn: str, shape: tuple[int, ...], axis: str, dim: int | None) -> int | None:
    if dim is None:
        return None
    if not -len(shape) <= dim < len(shape):
        raise UsageError(
            f"cannot shard {short_repr(fqn)} {list(shape)}: it has no dim {dim} for {axis}",
            hint="put a rule for it before, with another dim or replicate",
        )
    return dim % len(shape)
