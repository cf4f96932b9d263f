"""Write OLMo-core's step folders: torch.load reads the trainer's state, DCP the tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from olmo_samples import codes, copied, sample, tensors, truth, write_local
from samples import value
from torch.distributed.checkpoint import FileSystemReader

import ckptcore
from ckptcore.errors import UnsupportedFormat

CORE = "v3_bf16params_ws2"
SAMPLES = [CORE, "olmo1_local_ws2", "olmo1_unsharded_safetensors", "v01_fsdp1_fp32_ws2"]


def by_torch(folder: Path) -> dict[str, Any]:
    """Read the tensors of a DCP folder with torch's own reader."""
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in stored.items() if hasattr(m, "size")
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return {k: value(v) for k, v in state.items()}


@pytest.mark.parametrize("name", SAMPLES)
def test_every_generation_becomes_a_step(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    root = sample(request, name)
    step = next(p for p in root.iterdir() if p.name.startswith("step"))
    out = tmp_path / "step9"
    ckptcore.convert(str(step), str(out), to="olmo_core", max_file_size=100_000)
    assert len(list((out / "model_and_optim").glob("*.distcp"))) > 1
    manifest = ckptcore.open(str(out))
    assert manifest.format == "olmo_core"
    assert manifest.origin["ephemeral"] is False
    assert json.loads((out / ".metadata.json").read_text()) == {"ephemeral": False}
    before = tensors(ckptcore.open(str(step)))
    assert truth(root).items() <= before.items()
    assert tensors(manifest) == before
    kept = {k: v for k, v in before.items() if not k.startswith("train.")}
    assert by_torch(out / "model_and_optim").items() >= kept.items()
    assert not codes(out)


def test_the_trainers_state_of_every_rank(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Shared values and each rank's own go into one file a rank, nested as they were."""
    step = copied(request, CORE, tmp_path)
    saved = []
    for rank in range(2):
        state = {
            "global_step": 3,
            "world_size": 2,
            "seen": [1, [2.5, None]],
            "flags": (True, "x"),
            "none": {},
            "rng": {
                "python": (3, (rank, 7), None),
                "numpy": np.random.RandomState(rank).get_state(),
                "torch": torch.arange(5, dtype=torch.uint8) + rank,
            },
            "callbacks": {"0": {"best": rank}, "1": {"best": 5}},
        }
        torch.save(state, step / "train" / f"rank{rank}.pt")
        saved.append(state)
    ckptcore.convert(str(step), str(tmp_path / "out"), to="olmo_core")
    assert sorted(p.name for p in (tmp_path / "out" / "train").iterdir()) == ["rank0.pt", "rank1.pt"]
    for rank, state in enumerate(saved):
        back = torch.load(tmp_path / "out" / "train" / f"rank{rank}.pt", weights_only=False)
        assert back.keys() == state.keys()
        assert (back["global_step"], back["world_size"], back["seen"]) == (3, 2, [1, [2.5, None]])
        assert (back["flags"], back["callbacks"]) == (state["flags"], state["callbacks"])
        assert back["rng"]["python"] == (3, (rank, 7), None)
        kind, keys, *rest = back["rng"]["numpy"]
        assert (kind, rest) == (state["rng"]["numpy"][0], list(state["rng"]["numpy"][2:]))
        assert (keys == state["rng"]["numpy"][1]).all()
        assert keys.dtype == np.uint32
        assert torch.equal(back["rng"]["torch"], state["rng"]["torch"])


def test_a_state_that_all_ranks_share_is_a_file_each(tmp_path: Path) -> None:
    write_local(tmp_path / "step1", "infos")
    ckptcore.convert(str(tmp_path / "step1"), str(tmp_path / "out"), to="olmo_core")
    for rank in range(3):
        back = torch.load(tmp_path / "out" / "train" / f"rank{rank}.pt", weights_only=True)
        assert back == {"global_step": 1, "world_size": 3}


def test_a_step_without_a_trainer(tmp_path: Path) -> None:
    """No trainer state is invented; the step is readable without it, with a warning."""
    torch.save({"model": {"w": torch.ones(3)}}, tmp_path / "x.pt")
    ckptcore.convert(str(tmp_path / "x.pt"), str(tmp_path / "step1"), to="olmo_core")
    assert not (tmp_path / "step1" / "train").exists()
    manifest = ckptcore.open(str(tmp_path / "step1"))
    assert tensors(manifest) == {"model.w": value(torch.ones(3))}
    assert [f.code for f in manifest.findings] == ["missing-part"]


def test_an_unlikely_world_size_creates_no_files(tmp_path: Path) -> None:
    """`world_size` is a number in a file, and cannot cause a million files."""
    write_local(tmp_path / "step1", "infos")
    for rank in range(3):
        torch.save({"world_size": 1 << 40}, tmp_path / "step1" / "train" / f"rank{rank}.pt")
    ckptcore.convert(str(tmp_path / "step1"), str(tmp_path / "out"), to="olmo_core", exclude=("optim.*",))
    assert [p.name for p in (tmp_path / "out" / "train").iterdir()] == ["rank0.pt"]


def test_values_inside_each_other_are_refused(tmp_path: Path) -> None:
    """`a` and `a.b` cannot both be keys of one nested state."""
    torch.save({"model.w": torch.ones(2), "train.a": 5, "train.a.b": torch.ones(1)}, tmp_path / "x.pt")
    for to in ("olmo_core", "olmo_v01"):
        with pytest.raises(UnsupportedFormat, match="inside another value"):
            ckptcore.convert(str(tmp_path / "x.pt"), str(tmp_path / to), to=to)
        assert not (tmp_path / to).exists()
    ckptcore.convert(str(tmp_path / "x.pt"), str(tmp_path / "out"), to="olmo_core", exclude=("train.a.*",))
    assert torch.load(tmp_path / "out" / "train" / "rank0.pt", weights_only=True) == {"a": 5}


@pytest.mark.parametrize("to", ["olmo_core", "olmo_v01"])
def test_lists_of_tensors_stay_lists(to: str, tmp_path: Path) -> None:
    step, states = tmp_path / "step1", [torch.arange(3), torch.arange(4)]
    write_local(step, "infos")
    for rank in range(3):
        torch.save(
            {"world_size": 3, "cuda": states, "by": {"0": 1, "2": states[0]}, "rank": rank},
            step / "train" / f"rank{rank}.pt",
        )
    ckptcore.convert(str(step), str(tmp_path / "out"), to=to)
    for rank in range(3):
        back = torch.load(tmp_path / "out" / "train" / f"rank{rank}.pt", weights_only=True)
        assert [t.tolist() for t in back["cuda"]] == [[0, 1, 2], [0, 1, 2, 3]]
        assert (back["by"]["0"], back["by"]["2"].tolist(), back["rank"]) == (1, [0, 1, 2], rank)
