"""What tensors leave of a storage is what no element of them is in."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ckptcore.core.object_tree import RefusedTensor
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.torchzip import reader
from ckptcore.encodings.torchzip.reader import Excess, excess


def view(tensor: torch.Tensor, key: str = "0") -> StoredView:
    nbytes = tensor.untyped_storage().nbytes()
    return StoredView(
        key, nbytes, "int32", tuple(tensor.shape), tensor.storage_offset(), tuple(tensor.stride())
    )


def left(*tensors: torch.Tensor) -> list[tuple[int, int]]:
    return [(one.start, one.end) for one in excess(map(view, tensors))]


def test_slices() -> None:
    complete = torch.arange(12, dtype=torch.int32)
    assert left(complete) == []
    assert left(complete[2:5]) == [(0, 8), (20, 48)]
    assert left(complete[2:5], complete[5:]) == [(0, 8)]
    assert left(complete[2:5], complete) == []
    assert left(complete[:0]) == [(0, 48)]
    assert left(complete.reshape(3, 4).t()) == []
    assert left(complete[::4]) == [(4, 16), (20, 32), (36, 48)]
    assert left(complete[:1].expand(5)) == [(4, 48)]


@pytest.mark.parametrize("most", [1 << 20, 2])
def test_any_view(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own indexing sees it; of a view with too many ranges, never more than is right."""
    monkeypatch.setattr(reader, "_MAX_RUNS", most)
    rng = random.Random(3)
    for _ in range(300):
        tensors = []
        complete = torch.zeros(60, dtype=torch.int32)
        for _ in range(rng.randint(1, 3)):
            shape = [rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
            strides = [rng.randint(0, 6) for _ in shape]
            tensors.append(complete.as_strided(shape, strides, rng.randint(0, 5)))
        for each in tensors:
            each.fill_(1)
        reported = np.zeros(60, np.int32)
        for start, end in left(*tensors):
            reported[start // 4 : end // 4] = 1
        unseen = 1 - complete.numpy()
        assert (reported <= unseen).all()
        if most > 2:
            assert (reported == unseen).all()


def test_a_tensor_that_cannot_be_read_may_have_all() -> None:
    part = view(torch.arange(12, dtype=torch.int32)[2:5])
    refused = RefusedTensor("torch.odd", "", False, "odd", (3,), ("0",))
    assert excess([part, refused]) == excess([refused, part]) == ()
    assert excess([part]) == (Excess("0", 0, 8), Excess("0", 20, 48))
