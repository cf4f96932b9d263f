"""Copy the elements of a box from a payload into a tile, within a buffer.

One recursive rule serves every layout. The box's elements span a range of the payload. If that
range is hardly larger than its elements, or has no gap of a page, and fits the buffer, it is read at once and
copied with strides; otherwise the box is cut along its widest-strided dim. Where each slice of that dim is
one range, many are read side by side and copied together.
`ckptcore.reading.interleave.Interleaver` handles copies that need no buffer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from operator import mul, sub
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import CONJ, NEG, SWAPPED, Chunks, is_row_major, row_major, view_of
from ckptcore.reading.payload import Payload, RangeVerifier
from ckptcore.utils.row_wise import all_rows

Bytes = npt.NDArray[np.uint8]
_OVERREAD = 4
_PAGE = 4096  # bytes: reading a page costs no more than reading an element
LINE = 64  # bytes of a cache line
_SIDE = 128  # elements of a block's side, while dims change their order
SLOTS = 1 << 21  # bytes read before a copy, so that they are still in a core's cache
# Element-wide integers: copies move bits, whatever they mean.
UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def tile_view(buffer: Bytes, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    """Return a row-major tile of ``shape`` over the buffer's first bytes, as integers of the same width."""
    unit = UNITS[BY_NAME[dtype].itemsize]
    count = prod(shape)  # numpy's takes ten times as long, for every tile
    return buffer[: count * np.dtype(unit).itemsize].view(unit).reshape(shape)


def index_of(box: Box, of: Box) -> Any:
    """Return the index of ``box`` in a tile over ``of``."""
    # Also nearly all tiles of small tensors: no index has to be made.
    if box == of:  # also every rank 0 tile, which `[()]` would turn into a copy
        return ...
    begins = map(sub, box.offset, of.offset)
    return tuple([slice(o, o + n) for o, n in zip(begins, box.shape, strict=True)])


class Overlap(NamedTuple):  # made for every chunk that is read: a dataclass takes three times as long
    """A chunk that shares elements with a box: its row, its box, and the shared box (``common``)."""

    row: int
    chunk: Box
    common: Box


def overlaps(chunks: Chunks, tensor: int, want: Box) -> Iterator[Overlap]:
    """Yield the chunks of a tensor, by its number, that share elements with ``want``, a box of it."""
    lo, shape = chunks.lo, chunks.shape
    first, last = int(chunks.first[tensor]), int(chunks.first[tensor + 1])
    rank = len(want.shape)
    rows: Any = range(first, last)
    index: Any = slice(first, last)
    # For few chunks a loop is faster than columns.
    if last - first > 8 and rank:
        low = lo[first:last, :rank]
        high = low + shape[first:last, :rank]
        begin, end = np.array(want.offset), np.array(want.end)
        rows = index = (first + np.flatnonzero(all_rows((low < end) & (high > begin)))).tolist()
    top, bottom = (want.offset[0], want.end[0]) if rank else (0, 1)
    boxes = zip(rows, lo[index, :rank].tolist(), shape[index, :rank].tolist(), strict=True)
    for row, offset, extent in boxes:
        if rank and (offset[0] >= bottom or offset[0] + extent[0] <= top):
            continue  # no box is made of a chunk of other rows
        box = Box(tuple(offset), tuple(extent))
        common = box.intersect(want)
        if common is not None:
            yield Overlap(row, box, common)


class StoredOrder(NamedTuple):
    """How far the elements of a tensor's rows are apart in storage: what the size of its tiles depends on.

    Attributes:
        across: Chunks side by side; 0 when none are. Those that start in one first row are. Each of them
            should get a large enough read per tile.
        shape: Extents of the first chunk.
        strides: Its strides, elements; None when it is row-major, or unknown before its item is read.
    """

    across: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] | None = None

    def run(self, tile: tuple[int, ...]) -> int:
        """Count the elements of a tile of this shape that follow each other in storage."""
        assert self.strides is not None  # the caller has checked
        run = 1
        for stride, taken, full in sorted(zip(self.strides, tile, self.shape, strict=True)):
            if full == 1 or stride == 0:
                continue
            if stride != run:
                break
            run *= min(taken, full)
            if taken < full:
                break
        return run


