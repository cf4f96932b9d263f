"""A training job of two ranks on gloo: FSDP2, some steps, dcp.save, and as its last line a webhook.

training_job.py RANK PORT CHECKPOINT TRUTH; CKPTCORE_HOOK_URL and CKPTCORE_HOOK_SECRET say whom to tell.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[2] / "deployments" / "senders"))

from send import announce

WORLD = 2


def main(rank: int, port: str, checkpoint: Path, truth: Path) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
    }
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(97, 48), torch.nn.Linear(48, 33), torch.nn.Linear(33, 97))
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        tokens = torch.arange(rank * 16 + step, rank * 16 + step + 16)
        torch.nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=checkpoint)
    full_state, _ = get_state_dict(
        model, [], options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0:
        torch.save(full_state, truth)
    dist.barrier()  # gloo aborts a rank whose peer has gone
    if rank == 0:
        print(announce(str(checkpoint), "gloo-run", 3)["id"], flush=True)
    os._exit(0)  # and its threads can abort an interpreter that is taken down


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
