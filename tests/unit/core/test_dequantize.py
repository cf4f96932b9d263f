"""MXFP4 is decoded in steps of 4,096 groups: any box, with fewer groups or more, as value by value."""

from __future__ import annotations

import numpy as np
import pytest

from ckptcore.core.box import Box
from ckptcore.core.dequantize import FP4, FUNCTIONS, GROUP

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (2, 4096), (2, 4097), (4097, 1), (1400, 3)])
def test_boxes_of_more_groups_than_a_step(rows: int, groups: int) -> None:
    (function,) = (f for name, f in FUNCTIONS.items() if "fp4" in name)
    rng, columns = np.random.default_rng(rows), groups * GROUP
    blocks = torch.from_numpy(rng.integers(0, 256, (rows, groups, GROUP // 2), np.uint8))
    scales = torch.from_numpy(rng.integers(100, 140, (rows, groups), np.uint8))
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).reshape(rows, groups, GROUP)
    wanted = torch.ldexp(torch.tensor(FP4)[halves.long()], scales[..., None].int() - 127)
    wanted = wanted.reshape(rows, columns).to(getattr(torch, function.dtype))
    for begin, end in ((0, columns), (31, columns), (0, columns - 1), (columns // 2, columns // 2 + 1)):
        box = Box((rows // 3, begin), (rows - rows // 3, end - begin))
        inputs = []
        for complete, need in zip((blocks, scales), function.needs(box, ()), strict=True):
            place = tuple(slice(a, b) for a, b in zip(need.offset, need.end, strict=True))
            inputs.append(complete[place].contiguous())
        found = torch.full(box.shape, 7.0, dtype=wanted.dtype)
        function.fill(torch, box, inputs, (), found)
        assert torch.equal(found, wanted[rows // 3 :, begin:end])
