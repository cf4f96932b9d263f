"""Devices: a lane scatters and casts to the same bits as the host."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from pieces import numbered, write_dcp
from samples import differences, read_safetensors

import ckptcore
from ckptcore import Box, Settings
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import CONJ, NEG, SWAPPED
from ckptcore.errors import BudgetTooSmall
from ckptcore.execution.device import DeviceStream, host_buffer
from ckptcore.fingerprints.device_sums import ROOM
from ckptcore.planning.tiles import DEVICE_BYTES, Budget
from ckptcore.reading.gather import _assign, tile_view

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FLAGS = {"complex64": (0, CONJ, NEG, SWAPPED), "float32": (0, NEG, SWAPPED)}


def lane(device: str) -> DeviceStream:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return DeviceStream(device, 1 << 16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strides", [(12, 4, 1), (1, 3, 6), (24, 4, 1), (12, 1, 3)])
@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "int64", "complex64", "complex128"])
def test_scatter_as_on_the_host(device: str, strides: tuple[int, ...], dtype: str) -> None:
    here, shape, width = lane(device), (2, 3, 4), BY_NAME[dtype].itemsize
    for flags in FLAGS.get(dtype, (0,)):
        span = (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))) * width
        kept = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 126, span).astype(np.uint8)
        want = tile_view(np.zeros(24 * width, np.uint8), shape, dtype)
        _assign(want, kept.copy(), shape, strides, dtype, flags)
        tile = here.tile(shape, dtype)
        read = host_buffer(span, device)
        read[:] = kept
        _assign(tile, read, shape, strides, dtype, flags)
        found = host_buffer(24 * width, device)
        here.fetch(tile, found)
        assert found.tobytes() == want.tobytes(), flags


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("target", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
def test_cast_as_torch(device: str, source: str, target: str) -> None:
    here = lane(device)
    values = (torch.randn(999, generator=torch.Generator().manual_seed(0)) * 50).to(getattr(torch, source))
    tile = here.tile((999,), source)
    raw = values.view(torch.uint8).numpy().copy()
    _assign(tile, raw, (999,), (1,), source, 0)
    found = host_buffer(999 * BY_NAME[target].itemsize, device)
    here.fetch_cast(tile, source, found, target, host_buffer(1 << 16, device))
    assert found.tobytes() == values.to(getattr(torch, target)).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("target", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("source", ["float8_e4m3fn", "float8_e5m2", "float16", "float32", "float64"])
def test_a_nan_has_the_bits_that_the_host_gives_it(
    source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another device writes other NaNs; here one that writes all ones."""

    def cast(self: DeviceStream, values: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(values)
        into.view(torch.uint8).view(-1, into.element_size())[values.double().isnan()] = 0xFF

    monkeypatch.setattr(DeviceStream, "_cast", cast)
    here, kind = lane("cpu"), getattr(torch, source)
    values = torch.tensor([1.0, torch.nan, -torch.nan, -2.0] * 9).to(kind)
    found, spare = (host_buffer(1 << 10, "cpu") for _ in range(2))
    for part in (values, values[:1]):
        tile = here.tile((len(part),), source)
        _assign(tile, part.view(torch.uint8).numpy().copy(), (len(part),), (1,), source, 0)
        into = found[: len(part) * BY_NAME[target].itemsize]
        here.fetch_cast(tile, source, into, target, spare)
        assert into.tobytes() == part.to(getattr(torch, target)).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_a_conversion_through_lanes_is_the_same(device: str, tmp_path: Path) -> None:
    """Strided and cast tensors in columns: every part takes its way through a lane."""
    there, tensor = lane(device).device, numbered((61, 67))
    columns = [Box((0, 0), (61, 30)), Box((0, 30), (61, 37))]
    state = {"a": (tensor, columns), "b": (tensor.to(torch.bfloat16), [Box.full((61, 67))])}
    write_dcp(tmp_path / "ckpt", state, turn=True)
    source, used = str(tmp_path / "ckpt"), []

    def stream_on(_: str, nbytes: int) -> DeviceStream:
        used.append(nbytes)
        return DeviceStream(there, nbytes)

    ckptcore.convert(source, str(tmp_path / "host"), dtype="bf16")
    means = Settings(memory=1 << 20, workers=2, device=there)
    with mock.patch("ckptcore.execution.execute.stream_on", stream_on):
        ckptcore.convert(source, str(tmp_path / "lanes"), settings=means, dtype="bf16")
    assert len(used) == 2
    assert not differences(read_safetensors(tmp_path / "host"), read_safetensors(tmp_path / "lanes"))


def test_a_buffer_that_cannot_be_had_is_a_matter_of_the_budget() -> None:
    with pytest.raises(BudgetTooSmall, match="cannot allocate a buffer of 140737488355328 bytes"):
        host_buffer(1 << 47, "cpu")  # more than a process can address


def test_a_device_is_used_for_what_is_cast_or_computed(tmp_path: Path) -> None:
    """What only moves stays on the host, and the plan says so; nothing asks for the device."""
    write_dcp(tmp_path / "ckpt", {"a": (numbered((8, 8)), [Box.full((8, 8))])})
    there = Settings(device="cuda:7")
    ready = ckptcore.prepare(str(tmp_path / "ckpt"), str(tmp_path / "out"), settings=there)
    assert [(f.code, f.message) for f in ready.warnings] == [
        ("unused-option", "--device cuda:7 is not used: no tensor is cast or computed, and the CPU copies")
    ]
    ckptcore.execute(ready, settings=there)
    found = ckptcore.fingerprint(str(tmp_path / "ckpt"), settings=there)
    assert [f.code for f in found.warnings] == ["unused-option"]


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_a_device_has_a_bound_for_all_workers(workers: int) -> None:
    budget = Budget.of(Settings(memory=1 << 30, workers=workers, device="cuda"))
    assert workers * (5 * budget.tile + ROOM) <= DEVICE_BYTES
    assert budget.usual == budget.tile >= 3 << 20
    assert Settings(device="cuda").threads <= 4
