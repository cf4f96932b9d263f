"""DCP folders without any tensor, and tuples with tensors in them, which torch stores as one object."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptcore
from ckptcore.errors import AmbiguousModel, UsageError

if TYPE_CHECKING:
    from driver import Cli

VALUES = {"step": 7, "name": "run", "losses": [1.5, None], "nested": {"seed": b"\0\1", "on": True}}


@pytest.fixture
def values(tmp_path: Path) -> Path:
    dcp.save(dict(VALUES), checkpoint_id=tmp_path / "values", no_dist=True)
    return tmp_path / "values"


@pytest.fixture
def tuples(tmp_path: Path) -> Path:
    state = {"w": torch.arange(6.0), "pair": (torch.arange(3), 1), "list": [(torch.ones(2), "a")]}
    dcp.save(state, checkpoint_id=tmp_path / "tuples", no_dist=True)
    return tmp_path / "tuples"


def filled() -> dict[str, Any]:
    return {"step": 0, "name": "", "losses": [0.0, 0], "nested": {"seed": b"", "on": False}}


def test_values_alone_are_read_and_checked(values: Path, cli: Cli) -> None:
    manifest = ckptcore.open(str(values))
    assert not manifest.tensors
    assert {b.key for b in manifest.blobs} >= {"step", "name", "nested.on"}
    for level in ("files", "coverage", "bytes", "values"):
        assert ckptcore.check(manifest, level).ok, level
    state = filled()
    ckptcore.load_into(manifest, state)
    assert state == VALUES
    assert cli("inspect", values).code == 0
    assert cli("validate", values, "--output", "json").json["ok"]
    assert cli("diff", values, values).code == 0


@pytest.mark.parametrize(
    "asked",
    [
        {"verb": "consolidate", "to": "dcp"},
        {"verb": "reshard", "to": "dcp", "mesh": "fsdp=3"},
        {"verb": "reshard", "to": "torch_ranks", "mesh": "pp=2,tp=2"},
        {"verb": "consolidate", "to": "torch_save"},
        {"verb": "consolidate", "to": "safetensors"},
    ],
)
def test_values_alone_are_written(asked: dict[str, Any], values: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckptcore.convert(str(values), str(out), **asked)
    written = ckptcore.open(str(out))
    assert ckptcore.check(written, "bytes").ok
    assert ckptcore.diff(str(values), str(out)).equal
    if asked["to"] == "dcp":
        state = filled()
        dcp.load(state, checkpoint_id=out, no_dist=True)
        assert state == VALUES


def test_values_alone_are_no_model(values: Path, tmp_path: Path) -> None:
    with pytest.raises(AmbiguousModel, match=r"has no tensor \(got 5 plain values\)") as error:
        ckptcore.convert(str(values), str(tmp_path / "out"), verb="export")
    assert "consolidate" in str(error.value.hint)
    with pytest.raises(UsageError, match="no tensor is left to write"):
        ckptcore.convert(str(values), str(tmp_path / "out"), exclude=["*"])


def pairs() -> dict[str, Any]:
    return {
        "w": torch.zeros(6),
        "pair": (torch.zeros(3, dtype=torch.int64), 0),
        "list": [(torch.zeros(2), "")],
    }


def test_tuples_are_written_as_parts_with_a_warning(tuples: Path, tmp_path: Path) -> None:
    """torch's loader asks for the tuple, so a strict load fails; what the warning names succeeds."""
    composed = ckptcore.plan(str(tuples), str(tmp_path / "out"), verb="reshard", to="dcp", mesh="fsdp=2")
    (found,) = [f for f in composed.warnings if f.code == "dropped-keys"]
    assert found.message == "2 objects with tensors inside are written as their parts: list, pair"
    assert "such as list.0.0" in str(found.hint)
    ckptcore.convert(str(tuples), str(tmp_path / "out"), verb="reshard", to="dcp", mesh="fsdp=2")
    with pytest.raises(dcp.CheckpointException, match=r"Missing key in checkpoint state_dict: (pair|list)"):
        dcp.load(pairs(), checkpoint_id=tmp_path / "out", no_dist=True)
    parts = {"w": torch.zeros(6), "pair.0": torch.zeros(3, dtype=torch.int64), "pair.1": 0}
    parts |= {"list.0.0": torch.zeros(2), "list.0.1": ""}
    dcp.load(parts, checkpoint_id=tmp_path / "out", no_dist=True)
    assert parts["pair.0"].tolist() == [0, 1, 2]
    assert (parts["pair.1"], parts["list.0.1"]) == (1, "a")
    for folder in (tuples, tmp_path / "out"):
        state = pairs()
        ckptcore.load_into(ckptcore.open(str(folder)), state)
        assert state["pair"][0].tolist() == [0, 1, 2]
        assert state["pair"][1] == 1
        assert state["list"][0][0].tolist() == [1.0, 1.0]
        assert state["list"][0][1] == "a"
