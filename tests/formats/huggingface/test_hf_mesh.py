"""Convert a Hugging Face folder for the ranks of a mesh, and go on training transformers' model from it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
import warm
from paths import JOBS

import ckptcore

JOB = JOBS / "hf_mesh_job.py"


def pretrained(folder: Path) -> Path:
    """A small Llama with random weights, as written by `save_pretrained`."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tiny_llama import tiny_llama

    model = tiny_llama(2, vocab_size=66, intermediate_size=56, tie_word_embeddings=False)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mesh", ["fsdp=2,tp=2", pytest.param("fsdp=3", marks=pytest.mark.soak)])
def test_a_model_is_loaded_on_a_mesh(mesh: str, tmp_path: Path) -> None:
    source, out, report = pretrained(tmp_path / "hf"), tmp_path / "out", tmp_path / "report.json"
    ckptcore.convert(str(source), str(out), verb="reshard", to="dcp", mesh=mesh)
    sizes = dict(part.split("=") for part in mesh.split(","))
    line = [*warm.python(), str(JOB), str(source), str(out), sizes["fsdp"], sizes.get("tp", "1"), str(report)]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    rows = json.loads(report.read_text())
    for differ, (written, full) in rows:
        assert differ == []
        assert written == full
    # The file of each rank holds what it asks for, so nothing else has to be read.
    data = {f.path for f in ckptcore.open(str(out)).files if f.path.endswith(".distcp")}
    assert data == {f"__{r}_0.distcp" for r in range(len(rows))}
