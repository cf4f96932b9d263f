"""One rank of a job under Accelerate's FSDP2: trains and saves, or resumes by `load_state`, and trains on.

    python accelerate_job.py save FOLDER            (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set)
    python accelerate_job.py resume FOLDER [FOLDER ...]

``resume`` prints a line of JSON: by FOLDER, a digest of every tensor of model and AdamW after `load_state`,
the scheduler's state, the losses of two more steps, and the digests behind them.

Accelerate enables FSDP on accelerators alone: on the CPU this job sets the type of its state.
Accelerate's own functions prepare, shard, save and load.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from decoders import FAMILIES, LENGTH, VOCABULARY, Decoder
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

warnings.filterwarnings("ignore")
NAMES = FAMILIES["hf"]
STEPS, MORE = 3, 2


def prepared() -> tuple[Accelerator, Any, Any, Any]:
    """Accelerator, and the model, optimizer and scheduler that it prepared."""
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Layer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    for state in (accelerator.state, PartialState()):  # each new AcceleratorState takes over the latter's
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = Decoder(NAMES)
    maker = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=maker) * 0.2 + 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.8, 0.9), foreach=False)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare(
        torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda n: 1 / (1 + n))
    )
    return accelerator, model, optimizer, scheduler


def train(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, steps: int) -> list[str]:
    maker = torch.Generator().manual_seed(100 + dist.get_rank())
    found = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=maker)
        optimizer.zero_grad()
        out = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        found.append(float(loss.detach()).hex())
    return found


def digest(tensor: torch.Tensor) -> str:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    raw = full.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{full.dtype} {tuple(full.shape)}".encode() + raw).hexdigest()


def digests(model: Any, optimizer: Any) -> dict[str, str]:
    weights, state = get_state_dict(model, optimizer.optimizer)
    found = {n: digest(t) for n, t in weights.items()}
    for name, row in state["state"].items():
        found |= {f"{name}::{k}": digest(t) for k, t in row.items()}
    return found


def main(verb: str, *folders: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for folder in folders:
        accelerator, model, optimizer, scheduler = prepared()
        assert accelerator.is_fsdp2
        assert any(isinstance(p, DTensor) for p in model.parameters())
        if verb == "save":
            train(accelerator, model, optimizer, scheduler, STEPS)
            accelerator.save_state(folder, safe_serialization=False)
            results[folder] = {"tensors": digests(model, optimizer)}
            continue
        accelerator.load_state(folder)
        tensors, schedule = digests(model, optimizer), repr(scheduler.scheduler.state_dict())
        losses = train(accelerator, model, optimizer, scheduler, MORE)
        after = digests(model, optimizer)
        results[folder] = {"tensors": tensors, "schedule": schedule, "losses": losses, "after": after}
    print("found: " + json.dumps(results), flush=True)
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


if __name__ == "__main__":
    main(*sys.argv[1:])
