"""Check that the digest of a manifest does not depend on the wording of its findings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.core.manifest import Manifest
from ckptcore.errors import finding


def test_findings_are_saved_and_not_digested(tmp_path: Path) -> None:
    save_file({"w": torch.arange(4)}, tmp_path / "a.safetensors")
    manifest = ckptcore.open(str(tmp_path / "a.safetensors"))
    warned = replace(manifest, findings=(finding("mixed-saves", "coverage", "two steps"),))
    assert warned.digest == manifest.digest
    assert Manifest.load(warned.dump()).findings == warned.findings
    assert replace(manifest, origin={"step": 7}).digest != manifest.digest
