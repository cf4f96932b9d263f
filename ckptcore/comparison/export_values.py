"""Read an export beside its source, through the map and the cast, and compare every element.

Both sides of a tensor are read box by box (`ckptcore.comparison.box_walk`). The source's elements are cast as
the export was, and the bits are compared. In the same pass the export is fingerprinted, and NaN and Inf of
both sides are counted. A tensor that is damaged on one side is recorded, and the others are still read.

Peak memory: the interpreter, torch where tensors are computed or cast, and ``Settings.memory``: per worker, a
tile of each side, a cast tile, and a buffer for strided reads.

NaN and Inf are counted in the bytes of elements, without torch and without a copy of another dtype.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.comparison.box_walk import OpenTensor, read_boxes
from ckptcore.comparison.opened import OpenSide
from ckptcore.comparison.tensor_processes import read_shared
from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec
from ckptcore.errors import DamagedCheckpoint
from ckptcore.fingerprints.sums import ZERO, Fingerprinted, add, box_sum, tensor_fingerprint
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import Tiles
from ckptcore.reading.casting import cast_into
from ckptcore.reading.equality import differing, index_in
from ckptcore.reading.gather import Bytes, tile_view
from ckptcore.utils.workers import Progress, ProgressMeter

Counts = tuple[int, int]  # NaN, Inf
_BLOCK = 1 << 16  # elements that fit into a core's cache
# dtype -> (unit, mask without the sign bit, bits of Inf): greater values are NaN.
_IEEE: dict[str, tuple[Any, int, int]] = {
    "float64": (np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    "float32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "float16": (np.uint16, 0x7FFF, 0x7C00),
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
    "float8_e5m2": (np.uint8, 0x7F, 0x7C),
}
# dtype -> (mask, bits of NaN); these have no Inf.
_NO_INF: dict[str, tuple[int, int]] = {
    "float8_e4m3fn": (0x7F, 0x7F),
    "float8_e4m3fnuz": (0xFF, 0x80),
    "float8_e5m2fnuz": (0xFF, 0x80),
    "float8_e8m0fnu": (0xFF, 0xFF),
}
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
SOURCE, EXPORT = "source", "export"


@dataclass(frozen=True, slots=True)
class TensorPair:
    """Two tensors of one shape that must be equal.

    Attributes:
        name: Their name in reports.
        rows: Their rows in the two manifests.
        sides: Numbers of (source, export) among the checkpoints that are read. The source must equal the
            export after the cast to the export's dtype.
        is_summed: Whether the second is a tensor of the export: it is fingerprinted, and NaN and Inf count.
    """

    name: str
    rows: tuple[int, int]
    sides: tuple[int, int] = (0, 1)
    is_summed: bool = True


@dataclass(frozen=True, slots=True)
class PairResult:
    """The result of comparing a pair.

    Attributes:
        name: Its name in reports.
        specs: The tensors, (source, export).
        differing: Number of elements whose bits differ.
        first: Index of one of them.
        nan: Number of NaN, (source, export).
        inf: Number of Inf, (source, export).
        fingerprint: Of the export's tensor.
        damage: (side, why it cannot be read).
    """

    name: str
    specs: tuple[TensorSpec, TensorSpec]
    differing: int
    first: tuple[int, ...] | None
    nan: tuple[int, int]
    inf: tuple[int, int]
    fingerprint: str
    damage: tuple[tuple[str, str], ...] = ()

    @property
    def fingerprinted(self) -> Fingerprinted:
        """The export's tensor in the form that checkpoint fingerprints are computed from."""
        spec = self.specs[1]
        return spec.fqn, spec.dtype, spec.shape, self.fingerprint


def read_pairs(
    sides: Sequence[OpenSide],
    pairs: Sequence[TensorPair],
    settings: Settings,
    progress: Progress | None = None,
) -> list[PairResult]:
    """Read and compare every pair of the checkpoints; return results in the order of the pairs.

    Raises:
        CkptError: The first error of any worker, except damage, which the results record.
    """
    sizes = [
        max(sides[n].manifest.tensors[row].nbytes for n, row in zip(pair.sides, pair.rows, strict=True))
        for pair in pairs
    ]
    meter = ProgressMeter(progress, "compare", sum(sizes))
    return read_shared(compare_pairs, sides, pairs, sizes, settings, meter)


def compare_pairs(
    sides: Sequence[OpenSide], pairs: Sequence[TensorPair], settings: Settings, meter: ProgressMeter
) -> list[PairResult]:
    """Compare pairs in the threads of this process. Nothing is read of those without elements."""
    opened = [_ComparedPair(pair, sides) for pair in pairs]
    full = [open_pair for open_pair in opened if open_pair.spec.numel]
    read_boxes(sides, full, _compares_box, settings, meter)
    return [open_pair.result() for open_pair in opened]


def finish(side: OpenSide, label: str) -> tuple[str, str] | None:
    """Verify the checksums of everything that was read of a side; return (side, damage) or None.

    Raises:
        SourceChanged: Its files are not those that were opened.
    """
    try:
        side.finish()
    except DamagedCheckpoint as error:
        return label, error.message
    return None