def stored_order(
    chunks: Chunks, tensor: int, rank: int, strides: Callable[[int], tuple[int, ...] | None] | None = None
) -> StoredOrder:
    """Return how a tensor of this rank, by its number, is stored.

    Args:
        chunks: Chunks of all tensors.
        tensor: The number.
        rank: Its rank.
        strides: Finds the strides of a chunk, by its row, that are not in the columns.
    """
    first, last = int(chunks.first[tensor]), int(chunks.first[tensor + 1])
    across = 0
    if last - first > 1:
        # Chunks that begin in one row are side by side there.
        most = int(np.unique(chunks.lo[first:last, 0], return_counts=True)[1].max()) if rank else last - first
        across = 0 if most == 1 else most
    if first == last or rank < 2:
        return StoredOrder(across)
    shape = tuple(chunks.shape[first, :rank].tolist())
    view = view_of(chunks, first, rank)
    chunk_strides = view.strides if view is not None else strides(first) if strides is not None else None
    return (
        StoredOrder(across)
        if is_row_major(shape, chunk_strides)
        else StoredOrder(across, shape, chunk_strides)
    )


def gather(
    payload: Payload,
    chunk: Box,
    want: Box,
    dtype: str,
    tile: npt.NDArray[Any],
    scratch: Bytes,
    verify_range: RangeVerifier | None,
) -> None:
    """Copy the elements ``want`` of a chunk into ``tile``.

    Args:
        payload: The chunk's bytes.
        chunk: Box of the chunk in the tensor.
        want: Box of the tensor, inside ``chunk``.
        dtype: Dtype of the elements.
        tile: A view of exactly the shape of ``want``.
        scratch: Working memory.
        verify_range: Called with the CRC-32 of every range read, to verify it.
    """
    strides = payload.strides or row_major(chunk.shape)
    args = _GatherArgs(payload, strides, dtype, BY_NAME[dtype].itemsize, scratch, verify_range)
    _copy_box(args, tuple(map(sub, want.offset, chunk.offset)), want.shape, tile)


def run_start(want: Box, chunk: Box) -> int | None:
    """Return the first element of ``want`` in a row-major chunk if it is one run there, else None."""
    element, partial = 0, False
    for n, begin, o, k in zip(chunk.shape, chunk.offset, want.offset, want.shape, strict=True):
        if partial and k != n:
            return None
        partial = partial or k > 1
        element = element * n + o - begin
    # `partial` is set by the first dim with extent over 1; that one may be cut.
    return element


class _GatherArgs(NamedTuple):  # made for every chunk that is read
    """The arguments of `gather` that do not change as a box is cut; ``strides`` in elements."""

    payload: Payload
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    scratch: Bytes
    verify_range: RangeVerifier | None


