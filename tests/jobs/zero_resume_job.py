"""A training job under FSDP2 that resumes from a resharded checkpoint of DeepSpeed's ZeRO-3.

    python zero_resume_job.py SPEC

SPEC: a JSON file {ranks, ckpt, weights, moments, step, lr, steps, out}. Forks gloo ranks. They build the
model of the DeepSpeed samples under FSDP2 with AdamW, load the folder ``ckpt`` with
`torch.distributed.checkpoint.load`, and compare weights and optimizer state with the safetensors files
``weights`` and ``moments``, bit for bit. Then they train, and so does one model in one process that got its
state from these files. OUT gets the JSON of what was wrong, and the losses of both.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import start_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

Tensors = dict[str, torch.Tensor]
BUFFERS = ("pos_scale", "step_count")


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    """A model with the parameters and buffers of the samples: a tied head, a frozen layer."""

    def __init__(self, truth: Tensors) -> None:
        super().__init__()
        (vocab, width), inner = truth["embed.weight"].shape, len(truth["blocks.0.up.weight"])
        self.embed = nn.Embedding(vocab, width)
        self.scale = nn.Parameter(torch.zeros(1))
        self.adapter_frozen = nn.Linear(width, width, dtype=truth["adapter_frozen.weight"].dtype)
        self.adapter_frozen.requires_grad_(False)
        count = sum(name.endswith(".up.weight") for name in truth)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(count))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.embed.weight
        for name in BUFFERS:
            self.register_buffer(name, torch.zeros_like(truth[name]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.pos_scale + self.scale
        x = x + self.adapter_frozen(x.to(self.adapter_frozen.weight.dtype)).float()
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def adamw(model: Tied) -> torch.optim.AdamW:
    """With the sample's two groups: matrices decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = ([p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2])
    decays = (0.1, 0.0)
    return torch.optim.AdamW(
        [{"params": g, "weight_decay": d} for g, d in zip(groups, decays, strict=True)],
        lr=0.5,  # the checkpoint's replaces it
        foreach=False,
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[str]:
    found = []
    tokens = torch.arange(24).reshape(2, 12) * 7 % 101
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss).hex())
    return found


def reference(truth: Tensors, moments: Tensors, spec: dict[str, Any]) -> list[str]:
    """The losses of one process, whose state comes from the files of the truth alone."""
    model = Tied(truth)
    model.load_state_dict(truth)
    optimizer = adamw(model)
    for group in optimizer.param_groups:
        group["lr"] = spec["lr"]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            state = {key: moments[f"{name}::{key}"].clone() for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(float(spec["step"])), **state}
    return train(model, optimizer, spec["steps"])


def unlike(state: dict[str, Any], truth: Tensors, moments: Tensors, step: int) -> Iterable[str]:
    """Yield what was not loaded as the truth has it."""
    loaded = {f"module.{n}": v for n, v in state["module"].items()}
    loaded |= {f"{n}::{k}": v for n, each in state["optimizer"]["state"].items() for k, v in each.items()}
    wanted = {f"module.{n}": v for n, v in truth.items()}
    owners = state["optimizer"]["state"]
    wanted |= {n: v for n, v in moments.items() if n.partition("::")[0] in owners}
    wanted |= {f"{n}::step": torch.tensor(float(step)) for n in owners}
    yield from (f"{n}: on one side only" for n in sorted(wanted.keys() ^ loaded.keys()))
    for name in sorted(wanted.keys() & loaded.keys()):
        value = loaded[name]
        full = value.full_tensor() if isinstance(value, DTensor) else value
        same = full.dtype == wanted[name].dtype and full.shape == wanted[name].shape
        if not same or not torch.equal(raw(full), raw(wanted[name])):
            yield f"{name} differs"


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def rank_main(rank: int, spec: dict[str, Any], folder: str) -> None:
    from safetensors.torch import load_file

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    world = spec["ranks"]
    dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    stored, moments = load_file(spec["weights"]), load_file(spec["moments"])
    truth = {n.removeprefix("module."): v for n, v in stored.items() if n.startswith("module.")}
    model = Tied(truth)
    for module in (*model.blocks, model.adapter_frozen, model):
        fully_shard(module, mesh=mesh)
    optimizer = adamw(model)
    own, state = get_state_dict(model, optimizer)
    loaded = {"module": own, "optimizer": state}
    dcp.load(loaded, checkpoint_id=spec["ckpt"])
    set_state_dict(model, optimizer, model_state_dict=loaded["module"], optim_state_dict=loaded["optimizer"])
    model_state, optimizer_state = get_state_dict(model, optimizer)  # what torch made of it
    wrong = list(unlike({"module": model_state, "optimizer": optimizer_state}, truth, moments, spec["step"]))
    wrong += [f"lr is {g['lr']}" for g in optimizer.param_groups if g["lr"] != spec["lr"]]
    losses = train(model, optimizer, spec["steps"])
    results: list[Any] = [None] * world
    dist.all_gather_object(results, {"wrong": wrong, "losses": losses})
    if rank == 0:
        made = {"ranks": results, "reference": reference(truth, moments, spec)}
        Path(spec["out"]).write_text(json.dumps(made))
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as meet:
        start_ranks(rank_main, (given, meet), given["ranks"])
