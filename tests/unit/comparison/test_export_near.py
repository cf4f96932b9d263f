"""Cosines of tensors that are read and summed in blocks are those of the whole tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.comparison import export_near
from ckptcore.comparison.export_near import near
from ckptcore.comparison.opened import OpenSide
from ckptcore.planning.request import Settings

REAL = export_near._BLOCK


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of the whole tensors, a complex number as its two parts."""
    one, two = (
        torch.view_as_real(t.to(torch.complex128)).reshape(-1) if t.is_complex() else t.double().reshape(-1)
        for t in (a, b)
    )
    return float(one @ two / (one.norm() * two.norm()))


@pytest.mark.parametrize(
    ("block", "memory", "rows"),
    [
        (REAL, 1 << 20, 700),  # several boxes, each of one block
        (REAL, 64 << 20, 700),  # one box of several blocks
        (100, 64 << 20, 3),
        (REAL, 64 << 20, 3),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_any_number_of_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, block: int, memory: int, rows: int
) -> None:
    monkeypatch.setattr(export_near, "_BLOCK", block)
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    width = 131
    # Only one block of elements differs from the other side, so each block counts.
    one = torch.randn(rows * width, dtype=kind if kind.is_complex else torch.float32).to(kind)
    first, last = one.clone(), one.clone()
    count = rows * width // 5
    first[:count] = first[:count].flip(0)
    last[-count:] = 0
    folders = [tmp_path / "export.safetensors", tmp_path / "base.safetensors"]
    save_file({name: one.reshape(rows, width).clone() for name in ("first", "last", "same")}, folders[0])
    others = {"first": first, "last": last, "same": one}
    save_file({name: t.reshape(rows, width).clone() for name, t in others.items()}, folders[1])
    sides = [OpenSide(path.stem, ckptcore.open(str(path))) for path in folders]
    found = near(*sides, Settings(memory=memory, workers=2))
    want = {name: cosine(one, other) for name, other in others.items()}
    assert dict(found.cosines) == pytest.approx(want, abs=1e-9)
    assert (found.only_export, found.only_base, found.shapes, found.zero) == ((), (), (), ())
