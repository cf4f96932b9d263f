"""Read OLMo's unsharded folders without the config, which is saved last."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptcore
from ckptcore.errors import UnknownFormat


def test_without_its_config(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optim.pt")
    with pytest.raises(UnknownFormat):  # any program's files
        ckptcore.open(str(tmp_path))
    torch.save({"epoch": 1}, tmp_path / "train.pt")
    manifest = ckptcore.open(str(tmp_path))
    assert (manifest.format, list(manifest.index)) == ("olmo_unsharded", ["model.w"])
    assert {f.code for f in manifest.findings} == {"missing-part"}
    (tmp_path / "config.yaml").write_text("run_name: x\n")
    assert not ckptcore.open(str(tmp_path)).findings
