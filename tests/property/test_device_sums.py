"""Sums on a device equal those of the host, bit for bit, for every dtype and any box."""

from __future__ import annotations

import weakref
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import partitions
from torch.utils._python_dispatch import TorchDispatchMode

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.fingerprints import device_sums as devicesums
from ckptcore.fingerprints.device_sums import DeviceSums
from ckptcore.fingerprints.sums import ZERO, add, box_sum

Shape = tuple[int, ...]
DTYPES = sorted(BY_NAME)
# Around the edges of words and rows: below one, a bit more, many, cut in the last dim and before it.
SHAPES = [
    (),
    (0, 3),
    (1,),
    (7,),
    (64, 3),
    (4097,),
    (40_000,),
    (3, 16_385),
    (300, 130),
    (7, 9, 300),
    (90, 3, 33),
    (2, 3, 2, 2731),
    (5, 1, 70_000),
    (9000, 2),
    (2, 32_768, 1),
]


def elements(dtype: str, shape: Shape, seed: int = 0) -> np.ndarray:
    """Random bits of a tensor, row-major."""
    count = prod(shape) * BY_NAME[dtype].itemsize
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def both(
    sums: DeviceSums, dtype: str, shape: Shape, box: Box, device: str = "cpu"
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(sum of random elements of a box on the host, sum on the device)."""
    raw = elements(dtype, box.shape)
    there = sums.box_sum(dtype, shape, box, torch.from_numpy(raw).to(device))
    return box_sum(dtype, shape, box, raw), there


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_box_as_on_the_host(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.sampled_from(SHAPES) | st.lists(st.integers(1, 30), max_size=4).map(tuple))
    units = data.draw(st.sampled_from([1, 1000, 1 << 19]))  # at once: a row at least, or several
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devicesums, "_UNITS", units)
        sums = DeviceSums(torch, "cpu")
        for box in data.draw(partitions(shape, 5)):
            here, there = both(sums, dtype, shape, box)
            assert here == there


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "complex128"])
def test_many_rows_have_several_pages_of_multipliers(dtype: str) -> None:
    shape = (3, 9000 * 8 // BY_NAME[dtype].itemsize // 2, 3)
    data = elements(dtype, shape).reshape(*shape, -1)
    sums, total = DeviceSums(torch, "cpu"), ZERO
    tall = (5000, 8192 // BY_NAME[dtype].itemsize * 3)
    column = Box((0, 5), (5000, 3))  # a few elements of each of 5000 rows and more
    assert len(set(both(sums, dtype, tall, column))) == 1
    for at in range(3):
        part = np.ascontiguousarray(data[at]).reshape(-1).view(np.uint8)
        total = add(
            total, sums.box_sum(dtype, shape, Box((at, 0, 0), (1, *shape[1:])), torch.from_numpy(part))
        )
    assert total == box_sum(dtype, shape, Box.full(shape), data.reshape(-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_bits_wrap_around_alike(dtype: str) -> None:
    """The largest words there are, whose products do not fit."""
    shape, sums = (70, 513), DeviceSums(torch, "cpu")
    for box in (Box.full(shape), Box((3, 1), (60, 500))):
        raw = np.full(box.numel * BY_NAME[dtype].itemsize, 255, np.uint8)
        assert sums.box_sum(dtype, shape, box, torch.from_numpy(raw)) == box_sum(dtype, shape, box, raw)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_as_on_the_host(dtype: str) -> None:
    """Some boxes of every shape, and what the device holds beside 64 MiB while it sums them."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    sums = DeviceSums(torch, "cuda")
    for shape in SHAPES:
        cut = tuple(max(1, n // 3) if n else 0 for n in shape)
        for box in (Box.full(shape), Box(tuple(min(1, n - 1) if n else 0 for n in cut), cut)):
            here, there = both(sums, dtype, shape, box, "cuda")
            assert here == there, (shape, box)
    shape = (8192, 8192 // BY_NAME[dtype].itemsize)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    here, there = both(sums, dtype, shape, Box.full(shape), "cuda")
    assert here == there
    assert torch.cuda.max_memory_allocated() - before <= (64 << 20) + devicesums.ROOM


class PeakMemory(TorchDispatchMode):
    """What torch holds beside a tensor: ``most`` bytes at once."""

    def __init__(self, beside: torch.Tensor) -> None:
        super().__init__()
        self._beside = beside.untyped_storage().data_ptr()
        self._made: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self._made.append(weakref.ref(found))
        alive = [t.untyped_storage() for t in (ref() for ref in self._made) if t is not None]
        peak = {s.data_ptr(): s.nbytes() for s in alive if s.data_ptr() != self._beside}
        self.most = max(self.most, sum(peak.values()))
        return found


@pytest.mark.grid
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "int64"])
@pytest.mark.parametrize("column", [0, 3])
def test_memory_does_not_grow_with_the_elements(dtype: str, column: int) -> None:
    """Words as they are, and elements one by one: bytes become numbers of eight times their width."""
    width = BY_NAME[dtype].itemsize
    shape = (4096, 8192 // width)
    box = Box((0, column), (4096, shape[1] - 2 * column))
    raw = elements(dtype, box.shape)
    there = torch.from_numpy(raw)
    with PeakMemory(there) as peak:
        found = DeviceSums(torch, "cpu").box_sum(dtype, shape, box, there)
    assert found == box_sum(dtype, shape, box, raw)
    assert 4 << 20 < peak.most < devicesums.ROOM
