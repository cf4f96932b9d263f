"""Real training with Lightning on CPU and gloo; run by an interpreter that has it.

lightning_train_job.py trainer STRATEGY OPTIMIZERS STEPS SAVE [FROM]   Trainer.fit, then save to SAVE
lightning_train_job.py fabric STRATEGY OPTIMIZERS STEPS SAVE [FROM]    the same loop in Fabric

Every rank is a process that Lightning starts. Rank 0 leaves the truth in SAVE.truth: the model and the
state of each optimizer by parameter name, and which parameter each number means. With FROM the run
goes on from that checkpoint, and SAVE.start.truth is what it goes on from.
"""

from __future__ import annotations

import copy
import sys
import warnings
from functools import partial
from typing import Any

import lightning as L
import lightning.fabric.strategies.fsdp as fabric_fsdp
import lightning.pytorch.strategies.fsdp as trainer_fsdp
import torch
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, StateDictType, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.api import FullOptimStateDictConfig


class Net(nn.Module):
    """Buffers, a tied weight, frozen parameters, parameters of one shape; nothing divides by two evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.embed = nn.Embedding(11, 4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(4)
        self.bn = nn.BatchNorm1d(4, momentum=0.0)  # ranks see other data: their statistics would differ
        self.up, self.down = nn.Linear(4, 7), nn.Linear(7, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.norm(self.frozen(self.embed(tokens) * self.scale)))
        return self.head(self.down(self.up(x).relu()))


def _one(cls: Any, net: nn.Module, **options: Any) -> list[Any]:
    return [cls(net.parameters(), **options)]


def _decay(net: nn.Module) -> list[Any]:
    """Matrices decay, vectors do not: two groups, frozen parameters left out."""
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [torch.optim.AdamW(groups, lr=1e-2)]


def _two(net: nn.Module) -> list[Any]:
    lower = [*net.embed.parameters(), *net.norm.parameters(), *net.bn.parameters()]
    upper = [*net.up.parameters(), *net.down.parameters()]
    return [torch.optim.AdamW(lower, lr=1e-2), torch.optim.SGD(upper, lr=1e-2, momentum=0.9)]


def _named(net: nn.Module) -> list[Any]:
    """In an order of the user's own, given by names."""
    return [torch.optim.AdamW(list(net.named_parameters())[::-1], lr=1e-2)]


OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(_one, torch.optim.AdamW, lr=1e-2),
    "sgd": partial(_one, torch.optim.SGD, lr=1e-2, momentum=0.9),
    "plain": partial(_one, torch.optim.SGD, lr=1e-2),
    "rmsprop": partial(_one, torch.optim.RMSprop, lr=1e-3),
    "adafactor": partial(_one, torch.optim.Adafactor, lr=1e-2),
    "decay": _decay,
    "two": _two,
    "named": _named,
}


class _CPU:
    """A mesh of two axes, which the strategies make of CUDA devices only."""

    def setup_environment(self) -> None:
        options = self.kwargs if hasattr(self, "kwargs") else self._fsdp_kwargs
        shape = options.pop("device_mesh", None)
        super().setup_environment()  # type: ignore[misc]
        if shape:
            options["device_mesh"] = init_device_mesh("cpu", shape)


def patch() -> None:
    """FSDP computes on the CPU, and full state dicts are not moved there: that crashes without a GPU."""
    make = FSDP.__init__

    def on_cpu(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **{**options, "device_id": torch.device("cpu")})

    def full(module: nn.Module, world_size: int, rank0_only: bool = True) -> Any:
        return FSDP.state_dict_type(
            module,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
            FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
        )

    FSDP.__init__ = on_cpu
    for module in (fabric_fsdp, trainer_fsdp):
        module._get_full_state_dict_context = full


class TrainerFSDP(_CPU, FSDPStrategy):
    pass


class FabricCPUFSDP(_CPU, FabricFSDP):
    pass


_HYBRID = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2), "state_dict_type": "sharded"}


def shard(net: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(net, mesh=mesh["data_parallel"])


_MP = {"data_parallel_size": 2, "tensor_parallel_size": 1}
_MP4 = {"data_parallel_size": 4, "tensor_parallel_size": 1}
_MP1 = {"data_parallel_size": 1, "tensor_parallel_size": 1}
# kind: processes, the Trainer's strategy, Fabric's
STRATEGIES: dict[str, tuple[int, Any, Any]] = {
    "single": (1, lambda: SingleDeviceStrategy(device="cpu"), lambda: "auto"),
    **{
        name: (ranks, partial(TrainerFSDP, **options), partial(FabricCPUFSDP, **options))
        for name, ranks, options in (
            ("fsdp", 2, {"state_dict_type": "sharded"}),
            ("fsdp_grad", 2, {"state_dict_type": "sharded", "sharding_strategy": "SHARD_GRAD_OP"}),
            ("fsdp_none", 2, {"state_dict_type": "sharded", "sharding_strategy": "NO_SHARD"}),
            ("fsdp_full", 2, {"state_dict_type": "full"}),
            ("fsdp_alone", 1, {"state_dict_type": "sharded"}),
            ("fsdp4", 4, {"state_dict_type": "sharded"}),
            ("hybrid", 4, _HYBRID),
        )
    },
    "mp": (2, partial(ModelParallelStrategy, **_MP), partial(FabricModelParallel, shard, **_MP)),
    "mp4": (4, partial(ModelParallelStrategy, **_MP4), partial(FabricModelParallel, shard, **_MP4)),
    "mp_alone": (1, partial(ModelParallelStrategy, **_MP1), partial(FabricModelParallel, shard, **_MP1)),
    "mp_full": (2, partial(ModelParallelStrategy, **_MP, save_distributed_checkpoint=False), None),
}


class Module(L.LightningModule):
    def __init__(self, kind: str, optimizers: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(5)
        self.net = Net()
        self.kind, self.made = kind, OPTIMIZERS[optimizers]
        self.automatic_optimization = optimizers != "two"
        self.order = [name for name, _ in self.named_parameters()]

    def configure_model(self) -> None:
        if self.kind.startswith("mp"):
            shard(self.net, self.device_mesh)

    def configure_optimizers(self) -> Any:
        return self.made(self.net)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch), batch)
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss


