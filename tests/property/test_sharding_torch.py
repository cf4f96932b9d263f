"""Shards: our boxes are the memory that FSDP2 over TP makes, and the offsets that torch computes for it."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard, _utils
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ckptcore.core.box import Box
from ckptcore.errors import UsageError
from ckptcore.topology import torch_chunk as cuts
from ckptcore.topology.layout import Mesh, TensorLayout, Topology, boxes

fast = settings(max_examples=150, deadline=None)
shapes = st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple)


def boxes_by_torch(shape: tuple[int, ...], mesh: Mesh, placements: list[Placement]) -> list[Box]:
    found = []
    for at in mesh.coordinates():
        local, offset = _utils._compute_local_shape_and_global_offset(
            torch.Size(shape), tuple(n for _, n in mesh.axes), list(at), placements
        )
        found.append(Box((0,) * len(shape) if 0 in local else tuple(offset), tuple(local)))
    return found


def trained(full: torch.Tensor, at: dict[str, int], sizes: dict[str, int], tp: int | None) -> torch.Tensor:
    """What `fully_shard` keeps of what `parallelize_module` keeps, both by torch.chunk."""
    part = full
    if tp is not None:
        part = chunk(part, sizes["tp"], at["tp"], tp)
    return chunk(part, sizes["fsdp"], at["fsdp"], 0)


def chunk(part: torch.Tensor, pieces: int, at: int, dim: int) -> torch.Tensor:
    found = torch.chunk(part, pieces, dim) if part.shape[dim] else []
    return found[at] if at < len(found) else part.narrow(dim, 0, 0)


@fast
@given(shapes, st.integers(1, 6), st.integers(1, 5), st.integers(1, 2), st.data())
def test_fsdp_over_tp(shape: tuple[int, ...], fsdp: int, tp: int, copies: int, data: st.DataObject) -> None:
    dim = data.draw(st.sampled_from([None, *range(len(shape))]))
    mesh = Mesh((("dp_replicate", copies), ("fsdp", fsdp), ("tp", tp)))
    first: Placement = _StridedShard(0, split_factor=tp) if dim == 0 and tp > 1 else Shard(0)
    placements = [Replicate(), first, Replicate() if dim is None else Shard(dim)]
    full = torch.arange(prod(shape)).reshape(shape)
    memory = [
        trained(full, dict(zip(("_", "fsdp", "tp"), at, strict=True)), dict(mesh.axes), dim)
        for at in mesh.coordinates()
    ]
    torchs = boxes_by_torch(shape, mesh, placements)
    right = all(same(cut(full, b), m) for b, m in zip(torchs, memory, strict=True))
    if not right:  # torch contradicts itself, for uneven strided shards
        assert dim == 0
        assert shape[0] % (fsdp * tp)
        with pytest.raises(UsageError, match=f"cannot cut a dim of {shape[0]} elements for {fsdp} and {tp}"):
            boxes(shape, mesh, placements)
        return
    found = boxes(shape, mesh, placements)
    for box, mine, theirs in zip(found, memory, torchs, strict=True):
        assert same(cut(full, box), mine)
        assert (box == theirs) or not (box.numel or theirs.numel)
    partition(shape, found, copies * (tp if dim is None else 1))


def test_a_tensor_without_elements_can_be_cut_for_any_ranks() -> None:
    mesh = Mesh((("fsdp", 4), ("tp", 3)))
    placements = [_StridedShard(0, split_factor=3), Shard(0)]
    assert all(not box.numel for box in boxes((14, 0), mesh, placements))
    with pytest.raises(UsageError):
        boxes((14, 1), mesh, placements)


@fast
@given(st.data())
def test_any_shards_without_strides(data: st.DataObject) -> None:
    """Also several axes on one dim, left to right, as torch's own function has them."""
    shape = data.draw(shapes)
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    mesh = Mesh(tuple((f"a{n}", size) for n, size in enumerate(sizes)))
    kinds: list[Placement] = [Replicate(), *(Shard(d) for d in range(len(shape)))]
    placements = [data.draw(st.sampled_from(kinds)) for _ in sizes]
    found = boxes(shape, mesh, placements)
    for box, theirs in zip(found, boxes_by_torch(shape, mesh, placements), strict=True):
        assert box == theirs or not (box.numel or theirs.numel)
    partition(shape, found, prod(s for s, p in zip(sizes, placements, strict=True) if p.is_replicate()))


@fast
@given(st.integers(0, 40), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_neighbours_that_cut_as_one(n: int, fsdp: int, ep: int, tp: int) -> None:
    mesh = Mesh((("fsdp", fsdp), ("ep", ep), ("tp", tp)))
    topology = Topology(mesh, {"w": TensorLayout(("fsdp+ep",), (Shard(0),))})
    flat = boxes((n,), Mesh((("one", fsdp * ep),)), [Shard(0)])
    assert list(topology.boxes("w", (n,))) == [box for box in flat for _ in range(tp)]
    owners = list(topology.owners("w", (n,)))
    assert sum(box.numel for _, box in owners) == n
    assert all(topology.boxes("w", (n,))[rank] == box for rank, box in owners)


@fast
@given(st.integers(0, 60), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_places_as_the_checkpoint_planner_finds_them(n: int, sizes: list[int], data: st.DataObject) -> None:
    factors = [data.draw(st.sampled_from([1, prod(sizes[k + 1 :])])) for k in range(len(sizes))]
    placements = [_StridedShard(0, split_factor=f) if f > 1 else Shard(0) for f in factors]
    mesh = Mesh(tuple((f"a{k}", size) for k, size in enumerate(sizes)))
    for at, box in zip(mesh.coordinates(), boxes_by_torch((n,), mesh, placements), strict=True):
        mine = [cuts.Cut(k, sizes[k], at[k], factors[k]) for k in range(len(sizes))]
        first, count = cuts.placed(n, mine)
        assert (count, first if count else 0) == (box.shape[0], box.offset[0])


def cut(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Empty parts have no place and no shape that matters."""
    return torch.equal(one, other) or not (one.numel() or other.numel())


def partition(shape: tuple[int, ...], found: list[Box], copies: int) -> None:
    count = np.zeros(shape, np.int64)
    for box in found:
        count[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] += 1
    assert (count == copies).all()
