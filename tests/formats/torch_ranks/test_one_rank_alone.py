"""Read one rank's file alone: a shard never counts as the full tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from samples import FIXTURES

import ckptcore
from ckptcore.conversion.pipeline import validate
from ckptcore.errors import AmbiguousModel, UnsupportedFormat


def codes(url: Path) -> set[str]:
    return {f.code for f in validate(ckptcore.open(str(url)), "coverage").findings}


def save(folder: Path, states: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, state in states.items():
        torch.save(state, folder / name)
    return folder


def adam(rows: int) -> dict[str, Any]:
    state = {0: {"exp_avg": torch.ones(rows, 2)}}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}


def test_a_model_parallel_rank(tmp_path: Path) -> None:
    """Its slices look like full tensors to a user who names a file or a folder of one rank."""
    folder = save(tmp_path / "iter_0000100" / "mp_rank_00_001", {"model_optim_rng.pt": {"model": {}}})
    for url in (folder, folder / "model_optim_rng.pt"):
        with pytest.raises(UnsupportedFormat, match="mp_rank_00_001/model_optim_rng") as caught:
            ckptcore.open(str(url))
        assert caught.value.hint == "name the folder of all ranks"


def test_a_flattened_rank() -> None:
    folder = FIXTURES / "olmo" / "v01_dtensor_ws4" / "ckpt"
    with pytest.raises(UnsupportedFormat, match="flattened shards"):
        ckptcore.open(str(folder / "rank_1.safetensors"))


def test_a_file_named_by_rank(tmp_path: Path) -> None:
    folder = save(tmp_path, {f"model_rank_{r}.pt": {"w": torch.ones(3)} for r in range(2)})
    assert codes(folder) == set()
    assert codes(folder / "model_rank_1.pt") == {"missing-file"}


def test_ranks_without_a_recorded_world_size(tmp_path: Path) -> None:
    """A missing last stage of a pipeline would not be noticed: a finding reports that."""
    stages = {f"model_rank_{r}.pt": {f"layers.{r}.w": torch.ones(3)} for r in range(2)}
    assert codes(save(tmp_path / "a", stages)) == {"unproven-parts"}
    assert codes(save(tmp_path / "b", {"model_rank_0.pt": {"w": torch.ones(3)}})) == {"unproven-parts"}
    one = {"model_world_size_1_rank_0.pt": {"w": torch.ones(3)}}  # the name says that this is all
    assert codes(save(tmp_path / "c", one)) == set()


def test_a_missing_model_file_is_the_finding(tmp_path: Path) -> None:
    """The optimizer's numbers mean the same as on the other ranks; random states are no parameters."""
    states: dict[str, Any] = {}
    for rank in range(2):
        states[f"model_world_size_2_rank_{rank}.pt"] = {"w": torch.ones(3, 2)}
        states[f"optim_world_size_2_rank_{rank}.pt"] = adam(3)
        states[f"extra_state_world_size_2_rank_{rank}.pt"] = {"rng": torch.ones(4)}
    folder = save(tmp_path, states)
    assert codes(folder) == set()
    (folder / "model_world_size_2_rank_1.pt").unlink()
    assert codes(folder) == {"missing-rank"}
    assert "optim.state.w.exp_avg" in ckptcore.open(str(folder)).index


def test_two_checkpoints_in_one_folder(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    save(tmp_path, {"dataloader_rank_0.pt": {"at": 3}})  # a trainer's own state
    torch.save({"at": 3}, tmp_path / "rng_rank_0.pt", _use_new_zipfile_serialization=False)
    assert ckptcore.open(str(tmp_path)).format == "dcp"
    save(tmp_path, {"model_world_size_1_rank_0.pt": {"w": torch.ones(3)}})
    with pytest.raises(AmbiguousModel, match="model_world_size_1_rank_0"):
        ckptcore.open(str(tmp_path))
