"""Safetensors beside the torch form of the same model: the smaller one is not taken for all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptcore.cli.main import run

LAYERS = {f"model.layers.{n}.mlp.weight": torch.full((2, 2), float(n)) for n in range(4)}
FIRST = dict(list(LAYERS.items())[:2])
BUFFERS = {"layers.0.attn.bias": torch.ones(1, 1, 2, 2, dtype=torch.uint8), "inv_freq": torch.ones(2)}
# The names of Llama, by which a config proves that a model is complete.
CONFIG = {
    "vocab_size": 4,
    "hidden_size": 2,
    "intermediate_size": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
LLAMA = {
    "model.embed_tokens.weight": torch.ones(4, 2),
    "model.norm.weight": torch.ones(2),
    "lm_head.weight": torch.ones(4, 2),
} | {
    f"model.layers.0.{name}.weight": torch.ones(2, 2)
    for name in (
        *(f"self_attn.{key}_proj" for key in "qkvo"),
        *(f"mlp.{key}_proj" for key in ("down", "gate", "up")),
    )
}


def consolidated(source: Path, *options: str) -> int:
    target = source.parent / "out.safetensors"
    return run(["consolidate", str(source), str(target), "--no-catalog", "--overwrite", *options])


@pytest.mark.parametrize("series", [False, True])
def test_safetensors_that_lack_tensors_of_the_torch_form(
    series: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "m"
    source.mkdir()
    save_file(FIRST, source / "model.safetensors")
    if series:
        files = {name: f"pytorch_model-{n + 1:05d}-of-00004.bin" for n, name in enumerate(LAYERS)}
        for name, path in files.items():
            torch.save({name: LAYERS[name]}, source / path)
        (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        torch.save(LAYERS, source / "pytorch_model.bin")
    assert consolidated(source) == 26
    first = "pytorch_model-00003-of-00004.bin" if series else "pytorch_model.bin"
    assert (
        f"model.layers.2.mlp.weight and 1 more of {first} is not in model.safetensors"
        in capsys.readouterr().err
    )
    assert consolidated(source, "--allow-incomplete") == 0
    assert consolidated(source / "model.safetensors") == 0  # the user has said which


def test_healthy_pairs(tmp_path: Path) -> None:
    source = tmp_path / "m"
    source.mkdir()
    torch.save(LAYERS, source / "pytorch_model.bin")
    save_file(LAYERS, source / "model.safetensors")
    assert consolidated(source) == 0
    tied = LAYERS | {"lm_head.weight": next(iter(LAYERS.values()))}
    torch.save(tied | BUFFERS, source / "pytorch_model.bin")
    assert consolidated(source) == 0
    (source / "pytorch_model.bin").write_bytes(b"no zip")
    assert consolidated(source) == 0


def test_a_config_proves_the_smaller_one(tmp_path: Path) -> None:
    source = tmp_path / "m"
    source.mkdir()
    torch.save(LLAMA | {"value_head.weight": torch.ones(1, 2)}, source / "pytorch_model.bin")
    save_file(LLAMA, source / "model.safetensors")
    assert consolidated(source) == 26
    (source / "config.json").write_text(json.dumps(CONFIG))
    assert consolidated(source) == 0
