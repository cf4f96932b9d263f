"""Train under FSDP2 on 2 gloo ranks, save, and announce the checkpoint with the fingerprint of the memory.

    python live_event_job.py FOLDER

It sends by `torch_exit.py`, which must be on the path, and prints the fingerprint.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch_exit
from forked import start_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import ckptcore

RANKS = 2


def rank_main(rank: int, folder: str, target: str) -> None:
    """Be one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=RANKS)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 9)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments}
    live = ckptcore.fingerprint_state(state)
    dcp.save(state, checkpoint_id=target)
    torch_exit.saved(target, 7, live.as_facts())
    if rank == 0:
        print(live.fingerprint, flush=True)
        torch_exit._run = "llama"
        torch_exit._announce()  # as at its exit
    dist.barrier()
    os._exit(0)  # gloo's threads can abort an interpreter that is taken down


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as store:
        start_ranks(rank_main, (store, sys.argv[1]), RANKS)
