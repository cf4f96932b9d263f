"""Write OLMo-core step folders for a mesh: complete, split for its ranks, and loadable by a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from olmo_samples import copied, tensors

import ckptcore
from ckptcore.conversion.pipeline import validate

STEP = "v3_bf16params_ws2"


@pytest.mark.alike(1)
@pytest.mark.parametrize("mesh", ["fsdp=1", "fsdp=3", "dp_replicate=2,fsdp=2"])
def test_a_step_of_a_mesh(mesh: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    step, out = copied(request, STEP, tmp_path), tmp_path / "out"
    ckptcore.convert(str(step), str(out), verb="reshard", to="olmo_core", mesh=mesh)
    world = {"fsdp=1": 1, "fsdp=3": 3}.get(mesh, 4)
    files = {p.name for p in (out / "model_and_optim").iterdir()}
    assert files == {".metadata", *(f"__{r}_0.distcp" for r in range(world))}
    written = ckptcore.open(str(out))
    assert (written.format, written.findings) == ("olmo_core", ())
    assert validate(written, "bytes").ok
    assert tensors(written) == tensors(ckptcore.open(str(step)))


def test_random_states_are_left_out(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A trainer restores them where ``world_size`` is its own, so a state without them has world size 0."""
    step, out = copied(request, STEP, tmp_path), tmp_path / "out"
    for rank in (0, 1):
        state = {"global_step": 3, "world_size": 2, "rng": {"python": rank}, "max_steps": 9}
        torch.save(state, step / "train" / f"rank{rank}.pt")
    ckptcore.convert(str(step), str(out), verb="reshard", to="olmo_core", mesh="fsdp=2")
    assert [p.name for p in (out / "train").iterdir()] == ["rank0.pt"]
    state = torch.load(out / "train" / "rank0.pt", weights_only=True)
    assert state == {"global_step": 3, "world_size": 0, "max_steps": 9}
    ckptcore.convert(str(step), str(tmp_path / "one"), to="olmo_core")
    assert torch.load(tmp_path / "one" / "train" / "rank1.pt", weights_only=True)["world_size"] == 2
