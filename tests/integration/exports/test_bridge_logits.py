"""The map to Megatron-Bridge: its own Qwen2.5-VL begins from the hub, and sees pictures as transformers does.

``CKPTCORE_BRIDGE_PYTHON`` names an interpreter with megatron-core 0.19.2, megatron-bridge 0.6.2 and
transformers 5; without it these are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trainer_names
from paths import JOBS

import ckptcore
from ckptcore.naming.maps.declaration import built_in_maps

pytest.importorskip("transformers", minversion="5.0")

pytestmark = pytest.mark.soak

VARIABLE = "CKPTCORE_BRIDGE_PYTHON"
LIMIT = 1e-5  # of logits whose standard deviation is about 1


@pytest.mark.parametrize("tied", [False, True])
def test_bridges_own_model_begins_from_the_hub(tmp_path: Path, tied: bool) -> None:
    """A strict load of one file, and of those of tp=2 pp=2, has the logits of transformers."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"no interpreter with megatron-bridge 0.6.2: {VARIABLE} can name one")
    model = trainer_names.tiny_model("qwen2_5_vl").float()
    model.config.tie_word_embeddings = tied
    model.tie_weights()
    model.save_pretrained(tmp_path / "hub")
    options: dict[str, Any] = {"to": "torch_dist", "names": "megatron", "catalog": False}
    ckptcore.convert(str(tmp_path / "hub"), str(tmp_path / "one"), verb="consolidate", **options)
    ckptcore.convert(
        str(tmp_path / "hub"), str(tmp_path / "ranks"), verb="reshard", mesh="tp=2,pp=2", **options
    )
    folders = [str(tmp_path / name / "release") for name in ("one", "ranks")]
    argv = [python, "-W", "ignore", str(JOBS / "bridge_logits_job.py")]
    argv += [str(tmp_path / "hub"), str(tmp_path / "answer.json"), *folders]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "answer.json").read_text())
    print(found)
    assert found["picture counts"] > 0.1
    assert len(found["folders"]) == 2
    assert all(difference < LIMIT for each in found["folders"] for difference in each.values())
    assert [m.loaded_by for m in built_in_maps() if m.arch == "qwen2_5_vl"] == ["Megatron-Bridge 0.6.2"]
