"""State that a reshard drops fails torch's own strict load; with --keep-object the load succeeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptcore
from ckptcore.planning.compose import compose
from ckptcore.planning.request import Request

LOADER = ["dataloader.dp_rank_0", "dataloader.dp_rank_1", "dataloader.world_size"]


def state(seed: int) -> dict[str, Any]:
    """What torchtitan saves: model, counters, and the data loader's positions for each data-parallel rank."""
    return {
        "model": {"w": torch.full((8, 4), float(seed))},
        "train_state": {"step": torch.tensor(seed), "losses": [seed, 0.5]},
        "dataloader": {"dp_rank_0": b"%d" % seed, "dp_rank_1": b"-%d" % seed, "world_size": seed},
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save(state(2), checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """The same with tensors as lists, to be compared."""
    return {
        k: plain(v) if isinstance(v, dict) else v.tolist() if isinstance(v, torch.Tensor) else v
        for k, v in values.items()
    }


def test_a_strict_load_fails_without_and_succeeds_with_it(saved: Path, tmp_path: Path) -> None:
    asked = {"verb": "reshard", "to": "dcp", "mesh": "fsdp=4"}
    ckptcore.convert(str(saved), str(tmp_path / "without"), **asked)
    loaded = state(7)
    with pytest.raises(dcp.CheckpointException, match=r"Missing key in checkpoint state_dict: dataloader\."):
        dcp.load(loaded, checkpoint_id=tmp_path / "without", no_dist=True)
    # What `dropped-keys` says: without these keys the load is complete.
    request = Request(str(saved), str(tmp_path / "x"), **asked)
    (found,) = [f for f in compose(request, ckptcore.open(str(saved))).warnings if f.code == "dropped-keys"]
    assert all(name in found.message for name in LOADER)
    less = {k: v for k, v in state(7).items() if k != "dataloader"}
    dcp.load(less, checkpoint_id=tmp_path / "without", no_dist=True)
    assert plain(less) == {k: v for k, v in plain(state(2)).items() if k != "dataloader"}

    ckptcore.convert(str(saved), str(tmp_path / "with"), keep_object=["dataloader.*"], **asked)
    loaded = state(7)
    dcp.load(loaded, checkpoint_id=tmp_path / "with", no_dist=True)
    assert plain(loaded) == plain(state(2))
