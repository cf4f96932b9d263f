"""Sharding: the boxes of a mesh hold every element, as often as the placements require."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from ckptcore.core.box import Box
from ckptcore.errors import UsageError
from ckptcore.topology.layout import MESH_OF_ONE, Mesh, boxes


@settings(deadline=None)
@given(st.data())
def test_every_element_once_per_replica(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    sizes = data.draw(st.lists(st.integers(1, 4), max_size=2))
    mesh = Mesh(tuple((f"axis{n}", size) for n, size in enumerate(sizes)))
    kinds = [Replicate(), *(Shard(d) for d in range(len(shape)))]
    placements = [data.draw(st.sampled_from(kinds)) for _ in sizes]
    copies = 1
    for size, placement in zip(sizes, placements, strict=True):
        copies *= size if isinstance(placement, Replicate) else 1
    count = np.zeros(shape, np.int64)
    found = boxes(shape, mesh, placements)
    for box in found:
        count[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] += 1
    assert len(found) == mesh.size
    assert (count == copies).all()


def test_the_mesh_of_one_holds_everything() -> None:
    assert boxes((3, 4), MESH_OF_ONE, []) == [Box((0, 0), (3, 4))]


def test_meshes_that_are_none() -> None:
    with pytest.raises(UsageError):
        Mesh((("a", 0),))
    with pytest.raises(UsageError):
        Mesh((("a", 2), ("a", 2)))
    with pytest.raises(UsageError, match=r"one placement per axis \(got 0 for the axes"):
        boxes((2,), Mesh((("a", 2),)), [])
