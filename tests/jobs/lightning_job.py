"""What Lightning itself does with a file or folder; run by an interpreter that has it.

lightning_job.py fit FILE        Trainer.fit(ckpt_path=FILE); the state it starts from -> FILE.state
lightning_job.py fabric FILE     Fabric.load(FILE, state)                             -> FILE.state
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import lightning as L
import torch
from torch import nn


def build(names: dict[str, torch.Tensor], parameters: set[str]) -> nn.Module:
    """A module with tensors of these names and shapes, all zero."""
    root = nn.Module()
    for name, value in names.items():
        *parts, last = name.split(".")
        at = root
        for part in parts:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        if name in parameters:
            setattr(at, last, nn.Parameter(torch.zeros_like(value)))
        else:
            at.register_buffer(last, torch.zeros_like(value))
    return root


class Module(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return sum(p.float().sum() for p in self.parameters()) * 0.0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.0, weight_decay=0.0)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class Watch(L.Callback):
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        model = {k: v.clone() for k, v in module.state_dict().items()}
        optimizer = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])
        self.seen = {"step": trainer.global_step, "model": model, "optimizer": optimizer}


def fit(file: str) -> dict[str, Any]:
    """The checkpoint's module has one attribute, ``net``."""
    saved = torch.load(file, weights_only=False)
    names = {k.removeprefix("net."): v for k, v in saved["state_dict"].items()}
    # Optimizers without names take states by position: parameters in the order of the saved groups.
    trained = [
        k.removeprefix("net.") for g in saved["optimizer_states"][0]["param_groups"] for k in g["params"]
    ]
    names = {k: names[k] for k in (*trained, *(k for k in names if k not in trained))}
    watch = Watch()
    trainer = L.Trainer(
        max_steps=100,
        max_epochs=5,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
    )
    data = torch.utils.data.DataLoader(torch.zeros(2, 1), batch_size=1)
    module = Module(build(names, set(trained)))
    trainer.fit(module, data, ckpt_path=file, weights_only=False)
    return watch.seen


def fabric(file: str) -> dict[str, Any]:
    saved = torch.load(file, weights_only=False)
    key = next(k for k in ("net", "model") if k in saved)
    names = saved[key]
    state = {key: build(names, {k for k, v in names.items() if v.is_floating_point()}), "iter": 0}
    rest = L.Fabric(accelerator="cpu", devices=1).load(file, state, weights_only=False)
    return {"model": dict(state[key].state_dict()), "iter": state["iter"], "rest": sorted(rest)}


if __name__ == "__main__":
    verb, path = sys.argv[1:]
    torch.save({"fit": fit, "fabric": fabric}[verb](path), path + ".state")
