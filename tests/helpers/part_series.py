"""Make checkpoints of several files, and damage them: every series and rank name that exists.

Each maker writes the complete save into an empty folder and returns its parts in their order. The damages
take what a maker wrote. No result of a damaged one may be another model without an error.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

N = 4  # parts
WIDTH, HEADS, INNER, VOCABULARY = 8, 2, 12, 16
Tensors = dict[str, torch.Tensor]


def model(layers: int = N) -> Tensors:
    """Return a Llama of Hugging Face's names, every value another."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for n in range(layers):
        shapes |= {f"model.layers.{n}.self_attn.{k}_proj.weight": (WIDTH, WIDTH) for k in "qkvo"}
        shapes |= {
            f"model.layers.{n}.mlp.{k}_proj.weight": (INNER, WIDTH) if k != "down" else (WIDTH, INNER)
            for k in ("gate", "up", "down")
        }
        shapes |= {f"model.layers.{n}.{k}_layernorm.weight": (WIDTH,) for k in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}
    tensors, start = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        tensors[name] = torch.arange(start, start + size, dtype=torch.float32).reshape(shape)
        start += size
    return tensors


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": N,
    "num_attention_heads": HEADS,
    "tie_word_embeddings": False,
}


def split(tensors: Tensors, parts: int) -> list[Tensors]:
    """Return the tensors in runs, each whole."""
    names = list(tensors)
    edges = [len(names) * n // parts for n in range(parts + 1)]
    return [{n: tensors[n] for n in names[a:b]} for a, b in pairwise(edges)]


def sliced(tensors: Tensors, ranks: int) -> list[Tensors]:
    """Return slices on dim 0, as of tensor parallelism; vectors are repeated."""
    cut = {n: t.chunk(ranks) for n, t in tensors.items() if t.dim() > 1}
    return [
        {n: cut[n][r].clone() if n in cut else t.clone() for n, t in tensors.items()} for r in range(ranks)
    ]


def write(path: Path, tensors: Mapping[str, Any]) -> str:
    """Write one file, in the format of its suffix."""
    if path.suffix == ".safetensors":
        save_file({n: t.contiguous() for n, t in tensors.items()}, path)
    else:
        torch.save(dict(tensors), path)
    return path.name


def numbered(pattern: str, index: str | None = None, first: int = 1) -> Callable[[Path], list[str]]:
    """Whole tensors in files that are counted, or numbered, with or without an index."""

    def make(folder: Path) -> list[str]:
        names, rows = [], {}
        for n, part in enumerate(split(model(), N)):
            names.append(write(folder / pattern.format(n=n + first, count=N), part))
            rows |= dict.fromkeys(part, names[-1])
        if index:
            total = sum(t.nbytes for t in model().values())
            (folder / index).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": rows}))
        return names

    return make


def ranked(pattern: str, beside: Mapping[str, Any] | None = None) -> Callable[[Path], list[str]]:
    """Slices of ranks, with what states their number."""

    def make(folder: Path) -> list[str]:
        for name, form in (beside or {}).items():
            (folder / name).write_text(json.dumps(form))
        return [
            write(folder / pattern.format(n=r, count=N), part) for r, part in enumerate(sliced(model(), N))
        ]

    return make


META_NAMES = {
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{k}_proj": f"attention.w{k}" for k in "qkvo"},
    **{f"mlp.{k}_proj": f"feed_forward.w{n}" for k, n in (("gate", 1), ("down", 2), ("up", 3))},
}


def meta(folder: Path) -> list[str]:
    """Meta's model-parallel files, as Llama 3 has them."""
    tensors = {}
    for name, value in model().items():
        for ours, theirs in META_NAMES.items():
            name = name.replace(ours, theirs)
        tensors[name.removeprefix("model.")] = value
    params = {"dim": WIDTH, "n_layers": N, "n_heads": HEADS, "vocab_size": VOCABULARY}
    (folder / "params.json").write_text(json.dumps(params))
    by_columns = [".wo.", ".w2."]
    ranks = [
        {
            name: value.chunk(N, int(any(k in name for k in by_columns)))[r].clone()
            if value.dim() > 1
            else value
            for name, value in tensors.items()
        }
        for r in range(N)
    ]
    return [write(folder / f"consolidated.{r:02d}.pth", part) for r, part in enumerate(ranks)]


def deepspeed(folder: Path) -> list[str]:
    """Model states of model-parallel ranks: read as a folder by their own reader."""
    return [
        write(
            folder / f"mp_rank_{r:02d}_model_states.pt",
            {"module": part, "mp_world_size": N, "dp_world_size": 1, "ds_version": "0.19.8"},
        )
        for r, part in enumerate(sliced(model(), N))
    ]


def torch_xla(folder: Path) -> list[str]:
    """Shards of torch_xla, whose names of this kind state nothing: their metadata does."""
    return [
        write(folder / f"rank_{r}.pth", {"model": part, "shard_metadata": {"rank": r, "world_size": N}})
        for r, part in enumerate(sliced(model(), N))
    ]


def composer(folder: Path) -> list[str]:
    """Slices of Composer's ranks, which record how many there were, and the config of their model."""
    record = {"huggingface": {"model": {"config": {"file_extension": ".json", "content": CONFIG}}}}
    beside = {"metadata": {"world_size": N}, "integrations": record, "run_name": "llm"}
    return [
        write(folder / f"ep0-ba10-rank{r}.pt", {"state": {"model": part, **beside}, "rng": []})
        for r, part in enumerate(sliced(model(), N))
    ]


# Series -> maker. The complete save is read, or refused: a part is never taken for it.
SERIES: dict[str, Callable[[Path], list[str]]] = {
    "five digits": numbered("model-{n:05d}-of-{count:05d}.safetensors"),
    "DeepSeek": numbered("model-{n:05d}-of-{count:06d}.safetensors"),
    "DeepSeek with an index": numbered(
        "model-{n:05d}-of-{count:06d}.safetensors", "model.safetensors.index.json"
    ),
    "Kimi": numbered("model-{n}-of-{count}.safetensors"),
    "from zero": numbered("model-{n:05d}-of-{count:05d}.safetensors", first=0),
    "underscores": numbered("model_{n}_of_{count}.safetensors"),
    "diffusers": numbered(
        "diffusion_pytorch_model-{n:05d}-of-{count:05d}.safetensors",
        "diffusion_pytorch_model.safetensors.index.json",
    ),
    "variant": numbered("model.fp16-{n:05d}-of-{count:05d}.safetensors", "model.safetensors.index.fp16.json"),
    "bin": numbered("pytorch_model-{n:05d}-of-{count:05d}.bin"),
    "bin with an index": numbered("pytorch_model-{n:05d}-of-{count:05d}.bin", "pytorch_model.bin.index.json"),
    "bin of a variant": numbered(
        "pytorch_model.fp16-{n:05d}-of-{count:05d}.bin", "pytorch_model.bin.index.fp16.json"
    ),
    "torchtune": numbered("hf_model_{n:04d}_0.pt"),
    "Meta": meta,
    "metaseq": ranked("reshard-model_part-{n}.pt"),
    "fairseq": ranked("checkpoint_last-shard{n}.pt"),
    "vLLM": ranked("model-rank-{n}-part-0.safetensors", {"config.json": CONFIG}),
    "TensorRT-LLM": ranked(
        "rank{n}.safetensors", {"config.json": {"mapping": {"tp_size": 2, "pp_size": 2, "world_size": 4}}}
    ),
    "safetensors of ranks": ranked("rank{n}.safetensors"),
    "nanotron": ranked("model_weight_pp-rank-0-of-1_tp-rank-{n}-of-{count}.safetensors"),
    "torch_xla": ranked("rank{n}-of-{count}-pytorch_model.bin"),
    "torch_xla by content": torch_xla,
    "plain ranks": ranked("model_rank_{n}.pt"),
    "plain ranks of safetensors": ranked("model_rank_{n}.safetensors"),
    "stages": numbered("model_rank_{n}.pt", first=0),
    "world size": numbered("model_world_size_4_rank_{n}.pt", first=0),
    "tensor-parallel ranks": ranked("tp_rank_{n:02d}.pt"),
    "axes": ranked("model.tp{n}.pp0.pt"),
    "DeepSpeed": deepspeed,
    "GPT-NeoX": ranked("layer_00-model_{n:02d}-model_states.pt"),
    "Composer's ranks": composer,
}


# Series whose index lists every tensor, beside those that say so.
INDEXED = ("diffusers", "variant", "bin of a variant")


def _missing(at: int) -> Callable[[Path, list[str]], None]:
    def damage(folder: Path, parts: list[str]) -> None:
        (folder / parts[at]).unlink()

    return damage


def _only(at: int) -> Callable[[Path, list[str]], None]:
    def damage(folder: Path, parts: list[str]) -> None:
        for path in parts:
            if path != parts[at]:
                (folder / path).unlink()

    return damage


def _renamed(folder: Path, parts: list[str]) -> None:
    (folder / parts[1]).rename(folder / ("moved" + Path(parts[1]).suffix))


def _truncated(folder: Path, parts: list[str]) -> None:
    path = folder / parts[-1]
    os.truncate(path, path.stat().st_size * 2 // 3)


def _copied(folder: Path, parts: list[str]) -> None:
    """A stray copy of a part takes the place of another that is missing."""
    shutil.copy(folder / parts[0], folder / ("copy of " + parts[0]))
    (folder / parts[-1]).unlink()


def _linked(folder: Path, parts: list[str]) -> None:
    """The name of a missing part is a link to another part."""
    (folder / parts[-1]).unlink()
    (folder / parts[-1]).symlink_to(parts[0])


def _other_step(folder: Path, parts: list[str]) -> None:
    """A part is from a save in another number of files."""
    last = folder / parts[-1]
    content = split(model(), N + 1)[-1]
    write(last, content)


DAMAGES: dict[str, Callable[[Path, list[str]], None]] = {
    "first missing": _missing(0),
    "middle missing": _missing(1),
    "last missing": _missing(-1),
    "first alone": _only(0),
    "middle alone": _only(1),
    "last alone": _only(-1),
    "renamed": _renamed,
    "truncated": _truncated,
    "stray copy": _copied,
    "link": _linked,
    "of another save": _other_step,
}
