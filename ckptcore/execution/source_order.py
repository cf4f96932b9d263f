"""Order the pieces of output files so that a remote source is read once, in large requests.

Each of many source files has a little of every output file. In file order, a large block of a source file
would be kept until the last output that needs it, and memory holds few such blocks. On a store with uploads
by handles the parts of an output may be sent in any order, so the outputs follow the source instead:

1. Tensors are sorted by their place in the source, and cut into *bands*: no source file has more than one
   block of a band.
2. Tensors are cut into *pieces*: complete rows, at the borders of the stored chunks.
3. Within a band, pieces follow source file by source file. A block is used within a moment, and the parts of
   uploads that are not full yet stay in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box, flat_start
from ckptcore.core.dtype import BY_NAME
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.tiles import Budget, Job, LiteralPart, TensorPart
from ckptcore.reading.gather import stored_order
from ckptcore.store.ahead import Ints
from ckptcore.store.objects.part_plan import plan_parts
from ckptcore.utils.distinct_values import unique

Int32s = npt.NDArray[np.int32]
_CHUNK = 4096  # pieces that are objects at the same time


@dataclass(frozen=True, slots=True)
class RowReads:
    """What one output file reads, range by range. Row i is range i.

    Attributes:
        paths: Source files.
        file: Index into ``paths``.
        start: First byte.
        end: Byte behind the last.
        tensor: Number of the tensor in the output file; inputs of derived tensors are behind these.
        begin: First row of it, counted from its box.
        stop: Row behind the last.
        places: Whether the elements are placed, and not only compared.
    """

    paths: tuple[str, ...]
    file: Ints
    start: Ints
    end: Ints
    tensor: Ints
    begin: Ints
    stop: Ints
    places: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SourceOrder:
    """Pieces of output files in the order of their source. Row i is piece i.

    Attributes:
        indices: Output files.
        file: Index into ``indices``.
        tensor: Number of the tensor in its file.
        begin: First row, counted from the tensor's box.
        stop: Row behind the last.
        counts: Pieces of each output file.
        open_bytes: The most bytes of parts that are begun and not full at the same time.
        part: Bytes of the largest part.
    """

    indices: tuple[int, ...]
    file: Int32s
    tensor: Int32s
    begin: Ints
    stop: Ints
    counts: tuple[int, ...]
    open_bytes: int
    part: int

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True, slots=True)
class Timed:
    """When the ranges of each output file are read in a `SourceOrder`.

    Attributes:
        begins: Of each file's `RowReads`: the number of the first piece that reads the range.
        ends: One behind the number of the last such piece.
        band: Of each range: number of its band.
    """

    begins: tuple[Ints, ...]
    ends: tuple[Ints, ...]
    band: tuple[Ints, ...]


@dataclass(frozen=True, slots=True)
class FilePieces:
    """The pieces of one output file, tensor by tensor, row by row.

    Attributes:
        index: Number of the file.
        reads: What it reads.
        tensor: Number of each piece's tensor.
        begin: First row.
        stop: Row behind the last.
        first_byte: First byte in the output file.
        last_byte: Byte behind the last.
        key: Piece -> number that grows with tensor and row.
        scale: A key is a tensor's number times this, and a row.
        part: Bytes of a part of the file's upload.
    """

    index: int
    reads: RowReads
    tensor: Ints
    begin: Ints
    stop: Ints
    first_byte: Ints
    last_byte: Ints
    key: Ints
    scale: int
    part: int


def can_follow(plan: FilePlan) -> bool:
    """Report whether a file's pieces may be made in any order.

    Computed tensors read inputs that other pieces read, too; checksums behind the data need file order.
    """
    return len(plan.columns) > 0 and not plan.derived and not any(x.crc_at for x in plan.literals)


def cut_pieces(plan: FilePlan, reads: RowReads) -> FilePieces:
    """Cut the tensors of an output file at the borders of the chunks that they read."""
    columns = plan.columns
    rank = columns.shape.shape[1]
    # A tensor of rank 0 counts as one row.
    rows = columns.shape[:, 0] if rank else np.ones(len(columns), np.int64)
    rows = np.where(columns.rank > 0, rows, 1)
    nbytes = columns.nbytes
    filled = np.flatnonzero(nbytes > 0)
    # One number for tensor and row: cuts of all tensors are sorted at once.
    scale = int(rows.max(initial=1)) + 1
    tensor_keys = filled * scale
    cuts = unique(
        np.concatenate(
            [
                tensor_keys,
                tensor_keys + rows[filled],
                reads.tensor * scale + reads.begin,
                reads.tensor * scale + reads.stop,
            ]
        )
    )
    tensor = cuts // scale
    # A piece is between two neighbouring cuts of one tensor.
    piece = np.flatnonzero(tensor[1:] == tensor[:-1])
    of, begin, stop = tensor[piece], cuts[piece] % scale, cuts[piece + 1] % scale
    row_bytes = nbytes // np.maximum(rows, 1)
    start = columns.start[of]
    return FilePieces(
        plan.index,
        reads,
        of,
        begin,
        stop,
        start + begin * row_bytes[of],
        start + stop * row_bytes[of],
        cuts[piece],
        scale,
        plan_parts(plan.nbytes, plan.path).part,
    )


def follow_source(files: Sequence[FilePieces], band: int) -> tuple[SourceOrder, Timed]:
    """Order the pieces of output files.

    Args:
        files: The pieces.
        band: The most bytes of a source file in a band, unless one range alone is longer.
    """
    paths: dict[str, int] = {}
    number = [np.array([paths.setdefault(p, len(paths)) for p in f.reads.paths], np.int64) for f in files]
    # Files are numbered over all outputs, as each output has its own list.
    path = np.concatenate([n[f.reads.file] for n, f in zip(number, files, strict=True)])
    tensor, kinds = _tensors_of(files)
    begin = np.concatenate([f.reads.begin for f in files])
    start = np.concatenate([f.reads.start for f in files])
    nbytes = np.concatenate([f.reads.end for f in files]) - start
    turn = _turns(path, tensor, begin, kinds)[path]
    bands = _bands(turn, tensor, start, nbytes, kinds, band)

    row, piece = _pairs(files)
    # Ranges that are only compared do not decide when a piece is made.
    places = np.concatenate([f.reads.places for f in files])[row]
    # A piece may read several ranges. Its place in the order is that of the first range, in the order of the
    # source's files: `far` is behind all of them, for pieces that read nothing.
    count = sum(len(f.tensor) for f in files)
    far = np.iinfo(np.int64).max
    source, place = np.full(count, far), np.full(count, far)
    np.minimum.at(source, piece[places], turn[row[places]])
    first = places & (turn[row] == source[piece])
    np.minimum.at(place, piece[first], start[row[first]])

    base = np.cumsum([0, *(len(f.tensor) for f in files)])
    owner = np.repeat(np.arange(len(files)), np.diff(base))
    of = np.concatenate([f.tensor for f in files])
    first_tensor = _first_tensors(files)
    piece_band = bands[first_tensor[owner] + of]
    first_byte = np.concatenate([f.first_byte for f in files])
    # Band by band, so that a block is needed for a moment only; within a band in the order of the source.
    order = np.lexsort((first_byte, owner, place, source, piece_band))
    when = np.empty(count, np.int64)
    when[order] = np.arange(count)

    # The other way round: when each range of the source is needed first and last.
    begins, ends = np.full(len(path), far), np.zeros(len(path), np.int64)
    np.minimum.at(begins, row, when[piece])
    np.maximum.at(ends, row, when[piece] + 1)
    edges = np.cumsum([0, *(len(f.reads.file) for f in files)])[1:-1]
    timed = Timed(
        tuple(np.split(np.minimum(begins, ends), edges)),  # a range that no piece reads is not expected
        tuple(np.split(ends, edges)),
        tuple(np.split(bands[tensor], edges)),
    )
    return (
        SourceOrder(
            tuple(f.index for f in files),
            owner[order].astype(np.int32),
            of[order].astype(np.int32),
            np.concatenate([f.begin for f in files])[order],
            np.concatenate([f.stop for f in files])[order],
            tuple(np.diff(base).tolist()),
            _open_bytes(files, owner, when, first_byte),
            max(f.part for f in files),
        ),
        timed,
    )


def _first_tensors(files: Sequence[FilePieces]) -> Ints:
    """Return the number of each file's first tensor, when the tensors of all files are numbered through."""
    most = [int(max(f.tensor.max(initial=-1), f.reads.tensor.max(initial=-1))) + 1 for f in files]
    return np.cumsum([0, *most])


