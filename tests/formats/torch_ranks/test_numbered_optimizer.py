"""An optimizer that numbers its parameters, and would have names in rank files, is refused before work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptcore.conversion.pipeline import convert
from ckptcore.errors import UnsupportedFormat
from ckptcore.planning.request import Request


def saved(folder: Path) -> Path:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "model.pt")
    return folder / "model.pt"


def test_numbers_that_rank_files_would_name(tmp_path: Path) -> None:
    request = Request(str(saved(tmp_path)), str(tmp_path / "out"), "reshard", to="torch_ranks", mesh="fsdp=2")
    with pytest.raises(UnsupportedFormat, match=r"number their parameters, .* \(weight for 0\)") as caught:
        convert(request, catalog_url=False)
    assert "--to dcp" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
