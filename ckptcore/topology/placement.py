"""Placements: torch's own, as values that can be had without importing torch.

Names and fields are those of torch/distributed/tensor/placement_types.py, so that torch's own may be given
wherever these are; importing torch.distributed.tensor alone would take longer than planning for
512 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shard:
    """A mesh axis cuts this dim, as torch.chunk does."""

    dim: int


@dataclass(frozen=True, slots=True)
class _StridedShard:
    """A mesh axis cuts each of the ``split_factor`` pieces that axes to its right have made of a dim."""

    dim: int
    split_factor: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the mesh axis has the same."""


Placement = Shard | _StridedShard | Replicate | Any  # Any: torch's own
