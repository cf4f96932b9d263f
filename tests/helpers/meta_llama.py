"""Make tiny checkpoints as Meta's ranks save them, of each generation, with the tensors of the model.

The cuts are those of Meta's public loaders, written here from torch's `chunk` alone: fairscale's parallel
layers (Llama 1 and 2), llama-models' `reshard_mp` (Llama 3 and 4).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
WIDTH, HEADS, KEYS, INNER, VOCABULARY, EXPERTS = 16, 4, 2, 24, 32, 4
SIZE = WIDTH // HEADS


def _drawn(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    generator = torch.Generator().manual_seed(7)
    return {n: torch.randn(s, generator=generator).bfloat16() for n, s in shapes.items()}


def llama(layers: int = 2) -> Tensors:
    """Return a Llama 2 or 3 in Meta's names."""
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (VOCABULARY, WIDTH)}
    for n in range(layers):
        at = f"layers.{n}"
        shapes |= {f"{at}.attention.{k}.weight": (WIDTH, WIDTH) for k in ("wq", "wo")}
        shapes |= {f"{at}.attention.{k}.weight": (KEYS * SIZE, WIDTH) for k in ("wk", "wv")}
        shapes |= {f"{at}.feed_forward.{k}.weight": (INNER, WIDTH) for k in ("w1", "w3")}
        shapes |= {f"{at}.feed_forward.w2.weight": (WIDTH, INNER)}
        shapes |= {f"{at}.{k}.weight": (WIDTH,) for k in ("attention_norm", "ffn_norm")}
    return _drawn(shapes | {"norm.weight": (WIDTH,), "output.weight": (VOCABULARY, WIDTH)})


def llama4() -> Tensors:
    """Return a Llama 4 of a dense layer and one of experts."""
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (VOCABULARY, WIDTH)}
    for n in range(2):
        at = f"layers.{n}"
        shapes[f"{at}.attention.wqkv.weight"] = (WIDTH + 2 * KEYS * SIZE, WIDTH)
        shapes[f"{at}.attention.wqkv.layer_norm_weight"] = (WIDTH,)
        shapes[f"{at}.attention.wo.weight"] = (WIDTH, WIDTH)
    shapes |= {"layers.0.feed_forward.mlp.fc1_weight": (2 * INNER, WIDTH)}
    shapes |= {"layers.0.feed_forward.mlp.fc2_weight": (WIDTH, INNER)}
    shapes |= {"layers.0.feed_forward.mlp.layer_norm_weight": (WIDTH,)}
    inside = "layers.1.feed_forward"
    shapes |= {f"{inside}.experts.moe_w_{k}_eD_F": (EXPERTS * WIDTH, INNER) for k in ("in", "swiglu")}
    shapes |= {f"{inside}.experts.moe_w_out_eF_D": (EXPERTS * INNER, WIDTH)}
    shapes |= {f"{inside}.router_DE": (WIDTH, EXPERTS), f"{inside}.norm.weight": (WIDTH,)}
    shapes |= {f"{inside}.w_{k}_FD.weight": (INNER, WIDTH) for k in ("in_shared", "swiglu")}
    shapes |= {f"{inside}.w_out_shared_DF.weight": (WIDTH, INNER)}
    return _drawn(shapes | {"norm.weight": (WIDTH,), "output.weight": (VOCABULARY, WIDTH)})


def params(**more: Any) -> dict[str, Any]:
    """Return the sizes in params.json, of both."""
    sizes = {"dim": WIDTH, "n_layers": 2, "n_heads": HEADS, "n_kv_heads": KEYS, "norm_eps": 1e-5}
    return {**sizes, "vocab_size": VOCABULARY, **more}


def rank(tensors: Tensors, number: int, ranks: int, generation: int) -> Tensors:
    """Return one rank's part."""
    return {name: _part(name, full, number, ranks, generation).clone() for name, full in tensors.items()}


def _part(name: str, full: torch.Tensor, number: int, ranks: int, generation: int) -> torch.Tensor:
    if "norm" in name or "router" in name:
        return full
    if "wqkv" in name:
        parts = full.split((WIDTH, KEYS * SIZE, KEYS * SIZE))
        return torch.cat([part.chunk(ranks)[number] for part in parts])
    if "fc1_weight" in name:
        return torch.cat([half.chunk(ranks)[number] for half in full.chunk(2)])
    if "moe_w" in name:
        dim = -2 if "out" in name else -1
        return full.unflatten(0, (EXPERTS, -1)).chunk(ranks, dim)[number].flatten(0, 1)
    columns = any(k in name for k in (".wo.", ".w2.", "fc2", "w_out_shared"))
    if columns or (generation < 3 and name == "tok_embeddings.weight"):
        return full.chunk(ranks, 1)[number]
    return full.chunk(ranks)[number]


def save(folder: Path, tensors: Tensors, ranks: int = 2, generation: int = 3, **more: Any) -> list[Path]:
    """Write params.json and every rank's file; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params(**more)))
    paths = [folder / f"consolidated.{number:02d}.pth" for number in range(ranks)]
    for number, path in enumerate(paths):
        torch.save(rank(tensors, number, ranks, generation), path)
    return paths