class _ComparedPair(OpenTensor):
    """A pair while it is read, and its result."""

    def __init__(self, pair: TensorPair, sides: Sequence[OpenSide]) -> None:
        super().__init__([sides[n] for n in pair.sides], pair.rows)
        self.pair, self.lock = pair, threading.Lock()
        self.differing = 0
        self.first: tuple[int, ...] | None = None
        self.nan, self.inf = (0, 0), (0, 0)
        self.sum, self.damage = ZERO, dict[str, str]()

    def count(self, before: Counts, after: Counts) -> None:
        """Add a box's numbers of NaN and Inf, in the source and in the export."""
        self.nan = self.nan[0] + before[0], self.nan[1] + after[0]
        self.inf = self.inf[0] + before[1], self.inf[1] + after[1]

    def result(self) -> PairResult:
        """Return the result."""
        source, export = self.specs
        taken = tensor_fingerprint(export.dtype, export.shape, self.sum)
        damage, name = tuple(self.damage.items()), self.pair.name
        return PairResult(
            name, (source, export), self.differing, self.first, self.nan, self.inf, taken, damage
        )


def _compares_box(buffers: Tiles) -> Callable[[_ComparedPair, Box], None]:
    """Return a function that compares one box; it is used in one thread."""
    source_buffer, export_buffer, cast, scratch = (buffers.take() for _ in range(4))

    def compare(open_pair: _ComparedPair, box: Box) -> None:
        tiles = []
        for n, (label, buffer) in enumerate(((SOURCE, source_buffer), (EXPORT, export_buffer))):
            dtype = open_pair.specs[n].dtype
            try:
                open_pair.readers[n].read(box, tile_view(buffer, box.shape, dtype), scratch)
            except DamagedCheckpoint as error:
                with open_pair.lock:
                    open_pair.damage.setdefault(label, error.message)
                return
            tiles.append(buffer[: box.numel * BY_NAME[dtype].itemsize])
        _compare_box(open_pair, box, tiles[0], tiles[1], cast, scratch)

    return compare


def _compare_box(
    open_pair: _ComparedPair, box: Box, stored: Bytes, got: Bytes, room: Bytes, scratch: Bytes
) -> None:
    (source, export), itemsize = open_pair.specs, BY_NAME[open_pair.specs[1].dtype].itemsize
    expected = stored
    if source.dtype != export.dtype:
        expected = room[: len(got)]
        cast_into(tile_view(stored, box.shape, source.dtype), source.dtype, expected, export.dtype)
    first_and_count = differing(expected, got, itemsize)
    # Only a cast computes NaN; stored bits are compared as they are.
    if first_and_count is not None and expected is not stored:
        first_and_count = _but_nan(expected, got, export.dtype, itemsize)
    before = after = (0, 0)
    summed = ZERO
    if open_pair.pair.is_summed:
        after = not_finite(got, export.dtype)
        before = after if first_and_count is None and expected is stored else not_finite(stored, source.dtype)
        summed = box_sum(export.dtype, export.shape, box, got, scratch)
    with open_pair.lock:
        open_pair.count(before, after)
        open_pair.sum = add(open_pair.sum, summed)
        if first_and_count is not None:
            open_pair.differing += first_and_count[1]
            index = index_in(box, first_and_count[0])
            open_pair.first = index if open_pair.first is None else min(open_pair.first, index)


def _but_nan(expected: Bytes, got: Bytes, dtype: str, itemsize: int) -> tuple[int, int] | None:
    """Compare cast elements like `differing`, with all NaN equal: processors choose different NaN bits."""
    units = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
    if BY_NAME[dtype].kind != "f" or itemsize not in units:
        return differing(expected, got, itemsize)
    mask = expected.view(units[itemsize]) != got.view(units[itemsize])
    mask &= ~(is_nan(expected, dtype) & is_nan(got, dtype))
    count = int(np.count_nonzero(mask))
    return (int(mask.argmax()), count) if count else None


def not_finite(data: Bytes, dtype: str) -> Counts:
    """Return the number of NaN and the number of Inf; each part of a complex number counts.

    >>> not_finite(np.array([1, np.nan, -np.inf], np.float32).view(np.uint8), "float32")
    (1, 1)
    """
    dtype = _PARTS.get(dtype, dtype)
    if dtype in _NO_INF:
        return int(np.count_nonzero(is_nan(data, dtype))), 0
    if dtype not in _IEEE:
        return 0, 0
    unit, mask, top = _IEEE[dtype]
    values = data.view(unit)
    room = np.empty(min(_BLOCK, len(values)), unit)
    nan = inf = 0
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        bare = np.bitwise_and(block, unit(mask), out=room[: len(block)])
        if bare.max() >= top:
            nan += int(np.count_nonzero(bare > unit(top)))
            inf += int(np.count_nonzero(bare == unit(top)))
    return nan, inf


def is_nan(data: Bytes, dtype: str) -> npt.NDArray[np.bool_]:
    """Return bool [n]: which elements of a real dtype are NaN."""
    nan_mask: npt.NDArray[np.bool_]
    if dtype in _NO_INF:
        mask, nan = _NO_INF[dtype]
        nan_mask = (data & np.uint8(mask)) == nan
        return nan_mask
    if BY_NAME[dtype].kind != "f":
        return np.zeros(len(data) // BY_NAME[dtype].itemsize, np.bool_)
    unit, mask, top = _IEEE[dtype]
    nan_mask = (data.view(unit) & unit(mask)) > unit(top)
    return nan_mask
