"""One rank of a job in which OLMo-core's own model and optimizer resume from step folders, and train on.

    python olmo_train_job.py CONFIG STEP STEP    (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set)

CONFIG: the config.json that OLMo-core's trainer wrote. For each STEP the job builds model and optimizer by
it, shards them with OLMo-core's own FSDP over all ranks, loads them with its `load_model_and_optim_state`,
and makes two steps. It prints one line of JSON: by STEP the digest of every tensor that was loaded, by name,
and the losses.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from olmo_core.distributed.checkpoint import load_model_and_optim_state
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim.config import OptimConfig
from torch.distributed.device_mesh import init_device_mesh

STEPS = 2


def digest(tensor: torch.Tensor) -> str:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    raw = full.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{full.dtype} {tuple(full.shape)}".encode() + raw).hexdigest()


def resumed(config: dict[str, Any], step: str, mesh: Any) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    model: Any = TransformerConfig.from_dict(config["model"]).build(init_device="cpu")
    model.apply_fsdp(dp_mesh=mesh)
    optim: Any = OptimConfig.from_dict(config["train_module"]["optim"]).build(model)
    load_model_and_optim_state(f"{step}/model_and_optim", model, optim, flatten_optimizer_state=True)
    found = {name: digest(p) for name, p in model.named_parameters()}
    names = {p: name for name, p in model.named_parameters()}
    for parameter, state in optim.state.items():
        found |= {f"{names[parameter]}::{k}": digest(v) for k, v in state.items() if torch.is_tensor(v)}
    maker = torch.Generator().manual_seed(7 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(2, config["model"]["vocab_size"], (2, 17), generator=maker)
        optim.zero_grad()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optim.step()
        losses.append(float(loss.detach()).hex())
    after = {name: digest(p) for name, p in model.named_parameters()}
    return {"loaded": found, "losses": losses, "after": after}


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    config = json.loads(Path(sys.argv[1]).read_text())
    print("found: " + json.dumps({step: resumed(config, step, mesh) for step in sys.argv[2:]}), flush=True)
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


if __name__ == "__main__":
    main()
