"""Test that the checkpoints of torch's own DCP recipe are converted unchanged."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import warm
from paths import JOBS
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

if TYPE_CHECKING:
    from driver import Cli

JOB = JOBS / "recipe_job.py"


def job(verb: str, folder: Path, ranks: int = 0) -> dict[str, str]:
    """The output of the recipe's step."""
    done = subprocess.run(
        [*warm.python(), str(JOB), verb, str(folder), *([str(ranks)] if ranks else [])],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(next(x for x in done.stdout.splitlines() if x.startswith("{")))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The recipe's checkpoint, saved by two ranks, and the digests of its tensors."""
    folder = tmp_path_factory.mktemp("recipe") / "checkpoint"
    return folder, job("save", folder, 2)


@pytest.mark.xdist_group("recipes")
class TestDcpRecipe:
    def test_what_we_write_loads_on_another_world(
        self, saved: tuple[Path, dict[str, str]], cli: Cli, tmp_path: Path
    ) -> None:
        folder, truth = saved
        done = cli("consolidate", folder, tmp_path / "ours", "--to", "dcp", "--max-file-size", "2KB")
        assert done.code == 0, done
        assert len(list((tmp_path / "ours").glob("*.distcp"))) > 2
        assert job("load", tmp_path / "ours", 3) == truth
        assert job("load-alone", tmp_path / "ours") == {k: v for k, v in truth.items() if "::" not in k}

    def test_dcp_to_torch(self, saved: tuple[Path, dict[str, str]], cli: Cli, tmp_path: Path) -> None:
        dcp_to_torch_save(saved[0], tmp_path / "theirs.pt")
        done = cli("consolidate", saved[0], tmp_path / "ours.pt")
        assert done.code == 0, done
        theirs = dict(leaves(torch.load(tmp_path / "theirs.pt", weights_only=True)))
        ours = dict(leaves(torch.load(tmp_path / "ours.pt", weights_only=True)))
        assert ours.keys() == theirs.keys()
        assert all(equal(ours[k], theirs[k]) for k in theirs)

    def test_torch_to_dcp(self, saved: tuple[Path, dict[str, str]], cli: Cli, tmp_path: Path) -> None:
        """Their folder is read, and ours from the same file loads as theirs does."""
        dcp_to_torch_save(saved[0], tmp_path / "whole.pt")
        torch_save_to_dcp(tmp_path / "whole.pt", tmp_path / "theirs")
        assert cli("validate", tmp_path / "theirs", "--level", "bytes").code == 0
        done = cli("consolidate", tmp_path / "whole.pt", tmp_path / "ours", "--to", "dcp")
        assert done.code == 0, done
        assert job("load", tmp_path / "ours", 2) == saved[1]


def leaves(tree: Any, name: str = "") -> Any:
    """(dotted name, leaf) of nested dicts and lists of dicts."""
    if isinstance(tree, dict):
        for k, v in tree.items():
            yield from leaves(v, f"{name}.{k}" if name else str(k))
    elif isinstance(tree, list) and any(isinstance(v, dict) for v in tree):
        for n, v in enumerate(tree):
            yield from leaves(v, f"{name}.{n}")
    else:
        yield name, tree


def equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)
