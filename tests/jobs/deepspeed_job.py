"""Train a small model with DeepSpeed on CPU ranks, from the start or from a checkpoint; report what it holds.

Runs in an environment of DeepSpeed's own: ``python deepspeed_job.py '{"world": 2, "stage": 2, ...}'``. Keys:
world, stage, groups (1 or 2), bf16, load (folder for `load_checkpoint`), universal, steps, save, client (a
file of torch with the job's own ``client_state``), out. Every world size sees the same batches. ``out`` gets
masters, moments and groups after the load, and all losses. With ``fsdp2`` the job trains with FSDP2 of torch
instead, and saves model and optimizer with its DCP.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

os.environ["DS_BUILD_OPS"] = "0"
import torch

BATCH = 4


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(53, 13)
        self.up = torch.nn.Linear(13, 29)
        self.norm = torch.nn.LayerNorm(29)
        self.down = torch.nn.Linear(29, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(torch.tanh(self.up(self.embed(x)))))


def groups_of(net: Net, groups: int) -> list[dict[str, Any]]:
    if groups == 1:
        return [{"params": list(net.parameters()), "weight_decay": 0.05}]
    flat = [p for p in net.parameters() if p.dim() == 1]
    return [
        {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1, "lr": 2e-2},
        {"params": flat, "weight_decay": 0.0, "lr": 1e-2},
    ]


def loss_of(model: Any, step: int, rank: int, world: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, 53, (BATCH, 6), generator=generator)
    target = torch.randint(0, 7, (BATCH, 6), generator=generator)
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    logits = model(ids[mine]).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target[mine].flatten())


def train_fsdp2(rank: int, form: dict[str, Any]) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = fully_shard(Net(), mesh=dist.init_device_mesh("cpu", (form["world"],)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.05)
    for step in range(form["steps"]):
        loss_of(net, step, rank, form["world"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    model, state = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": state}, checkpoint_id=form["save"])
    dist.barrier()
    os._exit(0)


def main(rank: int, form: dict[str, Any], port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(form["world"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    if form.get("fsdp2"):
        train_fsdp2(rank, form)
    import deepspeed
    import deepspeed.comm as dist
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    torch.manual_seed(form.get("seed", 1))
    net = Net()
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // form["world"],
        "zero_optimization": {"stage": form["stage"], "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if form.get("bf16"):
        config["bf16"] = {"enabled": True}
    if form.get("universal"):
        config["checkpoint"] = {"load_universal": True}
    optimizer = torch.optim.AdamW(groups_of(net, form.get("groups", 1)), lr=form.get("lr", 1e-2))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=schedule, config=config)
    client = None
    if form.get("load"):
        scheduler = form.get("scheduler", True)
        path, client = engine.load_checkpoint(form["load"], load_lr_scheduler_states=scheduler)
        assert path is not None
    known = {
        name: {"fp32": safe_get_full_fp32_param(p)}
        | {
            key: safe_get_full_optimizer_state(p, key)
            for key in ("exp_avg", "exp_avg_sq")
            if form.get("load")
        }
        for name, p in engine.module.named_parameters()
    }
    options = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
    start, losses = engine.global_steps, []
    for step in range(start, start + form["steps"]):
        loss = loss_of(engine, step, rank, form["world"])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / form["world"])
    if form.get("save"):
        info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
        mine = torch.load(form["client"], weights_only=False) if "client" in form else {"a": 1}
        engine.save_checkpoint(form["save"], tag="save", client_state={**info, "mine": mine})
    if rank == 0:
        kept = {k: client[k] for k in ("mine",) if k in (client or {})}
        torch.save(
            {
                "known": known,
                "options": options,
                "start": start,
                "losses": losses,
                "client": kept,
                "epoch": schedule.last_epoch - form["steps"],
            },
            form["out"],
        )
    dist.barrier()
    os._exit(0)  # gloo's teardown may abort after everything is written


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    torch.multiprocessing.spawn(main, (asked, number), asked["world"])
