"""Batches: checkpoints with values of their own, announced by the senders that ship."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from stack import ROOT, Stack

SENDERS = ROOT / "deployments" / "senders"
ROWS, COLUMNS, LAYERS = 64, 256, 32  # two MiB of float32 a checkpoint
PER_FILE = "256KiB"  # eight files of it
IN_THE_MIDDLE = ("*.ckptcore", ".*.ckptcore", "*.gone-*", ".*.gone-*", ".*.part", ".*.joint")


@dataclass
class Batch:
    """Checkpoints of one training run.

    answers: step -> the receiver's answer. seconds: step -> time its sender took.
    failed: step -> why it ended.
    """

    run: str
    number: int
    steps: tuple[int, ...]
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """The truth; no two steps of any batch have a tensor in common."""
        made = torch.Generator().manual_seed(1_000_003 * self.number + step)
        return {f"model.layers.{i}.weight": torch.randn(ROWS, COLUMNS, generator=made) for i in range(LAYERS)}

    def source(self, stack: Stack, step: int) -> Path:
        """Where a step was saved."""
        return stack.root / self.run / f"step-{step}"

    def export(self, stack: Stack, step: int) -> Path:
        """Where a step is exported to."""
        return stack.exports / self.run / f"step-{step}"

    def save(self, stack: Stack) -> None:
        """Real DCP folders of all steps."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "assuming the intent is to save in a single process": it is
            for step in self.steps:
                dcp.save(self.tensors(step), checkpoint_id=self.source(stack, step), no_dist=True)

    @contextmanager
    def announced(self, stack: Stack, draw: random.Random, within: float) -> Iterator[None]:
        """Each step announced at a random moment while the block runs; its end waits for all senders."""
        env = os.environ | {
            "CKPTCORE_HOOK_URL": f"http://127.0.0.1:{stack.ports['receiver']}/hooks/trainer",
            "CKPTCORE_HOOK_SECRET": stack.env["CKPTCORE_HOOK_SECRET"],
        }
        kinds = [[sys.executable, str(SENDERS / "send.py")], ["bash", str(SENDERS / "send.sh")]]
        threads = [
            threading.Thread(
                target=self._announce, args=(stack, step, kinds[i % 3 == 2], env, draw.uniform(0, within))
            )
            for i, step in enumerate(self.steps)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for thread in threads:
                thread.join()

    def _announce(
        self, stack: Stack, step: int, command: list[str], env: dict[str, str], wait: float
    ) -> None:
        time.sleep(wait)
        began = time.monotonic()
        done = subprocess.run(
            [*command, str(self.source(stack, step)), self.run, str(step)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        self.seconds[step] = time.monotonic() - began
        if done.returncode:
            self.failed[step] = done.stdout + done.stderr
        else:
            self.answers[step] = json.loads(done.stdout)


def left_in_the_middle(folder: Path) -> list[str]:
    """What staging has left anywhere below a folder."""
    return sorted({str(p) for pattern in IN_THE_MIDDLE for p in folder.rglob(pattern)})