class Start(L.Callback):
    """Takes the truth of what a run goes on from."""

    truth: dict[str, Any]

    def on_train_start(self, trainer: L.Trainer, module: Module) -> None:
        self.truth = truth(trainer.strategy.model, trainer.optimizers, module.order, module.kind)
        self.truth["step"] = trainer.global_step


def truth(model: nn.Module, optimizers: Any, order: list[str], kind: str) -> dict[str, Any]:
    """model: name -> tensor. optimizers: each {state: by name, numbers: number -> name}."""
    options = StateDictOptions(full_state_dict=True)
    states: list[dict[str, Any]] = []
    for optimizer in optimizers:
        # Fabric's wrapper shows as a module of its own.
        state = get_optimizer_state_dict(getattr(model, "_forward_module", model), optimizer, options=options)
        if kind == "single":  # in the order of the groups
            names = {id(p): n.removeprefix("_forward_module.") for n, p in model.named_parameters()}
            listed = [names[id(p)] for g in optimizer.param_groups for p in g["params"]]
            numbers = dict(enumerate(listed))
        else:  # in the order of the model
            listed = [n for g in state.get("param_groups", ()) for n in g["params"]]
            numbers = {order.index(n): n for n in listed}
        states.append({"state": state.get("state", {}), "numbers": numbers})
    found = get_model_state_dict(getattr(model, "_forward_module", model), options=options)
    return copy.deepcopy({"model": found, "optimizers": states})


def batches(rank: int) -> Any:
    torch.manual_seed(100 + rank)
    return torch.utils.data.DataLoader(torch.randint(0, 11, (64,)), batch_size=8)


def trainer(kind: str, optimizers: str, steps: int, save: str, start: str | None) -> None:
    ranks, strategy, _ = STRATEGIES[kind]
    seen = Start()
    run = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy(),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[seen],
        use_distributed_sampler=False,
    )
    module = Module(kind, optimizers)
    run.fit(module, batches(run.global_rank), ckpt_path=start, weights_only=False)
    run.save_checkpoint(save)
    end = truth(run.strategy.model, run.optimizers, module.order, kind)
    if run.is_global_zero:
        torch.save(seen.truth, save + ".start.truth")
        torch.save(end, save + ".truth")


def fabric(kind: str, optimizers: str, steps: int, save: str, start: str | None) -> None:
    """As the guide has it: a model, an optimizer and a count in one state."""
    ranks, _, strategy = STRATEGIES[kind]
    run = L.Fabric(accelerator="cpu", devices=ranks, strategy=strategy())
    run.launch()
    torch.manual_seed(5)
    net = Net()
    order = [name for name, _ in net.named_parameters()]
    if kind == "mp":
        wrapped = run.setup_module(net)
        (optimizer,) = OPTIMIZERS[optimizers](wrapped)
        optimizer = run.setup_optimizers(optimizer)
    else:
        wrapped, optimizer = run.setup(net, *OPTIMIZERS[optimizers](net))
    state = {"model": wrapped, "optimizer": optimizer, "iter": 0}
    if start:
        run.load(start, state)
    begin = truth(wrapped, [optimizer.optimizer], order, kind)
    data = iter(batches(run.global_rank))
    while state["iter"] < steps:
        batch = next(data)
        run.backward(nn.functional.cross_entropy(wrapped(batch), batch))
        optimizer.step()
        optimizer.zero_grad()
        state["iter"] += 1
    run.save(save, state)
    end = truth(wrapped, [optimizer.optimizer], order, kind)
    if run.is_global_zero:
        torch.save(begin, save + ".start.truth")
        torch.save(end, save + ".truth")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    patch()
    verb, kind, optimizers, steps, *paths = sys.argv[1:]
    run = {"trainer": trainer, "fabric": fabric}[verb]
    run(kind, optimizers, int(steps), paths[0], paths[1] if len(paths) > 1 else None)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # gloo aborts a rank whose peer has gone
        torch.distributed.destroy_process_group()
