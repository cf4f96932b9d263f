"""Tensors of more than 128 MiB, cut where no multiple of anything is: fingerprints of their parts add up.

Multipliers are made for 4,096 rows of 32 KiB at a time: here a job's box has rows of two such pages.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore import Settings

SHAPE = (5_003, 30_000)  # 143 MiB, a row per index
EDGE = 4096  # the index where the second page begins


@pytest.mark.parametrize(
    ("workers", "ranks"), [*(pytest.param(n, 3, marks=pytest.mark.soak) for n in (1, 4)), (4, 7)]
)
def test_shards_across_pages_of_row_multipliers(tmp_path: Path, workers: int, ranks: int) -> None:
    tensor = torch.zeros(SHAPE, dtype=torch.uint8)
    tensor.view(-1)[::7919].copy_(torch.arange(tensor.numel())[::7919] % 251 + 1)
    tensor[EDGE - 5 : EDGE + 5] = torch.arange(30_000) % 253
    source, sharded, single = (
        str(tmp_path / n) for n in ("model.safetensors", "sharded", "single.safetensors")
    )
    save_file({"embed": tensor}, source)
    settings = Settings(workers=workers, fingerprint=True)
    made = ckptcore.convert(
        source, sharded, verb="reshard", to="dcp", mesh=f"fsdp={ranks}", settings=settings
    )
    back = ckptcore.convert(sharded, single, settings=settings)
    assert torch.equal(load_file(single)["embed"], tensor)
    assert made.fingerprint == back.fingerprint == ckptcore.fingerprint(source).fingerprint
