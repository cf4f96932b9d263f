"""Imports: do the quick commands start without the heavy libraries?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

HEAVY = ("torch", "transformers", "prefect")


def imported(*arguments: str) -> set[str]:
    """Top-level packages that `python -m ckptcore ARGUMENTS` imports, as the interpreter saw it."""
    command = [sys.executable, "-X", "importtime", "-m", "ckptcore", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    words = [line for line in lines if not line.startswith("import time:")]
    assert done.returncode == 0, done.stdout + "\n".join(words)
    return {line.split("|")[-1].strip().split(".")[0] for line in lines if line not in words}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "step-1"
    dcp.save({"weight": torch.arange(6.0)}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("arguments", [("--help",), ("export", "--help"), ("formats",)])
def test_help_and_formats_start_light(arguments: tuple[str, ...]) -> None:
    found = imported(*arguments)
    assert "ckptcore" in found
    assert found.isdisjoint(HEAVY)


@pytest.mark.parametrize("verb", ["inspect", "validate"])
def test_metadata_is_read_without_torch(verb: str, saved: Path) -> None:
    found = imported(verb, str(saved))
    assert "ckptcore" in found
    assert found.isdisjoint(HEAVY)


def test_catalog_queries_start_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", f"sqlite:///{tmp_path}/catalog.db")
    found = imported("catalog", "list")
    assert "sqlalchemy" in found
    assert found.isdisjoint(HEAVY)
