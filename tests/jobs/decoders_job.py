"""A training job of a decoder on a mesh: saves checkpoints, or resumes from what others saved.

    python decoders_job.py SPEC

SPEC: a JSON file {axes: [[name, size], ...], out, cases: [...]}. Forks one gloo rank per place of the mesh.
A case has family, keys (of `KEYS`), dtype and ``original``, a DCP folder. Without ``written`` the job
saves it: known weights and AdamW state. With ``written``, a folder made of it for this mesh, the job loads
three times: the original and the written one with `torch.distributed.checkpoint.load`, and the written one
with `ckptcore.load_into`. Every time weights and state are compared with what is known, bit for bit, and
two training steps follow. ``saved`` gets what the job itself saves on this mesh. OUT gets one list per case,
with of each rank: what was wrong, the losses, and which part of each tensor torch says the rank has.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from decoders import FAMILIES, LENGTH, VOCABULARY, WIDTH, Decoder, Tensors, plan_of, truth_of
from forked import start_ranks
from reshard_job import flattened, raw
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import parallelize_module

import ckptcore

State = dict[str, Any]
WAYS = ("original", "written", "load_into")
SAVER: State = {"lr": 3e-3, "betas": (0.8, 0.9), "weight_decay": 0.05}


STEP = 41


def counted(model: State, optimizer: State, step: int) -> State:
    return {**model, "optimizer": optimizer, "train_state": {"step": torch.tensor(step, dtype=torch.int32)}}


# How trainers arrange model, optimizer (and step) into what they save, and whether its state is flattened.
KEYS: dict[str, tuple[bool, Callable[[State, State, int], State]]] = {
    "nested": (False, lambda model, optimizer, step: {"model": model, "optim": optimizer}),
    "flattened": (True, lambda model, optimizer, step: {"model": model, "optimizer": optimizer}),
    "torchtitan": (True, counted),
    "top": (True, lambda model, optimizer, step: {**model, **optimizer}),
}


class Job:
    def __init__(self, axes: list[tuple[str, int]], mesh: DeviceMesh, case: State) -> None:
        self.case, self.mesh, self.rank = case, mesh, dist.get_rank()
        self.names, self.dtype = FAMILIES[case["family"]], getattr(torch, case["dtype"])
        self.flat, self.tree = KEYS[case["keys"]]
        sizes = dict(axes)
        self.tp, self.pp = sizes.get("tp", 0), "pp" in sizes
        self.stage = mesh.get_local_rank("pp") if self.pp else None
        self.data = mesh[tuple(a for a in ("dp_replicate", "fsdp") if a in sizes)]
        weights, moments = truth_of(self.names, self.dtype)
        self.weights = {n: weights[n] for n in Decoder(self.names, self.stage).state_dict()}
        self.moments = {n: row for n, row in moments.items() if n in self.weights}
        self.wrong: list[str] = []
        self.losses: dict[str, list[str]] = {}
        self.values: dict[str, Any] = {}
        self.parts: dict[str, Any] = {}

    def build(self, weights: Tensors | None, **options: Any) -> tuple[Decoder, torch.optim.Optimizer]:
        """The model as it is trained on this mesh; without weights it has others than the known ones."""
        model = Decoder(self.names, self.stage)
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, 0.5, dtype=self.dtype)
        if self.names.kept:
            model.freqs_cis.fill_(1)
        if weights is not None:
            model.load_state_dict(weights)
        if self.tp:
            parallelize_module(model, self.mesh["tp"], plan_of(self.names))
        for layer in model.blocks():
            fully_shard(layer, mesh=self.data)
        fully_shard(model, mesh=self.data)
        return model, torch.optim.AdamW(model.parameters(), foreach=False, **options)

    def save(self) -> None:
        model, optimizer = self.build(self.weights, **SAVER)
        options = StateDictOptions(flatten_optimizer_state_dict=self.flat)
        tree = self.tree(*get_state_dict(model, optimizer, options=options), STEP)
        known = self.known()
        for name, tensor in tensors(tree).items():
            if "state" in name.split("."):
                at, shape = part(tensor)
                box = tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).copy_(known[name][box])
        self.compare("save", tree)
        dcp.save(tree, checkpoint_id=self.case["original"])

    def load(self, way: str) -> None:
        model, optimizer = self.build(None, lr=1e-2)
        options = StateDictOptions(flatten_optimizer_state_dict=self.flat)
        own, state = get_state_dict(model, optimizer, options=options)
        groups = {}
        if self.pp and not self.flat:  # stages would save theirs under the same names
            groups = {"param_groups": state.pop("param_groups")}
        tree = self.tree(own, state, 0)
        if way == "load_into":
            unused = ckptcore.load_into(ckptcore.open(self.case["written"]), tree)
            if unused and not self.pp:
                self.wrong.append(f"rank {self.rank}: load_into leaves {unused}")
            for name, value in self.values["written"].items():  # values are dcp's to load
                put_value(tree, name, value)
        else:
            dcp.load(tree, checkpoint_id=self.case[way])
        self.compare(way, tree)
        self.values[way] = {n: v for n, v in flattened(tree).items() if not isinstance(v, torch.Tensor)}
        if self.values[way] != self.values["original"]:
            self.wrong.append(f"rank {self.rank}, {way}: other values than the original's")
        if way == "written":
            self.parts = {n: part(t) for n, t in tensors(tree).items()}
            dcp.save(tree, checkpoint_id=self.case["saved"])
        state = {k: tree.get(k, v) for k, v in state.items()} | groups
        set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=state)
        self.losses[way] = self.train(model, optimizer)

    def train(self, model: Decoder, optimizer: torch.optim.Optimizer) -> list[str]:
        """Two losses, and a digest of the weights behind them; the last stage alone has losses."""
        found = []
        maker = torch.Generator().manual_seed(
            self.data.get_local_rank() if self.data.ndim == 1 else self.rank
        )
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=maker)
        for _ in range(2):
            optimizer.zero_grad()
            x = tokens[:, :-1]
            if self.stage == 1:
                x = self.received().requires_grad_()
            out = model(x)
            if self.stage == 0:
                dist.send(out.detach().contiguous(), self.peer())
                out.backward(self.received())
            else:
                loss = nn.functional.cross_entropy(out.float().flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
                found.append(float(loss.detach()).hex())
            if self.stage == 1:
                dist.send(x.grad.contiguous(), self.peer())
            optimizer.step()
        total = hashlib.sha256()
        for parameter in model.parameters():
            total.update(raw(parameter.to_local()).numpy().tobytes())
        return [*found, total.hexdigest()]

    def received(self) -> torch.Tensor:
        """What the other stage sends: activations, or their gradients."""
        length = LENGTH // self.tp if self.tp and self.names.kept else LENGTH
        got = torch.empty(2, length, WIDTH, dtype=self.dtype)
        dist.recv(got, self.peer())
        return got

    def peer(self) -> int:
        half = dist.get_world_size() // 2
        return (self.rank + half) % (2 * half)

    def known(self) -> Tensors:
        """Every tensor that this stage has to have, by its name in the checkpoint."""
        moments: State = {"state": self.moments}
        if self.flat:
            moments = {f"state.{n}.{k}": t for n, row in self.moments.items() for k, t in row.items()}
        return tensors(self.tree(self.weights, moments, STEP))

    def compare(self, way: str, tree: State) -> None:
        """Every tensor of the tree with what is known, and whether every known one is there."""
        known, found = self.known(), tensors(tree)
        for name, tensor in found.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if full.dtype != known[name].dtype or not torch.equal(raw(full), raw(known[name])):
                self.wrong.append(f"rank {self.rank}, {way}: {name} differs")
        self.wrong += [f"rank {self.rank}, {way}: {n} is not loaded" for n in known if n not in found]


def tensors(tree: State) -> Tensors:
    return {n: t for n, t in flattened(tree).items() if isinstance(t, torch.Tensor)}


def part(tensor: torch.Tensor) -> list[list[int]]:
    """[offset, shape] of what this rank has, as torch tells it."""
    if not isinstance(tensor, DTensor):
        return [[0] * tensor.ndim, list(tensor.shape)]
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return [list(offset), list(shape)]


def put_value(tree: Any, name: str, value: Any) -> None:
    """Sets a leaf by its flattened name; keys may have dots themselves."""
    if isinstance(tree, list):
        first, _, rest = name.partition(".")
        put_value(tree[int(first)], rest, value)
        return
    if name in tree:
        tree[name] = value
        return
    key = next(k for k in tree if name.startswith(f"{k}."))
    put_value(tree[key], name[len(key) + 1 :], value)


def rank_main(rank: int, world: int, spec: State, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=world)
    axes = [(a, n) for a, n in spec["axes"]]
    mesh = init_device_mesh("cpu", tuple(n for _, n in axes), mesh_dim_names=tuple(a for a, _ in axes))
    rows = []
    for case in spec["cases"]:
        job = Job(axes, mesh, case)
        if "written" in case:
            for way in WAYS:
                job.load(way)
        else:
            job.save()
        results: list[Any] = [None] * world
        dist.all_gather_object(results, {"wrong": job.wrong, "losses": job.losses, "parts": job.parts})
        rows.append(results)
    if rank == 0:
        Path(spec["out"]).write_text(json.dumps(rows))
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


if __name__ == "__main__":
    import torch._dynamo  # once, before the ranks are forked: FSDP imports it

    given = json.loads(Path(sys.argv[1]).read_text())
    size = 1
    for _, n in given["axes"]:
        size *= n
    with tempfile.TemporaryDirectory() as meet:
        start_ranks(rank_main, (size, given, meet), size)
