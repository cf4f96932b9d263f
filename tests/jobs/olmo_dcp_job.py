"""One rank of a job in which OLMo-core loads a step folder, or its DCP folder alone, into DTensors.

python olmo_dcp_job.py STEP SAMPLE [OUT]    (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment)

OUT: where rank 0 saves the trainer's state that `Checkpointer.load` (3.0) returns.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from olmo_core.distributed.checkpoint import RemoteFileSystemReader, get_checkpoint_metadata
from olmo_core.train.checkpoint import Checkpointer
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros


class NoModule:
    """A train module that asks for nothing."""

    def state_dict_to_load(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def main() -> None:
    step, root = sys.argv[1:3]
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    bare = os.path.exists(f"{step}/.metadata")
    assert bare or Checkpointer.dir_is_checkpoint(step), "OLMo-core does not take it for a checkpoint"
    truth = {f"model.{k}": v for k, v in load_file(f"{root}/expected.safetensors").items()}
    for key, value in load_file(f"{root}/expected_optim.safetensors").items():
        truth["optim.state." + key.replace("::", ".")] = value
    inside = step if bare else f"{step}/model_and_optim"
    missing = truth.keys() - get_checkpoint_metadata(inside).state_dict_metadata.keys()
    assert not missing, sorted(missing)[:3]
    state: dict[str, torch.Tensor] = {}
    for name, value in truth.items():
        rows = {"device_mesh": mesh, "placements": [Shard(0)]}
        state[name] = (
            zeros(value.shape, dtype=value.dtype, **rows) if value.dim() else torch.zeros_like(value)
        )
    # What OLMo-core's own functions call, which have other names in each release.
    dcp.load(state, storage_reader=RemoteFileSystemReader(inside))
    equal = 0
    for name, value in truth.items():
        found = state[name]
        full = found.full_tensor() if hasattr(found, "full_tensor") else found
        assert full.dtype == value.dtype, name
        assert torch.equal(full, value), name
        equal += 1
    if sys.argv[3:]:
        with tempfile.TemporaryDirectory() as work:
            found = Checkpointer(work_dir=Path(work)).load(step, NoModule(), load_trainer_state=True)
        if dist.get_rank() == 0:
            torch.save(found, sys.argv[3])
    print("equal:", equal, flush=True)
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


if __name__ == "__main__":
    main()
