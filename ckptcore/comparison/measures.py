"""Measure how far the elements of two tensors are apart: what changed between two steps of a run.

Elements are widened block by block, differences are taken in float32 (float64 for wider ones), and sums are
added up in float64. Elements where either side, or the difference, is not finite are counted apart, and part
of no measure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptcore.core.dtype import BY_NAME
from ckptcore.reading.casting import torch_on
from ckptcore.reading.gather import Bytes

_BLOCK = 1 << 15  # elements whose float32 fit a core's cache


@dataclass(frozen=True, slots=True)
class Measures:
    """How far two tensors are apart, B - A.

    Attributes:
        max_abs: The largest absolute difference of two elements.
        mean_abs: The mean absolute difference.
        max_rel: The largest difference relative to the larger of the two elements.
        mean_rel: The mean of these.
        norm_a: The Euclidean norm of A.
        norm_b: That of B.
        norm: That of the difference.
        cosine: Of the angle between A and B; None if one of them is zero.
        not_finite: Number of elements that are left out.
    """

    max_abs: float
    mean_abs: float
    max_rel: float
    mean_rel: float
    norm_a: float
    norm_b: float
    norm: float
    cosine: float | None
    not_finite: int

    @property
    def change(self) -> float:
        """Return the norm of the difference relative to A's; infinite where A is zero and B is not."""
        return ratio(self.norm, self.norm_a)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form; null for what is infinite."""
        names = ("max_abs", "mean_abs", "max_rel", "mean_rel", "norm_a", "norm_b", "norm")
        numbers = {name: getattr(self, name) for name in (*names, "change", "cosine")}
        finite = {name: n if n is not None and math.isfinite(n) else None for name, n in numbers.items()}
        return finite | {"not_finite": self.not_finite}


class Sums:
    """The sums behind `Measures`, of the boxes that were read so far."""

    def __init__(self) -> None:
        self.maxima = np.zeros(2)  # absolute, relative
        # absolute and relative differences; squares of the difference, of A and of B; A times B
        self.totals = np.zeros(6)
        self.numel = self.not_finite = 0

    def add(self, box_sums: Sums) -> None:
        """Add those of another box."""
        self.maxima = np.maximum(self.maxima, box_sums.maxima)
        # Squares of the largest float64 are infinite, and so are products of A and B, with either sign.
        with np.errstate(over="ignore", invalid="ignore"):
            self.totals += box_sums.totals
        self.numel += box_sums.numel
        self.not_finite += box_sums.not_finite

    def measures(self) -> Measures:
        """Return what the sums mean."""
        absolute, relative, squares, of_a, of_b, product = self.totals.tolist()
        counted = max(self.numel - self.not_finite, 1)
        lengths = math.sqrt(of_a) * math.sqrt(of_b)
        cosine = product / lengths if lengths and math.isfinite(lengths) else None
        # Rounding can make a cosine exceed 1.
        return Measures(
            float(self.maxima[0]),
            absolute / counted,
            float(self.maxima[1]),
            relative / counted,
            math.sqrt(of_a),
            math.sqrt(of_b),
            math.sqrt(squares),
            None if cosine is None else max(-1.0, min(1.0, cosine)),
            self.not_finite,
        )


def is_measured(dtype: str) -> bool:
    """Report whether elements of a dtype are numbers: packed ones are not."""
    return BY_NAME[dtype].kind != "p"


def sums_of(raw_a: Bytes, dtype_a: str, raw_b: Bytes, dtype_b: str, *, equal: bool) -> Sums:
    """Sum up two runs of elements of one length.

    Args:
        raw_a: Bytes of A's elements.
        dtype_a: Their dtype, one that `is_measured`.
        raw_b: Bytes of B's elements.
        dtype_b: Their dtype.
        equal: Whether the bits are known to be equal: then only A's squares are computed.
    """
    torch = torch_on("cpu")
    sums = Sums()
    a, b = _elements(torch, raw_a, dtype_a), _elements(torch, raw_b, dtype_b)
    for start in range(0, len(a), _BLOCK):
        block_a = _widened(torch, a[start : start + _BLOCK])
        block_b = block_a if equal else _widened(torch, b[start : start + _BLOCK])
        if block_a.dtype != block_b.dtype:
            block_a, block_b = block_a.double(), block_b.double()
        sums.numel += len(block_a)
        if not _add_finite(torch, sums, block_a, block_b, equal):
            _add_others(torch, sums, block_a, block_b)
    return sums


def _add_finite(torch: Any, sums: Sums, a: Any, b: Any, equal: bool) -> bool:
    """Add a block; return False, and add nothing, if an element or a square is not finite."""
    of_a = torch.dot(a, a).item()
    if not math.isfinite(of_a):
        return False
    if equal:
        sums.totals[3:] += of_a
        return True
    of_b, difference = torch.dot(b, b).item(), b - a
    squares = torch.dot(difference, difference).item()
    if not (math.isfinite(of_b) and math.isfinite(squares)):
        return False
    product = torch.dot(a, b).item()
    difference.abs_()
    largest = a.abs()
    # Two zeros differ by 0 relative to `tiny`; 0 / 0 would be NaN.
    torch.maximum(largest, b.abs(), out=largest).clamp_min_(torch.finfo(a.dtype).tiny)
    ratios = torch.div(difference, largest, out=largest)
    _note_maxima(sums, difference, ratios)
    sums.totals += (difference.sum().item(), ratios.sum().item(), squares, of_a, of_b, product)
    return True


def _add_others(torch: Any, sums: Sums, a: Any, b: Any) -> None:
    """Add the finite elements of a block in float64."""
    a, b = a.double(), b.double()
    finite = torch.isfinite(b - a)
    a, b = a[finite], b[finite]
    sums.not_finite += len(finite) - len(a)
    if not len(a):
        return
    sizes = (b - a).abs()
    ratios = sizes / torch.maximum(a.abs(), b.abs()).clamp_min(torch.finfo(a.dtype).tiny)
    _note_maxima(sums, sizes, ratios)
    pairs = ((sizes, sizes), (a, a), (b, b), (a, b))
    dots = [torch.dot(left, right).item() for left, right in pairs]
    with np.errstate(over="ignore"):
        sums.totals += (sizes.sum().item(), ratios.sum().item(), *dots)


def _note_maxima(sums: Sums, sizes: Any, ratios: Any) -> None:
    sums.maxima = np.maximum(sums.maxima, (sizes.amax().item(), ratios.amax().item()))


def _elements(torch: Any, raw: Bytes, dtype: str) -> Any:
    elements = torch.from_numpy(raw).view(getattr(torch, dtype))
    return torch.view_as_real(elements).reshape(-1) if elements.is_complex() else elements


def _widened(torch: Any, block: Any) -> Any:
    """Return elements as float32, or float64 if they are wider or integers."""
    if block.dtype in (torch.float32, torch.float64):
        return block
    return block.to(torch.float32 if block.is_floating_point() else torch.float64)


def ratio(part: float, total: float) -> float:
    """Return a part relative to a total; infinite where only that is zero."""
    if total:
        return part / total
    return math.inf if part else 0.0
