"""Load a checkpoint into the live modules of two gloo ranks, as a training job does: with the wheel alone.

    python plain_load_job.py CHECKPOINT

Prints the rows that each rank has, in the order of the ranks.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

import ckptcore

RANKS = 2


def rank_main(rank: int, store: str, source: str) -> None:
    """Be one rank."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    state: dict[str, DTensor] = {"layers.0.weight": zeros(2, 3, device_mesh=mesh, placements=[Shard(0)])}
    ckptcore.load_into(ckptcore.open(source), state)
    mine = state["layers.0.weight"].to_local()
    gathered = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(gathered, mine)
    if rank == 0:
        for part in gathered:
            print(part.flatten().tolist(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (f"{folder}/store", sys.argv[1]), RANKS)
