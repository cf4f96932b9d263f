"""A DCP folder of OLMo-core alone, without a trainer's step around it, stays one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from olmo_samples import codes, copied, tensors
from samples import value

import ckptcore

STEP = "v3_bf16params_ws2"


def by_torch(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, object]:
    """Read float32 tensors of a DCP folder with torch's own loader."""
    state = {name: torch.empty(shape) for name, shape in shapes.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return {name: value(t) for name, t in state.items()}


@pytest.mark.alike(1)
@pytest.mark.parametrize("verb", ["consolidate", "reshard"])
def test_it_comes_back_as_one(verb: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    bare, out = copied(request, STEP, tmp_path) / "model_and_optim", tmp_path / "out"
    source = ckptcore.open(str(bare))
    assert source.format == "olmo_core"
    mesh = {"mesh": "fsdp=3"} if verb == "reshard" else {}
    ckptcore.convert(str(bare), str(out), verb=verb, to="olmo_core", **mesh)
    world = 3 if mesh else 1
    assert {p.name for p in out.iterdir()} == {".metadata", *(f"__{r}_0.distcp" for r in range(world))}
    before = tensors(source)
    assert tensors(ckptcore.open(str(out))) == before
    floats = {t.fqn: t.shape for t in source.tensors if t.dtype == "float32"}
    assert floats
    assert by_torch(out, floats) == {name: before[name] for name in floats}
    assert not codes(out)


def test_a_step_stays_a_step(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    step, out = copied(request, STEP, tmp_path), tmp_path / "out"
    ckptcore.convert(str(step), str(out), verb="reshard", to="olmo_core", mesh="fsdp=2")
    assert {".metadata.json", "model_and_optim"} <= {p.name for p in out.iterdir()}


def test_metadata_alone_is_read_as_dcp(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Without a shard only a class name shows the writer: names and shapes are read as those of DCP."""
    bare, alone = copied(request, STEP, tmp_path) / "model_and_optim", tmp_path / "alone"
    alone.mkdir()
    (bare / ".metadata").rename(alone / ".metadata")
    found = ckptcore.open(str(alone))
    assert found.format == "dcp"
    assert found.tensors
    assert codes(alone) >= {"missing-file"}
