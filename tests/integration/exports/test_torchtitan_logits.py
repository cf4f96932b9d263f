"""The maps from torchtitan: its own models compute the logits that transformers computes from the export.

torchtitan makes the weights and names them; both models answer the same question in float32.
``CKPTCORE_TORCHTITAN_PYTHON`` names an interpreter with torchtitan 0.3.0; without it these are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import trainer_names
from paths import JOBS

import ckptcore
from ckptcore.naming.maps.declaration import built_in_maps

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

pytestmark = pytest.mark.soak

VARIABLE = "CKPTCORE_TORCHTITAN_PYTHON"
LIMIT = 1e-5  # of logits whose standard deviation is about 1
IDS = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(1))
# Family -> what its tiny config must say so that torchtitan can build it: it means some sizes for GPUs.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "hidden_size": 64},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "norm_topk_prob": True},
    "deepseek_v3": {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 16},
    "gpt_oss": {
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


# Biases that balance experts in training: the hub's models of these families have none.
DROPPED = {"qwen3_moe": (".expert_bias_E",), "gpt_oss": (".expert_bias_E",)}


def hub_config(arch: str) -> dict[str, Any]:
    config, _ = trainer_names.hub_model(arch)
    return config | {"dtype": "float32"} | FAMILIES[arch]


@pytest.fixture(scope="module")
def titan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What torchtitan answers, from one process."""
    asked = [{"config": hub_config(a), "ids": IDS, "zero": DROPPED.get(a, ())} for a in FAMILIES]
    return dict(zip(FAMILIES, answers(asked, tmp_path_factory.mktemp("titan")), strict=True))


def answers(asked: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What torchtitan answers to questions of its job, which has files in the folder."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"no interpreter with torchtitan 0.3.0: {VARIABLE} can name one")
    torch.save(asked, folder / "asked.pt")
    argv = [python, "-W", "ignore", str(JOBS / "torchtitan_logits_job.py")]
    argv += [str(folder / "asked.pt"), str(folder / "answer.pt")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = torch.load(folder / "answer.pt", weights_only=True)
    return found


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("arch", FAMILIES)
def test_torchtitans_own_model_agrees_with_the_export(
    titan: dict[str, dict[str, Any]], tmp_path: Path, arch: str
) -> None:
    dcp.save({"model": titan[arch]["state"]}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps(hub_config(arch)))
    options = {"verb": "export", "catalog": False, "config": str(tmp_path / "config.json")}
    ckptcore.convert(str(tmp_path / "ckpt"), str(tmp_path / "out"), **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        found = model.eval()(IDS).logits
    assert found.std() > 0.05
    difference = float((found - titan[arch]["logits"]).abs().max())
    print(f"logits differ by {difference:.1e}")
    assert difference < LIMIT


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(
    ("arch", "tied"), [*((arch, False) for arch in FAMILIES), ("llama", True), ("qwen3", True)]
)
def test_torchtitans_own_model_loads_what_the_way_back_makes(tmp_path: Path, arch: str, tied: bool) -> None:
    """And computes the logits of the model on the hub."""
    form = hub_config(arch) | {"tie_word_embeddings": tied}
    config = transformers.CONFIG_MAPPING[form["model_type"]].from_dict(form)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            drawn = torch.randn(tensor.shape)
            tensor.copy_(1 + drawn / 8 if "norm" in name else drawn / 4)
        expected = model(IDS).logits
    model.save_pretrained(tmp_path / "hub")
    stored = ckptcore.open(str(tmp_path / "hub"))
    assert any(t.fqn == "lm_head.weight" for t in stored.tensors) is not tied
    maps = [m for m in built_in_maps() if (m.arch, m.world) == (arch, "torchtitan")]
    options = {"verb": "reshard", "mesh": "fsdp=2", "names": "torchtitan", "catalog": False}
    ckptcore.convert(str(tmp_path / "hub"), str(tmp_path / "dcp"), **options)
    asked = {"config": form, "ids": IDS, "zero": (), "folder": str(tmp_path / "dcp")}
    (found,) = answers([asked], tmp_path)
    assert found["left"] == []
    assert expected.std() > 0.05
    assert float((expected - found["logits"]).abs().max()) < LIMIT
    assert [m.loaded_by for m in maps] == ["torchtitan 0.3.0"]
