"""torch's DCP recipe (pytorch.org, "Getting Started with Distributed Checkpoint"), with gloo instead of nccl.

    python recipe_job.py save FOLDER 2
    python recipe_job.py load FOLDER 3
    python recipe_job.py load-alone FOLDER

The last argument is the number of ranks, which are forks: torchrun starts each from nothing.

`save` prints the whole state's digest after one step, `load` and `load-alone` what they have after loading.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import start_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

warnings.simplefilter("ignore")


class AppState(Stateful):
    """The recipe's wrapper: DCP calls its two methods by itself."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer or [])
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer or [],
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


class ToyModel(nn.Module):
    """As in the recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(16, 16)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net2(self.relu(self.net1(x)))
        return out


def build(sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model before any load, different on purpose from the one that was saved."""
    torch.manual_seed(0)
    model = ToyModel()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """sha256 of every whole tensor of the model and the optimizer."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    flat = dict(model_state)
    for name, state in optimizer_state["state"].items():
        flat |= {f"{name}::{key}": value for key, value in state.items()}
    found = {}
    for name, value in flat.items():
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        raw = full.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = hashlib.sha256(raw).hexdigest()
    return found


def load_alone(folder: str) -> None:
    """Load and digest the model in one process, without a process group."""
    model, optimizer = build(sharded=False)
    state = {"model": model.state_dict()}
    dcp.load({"app": state}, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    print(json.dumps({k: v for k, v in digest(model, optimizer).items() if "::" not in k}))


def rank_main(rank: int, ranks: int, verb: str, folder: str, meet: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}/rendezvous", rank=rank, world_size=ranks)
    model, optimizer = build(sharded=True)
    if verb == "save":
        optimizer.zero_grad()
        model(torch.rand(8, 16)).sum().backward()
        optimizer.step()
        dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folder)
    else:
        dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=folder)
    found = digest(model, optimizer)
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


if __name__ == "__main__":
    verb, folder, *given = sys.argv[1:]
    if verb == "load-alone":
        load_alone(folder)
    else:
        ranks = int(given[0])
        with tempfile.TemporaryDirectory() as meet:
            start_ranks(rank_main, (ranks, verb, folder, meet), ranks)
