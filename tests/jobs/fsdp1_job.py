"""FSDP1 jobs that save optimizers by name on every rank, and jobs that load what was made of their files.

Run as a program: ``fsdp1_job.py save FOLDER`` leaves ``FOLDER/<case>/ckpt`` with the ranks' files and
``FOLDER/<case>/truth.pt`` with the whole tensors; ``fsdp1_job.py load FOLDER`` loads every
``FOLDER/<case>/new`` as an FSDP2 job and as an FSDP1 job do, and compares every parameter's state by name.
All weights have one shape: only their names tell them apart.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import start_ranks
from ranks_job import gathered
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import OptimStateKeyType, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

RANKS = 2
CASES = {"orig": True, "flat": False}  # use_orig_params


class Layer(torch.nn.Module):
    """What FSDP1 wraps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 6)
        self.down = torch.nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Model(torch.nn.Module):
    """As language models are: the root keeps modules before and behind the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.arange(3))
        self.embed = torch.nn.Linear(6, 6, bias=False)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.norm = torch.nn.Linear(6, 6, bias=False)
        self.lm_head = torch.nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(self.norm(x))


def wrapped(use_orig_params: bool) -> Any:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    model = FSDP1(
        Model(),
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        device_mesh=mesh,
    )
    FSDP1.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model


def save(folder: Path) -> None:
    rank = dist.get_rank()
    for case, use_orig_params in CASES.items():
        torch.manual_seed(5)
        model = wrapped(use_orig_params)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(4, 6) + rank).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights, states = model.state_dict(), FSDP1.optim_state_dict(model, optimizer)
        own = optimizer.state_dict()  # flat
        truth = {name: gathered(value) for name, value in weights.items()}
        truth |= {
            f"{name}/{key}": gathered(value)
            for name, row in states["state"].items()
            for key, value in row.items()
        }
        here = folder / case
        for kind, state in (("ckpt", states), ("verl", own)):
            (here / kind).mkdir(parents=True, exist_ok=True)
            torch.save(weights, here / f"{kind}/model_world_size_{RANKS}_rank_{rank}.pt")
            torch.save(state, here / f"{kind}/optim_world_size_{RANKS}_rank_{rank}.pt")
        if rank == 0:
            torch.save(truth, here / "truth.pt")
            torch.save([g["params"] for g in states["param_groups"]], here / "groups.pt")


def load(folder: Path) -> None:
    for case, use_orig_params in CASES.items():
        truth = torch.load(folder / case / "truth.pt")
        where = [f"_world_size_{RANKS}_rank_{dist.get_rank()}.pt"]
        weights, states = (torch.load(folder / case / f"new/{k}{where[0]}") for k in ("model", "optim"))
        fsdp2(truth, weights, states)
        fsdp1(truth, weights, states, use_orig_params)


def fsdp2(truth: dict[str, Any], weights: Any, states: Any) -> None:
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",)))
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    count = 0
    for name, param in model.named_parameters():
        same(param, truth[name], name)
        for key, value in optimizer.state[param].items():
            same(value, truth[f"{name}/{key}"], f"{name}/{key}")
            count += 1
    assert count == 27, count


def fsdp1(truth: dict[str, Any], weights: Any, states: Any, use_orig_params: bool) -> None:
    model = wrapped(use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    model.load_state_dict(weights)
    named = FSDP1.rekey_optim_state_dict(states, OptimStateKeyType.PARAM_NAME, Model())
    optimizer.load_state_dict(FSDP1.optim_state_dict_to_load(model, optimizer, named))
    by_name = FSDP1.optim_state_dict(model, optimizer)["state"]
    found = {f"{name}/{key}": value for name, row in by_name.items() for key, value in row.items()}
    assert found.keys() | model.state_dict().keys() == truth.keys()
    for name, value in [*model.state_dict().items(), *found.items()]:
        same(value, truth[name], name)


def same(value: Any, wanted: torch.Tensor, name: str) -> None:
    full = value.full_tensor() if isinstance(value, DTensor) else value
    assert torch.equal(full, wanted), name


def rank_main(rank: int, folder: Path, verb: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{verb}", rank=rank, world_size=RANKS)
    {"save": save, "load": load}[verb](folder)
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


if __name__ == "__main__":
    start_ranks(rank_main, (Path(sys.argv[2]).resolve(), sys.argv[1]), RANKS)
