"""Read folders of safetensors without an index: choose the files, and report missing ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ckptcore
from ckptcore.conversion.pipeline import validate
from ckptcore.errors import NameMismatch, UnknownFormat

NAMES = [f"model-{n + 1:05d}-of-00003.safetensors" for n in range(3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for n, name in enumerate(NAMES):
        save_file({f"w{n}": np.full(3, n)}, tmp_path / name)
    return tmp_path


def codes(url: Path) -> set[str]:
    found = validate(ckptcore.open(str(url)), "coverage").findings
    return {f"{f.code} {f.file or ''}".strip() for f in found if f.severity != "info"}


def test_numbered_files(folder: Path) -> None:
    """As written by torch's ranks that consolidate together, before they wrote an index."""
    manifest = ckptcore.open(str(folder))
    assert manifest.format == "safetensors"
    assert {t.fqn: ckptcore.read(manifest, t.fqn).tolist() for t in manifest.tensors} == {
        f"w{n}": [n] * 3 for n in range(3)
    }
    assert codes(folder) == set()


@pytest.mark.parametrize("lost", [[0], [1], [2], [0, 1], [1, 2]])
def test_a_missing_file(lost: list[int], folder: Path) -> None:
    for n in lost:
        (folder / NAMES[n]).unlink()
    assert codes(folder) == {f"missing-file {NAMES[n]}" for n in lost}


def test_one_of_them_by_name(folder: Path) -> None:
    assert codes(folder / NAMES[1]) == {f"missing-file {NAMES[1]}"}


def test_files_beside_a_series(folder: Path) -> None:
    """A series and another file are ambiguous; loaders take model.safetensors."""
    save_file({"other": np.zeros(2)}, folder / "adapter_model.safetensors")
    with pytest.raises(UnknownFormat):
        ckptcore.open(str(folder))
    save_file({"all": np.zeros(2)}, folder / "model.safetensors")
    assert [t.fqn for t in ckptcore.open(str(folder)).tensors] == ["all"]
    assert codes(folder) == {f"stray-file {n}" for n in (*NAMES, "adapter_model.safetensors")}


def test_a_reserved_name(tmp_path: Path) -> None:
    torch.save({"__metadata__": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(NameMismatch, match="__metadata__"):
        ckptcore.convert(str(tmp_path / "a.pt"), str(tmp_path / "out"))
