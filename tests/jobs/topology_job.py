"""A small training job, sharded by torch itself, that records which elements each rank holds.

Run as a program: ``topology_job.py FOLDER --ranks N``. Forks N gloo ranks. For every mesh of `MESHES` with
that many ranks and every model of `MODELS` that fits, ``FOLDER/<model>-<mesh>/rank<r>.json`` records for each
parameter of the rank [local shape, elements], and ``FOLDER/<model>-<mesh>/ckpt`` is the
DCP folder of model and optimizer that the job saved. Every element of a parameter has its own number as
value, so the numbers say which part it is, whatever torch believes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import start_ranks
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

LAYERS, WIDTH, HIDDEN, KV, VOCABULARY, EXPERTS = 3, 6, 10, 3, 13, 4
MESHES = {
    4: (
        "fsdp=4",
        "tp=4",
        "fsdp=2,tp=2",
        "dp_replicate=2,fsdp=2",
        "fsdp=2,cp=2",
        "fsdp=2,ep=2",
        "pp=2,fsdp=2",
        "pp=2,tp=2",
        "ep=4",
    ),
    8: ("dp_replicate=2,fsdp=2,tp=2", "fsdp=4,tp=2", "pp=2,fsdp=2,tp=2", "fsdp=2,ep=2,tp=2", "fsdp=4,ep=2"),
}


def linear(wide: int, out: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(wide, out, bias=bias)


class Parts(nn.Module):
    """Modules by name; computes nothing."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Experts(nn.Module):
    """torchtitan's: [experts, out, in], even: FSDP cuts other dims than the first evenly only."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(EXPERTS, 12, 8))
        self.w2 = nn.Parameter(torch.zeros(EXPERTS, 8, 12))
        self.w3 = nn.Parameter(torch.zeros(EXPERTS, 12, 8))


def torchtitan(moe: bool = False) -> nn.Module:
    layers = nn.ModuleDict()
    for n in range(LAYERS):
        attention = Parts(
            wq=linear(WIDTH, WIDTH), wk=linear(WIDTH, KV), wv=linear(WIDTH, KV), wo=linear(WIDTH, WIDTH)
        )
        dense = Parts(w1=linear(WIDTH, HIDDEN), w2=linear(HIDDEN, WIDTH), w3=linear(WIDTH, HIDDEN))
        router = Parts(gate=linear(WIDTH, EXPERTS))
        rest = {"moe": Parts(experts=Experts(), router=router)} if moe else {"feed_forward": dense}
        layers[str(n)] = Parts(
            attention=attention,
            attention_norm=nn.LayerNorm(WIDTH, bias=False),
            ffn_norm=nn.LayerNorm(WIDTH, bias=False),
            **rest,
        )
    return Parts(
        tok_embeddings=nn.Embedding(VOCABULARY, WIDTH),
        layers=layers,
        norm=nn.LayerNorm(WIDTH, bias=False),
        output=linear(WIDTH, VOCABULARY),
    )


def qwen() -> nn.Module:
    """Hugging Face names, with biases."""
    layers = nn.ModuleList()
    for _ in range(LAYERS):
        attention = Parts(
            q_proj=linear(WIDTH, WIDTH, True),
            k_proj=linear(WIDTH, KV, True),
            v_proj=linear(WIDTH, KV, True),
            o_proj=linear(WIDTH, WIDTH),
        )
        mlp = Parts(
            gate_proj=linear(WIDTH, HIDDEN),
            up_proj=linear(WIDTH, HIDDEN),
            down_proj=linear(HIDDEN, WIDTH, True),
        )
        layers.append(
            Parts(
                self_attn=attention,
                mlp=mlp,
                input_layernorm=nn.LayerNorm(WIDTH, bias=False),
                post_attention_layernorm=nn.LayerNorm(WIDTH, bias=False),
            )
        )
    inner = Parts(
        embed_tokens=nn.Embedding(VOCABULARY, WIDTH), layers=layers, norm=nn.LayerNorm(WIDTH, bias=False)
    )
    return Parts(model=inner, lm_head=linear(WIDTH, VOCABULARY))


def col() -> ColwiseParallel:
    return ColwiseParallel()


def row() -> RowwiseParallel:
    return RowwiseParallel()


TITAN_PLAN = {
    "tok_embeddings": row,
    "norm": SequenceParallel,
    "output": col,
    "layers.*.attention.wq": col,
    "layers.*.attention.wk": col,
    "layers.*.attention.wv": col,
    "layers.*.attention.wo": row,
    "layers.*.attention_norm": SequenceParallel,
    "layers.*.ffn_norm": SequenceParallel,
    "layers.*.feed_forward.w1": col,
    "layers.*.feed_forward.w2": row,
    "layers.*.feed_forward.w3": col,
}
QWEN_PLAN = {
    "model.embed_tokens": row,
    "lm_head": col,
    "model.layers.*.self_attn.q_proj": col,
    "model.layers.*.self_attn.k_proj": col,
    "model.layers.*.self_attn.v_proj": col,
    "model.layers.*.self_attn.o_proj": row,
    "model.layers.*.mlp.gate_proj": col,
    "model.layers.*.mlp.up_proj": col,
    "model.layers.*.mlp.down_proj": row,
}
# Name: (model, TP plan, layers, what the first and the last stage have beside their layers).
MODELS: dict[str, Any] = {
    "torchtitan": (torchtitan, TITAN_PLAN, "layers", (["tok_embeddings"], ["norm", "output"])),
    "torchtitan-moe": (
        lambda: torchtitan(moe=True),
        TITAN_PLAN,
        "layers",
        (["tok_embeddings"], ["norm", "output"]),
    ),
    "qwen": (qwen, QWEN_PLAN, "model.layers", (["model.embed_tokens"], ["model.norm", "lm_head"])),
}


def fits(model: str, mesh: str) -> bool:
    return ("ep=" in mesh) == model.endswith("-moe")


def sizes(mesh: str) -> dict[str, int]:
    return {a: int(n) for a, n in (part.split("=") for part in mesh.split(","))}


def numbered(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.arange(p.numel(), dtype=p.dtype).view(p.shape))


def staged(model: nn.Module, name: str, stage: int, stages: int) -> None:
    """Takes out what other stages have; layers as torchtitan and Megatron-Core split three for two."""
    _, _, where, (first, last) = MODELS[name]
    layers = model.get_submodule(where)
    least, more = divmod(LAYERS, stages)
    begin = stage * least + min(stage, more)
    mine = range(begin, begin + least + (stage < more))
    for key in [k for k, _ in layers.named_children()]:
        if int(key) not in mine:
            layers._modules[key] = None
    for names, here in ((first, stage == 0), (last, stage == stages - 1)):
        for path in names if not here else ():
            owner, _, leaf = path.rpartition(".")
            model.get_submodule(owner)._modules[leaf] = None


def sharded(name: str, mesh: str) -> nn.Module:
    """The model as trainers shard it: pipeline stage, expert parallel, tensor parallel, FSDP2."""
    size = sizes(mesh)
    order = [a for a in ("pp", "dp_replicate", "fsdp", "cp", "ep", "tp") if a in size]
    grid = init_device_mesh("cpu", tuple(size[a] for a in order), mesh_dim_names=tuple(order))
    build, plan, where, _ = MODELS[name]
    model: nn.Module = build()
    numbered(model)
    if "pp" in size:
        staged(model, name, grid["pp"].get_local_rank(), size["pp"])
    if "tp" in size:
        there = {n for n, _ in model.named_modules()}
        names = {p: s for p, s in plan.items() if any(re.fullmatch(p.replace("*", r"\d+"), t) for t in there)}
        parallelize_module(model, grid["tp"], {p: style() for p, style in names.items()})
    data = [a for a in ("fsdp", "cp", "ep") if a in size]
    if not data:
        return model
    flat = grid[tuple(data)]._flatten("_".join(data)) if len(data) > 1 else grid[data[0]]
    experts = [m for m in model.modules() if isinstance(m, Experts)]
    for module in experts:
        tp = {"w1": 1, "w3": 1, "w2": 2}
        for leaf, p in list(module.named_parameters()):
            axes = ("ep", "tp") if "tp" in size else ("ep",)
            module.register_parameter(
                leaf,
                nn.Parameter(
                    distribute_tensor(
                        p.detach(),
                        grid[axes] if len(axes) > 1 else grid["ep"],
                        [Shard(0), *([Shard(tp[leaf])] if "tp" in size else [])],
                    )
                ),
            )
        if "fsdp" in size:
            dim = Shard(1) if size["fsdp"] * size["ep"] > EXPERTS else Shard(0)
            fully_shard(module, mesh=grid["fsdp"], shard_placement_fn=partial(_cut, dim))
    if "dp_replicate" in size:
        flat = grid["dp_replicate", "fsdp"]
    ignored = {p for m in experts for p in m.parameters()} if "fsdp" not in size else None
    for layer in model.get_submodule(where).children():
        fully_shard(layer, mesh=flat, ignored_params=ignored)
    fully_shard(model, mesh=flat, ignored_params=ignored)
    return model


def _cut(dim: Shard, _: nn.Parameter) -> Shard:
    return dim


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.no_grad():
        for p, old in zip(model.parameters(), before, strict=True):
            p.copy_(old)
    return optimizer


def rank_main(rank: int, world: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for mesh in MESHES[world]:
        for name in (m for m in MODELS if fits(m, mesh)):
            out = folder / f"{name}-{mesh}"
            out.mkdir(exist_ok=True)
            model = sharded(name, mesh)
            optimizer = stepped(model)
            found = {}
            for fqn, p in model.named_parameters():
                local = p.to_local() if isinstance(p, DTensor) else p
                found[fqn] = [list(local.shape), local.detach().reshape(-1).tolist()]
            (out / f"rank{rank}.json").write_text(json.dumps(found))
            if "pp" not in sizes(mesh):
                state = {
                    "model": get_model_state_dict(model),
                    "optim": get_optimizer_state_dict(model, optimizer),
                }
                dcp.save(state, checkpoint_id=out / "ckpt")
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    given = parser.parse_args()
    start_ranks(rank_main, (given.ranks, given.folder.resolve()), given.ranks)


if __name__ == "__main__":
    main()
