"""Fingerprint the live state of 2 x 2 gloo ranks under HSDP and tensor parallelism, and save it.

    python fingerprint_job.py FOLDER

Prints the fingerprint as JSON. Every rank has the same one, over a mesh or not. One changed bit is named: in
all replicas by comparing fingerprints, in one of them by an error of every rank.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import start_ranks
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptcore
from ckptcore.errors import DamagedCheckpoint, UsageError

RANKS = 4


def flip(tensor: torch.Tensor) -> None:
    """Change one bit of the first element of this rank's memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.numel():
        local.detach().view(torch.uint8).view(-1)[0] ^= 1


def rank_main(rank: int, folder: str, target: str) -> None:
    """Be one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(9, 7, dtype=torch.bfloat16), nn.Linear(7, 3, dtype=torch.bfloat16))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 9, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    table, column = torch.randn(10, 6), torch.randn(9)
    mine = column[3 * rank : 3 * rank + 3]  # none on the last rank
    meta = [LocalShard.from_tensor_and_offsets(mine.clone(), [3 * rank], rank)] if len(mine) else []
    state: dict[str, Any] = {
        "model": weights,
        "optim": moments,
        "two": distribute_tensor(table, mesh, [Shard(0), Shard(1)]),
        "tp": distribute_tensor(table, mesh["shard"], [Shard(1)]),
        "equal": distribute_tensor(table, mesh, [Replicate(), Replicate()]),
        "fsdp1": init_from_local_shards(meta, 9),
        "plain": torch.arange(5),
        "step": 7,
    }
    fingerprints = ckptcore.fingerprint_state(state)
    assert ckptcore.fingerprint_state(state, mesh) == fingerprints
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, fingerprints)
    assert gathered == [fingerprints] * RANKS
    dcp.save(state, checkpoint_id=target)

    names = ("model.0.weight", "two", "tp", "plain")
    live = dict(zip(names, (weights["0.weight"], state["two"], state["tp"], state["plain"]), strict=True))
    for name, tensor in live.items():
        flip(tensor)  # in every replica
        assert ckptcore.fingerprint_state(state).differing(fingerprints) == (name,)
        flip(tensor)
        if name == "two":  # it has no replicas
            continue
        if rank == 3:
            flip(tensor)
        for ranks in (None, mesh):
            with pytest.raises(
                DamagedCheckpoint, match=f"cannot fingerprint {name}: ranks . and 3 "
            ) as error:
                ckptcore.fingerprint_state(state, ranks)
            assert [found.code for found in error.value.findings] == ["replica-mismatch"]
        if rank == 3:
            flip(tensor)
    assert ckptcore.fingerprint_state(state) == fingerprints

    half = {"tp": state["tp"], "two": state["two"]}
    with pytest.raises(UsageError, match="cannot fingerprint two: 2 parts"):
        ckptcore.fingerprint_state(half, mesh["shard"])
    with pytest.raises(UsageError, match="meta device"):  # of one rank, raised by all
        ckptcore.fingerprint_state({"plain": torch.empty(5, device="meta" if rank == 2 else "cpu")}, mesh)
    if rank == 0:
        print(json.dumps(fingerprints.as_dict()), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads can abort an interpreter that is taken down


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as store:
        start_ranks(rank_main, (store, sys.argv[1]), RANKS)
