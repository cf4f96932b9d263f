"""Names after renaming: one that is stored empty is a name, one that becomes empty is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptcore
from ckptcore.errors import NameMismatch

TENSORS = {"": torch.arange(3.0), "w": torch.ones(2)}


@pytest.mark.parametrize("to", ["safetensors", "dcp", "torch"])
@pytest.mark.parametrize("stored", ["torch", "dcp"])
def test_a_tensor_without_a_name_is_written(stored: str, to: str, tmp_path: Path) -> None:
    source = tmp_path / ("source.pt" if stored == "torch" else "source")
    if stored == "torch":
        torch.save(TENSORS, source)
    else:
        dcp.save(TENSORS, checkpoint_id=source, no_dist=True)
    out = tmp_path / {"safetensors": "out.safetensors", "dcp": "out", "torch": "out.pt"}[to]
    ckptcore.convert(str(source), str(out), to="dcp" if to == "dcp" else None)
    if to == "dcp":
        found: dict[str, Any] = {name: torch.zeros_like(value) for name, value in TENSORS.items()}
        dcp.load(found, checkpoint_id=out, no_dist=True)
    else:
        found = load_file(out) if to == "safetensors" else torch.load(out)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], value) for name, value in TENSORS.items())


@pytest.mark.parametrize("rule", [("w", ""), ("*", "")])
def test_a_name_that_becomes_empty_is_refused(rule: tuple[str, str], tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "source.pt")
    with pytest.raises(NameMismatch, match="w would have an empty name"):
        ckptcore.convert(str(tmp_path / "source.pt"), str(tmp_path / "out.safetensors"), rename=[rule])
    assert not (tmp_path / "out.safetensors").exists()