def _copy_box(
    args: _GatherArgs, offset: tuple[int, ...], shape: tuple[int, ...], tile: npt.NDArray[Any]
) -> None:
    """Copy the elements [offset, offset + shape) of a chunk, cut as far as the buffer requires."""
    payload, strides, itemsize, verify_range = args.payload, args.strides, args.itemsize, args.verify_range
    rows = verify_range is not None and payload.strides is None
    # Rows as they are stored add up to the record, so its checksum can be computed from what is read.
    read_range = range_of(offset, shape, strides, itemsize, len(args.scratch), rows)
    if read_range is not None:
        begin, end, first = read_range
        buffer = args.scratch[: (end - begin) * itemsize]
        first_byte = payload.start + begin * itemsize
        payload.fill(first_byte, buffer.data, verify_range)
        elements = buffer[(first - begin) * itemsize :][: _span(shape, strides) * itemsize]
        _assign(tile, elements, shape, strides, args.dtype, payload.flags)
        return
    span = _span(shape, strides)
    # Along the widest-strided dim, slices are farthest apart: cutting there leaves the densest ranges.
    dim = max((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: strides[d])
    # As many steps along that dim as fit the buffer, or one by one where gaps are wide.
    inner = span - (shape[dim] - 1) * strides[dim]
    room = len(args.scratch) // itemsize
    step = max(1, min(shape[dim] - 1, (room - inner) // max(strides[dim], 1)))
    if not _is_dense(
        step * strides[dim] + inner, (*shape[:dim], step + 1, *shape[dim + 1 :]), strides, itemsize
    ):
        step = 1
    # One by one: if each slice is a range, several are read side by side and copied at once.
    if step == 1:
        slice_shape = (*shape[:dim], 1, *shape[dim + 1 :])
        first_slice = range_of(offset, slice_shape, strides, itemsize, len(args.scratch), rows)
        if first_slice is not None:
            _fill_slices(args, first_slice, shape, dim, tile)
            return
    for start in range(0, shape[dim], step):
        n = min(step, shape[dim] - start)
        part_offset = (*offset[:dim], offset[dim] + start, *offset[dim + 1 :])
        part_shape = (*shape[:dim], n, *shape[dim + 1 :])
        index = (slice(None),) * dim + (slice(start, start + n),)
        _copy_box(args, part_offset, part_shape, tile[index])


def _fill_slices(
    args: _GatherArgs,
    first_slice: tuple[int, int, int],
    shape: tuple[int, ...],
    dim: int,
    tile: npt.NDArray[Any],
) -> None:
    """Copy a box whose slices along ``dim`` are a range each, as many at a time as fit a core's cache.

    first_slice: result of `range_of` for the first one. tile: a view of exactly that shape.
    """
    payload, itemsize = args.payload, args.itemsize
    begin, end, first = first_slice
    span, lead = end - begin, (first - begin) * itemsize
    pitch = slot_pitch(span * itemsize) // itemsize
    room = min(len(args.scratch), SLOTS) // itemsize
    count = 1 + max(room - span, 0) // pitch
    strides = (*args.strides[:dim], pitch, *args.strides[dim + 1 :])
    for position in range(0, shape[dim], count):
        n = min(count, shape[dim] - position)
        buffer = args.scratch[: ((n - 1) * pitch + span) * itemsize]
        for i in range(n):
            slot = buffer[i * pitch * itemsize :][: span * itemsize]
            payload.fill(
                payload.start + (begin + (position + i) * args.strides[dim]) * itemsize,
                slot.data,
                args.verify_range,
            )
        part = (*shape[:dim], n, *shape[dim + 1 :])
        index = (slice(None),) * dim + (slice(position, position + n),)
        elements = buffer[lead:][: _span(part, strides) * itemsize]
        _assign(tile[index], elements, part, strides, args.dtype, payload.flags)


def slot_pitch(nbytes: int) -> int:
    """Count the bytes from slot to slot: whole cache lines and one more.

    The extra line keeps slots from competing for the same cache sets.
    """
    return -(-nbytes // LINE) * LINE + LINE


def range_of(
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    room: int,
    rows: bool,
) -> tuple[int, int, int] | None:
    """Find one read of elements [begin, end) that contains a box.

    Args:
        offset: First index of the box in the chunk.
        shape: Extent of the box.
        strides: Of the chunk, elements.
        itemsize: Bytes per element.
        room: Bytes of the buffer.
        rows: Prefer complete rows of a row-major chunk if the box has most of their elements; such reads add
            up to a checksum.

    Returns:
        (begin, end, the box's first element); None if it does not fit ``room`` or has large gaps.
    """
    first = sum(map(mul, offset, strides))
    span = _span(shape, strides)
    # Too long for the buffer, or too much would be read for nothing.
    if span * itemsize > room or not _is_dense(span, shape, strides, itemsize):
        return None
    if rows and shape:
        begin, end = _element_range(offset, shape, strides)
        if end - begin <= room // itemsize and _is_dense(end - begin, shape, strides, itemsize):
            return begin, end, first
    return first, first + span, first


def _is_dense(length: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Report whether a range of ``length`` elements is read at once rather than the runs of a box in it.

    It is where no gap is larger than a page: a read of each run would touch the same pages, at the cost of
    a call for each.
    """
    if length <= _OVERREAD * prod(shape):
        return True
    inner = 1  # elements from the first to the last of the dims so far, both included
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if n > 1:
            # A gap of more than a page: reading it touches pages that nothing needs.
            if (stride - inner) * itemsize > _PAGE:
                return False
            inner += (n - 1) * stride
    return (length - inner) * itemsize <= _PAGE


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Count the elements from the first to the last of a box, both included."""
    span: int = 1 + sum(map(mul, shape, strides)) - sum(strides)
    return span


def _element_range(
    offset: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, int]:
    """Return the elements [begin, end) of the complete rows of a row-major chunk that contain a box."""
    dim = next((d for d in range(len(shape)) if shape[d] > 1), len(shape) - 1)
    lead = sum(map(mul, offset[: dim + 1], strides))
    return lead, lead + shape[dim] * strides[dim]


def _assign(
    tile: npt.NDArray[Any],
    buffer: Bytes,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
    flags: int,
) -> None:
    itemsize = BY_NAME[dtype].itemsize
    if flags & SWAPPED:
        # Complex numbers are two parts, and each is swapped by itself.
        part = itemsize // 2 if BY_NAME[dtype].kind == "c" else itemsize
        buffer.view(UNITS[part]).byteswap(inplace=True)
    unit = UNITS[itemsize]
    source: npt.NDArray[Any] = np.ndarray(
        shape, unit, buffer=buffer.data, strides=tuple(s * itemsize for s in strides)
    )
    if flags & (CONJ | NEG) and dtype == "complex128":
        tile[...] = source
        _flip_signs(tile, flags)
    elif flags & (CONJ | NEG):
        _assign_torch(tile, source, dtype, flags)
    else:
        _assign_blocks(tile, source, itemsize)


def _assign_blocks(tile: npt.NDArray[Any], source: npt.NDArray[Any], itemsize: int) -> None:
    """Copy in blocks that fit a core's cache where tile and source have different innermost dims.

    Whole rows would touch another cache line with each element: that takes five times as long.
    """
    dims = [d for d in range(tile.ndim) if tile.shape[d] > 1]
    moved = [d for d in dims if source.strides[d]]  # the others repeat what is there
    inner = min(moved, key=lambda d: source.strides[d], default=0)
    # Both have the same innermost dim: numpy's own loop is as fast as it gets.
    if not moved or inner == moved[-1]:
        tile[...] = source
        return
    side = _SIDE if itemsize <= 4 else _SIDE // 2
    room, extents = side * side, [1] * tile.ndim
    for d in (dims[-1], *sorted(dims[:-1], key=lambda d: source.strides[d] or sys.maxsize)):
        extents[d] = min(tile.shape[d], room, side) if d in (dims[-1], inner) else min(tile.shape[d], room)
        room = max(room // extents[d], 1)
    for begin in product(*(range(0, n, step) for n, step in zip(tile.shape, extents, strict=True))):
        block = tuple(slice(b, b + step) for b, step in zip(begin, extents, strict=True))
        tile[block] = source[block]


def _flip_signs(tile: npt.NDArray[Any], flags: int) -> None:
    """Conjugate or negate elements of 16 bytes.

    Torch's kernels write these with instructions for aligned memory (ATen/native/cpu/UnaryOpsKernel.cpp,
    `conj_kernel`): at an address between, as tensors behind a header of 8 bytes have it, the process ended.
    """
    if flags & CONJ:
        np.conjugate(tile, out=tile)
    if flags & NEG:
        np.negative(tile, out=tile)


def _assign_torch(tile: npt.NDArray[Any], source: npt.NDArray[Any], dtype: str, flags: int) -> None:
    """Conjugate or negate with torch."""
    import torch

    kind = getattr(torch, dtype)
    target, values = _as_torch(torch, tile, kind), _as_torch(torch, source, kind)
    if flags & CONJ:
        values = values.conj()
    if flags & NEG:
        values = -values
    target.copy_(values)


def _as_torch(torch: Any, array: npt.NDArray[Any], kind: Any) -> Any:
    """Return a tensor over the array's memory, with its strides."""
    itemsize = array.dtype.itemsize
    span = 1 + sum((n - 1) * s // itemsize for n, s in zip(array.shape, array.strides, strict=True))
    flat = np.lib.stride_tricks.as_strided(array, (span,), (itemsize,)).view(np.uint8)
    return (
        torch.from_numpy(flat).view(kind).as_strided(array.shape, tuple(s // itemsize for s in array.strides))
    )
