"""A training job in small that saves with torch.save on every rank, in every way that jobs do.

Run as a program: ``ranks_job.py FOLDER [--ranks N] [--seed S]``. Forks N gloo ranks; every case of
`CASES` leaves ``FOLDER/<case>/ckpt`` and, by the first rank, ``FOLDER/<case>/truth.pt``: the whole
tensors under the names that they must be read by.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from forked import start_ranks
from fresh_job import random_state
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

Truth = dict[str, torch.Tensor]
FULL = StateDictOptions(full_state_dict=True)


class Model(torch.nn.Module):
    """Uneven on any number of ranks, with a tied weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.up = torch.nn.Linear(6, 9)
        self.down = torch.nn.Linear(9, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.arange(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.embed(x)))) * self.scale


def trained(shard: Callable[[torch.nn.Module], torch.nn.Module]) -> tuple[Any, Any]:
    torch.manual_seed(7)
    model = shard(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.arange(4) + dist.get_rank()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def truth_of(model: Any, optimizer: Any) -> Truth:
    weights = get_model_state_dict(model, options=FULL)
    states = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
    found = {f"model.{k}": v for k, v in weights.items()}
    return found | {f"optim.state.{k}.{n}": v for k, row in states.items() for n, v in row.items()}


def verl_files(folder: Path, model: Any, optimizer: Any) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = folder / "global_step_3" / "actor"
    folder.mkdir(parents=True, exist_ok=True)
    extra = {"rng": {"cpu": torch.full((64,), rank, dtype=torch.uint8), "random": (3, rank)}, "epoch": 2}
    for kind, state in (
        ("model", model.state_dict()),
        ("optim", optimizer.state_dict()),
        ("extra_state", extra),
    ):
        torch.save(state, folder / f"{kind}_world_size_{world}_rank_{rank}.pt")


def fsdp2(folder: Path, rng: Random) -> Truth:
    model, optimizer = trained(
        lambda m: fully_shard(m, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    )
    verl_files(folder, model, optimizer)
    return truth_of(model, optimizer)


def hsdp(folder: Path, rng: Random) -> Truth:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("ddp", "fsdp"))
    model, optimizer = trained(lambda m: fully_shard(m, mesh=mesh))
    verl_files(folder, model, optimizer)
    return truth_of(model, optimizer)


def fsdp2_tp(folder: Path, rng: Random) -> Truth:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))

    def shard(model: Any) -> Any:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])

    torch.manual_seed(7)
    full = {k: v.clone() for k, v in Model().state_dict().items()}
    torch.manual_seed(7)
    model = shard(Model())
    torch.save(model.state_dict(), folder / f"model-rank-{dist.get_rank()}.pth")
    return full


def fsdp1(**options: Any) -> tuple[Any, Any, Truth]:
    """The sharded state dicts of model and optimizer, and the whole tensors, gathered by torch."""
    model, optimizer = trained(
        lambda m: FSDP1(m, device_id=torch.device("cpu"), use_orig_params=True, **options)
    )
    with FSDP1.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        weights, states = model.state_dict(), FSDP1.optim_state_dict(model, optimizer)
    truth = {f"model.{k}": gathered(v) for k, v in weights.items()}
    truth |= {
        f"optim.state.{k}.{n}": gathered(v) for k, row in states["state"].items() for n, v in row.items()
    }
    return weights, states, truth


def gathered(value: Any) -> torch.Tensor:
    """The whole tensor; its elements on the first rank alone."""
    if isinstance(value, ShardedTensor):
        full = torch.empty(value.size(), dtype=value.dtype)
        value.gather(0, full if dist.get_rank() == 0 else None)
        return full
    return value.full_tensor() if isinstance(value, DTensor) else value


def fsdp1_sharded(folder: Path, rng: Random) -> Truth:
    """OLMo's torch_legacy: one pickle a rank, ShardedTensors in two dicts."""
    weights, states, truth = fsdp1()
    state = {"model": weights, "optim": states, "epoch": 3, "betas": (0.9, 0.95)}
    torch.save(state, folder / f"rank{dist.get_rank()}.pt")
    return truth


