"""Casting: a tile becomes what torch makes of the whole tensor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ckptcore.core.dtype import BY_NAME
from ckptcore.errors import DeviceUnavailable
from ckptcore.reading.casting import PLAIN, cast_into, torch_on
from ckptcore.reading.gather import tile_view

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_every_pair_as_torch(source: str, target: str) -> None:
    torch.manual_seed(0)
    values = torch.cat([torch.randn(4099) * 100, torch.tensor([0.0, -0.0, 1e-30, 65504.0, 448.0])])
    values = values.to(getattr(torch, source))
    raw = values.view(torch.uint8).numpy().copy()
    out = np.empty(values.numel() * BY_NAME[target].itemsize, np.uint8)
    cast_into(tile_view(raw, (values.numel(),), source), source, out, target)
    want = torch.empty(values.numel(), dtype=getattr(torch, target)).copy_(values)
    assert out.tobytes() == want.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("pair", PLAIN)
def test_what_numpy_casts_is_what_torch_casts(pair: tuple[str, str]) -> None:
    """Every bfloat16; of float32 every exponent with the bits that decide how it is rounded."""
    source, target = pair
    upper = np.arange(1 << 16, dtype=np.uint32)
    lower = np.array([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], np.uint32)
    bits = (upper[:, None] << 16 | lower).reshape(-1) if source == "float32" else upper.astype(np.uint16)
    assert _cast(PLAIN[pair], bits, target) == _as_torch(bits, source, target)


@pytest.mark.soak
def test_every_float32_is_rounded_as_torch_rounds() -> None:
    step = 1 << 24
    for first in range(0, 1 << 32, step):
        bits = np.arange(first, first + step, dtype=np.uint64).astype(np.uint32)
        ours = _cast(PLAIN["float32", "bfloat16"], bits, "bfloat16")
        assert ours == _as_torch(bits, "float32", "bfloat16"), hex(first)


def _cast(plain: Callable[..., None], bits: np.ndarray, target: str) -> bytes:
    out = np.empty(len(bits) * BY_NAME[target].itemsize, np.uint8)
    plain(bits, out)
    return out.tobytes()


def _as_torch(bits: np.ndarray, source: str, target: str) -> bytes:
    values = torch.from_numpy(bits.view(np.uint8)).view(getattr(torch, source))
    return values.to(getattr(torch, target)).view(torch.uint8).numpy().tobytes()


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(DeviceUnavailable, match="cuda"):
        torch_on("cuda")
