"""Compute the cosine between each tensor of an export and its namesake in a related folder.

Fine-tuned weights stay near the weights that they started from: their cosine is near 1. Rows in a wrong
order, gate in the place of up, or experts shifted by one make it about 0, in that tensor. Both sides are read
box by box, and sums are computed in float64.

Peak memory: the interpreter, torch, and ``Settings.memory``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptcore.comparison.box_walk import OpenTensor, read_boxes
from ckptcore.comparison.opened import OpenSide
from ckptcore.core.box import Box
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import Tiles
from ckptcore.reading.casting import torch_on
from ckptcore.utils.workers import Progress, ProgressMeter

_BLOCK = 1 << 16  # elements that are cast to float64 at a time


@dataclass(frozen=True, slots=True)
class Near:
    """Cosines between the tensors of two folders.

    Attributes:
        cosines: (name, cosine) of tensors that both have in one shape.
        only_export: Names that the base lacks.
        only_base: Names that the export lacks.
        shapes: (name, shape in the export, shape in the base) where shapes differ.
        zero: Names where exactly one side is all zeros: they have no cosine.
    """

    cosines: tuple[tuple[str, float], ...]
    only_export: tuple[str, ...]
    only_base: tuple[str, ...]
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    zero: tuple[str, ...]


def near(export: OpenSide, base: OpenSide, settings: Settings, progress: Progress | None = None) -> Near:
    """Compare the tensors that two checkpoints have under one name.

    Raises:
        CkptError: The first error of any worker, or an error of `OpenSide.finish`.
    """
    mine, theirs = export.manifest.index, base.manifest.index
    shapes, pairs = [], []
    for name, row in mine.items():
        if name not in theirs:
            continue
        a, b = export.manifest.tensors[row], base.manifest.tensors[theirs[name]]
        if a.shape != b.shape:
            shapes.append((name, a.shape, b.shape))
        elif a.numel:
            pairs.append(_SummedPair(name, (export, base), (row, theirs[name])))
    meter = ProgressMeter(progress, "near", sum(p.spec.nbytes for p in pairs))
    read_boxes((export, base), pairs, _sums_box, settings, meter)
    export.finish()
    base.finish()
    cosines = {p.name: p.cosine() for p in pairs}
    return Near(
        tuple((n, c) for n, c in cosines.items() if c is not None),
        tuple(n for n in mine if n not in theirs),
        tuple(n for n in theirs if n not in mine),
        tuple(shapes),
        tuple(n for n, c in cosines.items() if c is None),
    )


class _SummedPair(OpenTensor):
    """A pair of tensors while it is read, and its sums."""

    def __init__(self, name: str, sides: tuple[OpenSide, OpenSide], rows: tuple[int, int]) -> None:
        super().__init__(sides, rows)
        self.name, self.lock, self.sums = name, threading.Lock(), np.zeros(3)

    def cosine(self) -> float | None:
        """Return the cosine, NaN if an element is NaN; None if exactly one side is all zeros."""
        dot, squares_a, squares_b = self.sums.tolist()
        if squares_a == squares_b == 0:
            return 1.0
        if squares_a == 0 or squares_b == 0:
            return None
        return float(dot / (math.sqrt(squares_a) * math.sqrt(squares_b)))


def _sums_box(buffers: Tiles) -> Callable[[_SummedPair, Box], None]:
    """Return a function that reads and sums one box; it is used in one thread."""
    torch = torch_on("cpu")
    *tile_buffers, scratch = (buffers.take() for _ in range(3))

    def read(pair: _SummedPair, box: Box) -> None:
        read_tiles = zip(pair.read(box, tile_buffers, scratch), pair.specs, strict=True)
        tiles = [torch.from_numpy(tile).view(getattr(torch, spec.dtype)) for tile, spec in read_tiles]
        sums = np.zeros(3)
        for start in range(0, box.numel, _BLOCK):
            a, b = (_as_float64(torch, h[start : start + _BLOCK]) for h in tiles)
            sums += [float(torch.dot(a, b)), float(torch.dot(a, a)), float(torch.dot(b, b))]
        with pair.lock:
            pair.sums += sums

    return read


def _as_float64(torch: Any, block: Any) -> Any:
    """Return elements as float64; a complex number as its two parts."""
    if block.is_complex():
        block = torch.view_as_real(block.to(torch.complex128)).reshape(-1)
    return block.to(torch.float64)
