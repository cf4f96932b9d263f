"""Lightning's two guides to distributed checkpoints, on CPU and gloo; run by an interpreter that has it.

lightning_guide_job.py save | load PATH | fabric-save | fabric-load PATH

The programs of "Distributed checkpoints (expert)" of the Trainer and "Saving and Loading Distributed
Checkpoints" of Fabric, in the current folder, which must hold ``data/wikitext-2.txt``: the guide's own
dataset downloads it only where it is not there. Changed: the accelerator, the strategy's CPU form, in
Fabric the size of the model, and momentum for the Trainer's SGD: Lightning cannot load the folder of an
optimizer without states (torch 2.13: "must have the keys state"). Each leaves ``<what>.truth``: the
whole model by name.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.demos import LightningTransformer, Transformer, WikiText2
from lightning_train_job import FabricCPUFSDP, TrainerFSDP, patch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


def truth(model: Any, path: str, rank: int) -> None:
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(found, path)


class Guide(LightningTransformer):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)


class Started(L.Callback):
    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        truth(trainer.strategy.model, "load.truth", trainer.global_rank)


def save() -> None:
    model = Guide()
    strategy = TrainerFSDP(state_dict_type="sharded")
    trainer = L.Trainer(accelerator="cpu", devices=4, strategy=strategy, max_steps=3)
    trainer.fit(model)
    truth(trainer.strategy.model, "save.truth", trainer.global_rank)


def load(path: str) -> None:
    model = Guide()
    strategy = TrainerFSDP(state_dict_type="sharded")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=5,
        callbacks=[Started()],
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(model, ckpt_path=path, weights_only=False)


def state(fabric: L.Fabric) -> tuple[Any, Any, dict[str, Any]]:
    fabric.launch()
    with fabric.rank_zero_first():
        dataset = WikiText2()
    model = Transformer(vocab_size=dataset.vocab_size, nlayers=2, nhid=12, ninp=16, nhead=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    return dataset, (model, optimizer), {"model": model, "optimizer": optimizer, "iteration": 0}


def fabric_save() -> None:
    strategy = FabricCPUFSDP(state_dict_type="sharded")
    fabric = L.Fabric(accelerator="cpu", devices=4, strategy=strategy)
    dataset, (model, optimizer), kept = state(fabric)
    for i in range(4):
        input, target = fabric.to_device(dataset[i])
        output = model(input.unsqueeze(0), target.unsqueeze(0))
        loss = F.nll_loss(output, target.view(-1))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    fabric.save("my-checkpoint.ckpt", kept)
    truth(model._forward_module, "fabric-save.truth", fabric.global_rank)


def fabric_load(path: str) -> None:
    strategy = FabricCPUFSDP(state_dict_type="sharded")
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    _, (model, _), kept = state(fabric)
    fabric.load(path, kept)
    truth(model._forward_module, "fabric-load.truth", fabric.global_rank)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    patch()
    {"save": save, "load": load, "fabric-save": fabric_save, "fabric-load": fabric_load}[sys.argv[1]](
        *sys.argv[2:]
    )
