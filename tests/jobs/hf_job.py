"""A job in small that saves with torch's HuggingFaceStorageWriter, every rank its shards.

Run as a program: ``hf_job.py SEED FOLDER [--ranks N] [--cases N]``. Forks N gloo ranks, which write
``FOLDER/<case>/ckpt``; the first writes ``FOLDER/<case>/truth.pt``, whole tensors as they were before
they were sharded, and ``job.json``, what was decided.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import start_ranks
from fresh_job import DTYPES, NOT_IN_SAFETENSORS, random_tensor, sharded
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

# torch's consolidation fails for integers, and writes 0-d tensors as 0.0.
CONSOLIDATED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def placements(
    rng: Random, shape: tuple[int, ...], meshes: dict[str, DeviceMesh]
) -> tuple[str, tuple[Any, ...]]:
    """A mesh by name, and how a tensor is distributed over it."""
    dims, first = len(shape), shape[0] if shape else 0
    if not dims or rng.random() < 0.15:
        return "one", (Replicate(),)
    if "two" not in meshes or rng.random() < 0.5:
        return "one", (Shard(rng.randrange(dims)),)
    if rng.random() < 0.3 and (first % (2 * meshes["two"].size(0)) == 0 or meshes["two"].size() == 4):
        # With other meshes, uneven strided shards are another rule than `local_index`'s.
        return "two", (_StridedShard(0, split_factor=meshes["two"].size(1)), Shard(0))
    return "two", rng.choice(
        [(Shard(rng.randrange(dims)), Shard(rng.randrange(dims))), (Replicate(), Shard(rng.randrange(dims)))]
    )


def contiguous(value: DTensor) -> DTensor:
    """The writer refuses other strides."""
    return DTensor.from_local(
        value.to_local().contiguous(),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def write(rng: Random, seed: int, folder: Path, meshes: dict[str, DeviceMesh]) -> None:
    """One case: the same decisions on every rank."""
    consolidate = rng.random() < 0.3
    dtypes = CONSOLIDATED if consolidate else [d for d in DTYPES if d not in NOT_IN_SAFETENSORS]
    state: dict[str, Any] = {}
    truth: dict[str, torch.Tensor] = {}
    made: dict[str, str] = {}
    for number in range(rng.randint(3, 16)):
        name = f"layers.{number}.w"
        least = 1 if consolidate else 0
        shape = tuple(rng.choice([1, 2, 3, 5, 7, 16, 33]) for _ in range(rng.randint(least, 3)))
        truth[name] = random_tensor(name, rng.choice(dtypes), shape, seed)
        where, how = placements(rng, shape, meshes)
        plain = rng.random() < 0.1
        state[name] = truth[name] if plain else contiguous(sharded(truth[name], meshes[where], how, False))
        made[name] = f"{truth[name].dtype} {shape} {'plain' if plain else (where, how)}"
    files = rng.randint(1, min(3, len(state)))
    mapping = {n: 1 + i % files for i, n in enumerate(state)} if files > 1 else None
    writer = dcp.HuggingFaceStorageWriter(
        str(folder / "ckpt"),
        fqn_to_index_mapping=mapping,
        save_distributed=True,
        enable_consolidation=consolidate,
    )
    dcp.save(state, storage_writer=writer)
    if dist.get_rank() == 0:
        torch.save(truth, folder / "truth.pt")
        job = {"consolidate": consolidate, "files": files, "ranks": dist.get_world_size(), "keys": made}
        (folder / "job.json").write_text(json.dumps(job, indent=1))


def rank_main(rank: int, world: int, seed: int, cases: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    meshes = {"one": init_device_mesh("cpu", (world,), mesh_dim_names=("all",))}
    if world % 2 == 0:
        meshes["two"] = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("outer", "inner"))
    for case in range(cases):
        here = folder / f"{seed}-{case}"
        if rank == 0:
            here.mkdir()
        dist.barrier()
        write(Random(f"hf/{seed}/{case}"), seed * 1000 + case, here, meshes)
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cases", type=int, default=6)
    given = parser.parse_args()
    start_ranks(rank_main, (given.ranks, given.seed, given.cases, given.folder.resolve()), given.ranks)


if __name__ == "__main__":
    main()
