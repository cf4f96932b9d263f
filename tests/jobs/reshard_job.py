"""A training job on a mesh: torch resumes from a resharded checkpoint as it does from the original.

    python reshard_job.py SPEC

SPEC: a JSON file {axes: [[name, size], ...], truth, original, written, saved, out}. Forks one gloo rank
per place of the mesh. The ranks build an FSDP2 (HSDP, TP, pipeline) model and AdamW, and load three times:
the original and the written folder with `torch.distributed.checkpoint.load`, and the written one with
`ckptcore.load_into`. Every time parameters and optimizer state are compared with the truth, bit for bit,
and two training steps give losses. Then the job saves to ``saved`` what it loaded. OUT gets the JSON of
what was wrong, and the losses.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import start_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptcore

BUFFERS = ("pos", "mask", "step0d")
Tensors = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.ln(x))))


class Toy(nn.Module):
    """The model that the samples were saved from, or one stage of it."""

    def __init__(self, truth: Tensors, tied: bool, stage: int | None) -> None:
        super().__init__()
        vocab, width = truth["embed.weight"].shape
        inner = truth["layers.0.up.weight"].shape[0]
        count = 1 + max(int(n.split(".")[1]) for n in truth if n.startswith("layers."))
        mine = [n for n in range(count) if stage is None or stage_of(f"layers.{n}.") == stage]
        if stage in (None, 0):
            self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleDict({str(n): Block(width, inner) for n in mine})
        if stage in (None, 1):
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocab, bias=False)
            self.gate = nn.Parameter(torch.empty(3))
            self.scale = nn.Parameter(torch.empty(1))
            for name in BUFFERS:
                self.register_buffer(name, torch.zeros_like(truth[name]))
        self.tied = tied
        self.tie()

    def tie(self) -> None:
        if self.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) * self.scale + self.gate.sum()


class Plain(nn.Module):
    """Parameters by name at the top, as in the sample with torchtitan's names; it is never run."""

    def __init__(self, truth: Tensors, trained: set[str]) -> None:
        super().__init__()
        for name, value in truth.items():
            if name in trained:
                setattr(self, name, nn.Parameter(torch.empty_like(value)))
            else:
                self.register_buffer(name, torch.zeros_like(value))


def stage_of(name: str) -> int:
    """The pipeline stage, of two, that has a parameter or buffer."""
    return 0 if name.startswith(("embed.", "layers.0.", "layers.1.")) else 1


def wrapped(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        plan: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "layers.*.up": ColwiseParallel(),
            "layers.*.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
        if isinstance(model, Toy):
            model.tie()  # each module has got a tensor of its own
    data = tuple(n for n in ("dp_replicate", "fsdp") if n in names)
    for layer in getattr(model, "layers", nn.ModuleDict()).values():
        fully_shard(layer, mesh=mesh[data])
    return fully_shard(model, mesh=mesh[data])


class Job:
    def __init__(self, spec: dict[str, Any], rank: int) -> None:
        from safetensors.torch import load_file

        self.spec, self.rank = spec, rank
        names = tuple(n for n, _ in spec["axes"])
        self.mesh = init_device_mesh("cpu", tuple(n for _, n in spec["axes"]), mesh_dim_names=names)
        self.stage = self.mesh.get_local_rank("pp") if "pp" in names else None
        self.truth: Tensors = load_file(spec["truth"])
        self.titan = not any(n.startswith("model.") for n in self.truth)
        part = {n.removeprefix("model."): t for n, t in self.truth.items()}
        self.model_truth = {n: t for n, t in part.items() if "optim" not in n.split(".")[0]}
        self.trained = {n.split(".")[2] for n in part if n.startswith("optimizer.state.")}
        self.wrong: list[str] = []
        self.losses: dict[str, list[str]] = {}

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        if self.titan:
            model: nn.Module = Plain(
                {n: t for n, t in self.model_truth.items() if "." not in n}, self.trained
            )
        else:
            tied = "optim.state.head.weight.step" not in self.truth
            model = Toy(self.model_truth, tied, self.stage)
            dtype = self.model_truth["norm.weight"].dtype
            for parameter in model.parameters():
                parameter.data = torch.full_like(parameter, 0.5, dtype=dtype)
        model = wrapped(model, self.mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """As the sample's job saved it, without what differs from stage to stage."""
        options = StateDictOptions(flatten_optimizer_state_dict=self.titan)
        own, state = get_state_dict(model, optimizer, options=options)
        if self.titan:
            kept = {k: v for k, v in state.items() if k.startswith("state.")}
            for k, v in kept.items():  # the sample's moments are wider than their parameter
                kept[k] = v.to(self.truth[f"optimizer.{k}"].dtype)
            return {**own, "optimizer": kept}
        if self.stage is not None:
            state = {"state": state["state"]}
        return {"model": own, "optim": state}

    def load(self, name: str) -> None:
        model, optimizer = self.build()
        state = self.state(model, optimizer)
        if name == "load_into":
            flat = flattened(state)
            tensors = {n: v for n, v in flat.items() if isinstance(v, torch.Tensor)}
            ckptcore.load_into(ckptcore.open(self.spec["written"]), tensors)
            if not self.titan and self.stage is None:
                state["optim"]["param_groups"] = self.groups  # values are dcp's to load
        else:
            dcp.load(state, checkpoint_id=self.spec[name])
        self.compare(name, state)
        if name == "written":
            dcp.save(state, checkpoint_id=self.spec["saved"])
        if self.titan or self.stage is not None:
            return
        self.groups = state["optim"]["param_groups"]
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.losses[name] = self.train(model, optimizer)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
        found = []
        tokens = torch.arange(24).reshape(2, 12) * 7 % 100
        for _ in range(2):
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss).hex())
        return found

    def compare(self, name: str, state: dict[str, Any]) -> None:
        found = {n: v for n, v in flattened(state).items() if isinstance(v, torch.Tensor)}
        for fqn, tensor in found.items():
            value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if not torch.equal(raw(value), raw(self.truth[fqn])):
                self.wrong.append(f"rank {self.rank}, {name}: {fqn} differs")
        absent = [n for n in self.truth if n not in found and self.mine(n)]
        self.wrong += [f"rank {self.rank}, {name}: {n} is not loaded" for n in absent]

    def mine(self, name: str) -> bool:
        if name.startswith("train_state."):
            return False
        own = name.removeprefix("model.").removeprefix("optim.state.")
        return self.stage is None or stage_of(own) == self.stage


def flattened(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, dict) or (isinstance(tree, list) and any(isinstance(v, dict) for v in tree)):
        rows = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {n: v for k, t in rows for n, v in flattened(t, f"{path}.{k}" if path else str(k)).items()}
    return {path: tree}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)


def rank_main(rank: int, world: int, spec: dict[str, Any], folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=world)
    job = Job(spec, rank)
    for name in ("original", "written", "load_into"):
        job.load(name)
    results: list[Any] = [None] * world
    dist.all_gather_object(results, {"wrong": job.wrong, "losses": job.losses})
    if rank == 0:
        Path(spec["out"]).write_text(json.dumps(results))
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    size = 1
    for _, n in given["axes"]:
        size *= n
    with tempfile.TemporaryDirectory() as meet:
        start_ranks(rank_main, (size, given, meet), size)
