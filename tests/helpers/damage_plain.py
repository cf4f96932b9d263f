"""Plain checkpoints to damage: what no sample of the repository is, written by the formats' own libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from damage_sites import Tree


def _tensors() -> dict[str, Any]:
    import torch

    maker = torch.Generator().manual_seed(3)
    names = ["embed.weight", *(f"layers.{n}.{k}" for n in range(3) for k in ("up.weight", "down.weight"))]
    made = {n: torch.randn(12, 8, generator=maker) for n in names}
    return made | {"norm.weight": torch.randn(8, generator=maker).bfloat16(), "count": torch.arange(5)}


def torch_file(root: Path) -> Tree:
    import torch

    state = {k: v for k, v in _tensors().items() if v.dtype == torch.float32}
    torch.save({"model": state, "global_step": 7, "names": ["a", "b"]}, root / "model.pt")
    return Tree(root, "model.pt")


def torch_file_before_zip(root: Path) -> Tree:
    import torch

    state = {k: v for k, v in _tensors().items() if v.dtype == torch.float32}
    tree = {"model": state, "global_step": 7, "names": ["a", "b"]}
    torch.save(tree, root / "model.pt", _use_new_zipfile_serialization=False)
    return Tree(root, "model.pt")


def safetensors_folder(root: Path) -> Tree:
    from safetensors.torch import save_file

    metadata = {"format": "pt", "ckptcore.objects": '{"step": 7}'}  # plain values as they are written here
    save_file(_tensors(), root / "model.safetensors", metadata)
    (root / "config.json").write_text('{"model_type": "none"}')
    return Tree(root)


def indexed_folder(root: Path) -> Tree:
    from safetensors.torch import save_file

    state = _tensors()
    parts = [dict(list(state.items())[n::2]) for n in range(2)]
    index: dict[str, Any] = {
        "metadata": {"total_size": sum(t.nbytes for t in state.values())},
        "weight_map": {},
    }
    for n, part in enumerate(parts):
        name = f"model-0000{n + 1}-of-00002.safetensors"
        save_file(part, root / name, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(part, name)
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return Tree(root)


def padded_arrays(root: Path) -> Tree:
    """Two zarr arrays, of which one is a padded vocabulary: its chunks may stick out."""
    import numpy as np
    import torch

    metadata = {"sharded_backend": "zarr", "common_backend": "torch"}
    (root / "metadata.json").write_text(json.dumps(metadata | {f"{k}_version": 1 for k in metadata}))
    torch.save({"iteration": 7, "checkpoint_version": 3.0}, root / "common.pt")
    for name in ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight"):
        form = {
            "zarr_format": 2,
            "shape": [8, 6],
            "chunks": [4, 6],
            "dtype": "<f4",
            "order": "C",
            "compressor": None,
            "filters": None,
            "fill_value": None,
        }
        folder = root / name
        folder.mkdir()
        (folder / ".zarray").write_text(json.dumps(form))
        for n in range(2):
            values = np.random.default_rng(n).standard_normal((4, 6)).astype("<f4")
            (folder / f"{n}.0").write_bytes(values.tobytes())
    return Tree(root)


MADE: dict[str, Callable[[Path], Tree]] = {
    "torch-file": torch_file,
    "torch-file-before-zip": torch_file_before_zip,
    "safetensors-folder": safetensors_folder,
    "indexed-folder": indexed_folder,
    "padded-arrays": padded_arrays,
}


def made(name: str, under: Path) -> Tree:
    """One of them, in a folder of its own."""
    root = under / name / "ckpt"
    if root.exists():
        return Tree(root, "model.pt" if name.startswith("torch-file") else None)
    root.mkdir(parents=True)
    return MADE[name](root)