def _tensors_of(files: Sequence[FilePieces]) -> tuple[Ints, int]:
    """Return each range's tensor, numbered through all files, and how many tensors there are."""
    first = _first_tensors(files)
    return np.concatenate([f.reads.tensor + n for f, n in zip(files, first.tolist(), strict=False)]), int(
        first[-1]
    )


def _turns(path: Ints, tensor: Ints, begin: Ints, kinds: int) -> Ints:
    """Return, for each source file, when its turn is: the order of rows of the tensors cut most finely."""
    count = np.bincount(tensor, minlength=kinds)
    ordered_paths = path[np.lexsort((begin, tensor, -count[tensor]))]
    distinct_paths, first = np.unique(ordered_paths, return_index=True)
    turn = np.zeros(int(path.max(initial=-1)) + 1, np.int64)
    turn[distinct_paths[np.argsort(first)]] = np.arange(len(distinct_paths))
    return turn


def _bands(turn: Ints, tensor: Ints, start: Ints, nbytes: Ints, kinds: int, limit: int) -> Ints:
    """Return the band of each tensor."""
    order = np.lexsort((start, turn, tensor))
    first = np.searchsorted(tensor[order], np.arange(kinds + 1))
    has = np.flatnonzero(first[1:] > first[:-1])
    # Which is first in the source decides when the tensor's band begins.
    lead = order[first[has]]  # the range of each tensor that comes first in the source
    band = np.zeros(kinds, np.int64)
    filled = np.zeros(int(turn.max(initial=-1)) + 1, np.int64)
    now, empty = 0, True
    # In the order of the source: a band ends when any file would give it more than a block.
    for n in has[np.lexsort((start[lead], turn[lead]))].tolist():
        rows = order[first[n] : first[n + 1]]
        tensor_bytes = np.bincount(turn[rows], weights=nbytes[rows], minlength=len(filled)).astype(np.int64)
        # Never an empty band: a tensor larger than the limit has one of its own.
        if not empty and bool((filled + tensor_bytes > limit)[tensor_bytes > 0].any()):
            now, filled = now + 1, np.zeros_like(filled)
        filled, empty = filled + tensor_bytes, False
        band[n] = now
    return band


