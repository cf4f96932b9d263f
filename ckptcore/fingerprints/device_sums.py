"""Sum the elements of a tensor on an accelerator.

The sums are those of `ckptcore.fingerprints.sums`, bit for bit: int64 in torch wraps around, which is
arithmetic modulo 2**64. Nothing is copied into rows of words. All rows of a piece of a box have their
elements at the same positions, so an element at byte s of word r is its value times V0[r] * 256**s, and its
bytes in reverse order times V1[r] * 256**(8 - width - s). Where elements fill complete words, words are
used instead.

The elements stay on the device; two numbers per box come back. Beside the elements this takes at most `ROOM`
bytes of the device's memory, whatever their number. Multipliers stay there between boxes: to copy them for
each would make the host wait for what the device has begun.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.fingerprints.sums import (
    ROW,
    WORD,
    ZERO,
    RowLayout,
    RowSpan,
    Shape,
    Sum,
    blocks,
    page,
    row_factors,
    rows_of,
)

ROOM = 16 << 20  # bytes
_UNITS = 1 << 19  # elements or words at once; each takes up to three numbers of 8 bytes
_MASK = (1 << 64) - 1
_PAGES = 8  # of row multipliers that stay: 64 KiB each, for 128 MiB of a tensor
_POSITIONS = 4  # multipliers of the elements of a row that stay, up to 512 KiB each
_KINDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class DeviceSums:
    """Sums on one device, for one thread at a time, in one stream. It keeps multipliers there."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch, self._device = torch, device
        self._factors = self._on_device(page("word", 0))  # V0 and V1
        self._pages: OrderedDict[Hashable, Any] = OrderedDict()
        self._positions: OrderedDict[Hashable, Any] = OrderedDict()

    def box_sum(self, dtype: str, shape: Shape, box: Box, elements: Any) -> Sum:
        """Return what a box adds to the sum of its tensor, like `ckptcore.fingerprints.sums.box_sum`."""
        if not elements.numel():
            return ZERO
        # The only wait for the device. int64 has the same bits as the sum modulo 2**64.
        lane0, lane1 = self.box_total(dtype, shape, box, elements).tolist()
        return lane0 & _MASK, lane1 & _MASK

    def box_total(self, dtype: str, shape: Shape, box: Box, elements: Any) -> Any:
        """Return the sum of a box that is not empty as two int64 on the device, without waiting for it.

        Args:
            dtype: Dtype of the tensor.
            shape: Shape of the tensor.
            box: The box.
            elements: Bytes of its elements, uint8 on the device, from the beginning of its storage on.
        """
        torch, width = self._torch, BY_NAME[dtype].itemsize
        if width > WORD:
            shape, box, width = (*shape, 2), Box((*box.offset, 0), (*box.shape, 2)), WORD
        elif not shape:
            shape, box = (1,), Box.full((1,))
        cut = RowLayout(rows_of(shape, width), box)
        numbers = elements.view(getattr(torch, _KINDS[width]))
        grid = numbers.view(cut.lead, box.shape[cut.rows.dim], prod(cut.behind))
        # All elements as words: a piece that fits is a strided view of them, and nothing is copied.
        qwords = elements[: len(elements) // WORD * WORD].view(torch.int64)
        total = torch.zeros(2, dtype=torch.int64, device=self._device)
        for piece in cut.pieces():
            part = grid[:, piece.box_start : piece.box_start + piece.count * piece.length]
            self._piece(cut, piece, part.view(cut.lead, piece.count, -1), qwords, total)
        return total

    def _piece(self, cut: RowLayout, piece: RowSpan, values: Any, qwords: Any, total: Any) -> None:
        """Add a piece, ``values`` [lead, rows, elements], to ``total``; ``qwords`` is all elements."""
        per = cut.rows.per
        if cut.fits(piece.skipped * cut.rows.inner, values.shape[2]) and _is_word_aligned(values, per):
            size = (*values.shape[:2], values.shape[2] // per)
            steps = (values.stride(0) // per, values.stride(1) // per, 1)
            values = qwords.as_strided(size, steps, values.storage_offset() // per)
            factors = self._row_positions(cut, piece, per, self._of_lanes)
        else:
            factors = self._row_positions(cut, piece, 1, self._of_elements)
        for group, lead, across in blocks(values, min(ROW, max(1, _UNITS // values.shape[2]))):
            rows = self._row_factors(cut, lead, slice(piece.row + across.start, piece.row + across.stop))
            for lane, terms in enumerate((group, self._turned(group))):
                total[lane] += (self._wide(terms).mul(factors[lane]).sum(-1) * rows[lane]).sum()

    def _row_positions(
        self,
        cut: RowLayout,
        piece: RowSpan,
        group: int,
        factors: Callable[[slice | npt.NDArray[np.int64], int], Any],
    ) -> Any:
        """Return the multipliers of a piece's elements, or of its words, [2, positions]."""
        key = (cut.rows, cut.behind, cut.box.offset[cut.rows.dim + 1 :], piece.skipped, piece.length, group)
        make = partial(factors, cut.picked(piece, group), cut.rows.per)
        return _kept(self._positions, key, _POSITIONS, make)

    def _row_factors(self, cut: RowLayout, lead: slice, across: slice) -> Any:
        """Return the multipliers of rows, [2, leads, rows]."""
        number = cut.leads(lead)
        starts, count = number[:, 0] + across.start, across.stop - across.start
        step = int(starts[1] - starts[0]) if len(starts) > 1 else count
        first, last = int(starts[0]), int(starts[-1]) + count
        # Rows in several dims before the cut one, or far apart, are copied there.
        if (np.diff(starts) != step).any() or last - first > _PAGES * ROW:
            return self._on_device(np.stack(row_factors(number + np.arange(across.start, across.stop))))
        pages = []
        for n in range(first // ROW, -(-last // ROW)):
            rows = _kept(self._pages, n, _PAGES, partial(self._row_page, n))
            pages.append(rows[:, max(first - n * ROW, 0) : last - n * ROW])
        span = pages[0] if len(pages) == 1 else self._torch.cat(pages, dim=1)
        return span.as_strided((2, len(starts), count), (span.stride(0), step, 1), span.storage_offset())

    def _row_page(self, number: int) -> Any:
        return self._on_device(page("row", number))

    def _of_lanes(self, place: slice | npt.NDArray[np.int64], per: int) -> Any:
        """Return the multipliers of words at these positions of a row, [2, positions]."""
        return self._factors[:, self._index(place)]

    def _of_elements(self, place: slice | npt.NDArray[np.int64], per: int) -> Any:
        """Return the multipliers of elements at these positions of a row, [2, positions]."""
        if isinstance(place, slice):
            place = np.arange(place.start, place.stop)
        word, within = self._index(place // per), place % per
        step = 8 * WORD // per
        shifts = np.stack([step * within, step * (per - 1 - within)]).astype(np.uint64)
        return self._factors[:, word] * self._on_device(np.uint64(1) << shifts)

    def _turned(self, values: Any) -> Any:
        """Return the values with their bytes in reverse order."""
        width = values.element_size()
        if width == 1:
            return values
        octets = values.view(self._torch.uint8).unflatten(-1, (-1, width))
        return octets.flip(-1).view(values.dtype).squeeze(-1)

    def _wide(self, values: Any) -> Any:
        """Return the values' bits as non-negative int64, or as int64 for words."""
        width = values.element_size()
        wide = values.to(self._torch.int64)
        return wide.bitwise_and_((1 << 8 * width) - 1) if 1 < width < WORD else wide

    def _index(self, place: slice | npt.NDArray[np.int64]) -> Any:
        return place if isinstance(place, slice) else self._torch.from_numpy(place).to(self._device)

    def _on_device(self, numbers: npt.NDArray[np.uint64]) -> Any:
        return self._torch.tensor(numbers.view(np.int64), device=self._device)


def _kept(memo: OrderedDict[Hashable, Any], key: Hashable, most: int, make: Callable[[], Any]) -> Any:
    """Return what ``memo`` has for a key, made if it is not there; the oldest of more than ``most`` goes."""
    if key not in memo:
        memo[key] = make()
        if len(memo) > most:
            memo.popitem(last=False)
    return memo[key]


def _is_word_aligned(values: Any, per: int) -> bool:
    """Report whether rows of ``values`` begin at word boundaries in memory."""
    counts = [values.storage_offset()]
    counts += [values.stride(dim) for dim in (0, 1) if values.shape[dim] > 1]
    return all(n % per == 0 for n in counts)
