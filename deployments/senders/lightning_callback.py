"""Announce what a Lightning trainer has saved; needs send.py beside it.

trainer = Trainer(callbacks=[ModelCheckpoint(...), AnnounceCheckpoint(run="llama")])
"""

from __future__ import annotations

import logging
from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    from pytorch_lightning.callbacks import Callback

from send import announce

log = logging.getLogger(__name__)


class AnnounceCheckpoint(Callback):
    """Tell the receiver of the last checkpoint when training ends, whichever way it ends.

    run: what the training run is called. every: also tell of each new one at the end of an epoch.
    """

    def __init__(self, run: str = "", every: bool = False) -> None:
        self.run, self.every = run, every
        self._told = ""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.every:
            self._tell(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._tell(trainer)

    def _tell(self, trainer: Any) -> None:
        saver = trainer.checkpoint_callback
        path = str(getattr(saver, "last_model_path", "") or getattr(saver, "best_model_path", ""))
        if not trainer.is_global_zero or not path or path == self._told:
            return
        self._told = path
        try:
            answer = announce(path, self.run, int(trainer.global_step))
        except (OSError, KeyError, ValueError) as error:  # a training run must not die of its messenger
            log.warning("%s was not announced: %s", path, error)
        else:
            log.info("%s is announced: %s", path, answer)