def fsdp1_mesh(folder: Path, rng: Random) -> Truth:
    weights, states, truth = fsdp1(device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.save(weights, folder / f"model_rank_{dist.get_rank()}.pt")
    torch.save(states, folder / f"optim_rank_{dist.get_rank()}.pt")
    return truth


def fsdp1_local(folder: Path, rng: Random) -> Truth:
    model, _ = trained(lambda m: FSDP1(m, device_id=torch.device("cpu"), use_orig_params=False))
    with FSDP1.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        torch.save(model.state_dict(), folder / f"model_rank_{dist.get_rank()}.pt")
    return {}


def full(folder: Path, rng: Random) -> Truth:
    """Every rank saves the whole model, and its own random state."""
    torch.manual_seed(7)
    model = Model().state_dict()
    own = torch.full((5056,), dist.get_rank(), dtype=torch.uint8)
    torch.save({"model": model, "rng": own, "step": 4}, folder / f"ckpt_rank_{dist.get_rank():05d}.pt")
    return {f"model.{k}": v for k, v in model.items()}


def nodcp(folder: Path, rng: Random) -> Truth:
    """Accelerate with ``use_dcp=False``."""
    model, optimizer = trained(
        lambda m: fully_shard(m, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    )
    rank = dist.get_rank()
    torch.save(get_model_state_dict(model), folder / f"pytorch_model_fsdp_0_rank{rank}.bin")
    torch.save(get_optimizer_state_dict(model, optimizer), folder / f"optimizer_0_rank{rank}.bin")
    torch.save(
        {"seed": torch.full((9,), rank, dtype=torch.uint8), "step": 2}, folder / f"random_states_{rank}.pkl"
    )
    if rank == 0:
        torch.save({"last_epoch": 2, "base_lrs": [0.1]}, folder / "scheduler.bin")
    return {k.replace("optim.", "optimizer.", 1): v for k, v in truth_of(model, optimizer).items()}


def stages(folder: Path, rng: Random) -> Truth:
    """Two stages of a pipeline: each half of the ranks holds tensors of its own."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    full = {f"layers.{n}.w": torch.arange(15.0).reshape(5, 3) + 100 * n for n in range(2)}
    mine = {
        k: DTensor.from_local(
            piece(v, mesh["dp"]), mesh["dp"], [shard_of(0)], run_check=False, shape=v.shape, stride=v.stride()
        )
        for k, v in full.items()
        if k.startswith(f"layers.{stage}.")
    }
    torch.save(mine, folder / f"model_rank{dist.get_rank()}.pt")
    return full


def piece(full_tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
    parts = torch.chunk(full_tensor, mesh.size())
    at = mesh.get_local_rank()
    return parts[at].clone() if at < len(parts) else full_tensor[:0].clone()


def shard_of(dim: int) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(dim)


def random(folder: Path, rng: Random) -> Truth:
    world = dist.get_world_size()
    meshes = {"one": init_device_mesh("cpu", (world,))}
    if world % 2 == 0:
        meshes["two"] = init_device_mesh("cpu", (world // 2, 2))
    state, truth, _ = random_state(rng, rng.randrange(1 << 20), meshes, safetensors=False)
    torch.save(state, folder / f"state.rank_{dist.get_rank()}.pt")
    return truth


ANY: dict[str, Callable[[Path, Random], Truth]] = {
    "fsdp2": fsdp2,
    "fsdp1_sharded": fsdp1_sharded,
    "fsdp1_mesh": fsdp1_mesh,
    "fsdp1_local": fsdp1_local,
    "full": full,
    "nodcp": nodcp,
    "random0": random,
    "random1": random,
    "random2": random,
}
EVEN: dict[str, Callable[[Path, Random], Truth]] = {"hsdp": hsdp, "fsdp2_tp": fsdp2_tp, "stages": stages}


def cases(ranks: int) -> dict[str, Callable[[Path, Random], Truth]]:
    """The cases of a job of so many ranks."""
    return ANY | (EVEN if ranks >= 4 and ranks % 2 == 0 else {})


def rank_main(rank: int, world: int, seed: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    for name, save in cases(world).items():
        here = folder / name
        (here / "ckpt").mkdir(parents=True, exist_ok=True)
        dist.barrier()
        truth = save(here / "ckpt", Random(f"{seed}/{name}"))
        if rank == 0:
            torch.save(truth, here / "truth.pt")
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    start_ranks(rank_main, (given.ranks, given.seed, given.folder.resolve()), given.ranks)


if __name__ == "__main__":
    main()
