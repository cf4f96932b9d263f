"""A job of two gloo ranks that shards models of the hub with FSDP2, and saves them by DCP.

Run as a program: ``fsdp2_models_job.py FOLDER``. Every ``FOLDER/<name>/hub`` is opened, and
``FOLDER/<name>/source`` is what the ranks save of its `state_dict()`.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import start_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS = 2


def saved(hub: Path, mesh: Any, folder: Path) -> None:
    """One model: its layers are sharded each, and then what is left."""
    import transformers

    library: Any = transformers
    (name,) = library.AutoConfig.from_pretrained(hub).architectures
    model = getattr(library, name).from_pretrained(hub)
    for module in [*model.modules()]:
        if type(module).__name__ in (model._no_split_modules or ()):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    dcp.save({"model": state, "step": torch.tensor(3)}, checkpoint_id=folder)


def rank_main(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for hub in sorted(folder.glob("*/hub")):
        saved(hub, mesh, hub.parent / "source")
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


if __name__ == "__main__":
    start_ranks(rank_main, (Path(sys.argv[1]).resolve(),), RANKS)
