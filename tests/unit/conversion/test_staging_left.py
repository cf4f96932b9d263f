"""A staging folder that cannot be removed does not make a complete conversion fail."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.utils import host


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO, errno.EROFS])
def test_what_cannot_be_removed_is_left_to_a_later_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    save_file({"w": torch.arange(6.0)}, tmp_path / "source.safetensors")
    real = host.rename

    def refused(old: str, new: str, **folders: Any) -> None:
        if ".gone-" in new:
            raise OSError(number, os.strerror(number))
        real(old, new, **folders)

    with monkeypatch.context() as full, caplog.at_level(logging.WARNING, "ckptcore"):
        full.setattr(host, "rename", refused)
        ckptcore.convert(str(tmp_path / "source.safetensors"), str(tmp_path / "out"), catalog=False)
    assert "is complete, and its staging folder is left" in caplog.text
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["w"], torch.arange(6.0))
    assert (tmp_path / ".out.ckptcore").exists()
    ckptcore.convert(str(tmp_path / "source.safetensors"), str(tmp_path / "out"), catalog=False)
    assert not (tmp_path / ".out.ckptcore").exists()
