"""A job that loads: every rank gets its own part of every tensor, in place.

Run as a program: ``load_job.py SEED CHECKPOINT TRUTH --ranks N``. Forks N gloo ranks; each builds a
state dict with random placements, filled with a pattern, lets `ckptcore.load_into` fill it, and
compares its local parts with the truth, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from forked import start_ranks
from fresh_job import local_index, picked
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckptcore


def pattern(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Not what the checkpoint holds."""
    raw = torch.full((shape.numel() * dtype.itemsize,), 1, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if shape.numel() else torch.empty(shape, dtype=dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)


def rank_main(rank: int, world: int, seed: int, source: Path, truth: Path, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=world)
    rng = Random(seed)
    one = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    two = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("o", "i")) if world % 2 == 0 else None
    expected = torch.load(truth, weights_only=False)
    state: dict[str, Any] = {}
    wanted: dict[str, torch.Tensor] = {}
    for name, full in expected.items():
        if not isinstance(full, torch.Tensor):
            continue
        kind = rng.choice(["plain", "one", "two", "strided", "replicate"])
        mesh, places = one, (Replicate(),)
        if full.dim() and kind == "one":
            places = (Shard(rng.randrange(full.dim())),)
        elif full.dim() and two is not None and kind == "two":
            mesh, places = two, (Shard(rng.randrange(full.dim())), Shard(rng.randrange(full.dim())))
        elif full.dim() and two is not None and kind == "strided":
            mesh, places = two, (_StridedShard(0, split_factor=2), Shard(0))
        index = torch.arange(full.numel()).reshape(full.shape)
        mine = picked(full, local_index(index, mesh, places))
        wanted[name] = mine
        local = pattern(mine.shape, full.dtype)
        if kind == "plain":
            if full.dim() == 2 and full.numel():
                local = local.t().contiguous().t()  # a parameter need not be row-major
            wanted[name], state[name] = (
                full,
                local if mine.shape == full.shape else pattern(full.shape, full.dtype),
            )
            continue
        stride = torch.empty(full.shape, device="meta").stride()
        state[name] = DTensor.from_local(
            local, mesh, places, run_check=False, shape=full.shape, stride=stride
        )
    before = {n: (t.to_local() if isinstance(t, DTensor) else t).data_ptr() for n, t in state.items()}
    ckptcore.load_into(ckptcore.open(str(source)), state)
    wrong = []
    for name, mine in wanted.items():
        tensor = state[name]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not torch.equal(raw(local), raw(mine)):
            how = getattr(tensor, "placements", "plain")
            wrong.append(f"rank {rank}: {name} {mine.dtype} {tuple(expected[name].shape)} {how}")
        if local.data_ptr() != before[name]:
            wrong.append(f"rank {rank}: {name} was replaced, not filled in place")
    if wrong:
        raise AssertionError("\n".join(wrong))
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("source", type=Path)
    parser.add_argument("truth", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start_ranks(rank_main, (given.ranks, given.seed, given.source, given.truth, folder), given.ranks)


if __name__ == "__main__":
    main()