def _pairs(files: Sequence[FilePieces]) -> tuple[Ints, Ints]:
    """Return every (range, piece) that overlap, both numbered through all files."""
    rows, pieces, row, piece = [], [], 0, 0
    for f in files:
        lead = f.reads.tensor * f.scale
        low = np.searchsorted(f.key, lead + f.reads.begin, "right") - 1
        high = np.searchsorted(f.key, lead + f.reads.stop - 1, "right") - 1
        count = np.maximum(high - low + 1, 0)
        of = np.repeat(np.arange(len(count)), count)
        rows.append(of + row)
        pieces.append(
            np.repeat(low, count) + np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count) + piece
        )
        row, piece = row + len(count), piece + len(f.key)
    return np.concatenate(rows), np.concatenate(pieces)


def _open_bytes(files: Sequence[FilePieces], owner: Ints, when: Ints, first_byte: Ints) -> int:
    """Count the most bytes of parts between their first and their last piece."""
    part = np.array([f.part for f in files], np.int64)
    size = part[owner]
    last_byte = np.concatenate([f.last_byte for f in files]) - 1
    # A piece begins in one part and may end in another; parts of all files are numbered through.
    most = int((last_byte // size).max(initial=0)) + 1
    key = np.concatenate([owner * most + first_byte // size, owner * most + last_byte // size])
    parts, part_row = np.unique(key, return_inverse=True)
    opens, closes = np.full(len(parts), np.iinfo(np.int64).max), np.zeros(len(parts), np.int64)
    piece_times = np.concatenate([when, when])
    np.minimum.at(opens, part_row, piece_times)
    np.maximum.at(closes, part_row, piece_times + 1)
    nbytes = part[parts // most]
    change, event = np.concatenate([nbytes, -nbytes]), np.concatenate([opens, closes])
    turn = np.lexsort((change, event))  # a part that is full is given back before the next one is begun
    inside = int(part.max(initial=0))  # of a piece that is longer than a part
    return int(np.cumsum(change[turn]).max(initial=0)) + inside


def ordered_jobs(
    order: SourceOrder, load: Callable[[int], FilePlan], budget: Budget
) -> Iterator[tuple[int, Job, bool]]:
    """Yield (index of the output file, job, whether it is the file's last), in the order of the source.

    Args:
        order: The pieces.
        load: Returns the plan of one output file by its index; called once for each.
        budget: Bounds a job.
    """
    cutters: dict[int, _FileJobs] = {}
    left = list(order.counts)
    for chunk_start in range(0, len(order), _CHUNK):
        columns = (order.file, order.tensor, order.begin, order.stop)
        for file, tensor, begin, stop in zip(
            *(c[chunk_start : chunk_start + _CHUNK].tolist() for c in columns), strict=True
        ):
            cutter = cutters.get(file)
            # Plans are loaded when the first piece needs them, and given up behind the last.
            if cutter is None:
                cutter = cutters[file] = _FileJobs(load(order.indices[file]), budget)
            left[file] -= 1
            ahead = cutter.jobs(tensor, begin, stop)
            job: Job | None = next(ahead)
            while job is not None:
                after = next(ahead, None)
                # Known only with the next job: the last one of a file closes it.
                yield order.indices[file], job, after is None and not left[file]
                job = after
            if not left[file]:
                del cutters[file]


class _FileJobs:
    """Cuts the pieces of one output file into jobs, numbered in the order in which they are asked for."""

    def __init__(self, plan: FilePlan, budget: Budget) -> None:
        self._plan, self._next = plan, 0
        # Decoded items take a part of the tiles, as in file order.
        self._budget = budget.beside_decoded if plan.items.codec.any() else budget
        self._literals: dict[int, list[int]] = {}  # known bytes come with the tensor behind them
        starts = [(t.start, n) for n, t in enumerate(plan.tensors) if t.nbytes]
        place = 0
        for number, literal in enumerate(plan.literals):
            # A literal belongs to the first tensor behind it, or to the last one of the file.
            while place < len(starts) - 1 and starts[place][0] < literal.start:
                place += 1
            self._literals.setdefault(starts[place][1], []).append(number)
        self._limits: dict[int, int] = {}

    def jobs(self, tensor: int, begin: int, stop: int) -> Iterator[Job]:
        """Yield the jobs of a piece, and before the first of a tensor those of known bytes."""
        for number in self._literals.pop(tensor, ()):
            literal = self._plan.literals[number]
            for start in range(0, len(literal.data), self._budget.usual):
                end = min(start + self._budget.usual, len(literal.data))
                yield self._job(literal.start + start, LiteralPart(number, start, end))
        planned = self._plan.tensors[tensor]
        itemsize = BY_NAME[planned.dtype].itemsize
        widest = max(itemsize, BY_NAME[planned.source_dtype].itemsize)
        limit = self._limits.get(tensor)
        if limit is None:
            stored = stored_order(self._plan.reads, tensor, len(planned.shape))
            limit = self._budget.step(stored, planned.shape, widest)
            self._limits[tensor] = limit
        o, s = planned.offset, planned.shape
        rows = Box((o[0] + begin, *o[1:]), (stop - begin, *s[1:])) if s else planned.box
        for box in rows.tiles(limit // widest):
            offset = flat_start(s, box.within(planned.box).offset) * itemsize
            yield self._job(planned.start + offset, TensorPart(tensor, box, box.numel * itemsize, offset))

    def _job(self, start: int, part: LiteralPart | TensorPart) -> Job:
        self._next += 1
        return Job(self._next - 1, start, part.nbytes, ((0, part),))
