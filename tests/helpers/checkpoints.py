"""Small checkpoints for the tests of sweep, scrub and retire."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def save(folder: Path, seed: int = 0, **more: torch.Tensor) -> Path:
    """A real DCP checkpoint of two tensors."""
    weight = torch.arange(64, dtype=torch.float32).reshape(8, 8) + seed
    tensors = {"layers.0.weight": weight, "scale": torch.tensor(float(seed)), **more}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "assuming the intent is to save in a single process": it is
        dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    return folder
