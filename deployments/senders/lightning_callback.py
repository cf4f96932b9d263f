"""Announce what a Lightning trainer has saved; needs send.py beside it.

trainer = Trainer(callbacks=[ModelCheckpoint(...), AnnounceCheckpoint(run="llama")])
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    from pytorch_lightning.callbacks import Callback

from send import announce

log = logging.getLogger(__name__)


class AnnounceCheckpoint(Callback):
    """Tell the receiver of the last checkpoint when training ends, whichever way it ends.

    run: what the training run is called. every: tell of each one as soon as it is saved.

    Lightning calls savers after all other callbacks, at the end of an epoch and at that of a failed run, and
    what they show says nothing about the step of a file. All of them save by `Trainer.save_checkpoint`
    (lightning, pytorch/callbacks/model_checkpoint.py), so it is there that this one listens.
    """

    def __init__(self, run: str = "", every: bool = False) -> None:
        self.run, self.every = run, every
        self._trainer: Any = None  # whose saves are listened to
        self._last: tuple[str, int] | None = None  # path and step
        self._told: tuple[str, int] | None = None
        self._ended = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self._last = self._told = None
        self._ended = False
        if self._trainer is trainer:  # it is fitted once more
            return
        self._trainer, save = trainer, trainer.save_checkpoint

        @functools.wraps(save)
        def save_and_say(filepath: Any, *args: Any, **options: Any) -> None:
            save(filepath, *args, **options)
            self._saved(trainer, str(filepath))

        trainer.save_checkpoint = save_and_say

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(trainer)  # savers that save now, too, come after this

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._end(trainer)

    def _saved(self, trainer: Any, path: str) -> None:
        step = int(trainer.global_step)
        if os.path.basename(path.rstrip("/")).startswith("."):
            return  # of the tuner, who takes it away again
        if self._last is not None and self._last[1] == step:
            return  # the same once more under another name, such as last.ckpt, which will be written over
        self._last = (path if "://" in path else os.path.abspath(path), step)
        if self.every or self._ended:
            self._tell(trainer)

    def _end(self, trainer: Any) -> None:
        self._ended = True
        self._tell(trainer)

    def _tell(self, trainer: Any) -> None:
        if not trainer.is_global_zero or self._last is None or self._last == self._told:
            return
        self._told = path, step = self._last
        try:
            answer = announce(path, self.run, step)
        except (OSError, KeyError, ValueError) as error:  # a training run must not die of its messenger
            log.warning("%s was not announced: %s", path, error)
        else:
            log.info("%s is announced: %s", path, answer)
