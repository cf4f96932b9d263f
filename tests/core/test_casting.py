"""Casting: does a tile become what torch makes of the whole tensor, on every device?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ckptcore.casting import cast_into
from ckptcore.dtype import BY_NAME
from ckptcore.errors import DeviceUnavailable
from ckptcore.gather import tile_view

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_every_pair_as_torch(source: str, target: str, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    torch.manual_seed(0)
    values = torch.cat([torch.randn(4099) * 100, torch.tensor([0.0, -0.0, 1e-30, 65504.0, 448.0])])
    values = values.to(getattr(torch, source))
    raw = values.view(torch.uint8).numpy().copy()
    out = np.empty(values.numel() * BY_NAME[target].itemsize, np.uint8)
    cast_into(tile_view(raw, (values.numel(),), source), source, out, target, device)
    want = torch.empty(values.numel(), dtype=getattr(torch, target)).copy_(values)
    assert out.tobytes() == want.view(torch.uint8).numpy().tobytes()


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(DeviceUnavailable, match="cuda"):
        cast_into(np.zeros(1, np.uint32), "float32", np.zeros(2, np.uint8), "bfloat16", "cuda")
