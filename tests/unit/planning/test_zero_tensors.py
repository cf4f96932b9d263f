"""What may be dropped only where it is zero is counted to its last element, tile by tile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.naming.rename import Dropped
from ckptcore.planning import zero_tensors
from ckptcore.planning.zero_tensors import not_zero

REAL = zero_tensors._TILE


@pytest.mark.parametrize(
    ("tile", "shape"),
    [(REAL, (3, 7, 29_000)), (REAL, (1_100_000,)), (64, (5, 9)), (64, (70, 1)), (64, (3,)), (64, ())],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_one_element_of_any_tile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tile: int, shape: tuple[int, ...], dtype: str
) -> None:
    monkeypatch.setattr(zero_tensors, "_TILE", tile)
    kind = getattr(torch, dtype)
    zero = torch.zeros(shape, dtype=kind)
    tensors = {"none": -zero}
    places = sorted({0, zero.numel() // 2, zero.numel() - 1})
    for at in places:
        tensors[f"one.{at}"] = zero.clone()
        tensors[f"one.{at}"].view(-1)[at] = 3
    tensors["every"] = torch.ones(shape, dtype=kind)
    save_file(tensors, tmp_path / "model.safetensors")
    source = ckptcore.open(str(tmp_path / "model.safetensors"))
    asked = [Dropped(name, "a rule", only_zero="it must be zero") for name in tensors]
    found = {each.fqn: (count, numel) for each, count, numel in not_zero(source, asked)}
    one = {f"one.{at}": (1, zero.numel()) for at in places}
    assert found == one | {"every": (zero.numel(), zero.numel())}
