"""Load several formats into FSDP2 modules of two gloo ranks, by `torch.distributed.checkpoint`.

    python storage_reader_job.py SOURCE TRUTH NAMES ...

NAMES is the naming scheme of the truth, ``stored`` for the checkpoint's own. Every rank compares its shards
with the truth, a safetensors file, bit for bit; a name that the checkpoint lacks ends both ranks as torch
ends them, and fills nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import start_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import ckptcore

RANKS = 2


def module_of(truth: dict[str, torch.Tensor], mesh: DeviceMesh) -> nn.Module:
    """Return an FSDP2 module with a parameter, or a buffer, of each name; all are zero."""
    root = nn.Module()
    for name, full in truth.items():
        *path, last = name.split(".")
        inner = root
        for part in path:
            if part not in inner._modules:
                inner.add_module(part, nn.Module())
            inner = inner.get_submodule(part)
        zero = torch.zeros_like(full)
        if full.is_floating_point() and full.dim():
            inner.register_parameter(last, nn.Parameter(zero))
        else:
            inner.register_buffer(last, zero)
    fully_shard(root, mesh=mesh)
    return root


def rank_main(rank: int, folder: str, cases: list[tuple[str, ...]]) -> None:
    """Be one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for source, file, names in cases:
        truth = load_file(file)
        reader = ckptcore.StorageReader(source, names)
        offered = reader.read_metadata().state_dict_metadata
        # The truth of DeepSpeed has the prefix of its module.
        truth = {n if n in offered else n.removeprefix("module."): t for n, t in truth.items()}
        state = module_of(truth, mesh).state_dict()
        sharded = sum(isinstance(t, DTensor) for t in state.values())
        assert sharded, f"{source}: nothing is sharded"
        refused = {**state, "absent": torch.zeros(1)}
        with pytest.raises(CheckpointException, match=r"Missing key in .* state_dict: absent\.") as error:
            dcp.load(refused, storage_reader=reader)
        assert sorted(error.value.failures) == [*range(RANKS)]
        assert not any((t.to_local() if isinstance(t, DTensor) else t).any() for t in state.values())
        dcp.load(state, storage_reader=reader)
        for name, full in truth.items():
            live: torch.Tensor | DTensor = state[name]
            wanted = full
            if isinstance(live, DTensor):
                wanted = distribute_tensor(full, mesh, live.placements).to_local()
                live = live.to_local()
            same = torch.equal(live.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))
            assert live.dtype == wanted.dtype, f"{source}: {name} is {live.dtype}"
            assert same, f"rank {rank} of {source}: {name} differs"
        if rank == 0:
            print(f"{reader.checkpoint_id}: {len(truth)} tensors, {sharded} sharded", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads can abort an interpreter that is taken down


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as store:
        start_ranks(rank_main, (store, list(zip(*[iter(sys.argv[1:])] * 3, strict=True))), RANKS)
