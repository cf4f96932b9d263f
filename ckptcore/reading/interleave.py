"""Copy chunks into a tile, in one of three ways that depend on both layouts.

- One run in the chunk and in the tile is read straight into the tile.
- Chunks side by side in short runs are read one by one into slots of the buffer, and copied
  together, row by row of the tile. One after another, each would touch every row of the tile for a few bytes,
  and memory moves whole cache lines and pages for them: together is five times as fast for runs of 64 bytes.
- `ckptcore.reading.gather.gather` copies everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import row_major
from ckptcore.reading.gather import (
    LINE,
    SLOTS,
    UNITS,
    Bytes,
    gather,
    index_of,
    range_of,
    run_start,
    slot_pitch,
)
from ckptcore.reading.payload import Payload, RangeVerifier

_RUN = 256  # bytes in a row of the tile; longer runs are as fast alone


@dataclass(frozen=True, slots=True)
class _Like:
    """What the slots of one copy have in common.

    Attributes:
        shape: Elements.
        strides: Elements.
        lead: Elements of a slot before the first wanted one.
        nbytes: Bytes of a slot.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lead: int
    nbytes: int


class Interleaver:
    """Fills one tile over the box ``of`` from chunks; `flush` completes it.

    Args:
        tile: The tile.
        of: Its box.
        dtype: Dtype of its elements.
        scratch: Working memory, in use until `flush`.
    """

    def __init__(self, tile: npt.NDArray[Any], of: Box, dtype: str, scratch: Bytes) -> None:
        self._tile: Any = tile
        self._of, self._dtype, self._scratch = of, dtype, scratch
        self._itemsize = BY_NAME[dtype].itemsize
        self._like: _Like | None = None
        self._first = of  # the box of the first slot
        self._count, self._dim = 0, 0  # number of filled slots, and the dim they follow each other in

    def put(self, payload: Payload, chunk: Box, want: Box, verify_range: RangeVerifier | None) -> None:
        """Read the elements ``want`` of a chunk; they are in the tile after `flush`.

        Args:
            payload: The chunk's bytes.
            chunk: Box of the chunk in the tensor.
            want: Box of the tensor, inside ``chunk``.
            verify_range: Called with the CRC-32 of every range read.
        """
        plain = payload.strides is None and not payload.flags  # row-major, and no change of bits
        slot_range = self._range(chunk, want, verify_range is not None) if plain else None
        if slot_range is None:
            part = self._part(want)
            straight = plain and part.flags.c_contiguous
            run = run_start(want, chunk) if straight else None
            if run is None:
                self.flush()
                gather(payload, chunk, want, self._dtype, part, self._scratch, verify_range)
                return
            target = part.reshape(-1).view(np.uint8).data
            first_byte = payload.start + run * self._itemsize
            payload.fill(first_byte, target, verify_range)
            return
        begin, end, first = slot_range
        like = _Like(want.shape, row_major(chunk.shape), first - begin, (end - begin) * self._itemsize)
        if not self._follows(like, want):
            self.flush()
            self._like, self._first = like, want
        start = self._count * slot_pitch(like.nbytes)
        slot = self._scratch[start : start + like.nbytes]
        first_byte = payload.start + begin * self._itemsize
        payload.fill(first_byte, slot.data, verify_range)
        self._count += 1

    def flush(self) -> None:
        """Copy what was read into the tile."""
        like, count = self._like, self._count
        if like is None:
            return
        self._like, self._count = None, 0
        shape, d = like.shape, self._dim if count > 1 else 0
        source: npt.NDArray[Any] = np.ndarray(
            (count, *shape),
            UNITS[self._itemsize],
            self._scratch.data,
            like.lead * self._itemsize,
            (slot_pitch(like.nbytes), *(s * self._itemsize for s in like.strides)),
        )
        joined = Box(self._first.offset, (*shape[:d], count * shape[d], *shape[d + 1 :]))
        target = self._part(joined)
        steps = target.strides
        apart = np.lib.stride_tricks.as_strided(
            target, (*shape[:d], count, *shape[d:]), (*steps[:d], steps[d] * shape[d], *steps[d:])
        )
        apart[...] = np.moveaxis(source, 0, d)

    def _part(self, want: Box) -> Any:
        """Return the part of the tile that is ``want``."""
        return self._tile[index_of(want, self._of)]

    def _range(self, chunk: Box, want: Box, rows: bool) -> tuple[int, int, int] | None:
        """Return `range_of` for a slot of a row-major chunk; None for long runs, and for large ranges."""
        if not self._narrow(want):
            return None
        inside = want.within(chunk)
        room = min(len(self._scratch), SLOTS) // 2 - 2 * LINE  # a slot leaves room for another
        return range_of(inside.offset, inside.shape, row_major(chunk.shape), self._itemsize, room, rows)

    def _narrow(self, want: Box) -> bool:
        """Report whether the elements are short runs of the tile."""
        run = self._itemsize
        for mine, tiles in zip(reversed(want.shape), reversed(self._of.shape), strict=True):
            run *= mine
            if mine != tiles:
                return run <= _RUN and run < want.numel * self._itemsize
        return False

    def _follows(self, like: _Like, want: Box) -> bool:
        """Report whether the next slot is beside the last one, has its layout, and fits."""
        count = self._count
        if like != self._like or (count + 1) * slot_pitch(like.nbytes) > min(len(self._scratch), SLOTS):
            return False
        steps = [
            (d, b - a) for d, (a, b) in enumerate(zip(self._first.offset, want.offset, strict=True)) if a != b
        ]
        if len(steps) != 1 or (count > 1 and steps[0][0] != self._dim):
            return False
        self._dim = steps[0][0]
        return steps[0][1] == count * like.shape[self._dim]
