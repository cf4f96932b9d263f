"""Fixtures of the staging tests: a source, a place for outputs, and the folder of a stopped run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from staging_folders import half_done


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder that other users may read: pytest's own are closed, and shared with its other workers."""
    folder = Path(tempfile.mkdtemp(prefix="ckptcore-open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def source(open_folder: Path) -> Path:
    torch.manual_seed(0)
    path = open_folder / "source.safetensors"
    save_file({f"layers.{n}.weight": torch.randn(40, 50) for n in range(6)}, path)
    path.chmod(0o644)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where outputs go: ``place / "out"``, staged in ``place / ".out.ckptcore"``."""
    folder = tmp_path / "place"
    folder.mkdir()
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def left(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `half_done` leaves, to be copied."""
    return half_done(source, tmp_path_factory.mktemp("left"))
