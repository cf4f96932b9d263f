"""A training that begins from the hub makes the first steps of transformers, on every mesh, in every trainer.

The trainer builds its own model on gloo ranks, shards it and loads what `reshard --names` wrote for the mesh,
all by its own code: transformers under FSDP2, torchtitan 0.3.0 (`CKPTCORE_TORCHTITAN_PYTHON`) and OLMo-core
3.0.0 (`CKPTCORE_OLMO_CORE_3_PYTHON`). Megatron-Core's are in tests/formats/megatron/test_megatron_resume.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import first_steps
import pytest
import torch
import trainer_names
from paths import JOBS

import ckptcore

pytest.importorskip("transformers", minversion="5.0")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

# Trainer -> (the variable that names its interpreter, options of the reshard).
TRAINERS = {
    "transformers": ("", {"to": "dcp", "names": "hf-live"}),
    "torchtitan": ("CKPTCORE_TORCHTITAN_PYTHON", {"to": "dcp", "names": "torchtitan"}),
    "olmo_core": ("CKPTCORE_OLMO_CORE_3_PYTHON", {"to": "olmo_core", "names": "olmo_core"}),
}
# What a family's tiny config must say besides: torchtitan means some sizes for GPUs.
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "hidden_size": 64},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "norm_topk_prob": True},
}
SHARDED, WIDE, BOTH = "fsdp=2", "fsdp=4", "fsdp=2,tp=2"


@pytest.mark.parametrize(
    ("trainer", "family", "meshes"),
    [
        ("transformers", "llama", (SHARDED, BOTH)),
        ("transformers", "qwen3_moe", (SHARDED, WIDE)),
        ("torchtitan", "llama", (SHARDED, WIDE)),
        ("torchtitan", "qwen3", (SHARDED, WIDE)),
        ("torchtitan", "qwen3_moe", (SHARDED, WIDE)),
        ("olmo_core", "llama", (SHARDED, WIDE)),
        ("olmo_core", "qwen3", (SHARDED, WIDE)),
        ("olmo_core", "olmo2", (SHARDED, BOTH)),
    ],
)
def test_the_first_steps_are_those_of_transformers(
    trainer: str, family: str, meshes: tuple[str, ...], tmp_path: Path
) -> None:
    variable, options = TRAINERS[trainer]
    python = os.environ.get(variable) if variable else sys.executable
    if not python:
        pytest.skip(f"no interpreter with {trainer}: {variable} can name one")
    config = trainer_names.hub_model(family)[0] | {"dtype": "float32"} | FIELDS.get(family, {})
    hub = first_steps.hub_folder(config, tmp_path / "hub")
    starts = {}
    for mesh in meshes:
        out = str(tmp_path / mesh)
        ckptcore.convert(str(hub), out, verb="reshard", mesh=mesh, catalog=False, **options)
        sizes = dict(part.split("=") for part in mesh.split(","))
        starts[mesh] = (int(sizes["fsdp"]), int(sizes.get("tp", 1)), out)
    asked = {"trainer": trainer, "config": config, "ids": first_steps.IDS, "starts": starts}
    asked |= {"steps": first_steps.STEPS, "rate": first_steps.RATE}
    torch.save(asked, tmp_path / "asked.pt")
    line = [python, "-W", "ignore", str(JOBS / "first_steps_job.py")]
    line += [str(tmp_path / "asked.pt"), str(tmp_path / "answer.json")]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    expected = first_steps.losses(hub)
    assert expected[0] > expected[1] > expected[2]
    answer = json.loads((tmp_path / "answer.json").read_text())
    for mesh, (fsdp, tp, _) in starts.items():
        assert len(answer[mesh]) == fsdp * tp
        for rank in answer[mesh]:
            apart = max(abs(a / b - 1) for a, b in zip(rank, expected, strict=True))
            print(f"{mesh}: losses differ by {apart:.1e}")
            assert apart < first_steps.RELATIVE, mesh
