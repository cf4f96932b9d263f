"""A job that resumes: every rank gets from `load_into` what `torch.distributed.checkpoint.load` gives it.

Run as a program: ``app_job.py SEED FOLDER --ranks N``. Forks N gloo ranks, which save a sharded model, its
optimizer, ShardedTensors and plain values, and load them twice into states of another seed and another mesh:
by torch, and by ckptcore. Both must be equal, bit for bit, and ckptcore's tensors where they were.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import start_ranks
from fresh_job import several_shards
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptcore
from ckptcore.errors import NameMismatch, UsageError


class App(Stateful):
    """A model of uneven shapes on a mesh, and an optimizer that has made a step."""

    def __init__(self, seed: int, mesh: DeviceMesh) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1 / seed)
        self.model(torch.ones(2, 5)).sum().backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def state(seed: int, mesh: DeviceMesh) -> dict[str, Any]:
    """What every rank has; seed: of the values and of where ShardedTensors are cut."""

    def t(*shape: int) -> torch.Tensor:
        return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1000 * seed

    flat = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "app": App(seed, mesh),
        "step": seed,
        "history": [seed, {"loss": seed / 3}],
        "tensors": {
            "rows": distribute_tensor(t(5, 3), flat, [Shard(0)]),
            "columns": distribute_tensor(t(5, 3), flat, [Shard(1)]),
            "same": distribute_tensor(t(4), flat, [Replicate()]),
            "few": distribute_tensor(t(1, 2), flat, [Shard(0)]),
            "scalar": t(),
            "shards": several_shards(t(11, 2), Random(seed)),
        },
    }


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Stateful):
        value = value.state_dict()
    if isinstance(value, dict):
        return {k: v for key, x in value.items() for k, v in leaves(x, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {k: v for n, x in enumerate(value) for k, v in leaves(x, f"{path}.{n}").items()}
    if isinstance(value, ShardedTensor):
        return {f"{path}.{n}": s.tensor for n, s in enumerate(value.local_shards())}
    return {path: value.to_local() if isinstance(value, DTensor) else value}


def require_equal(ours: Any, theirs: Any) -> None:
    a, b = leaves(ours), leaves(theirs)
    assert a.keys() == b.keys()
    for name, x in a.items():
        equal = torch.equal(x, b[name]) if isinstance(x, torch.Tensor) else x == b[name]
        if not equal:
            raise AssertionError(f"rank {dist.get_rank()}: {name} is {x}, by torch {b[name]}")


def require_refused(manifest: ckptcore.Manifest, mesh: DeviceMesh) -> None:
    """A partial sum, and a shard that contradicts its metadata, after a tensor that could be filled."""
    partial = DTensor.from_local(torch.zeros(4), mesh, [torch.distributed.tensor.Partial()], run_check=False)
    torn = several_shards(torch.zeros(11, 2), Random(1))
    torn.local_shards()[0].tensor = torch.zeros(1, 1)
    for odd, error in ((("same", partial), UsageError), (("shards", torn), NameMismatch)):
        first = torch.zeros(())
        live = {"tensors": {"scalar": first, odd[0]: odd[1]}}
        with pytest.raises(error, match=f"tensors.{odd[0]}"):
            ckptcore.load_into(manifest, live)
        assert first.item() == 0


def require_materialised(manifest: ckptcore.Manifest, mesh: DeviceMesh, folder: Path) -> None:
    """Meta tensors, plain and sharded, in a dict that can take others."""

    def meta() -> dict[str, Any]:
        rows = distribute_tensor(torch.empty(5, 3), mesh, [Shard(0)]).to("meta")
        return {"tensors": {"rows": rows, "scalar": torch.empty((), device="meta")}}

    ours, theirs = meta(), meta()
    ckptcore.load_into(manifest, ours)
    dcp.load(theirs, checkpoint_id=folder)
    require_equal(ours, theirs)
    assert ours["tensors"]["rows"].device == theirs["tensors"]["rows"].device
    assert ours["tensors"]["rows"].placements == theirs["tensors"]["rows"].placements


def rank_main(rank: int, world: int, seed: int, folder: Path, meeting: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/r", rank=rank, world_size=world)
    one = init_device_mesh("cpu", (world,))
    two = (
        init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("outer", "inner")) if world % 2 == 0 else one
    )
    dcp.save(state(seed, two), checkpoint_id=folder)
    manifest = ckptcore.open(str(folder))
    ours, theirs = state(seed + 1, one), state(seed + 1, one)
    before = {n: t.data_ptr() for n, t in leaves(ours).items() if isinstance(t, torch.Tensor)}
    unused = ckptcore.load_into(manifest, ours)
    assert unused == [], unused
    dcp.load(theirs, checkpoint_id=folder)
    require_equal(ours, theirs)
    after = {n: t.data_ptr() for n, t in leaves(ours).items() if isinstance(t, torch.Tensor)}
    assert before == after
    require_refused(manifest, one)
    require_materialised(manifest, one, folder)
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as meeting:
        start_ranks(rank_main, (given.ranks, given.seed, given.folder, meeting), given.ranks)


if __name__ == "__main__":
    main()
