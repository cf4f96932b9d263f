"""Announce the checkpoints of a Lightning trainer; needs send.py beside it.

trainer = Trainer(callbacks=[ModelCheckpoint(...), AnnounceCheckpoint(run="llama")])
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    from pytorch_lightning.callbacks import Callback

from send import announce

log = logging.getLogger(__name__)

# Strategies whose model is what their checkpoints have, under the same names.
STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")


class AnnounceCheckpoint(Callback):
    """Announce the last checkpoint when training ends, normally or with an exception.

    Lightning calls `ModelCheckpoint` callbacks after all others, at the end of an epoch and of a failed run.
    Their attributes do not give the step of a file. All of them save by `Trainer.save_checkpoint`
    (lightning, pytorch/callbacks/model_checkpoint.py), so this callback wraps that method.

    Args:
        run: the name of the training run.
        every: announce each checkpoint as soon as it is saved.
        meta: facts about the training, as `send.announce`; the trainer's metrics are added.
        fingerprint: send the fingerprint of the model in memory at each save, with which a conversion
            compares the file. It needs ckptcore in the job, and about 0.3 s of CPU time for each GB.
    """

    def __init__(
        self,
        run: str = "",
        every: bool = False,
        meta: Mapping[str, Any] | None = None,
        fingerprint: bool = False,
    ) -> None:
        self.run, self.every, self.meta, self.fingerprint = run, every, dict(meta or {}), fingerprint
        self._metrics: dict[str, Any] = {}  # of the last checkpoint
        self._trainer: Any = None  # the trainer whose method is wrapped
        self._last: tuple[str, int] | None = None  # path and step
        self._announced: tuple[str, int] | None = None
        self._ended = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wrap the trainer's `save_checkpoint`."""
        if stage != "fit":
            return
        self._last = self._announced = None
        self._ended = False
        if self._trainer is trainer:  # a second call of fit
            return
        self._trainer, save = trainer, trainer.save_checkpoint

        @functools.wraps(save)
        def save_and_announce(filepath: Any, *args: Any, **options: Any) -> None:
            live = _live_facts(trainer) if self.fingerprint else {}  # on every rank
            save(filepath, *args, **options)
            self._saved(trainer, str(filepath), live)

        trainer.save_checkpoint = save_and_announce

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Announce the last checkpoint. Later ones, by other callbacks, are announced as they are saved."""
        self._end(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Announce the last checkpoint."""
        if stage == "fit":
            self._end(trainer)

    def _saved(self, trainer: Any, path: str, live: Mapping[str, str]) -> None:
        step = int(trainer.global_step)
        if os.path.basename(path.rstrip("/")).startswith("."):
            return  # a temporary file of the tuner
        if self._last is not None and self._last[1] == step:
            return  # a second file of the same step, such as last.ckpt, which the next save overwrites
        self._last = (path if "://" in path else os.path.abspath(path), step)
        # Tensors of one element; the others are no metrics.
        numbers = {n: v for n, v in trainer.callback_metrics.items() if getattr(v, "numel", lambda: 1)() == 1}
        metrics = {n: float(v) for n, v in numbers.items()}
        self._metrics = {"epoch": trainer.current_epoch, "metrics": metrics, **live}
        if self.every or self._ended:
            self._tell(trainer)

    def _end(self, trainer: Any) -> None:
        self._ended = True
        self._tell(trainer)

    def _tell(self, trainer: Any) -> None:
        if not trainer.is_global_zero or self._last is None or self._last == self._announced:
            return
        self._announced = path, step = self._last
        try:
            answer = announce(
                path, self.run, step, meta={"framework": "lightning", **self._metrics, **self.meta}
            )
        except (OSError, KeyError, ValueError) as error:  # must not end the training run
            log.warning("%s was not announced: %s", path, error)
        else:
            log.info("announced %s: %s", path, answer)


def _live_facts(trainer: Any) -> dict[str, str]:
    """Return the fingerprint of the model in memory, as facts; empty if it has none, which is logged."""
    strategy = type(trainer.strategy).__name__
    if strategy not in STRATEGIES:
        log.warning("%s has no fingerprint: only %s have", strategy, ", ".join(STRATEGIES))
        return {}
    try:
        import torch
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        import ckptcore

        state = get_model_state_dict(trainer.strategy.model)
        # Where all is replicated, the first rank saves, and others may differ in buffers, such as of norms.
        alone = all(type(value) in (torch.Tensor, torch.nn.Parameter) for value in state.values())
        return ckptcore.fingerprint_state(state, alone=alone).as_facts(model=True)
    except Exception as error:  # must not end the training run; on all ranks, or on none
        log.warning("the model has no fingerprint: %s", error)
        return {}
