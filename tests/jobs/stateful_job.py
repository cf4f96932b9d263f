"""A training job with a schedule of learning rates and torchdata's loader: saves, or resumes by DCP.

    python stateful_job.py SPEC

SPEC: a JSON file {axes: [[name, size], ...], out, original, written}. Forks one gloo rank per place of the
mesh, with FSDP2 (HSDP with ``dp_replicate``), tensor and pipeline parallelism. Without ``written`` the job
makes three steps, and saves model, AdamW, scheduler and the loaders of its data-parallel ranks to
``original``. With it, it resumes twice in new processes' state: from ``original`` and from ``written``, a
folder made of it for this mesh, asking for all keys that both have. OUT gets of each rank, per way: a digest
of each tensor that was loaded, by its name, the values, the losses of two more steps, and a digest of the
weights behind them. Loaders are asked for only where ``loaders`` says so.

The keys are torchtitan's: parameters at the top, ``optimizer``, ``lr_scheduler``, ``dataloader.dp_rank_N``.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from decoders import FAMILIES, LENGTH, VOCABULARY, WIDTH, Decoder, plan_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torchdata.stateful_dataloader import StatefulDataLoader

State = dict[str, Any]
NAMES = FAMILIES["torchtitan"]
WAYS = ("original", "written")
STEPS, MORE = 3, 2
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Texts(torch.utils.data.IterableDataset[torch.Tensor]):
    """Endless tokens of one data-parallel rank; its state is the number of the next sample."""

    def __init__(self, rank: int) -> None:
        self.rank, self.next = rank, 0

    def __iter__(self) -> Any:
        while True:
            maker = torch.Generator().manual_seed(1000 * self.rank + self.next)
            self.next += 1
            yield torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=maker)

    def state_dict(self) -> State:
        return {"next": self.next}

    def load_state_dict(self, state: State) -> None:
        self.next = state["next"]


class Job:
    def __init__(self, axes: list[tuple[str, int]], mesh: DeviceMesh, loaders: bool) -> None:
        sizes = dict(axes)
        self.tp, self.pp, self.loaders = "tp" in sizes, "pp" in sizes, loaders
        self.data = mesh[tuple(a for a in ("dp_replicate", "fsdp") if a in sizes)]
        self.stage = mesh.get_local_rank("pp") if self.pp else None
        self.degree = self.data.size()
        coordinate = self.data.get_coordinate()
        self.place = 0
        for at, name in zip(coordinate, self.data.mesh_dim_names, strict=True):
            self.place = self.place * sizes[name] + at
        self.model = Decoder(NAMES, self.stage)
        maker = torch.Generator().manual_seed(5)
        for parameter in self.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=maker) * 0.2 + 0.1
        if self.tp:
            parallelize_module(self.model, mesh["tp"], plan_of(NAMES))
        for layer in self.model.blocks():
            fully_shard(layer, mesh=self.data)
        fully_shard(self.model, mesh=self.data)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.8, 0.9), foreach=False)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))
        self.loader = StatefulDataLoader(Texts(self.place), batch_size=2, num_workers=0)

    def tree(self) -> State:
        """What torchtitan saves; a stage has the parameters of its own."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=_FLAT)
        found = {**model, "optimizer": optimizer, "lr_scheduler": self.scheduler.state_dict()}
        if self.loaders:
            state = pickle.dumps(self.loader.state_dict())
            found["dataloader"] = {f"dp_rank_{self.place}": state, "world_size": self.degree}
        return found

    def load(self, folder: str) -> tuple[State, State]:
        """Load everything, strictly; return the digests of the tensors, and the values."""
        tree = self.tree()
        dcp.load(tree, checkpoint_id=folder)
        tensors, values = flattened(tree)
        names = set(self.model.state_dict())
        model = {n: tree[n] for n in names}
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=model,
            optim_state_dict=tree["optimizer"],
            options=_FLAT,
        )
        self.scheduler.load_state_dict(tree["lr_scheduler"])
        if self.loaders:
            self.loader.load_state_dict(pickle.loads(tree["dataloader"][f"dp_rank_{self.place}"]))
        return tensors, values

    def train(self, steps: int) -> list[str]:
        """Losses of steps; the last stage alone has losses."""
        found, batches = [], iter(self.loader)
        for _ in range(steps):
            tokens = next(batches)
            self.optimizer.zero_grad()
            x = tokens[:, :-1]
            if self.stage == 1:
                x = self.received().requires_grad_()
            out = self.model(x)
            if self.stage == 0:
                dist.send(out.detach().contiguous(), self.peer())
                out.backward(self.received())
            else:
                loss = nn.functional.cross_entropy(out.float().flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
                found.append(float(loss.detach()).hex())
            if self.stage == 1:
                dist.send(x.grad.contiguous(), self.peer())
            self.optimizer.step()
            self.scheduler.step()
        return found

    def received(self) -> torch.Tensor:
        got = torch.empty(2, LENGTH, WIDTH)
        dist.recv(got, self.peer())
        return got

    def peer(self) -> int:
        half = dist.get_world_size() // 2
        return (dist.get_rank() + half) % (2 * half)


def flattened(tree: State) -> tuple[State, State]:
    """(digest of each tensor by name, the other values by name)."""
    tensors, values = dict[str, str](), dict[str, Any]()

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{name}.{key}" if name else str(key))
        elif isinstance(value, (list, tuple)):
            for n, inner in enumerate(value):
                walk(inner, f"{name}.{n}")
        elif isinstance(value, torch.Tensor):
            full = value.full_tensor() if isinstance(value, DTensor) else value
            tensors[name] = digest(full)
        else:
            values[name] = repr(value)

    walk(tree, "")
    return tensors, values


def digest(*tensors: torch.Tensor) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        raw = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        total.update(raw.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def rank_main(rank: int, world: int, spec: State, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=world)
    axes = [(a, n) for a, n in spec["axes"]]
    mesh = init_device_mesh("cpu", tuple(n for _, n in axes), mesh_dim_names=tuple(a for a, _ in axes))
    found: State = {}
    if "written" in spec:
        for way in WAYS:
            job = Job(axes, mesh, spec["loaders"])
            tensors, values = job.load(spec[way])
            losses = job.train(MORE)
            parameters = (p.to_local() for p in job.model.parameters())
            found[way] = {
                "tensors": tensors,
                "values": values,
                "losses": losses,
                "after": digest(*parameters),
            }
    else:
        job = Job(axes, mesh, loaders=True)
        job.train(STEPS)
        tree = job.tree()
        found["tensors"], found["values"] = flattened(tree)
        dcp.save(tree, checkpoint_id=spec["original"])
    results: list[Any] = [None] * world
    dist.all_gather_object(results, found)
    if rank == 0:
        Path(spec["out"]).write_text(json.dumps(results))
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


if __name__ == "__main__":
    import torch._dynamo  # once, before the ranks are forked: FSDP imports it

    given = json.loads(Path(sys.argv[1]).read_text())
    size = 1
    for _, n in given["axes"]:
        size *= n
    with tempfile.TemporaryDirectory() as meet:
        torch.multiprocessing.start_processes(rank_main, (size, given, meet), size, start_method="fork")
