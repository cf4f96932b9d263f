"""torch loads what was written into a trainer's nested state dict, strictly, also where some was left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptcore

SCHEDULE = {"last_epoch": 3, "base_lrs": [0.1], "milestones": {"a": 1}, "none": {}}


def state(seed: int, extra: dict[str, Any]) -> dict[str, Any]:
    weight = torch.arange(8.0).reshape(4, 2) + seed
    return {
        "model": {"w": weight},
        "optim": {
            "state": {"w": {"exp_avg": weight * 2, "step": torch.tensor(float(seed))}},
            "param_groups": [{"lr": seed / 8, "params": ["w"]}],
        },
        "extra_state": extra,
    }


def random_state(rank: int) -> dict[str, Any]:
    return {"cpu": torch.full((5,), rank, dtype=torch.uint8), "python": (3, (1, 2 + rank), None)}


def rank_files(folder: Path, extra: dict[str, Any]) -> Path:
    """Save as two ranks of verl do."""
    folder.mkdir()
    for rank in range(2):
        parts = state(3, {**extra, "rng": random_state(rank)})
        for name, value in parts.items():
            torch.save(value, folder / f"{name}_world_size_2_rank_{rank}.pt")
    return folder


def zeros(value: Any) -> Any:
    """The same tree with other values."""
    if isinstance(value, dict):
        return {k: zeros(v) for k, v in value.items()}
    if isinstance(value, list):
        return [zeros(v) for v in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)()


def require_equal(found: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)
    elif isinstance(wanted, (dict, list)):
        keys = list(wanted) if isinstance(wanted, dict) else range(len(wanted))
        assert len(found) == len(wanted)
        for key in keys:
            require_equal(found[key], wanted[key])
    else:
        assert found == wanted


@pytest.mark.parametrize(
    "extra", [{"lr_scheduler": SCHEDULE}, {"epoch": 3, "lr_scheduler": SCHEDULE}, {"n": 3}]
)
def test_without_the_random_states_of_other_ranks(extra: dict[str, Any], tmp_path: Path) -> None:
    """The schedule of rank files is asked for by the name that torch gives it."""
    source = rank_files(tmp_path / "ranks", extra)
    ckptcore.convert(str(source), str(tmp_path / "out"), verb="reshard", to="dcp", mesh="fsdp=2")
    wanted = state(3, extra)
    loaded = zeros(wanted)
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    require_equal(loaded, wanted)
    part = zeros({k: wanted[k] for k in ("model", "optim")})
    dcp.load(part, checkpoint_id=tmp_path / "out", no_dist=True)
    require_equal(part, {k: wanted[k] for k in part})
    changed = ckptcore.diff(str(source), str(tmp_path / "out"), exclude=["extra_state.rng*"])
    assert not changed.tensors
    assert not changed.objects


def test_without_what_was_excluded(tmp_path: Path) -> None:
    source = rank_files(tmp_path / "ranks", {"lr_scheduler": SCHEDULE})
    ckptcore.convert(
        str(source), str(tmp_path / "out"), verb="reshard", to="dcp", mesh="fsdp=2", exclude=["optim.state*"]
    )
    wanted = state(3, {"lr_scheduler": SCHEDULE})
    del wanted["optim"]["state"]
    loaded = zeros(wanted)
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    require_equal(loaded, wanted)


def test_with_all_that_was_saved(tmp_path: Path) -> None:
    wanted = state(3, {"lr_scheduler": SCHEDULE, "rng": random_state(1)})
    torch.save(wanted, tmp_path / "in.pt")
    ckptcore.convert(str(tmp_path / "in.pt"), str(tmp_path / "out"), to="dcp")
    loaded = zeros(wanted)
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    require_equal(loaded, wanted)
