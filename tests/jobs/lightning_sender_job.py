"""Real training with Lightning and the callback that announces; run by an interpreter that has it.

lightning_sender_job.py FOLDER: prints, for each way to train, what was announced: the file's name, the
step in the announcement, and the step that the file itself holds at that moment.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import lightning_callback
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

Announced = list[tuple[str, int, int]]


class Failed(Exception):
    """What a training run ends with."""


class Net(L.LightningModule):
    """Four steps an epoch. Its loss is better in the first epoch than in all others."""

    def __init__(self, fail_at: int | None) -> None:
        super().__init__()
        self.layer, self.fail_at = torch.nn.Linear(2, 1), fail_at

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if self.global_step == self.fail_at:
            raise Failed
        self.log("worse", float(self.current_epoch), on_step=False, on_epoch=True)
        loss: torch.Tensor = self.layer(batch).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(folder: Path, every: bool, fail_at: int | None = None, **saver: Any) -> Announced:
    """What was announced of three epochs, or fewer where it fails at a step."""
    announced: Announced = []

    def announce(path: str, run: str, step: int) -> dict[str, str]:
        announced.append((Path(path).name, step, torch.load(path, weights_only=False)["global_step"]))
        return {"status": "accepted"}

    lightning_callback.announce = announce
    announcer = lightning_callback.AnnounceCheckpoint(run="llama", every=every)
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[announcer, ModelCheckpoint(folder, filename="{step}", **saver)],
    )
    with contextlib.suppress(Failed):
        trainer.fit(Net(fail_at), torch.utils.data.DataLoader(torch.ones(4, 2)))
    return announced


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    best: dict[str, Any] = {"monitor": "worse", "mode": "min", "save_top_k": 1}
    ways = {
        "every": train(folder / "every", True, save_top_k=-1, save_last=True),
        "the last": train(folder / "last", False, save_top_k=-1),
        "the best": train(folder / "best", False, **best),
        "failed": train(folder / "failed", False, fail_at=9, save_top_k=-1),
        "failed and saved": train(folder / "saved", False, fail_at=9, save_top_k=-1, save_on_exception=True),
        "failed at once": train(folder / "at-once", True, fail_at=0),
    }
    print(json.dumps(ways))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
