"""Write small Hugging Face folders: safetensors files, their index, and a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"


def folder(path: Path, *files: dict[str, Any], config: Any = None) -> Path:
    """A Hugging Face folder with an index, a file for each dict. config: of config.json, text or JSON."""
    from safetensors.torch import save_file

    path.mkdir()
    places = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, path / name)
        places |= dict.fromkeys(tensors, name)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    if config is not None:
        (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def quantization(method: str, **fields: Any) -> dict[str, Any]:
    """A config.json of quantised weights."""
    return {"quantization_config": {"quant_method": method, **fields}}


def compressed(strategy: str, **fields: Any) -> dict[str, Any]:
    """A config.json as compressed-tensors writes it, with one group of Linear layers."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **fields}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return quantization("compressed-tensors", config_groups=groups, ignore=["lm_head"])
