"""Fetch expected ranges of objects in few large requests, a limited number ahead of their readers.

1. Ranges of one object that touch, or almost touch, are one span; spans are cut into blocks of at most
   16 MiB. A block is one request. With little memory blocks are smaller, so that each is fetched once.
2. Blocks are fetched in the order of their first use, as long as memory is left and not too many wait for
   their readers. How many requests are in flight depends on how long the store takes to answer, compared with
   how long a block takes to arrive.
3. A block whose readers are done is replaced first. If no memory is left, the block whose use is farthest
   away is given up, and fetched again later.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.store import Buffer
from ckptcore.store.ahead import ExpectedReads, Floats, Ints
from ckptcore.utils.distinct_values import unique
from ckptcore.utils.memory import untouched

BLOCK = 16 << 20
_LEAST_BLOCK = 256 << 10
GAP = 256 << 10  # bytes between two ranges that cost less than another request
_FIRST_IN_FLIGHT, _MOST_IN_FLIGHT = 4, 32
_LINE = 500e6  # bytes per second of a line that was not measured yet
_AHEAD = 2  # blocks that are in flight or wait for their readers, per request in flight

Fetch = Callable[[str, int, Buffer], "Future[Any]"]  # (path, first byte, buffer to fill)
Arrived = Callable[[str, int, Buffer], None]  # called once for each block that was fetched


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks of expected reads, sorted by file and place.

    Attributes:
        paths: Files.
        file: Index into ``paths``, per block.
        start: First byte.
        end: Byte behind the last.
        order: Numbers of blocks in the order of their first use.
        uses: When the reads of each block happen, block after block, sorted.
        used_bytes: Bytes of the block that are read until the end of each use.
        first: Block -> its first use in ``uses``, and one more.
        read_bytes: Bytes of it that will be read, each as often as it is read.
        needed: Bytes of it that will be read at least once.
        row: Path -> the slice of its blocks, as (first, behind the last).
        size: The most bytes that a block was allowed to have.
    """

    paths: tuple[str, ...]
    file: Ints
    start: Ints
    end: Ints
    order: Ints
    uses: Floats
    used_bytes: Ints
    first: Ints
    read_bytes: Ints
    needed: Ints
    row: dict[str, tuple[int, int]]
    size: int = BLOCK

    def __len__(self) -> int:
        return len(self.file)

    @property
    def most_alive(self) -> int:
        """Count the bytes of blocks that are between their first and their last use at the same time."""
        if not len(self):
            return 0
        nbytes = self.end - self.start
        when = np.concatenate([self.uses[self.first[:-1]], self.uses[self.first[1:] - 1]])
        change = np.concatenate([nbytes, -nbytes])
        turn = np.lexsort((-change, when))  # both at once count as both alive
        return int(np.cumsum(change[turn]).max())

    @property
    def over_read(self) -> int:
        """Count the bytes that are fetched and not asked for."""
        return max(0, int((self.end - self.start).sum()) - int(self.read_bytes.sum()))


def plan_blocks(reads: ExpectedReads, memory: int, gap: int = GAP) -> BlockTable:
    """Cut expected reads into the largest blocks that are each fetched once within a memory budget.

    Where files are read in another order than they were written, large blocks would be given up before all of
    their bytes were used. If no size avoids that, the smallest is used.
    """
    size = BLOCK
    while True:
        table = cut_into_blocks(reads, size, gap)
        if size <= _LEAST_BLOCK or fits(table, memory):
            return table
        # Halved until each block is fetched once: a block that is given up too early is paid for twice.
        size //= 2


def fits(table: BlockTable, memory: int) -> bool:
    """Report whether each block is fetched once within a memory budget, and some of them ahead."""
    # Beside the blocks in use some must be on their way, else readers wait for each request.
    return table.most_alive + min(memory // 4, _FIRST_IN_FLIGHT * table.size) <= memory


def cut_into_blocks(reads: ExpectedReads, size: int, gap: int = GAP) -> BlockTable:
    """Coalesce expected reads into blocks of at most ``size`` bytes."""
    # By file, place and end, so that one pass finds spans: runs of reads without a large gap. All is in
    # columns, because a checkpoint of a thousand ranks has millions of reads.
    rows = np.flatnonzero(reads.end > reads.start)
    rows = rows[np.lexsort((reads.end[rows], reads.start[rows], reads.file[rows]))]
    file, start, end = reads.file[rows], reads.start[rows], reads.end[rows]
    begins, ends = reads.begins[rows], reads.ends[rows]
    if not len(file):
        none = np.zeros(0, np.int64)
        return BlockTable(reads.paths, none, none, none, none, np.zeros(0), none, none, none, none, {}, size)
    # One coordinate for all files, far enough apart that none touch.
    stride = int(end.max()) + gap + 1
    base = file * stride
    first, last = base + start, base + end
    # A read far behind the one before it begins a span of its own, as the bytes between would be wasted.
    fresh = _begins_span(first, last, gap, None if reads.band is None else reads.band[rows])
    reach = np.maximum.accumulate(last)
    span_first = first[fresh]
    span_last = np.append(reach[np.flatnonzero(fresh)[1:] - 1], reach[-1])
    span_last[:-1] = np.minimum(span_last[:-1], span_first[1:])  # bands may overlap by a header
    # Each span is cut into blocks of `size`; only its last one is shorter.
    counts = -(-(span_last - span_first) // size)
    owner = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    block_first = span_first[owner] + nth * size
    block_last = np.minimum(block_first + size, span_last[owner])
    read, block = _overlaps(block_first, first, last)
    part_first = np.maximum(first[read], block_first[block])
    part = np.minimum(last[read], block_last[block]) - part_first
    # A read that touches several blocks passes through them in order, at an even pace: that is when each of
    # them is used, and how long it must stay in memory.
    share = (part_first - first[read]) / (last[read] - first[read])
    when = begins[read] + share * (ends[read] - begins[read])
    turn = np.lexsort((when, block))
    block, when, part = block[turn], when[turn], part[turn]
    # From here on a pair is one use of one block, sorted by block and time.
    first_pair = np.searchsorted(block, np.arange(len(block_first) + 1))
    sums = np.cumsum(part)
    used_bytes = sums - np.repeat(sums[first_pair[:-1]] - part[first_pair[:-1]], np.diff(first_pair))
    read_bytes = used_bytes[first_pair[1:] - 1]
    owner_file = block_first // stride
    needed = block_last - block_first
    # Bytes between reads of a span are fetched with it, and nobody waits for them.
    hole_first, hole_last = _holes(first, reach, fresh)
    hole, holed = _overlaps(block_first, hole_first, hole_last)
    inside = np.minimum(hole_last[hole], block_last[holed]) - np.maximum(hole_first[hole], block_first[holed])
    np.subtract.at(needed, holed, np.maximum(inside, 0))
    return BlockTable(
        reads.paths,
        owner_file,
        block_first - owner_file * stride,
        block_last - owner_file * stride,
        np.argsort(when[first_pair[:-1]], kind="stable"),
        when,
        used_bytes,
        first_pair,
        read_bytes,
        needed,
        _rows_of_files(reads.paths, owner_file),
        size,
    )


def _rows_of_files(paths: Sequence[str], owner_file: Ints) -> dict[str, tuple[int, int]]:
    """Return path -> the slice of its blocks, of sorted numbers of files."""
    numbers = unique(owner_file)
    firsts, behind = (np.searchsorted(owner_file, numbers, side).tolist() for side in ("left", "right"))
    return {paths[number]: (a, b) for number, a, b in zip(numbers.tolist(), firsts, behind, strict=True)}


def _begins_span(first: Ints, last: Ints, gap: int, band: Ints | None) -> npt.NDArray[np.bool_]:
    """Return which sorted reads begin a span: they are far behind those before, or of another band."""
    fresh = np.ones(len(first), bool)
    fresh[1:] = first[1:] > np.maximum.accumulate(last)[:-1] + gap
    if band is not None:
        # Reads of another band (a later time) are not joined, or early blocks would be kept until late ones.
        fresh[1:] |= (band[1:] != band[:-1]) & (first[1:] > first[:-1])
    return fresh


def _holes(first: Ints, reach: Ints, fresh: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Return what no read of a span wants: from the furthest byte so far to the next first byte."""
    next_one = np.flatnonzero(~fresh)
    # A hole exists only where the furthest byte so far is before the next first one.
    next_one = next_one[reach[next_one - 1] < first[next_one]]
    return reach[next_one - 1], first[next_one]


@dataclass(slots=True)
class _Loaded:
    """A block in memory, or on its way.

    Attributes:
        buffer: Its memory; a block may use less than all of it.
        view: The bytes of the block.
        future: Ends when the bytes have arrived.
        users: Readers that copy from it right now.
        counted: Whether `Arrived` was called.
        lock: Taken while it is called.
    """

    buffer: Buffer
    view: Buffer
    future: Future[Any]
    users: int = 0
    counted: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


def _in_flight(answer_s: float, moving_s: float) -> int:
    """Return how many requests to send at once, so that the store's answers never keep the line waiting.

    >>> _in_flight(0.0, 0.02), _in_flight(0.03, 0.03), _in_flight(1.0, 0.02)
    (4, 8, 32)
    """
    # While one block arrives, the answers of the others must be under way.
    requests = _FIRST_IN_FLIGHT * (1 + answer_s / moving_s)
    return int(min(_MOST_IN_FLIGHT, max(_FIRST_IN_FLIGHT, requests)))


def _overlaps(block_first: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Return every (range, block) that overlap, as two columns; the blocks' first bytes are sorted."""
    lowest = np.searchsorted(block_first, first, "right") - 1
    highest = np.searchsorted(block_first, last - 1, "right") - 1
    pairs = highest - lowest + 1
    which = np.repeat(np.arange(len(first)), pairs)
    return which, np.repeat(lowest, pairs) + np.arange(len(which)) - np.repeat(
        np.cumsum(pairs) - pairs, pairs
    )


def cover(borders: list[int], start: int, end: int) -> int:
    """Add a range to ranges that do not touch, given by their borders; return how many bytes are new.

    >>> known = [0, 10, 20, 30]
    >>> cover(known, 5, 25), known
    (10, [0, 30])
    >>> cover(known, 30, 31), cover(known, 40, 41), known
    (1, 1, [0, 31, 40, 41])
    """
    # Pairs of borders: an odd position is inside of a range.
    first, last = bisect_left(borders, start), bisect_right(borders, end)
    before, behind = [start] if first % 2 == 0 else [], [end] if last % 2 == 0 else []
    ranges = [*([] if before else [start]), *borders[first:last], *([] if behind else [end])]
    borders[first:last] = before + behind
    return end - start - (sum(ranges[1::2]) - sum(ranges[::2]))


class BlockReader:
    """Serves reads of expected ranges from blocks. Safe for threads.

    Args:
        table: The blocks.
        fetch: Begins one request.
        arrived: Called with every block, before it is read.
        answer_s: Returns how long the store takes until an answer begins, seconds.
        memory: The most bytes of blocks.
    """

    def __init__(
        self, table: BlockTable, fetch: Fetch, arrived: Arrived, answer_s: Callable[[], float], memory: int
    ) -> None:
        self._table, self._fetch, self._arrived, self._answer_s = table, fetch, arrived, answer_s
        size = int((table.end - table.start).max()) if len(table) else 1
        self._size = size
        # At least one block, or nothing could be read.
        self._capacity = max(1, min(memory // size, len(table)))
        self._lock = threading.Condition()  # reentrant: a request may end while it is begun
        self._loaded: dict[int, _Loaded] = {}
        self._free: list[Buffer] = []
        self._left = table.read_bytes.copy()
        self._needed = table.needed.copy()
        self._read: dict[int, list[int]] = {}  # block -> borders of what was read of it
        self._next = 0
        self._in_flight = 0
        # Until one has arrived: of what is known, only how long the store takes to answer.
        self._window = _in_flight(answer_s(), size / _LINE)
        self._closed = False

    def start(self) -> None:
        """Fetch the first blocks, before anyone reads."""
        with self._lock:
            self._advance()

    def read_into(self, path: str, start: int, into: Buffer, direct: Callable[[int, Buffer], None]) -> None:
        """Fill ``into``; what is in no block is asked of ``direct``."""
        row = self._table.row.get(path)
        if row is None:
            direct(start, into)
            return
        starts, ends = self._table.start, self._table.end
        while len(into):
            block = int(np.searchsorted(starts[row[0] : row[1]], start, "right")) - 1 + row[0]
            # Reads that were not expected (a header that was guessed too short) go to the store directly.
            if block < row[0] or start >= ends[block]:  # before, between or behind the blocks
                behind = block + 1
                count = min(len(into), int(starts[behind]) - start) if behind < row[1] else len(into)
                direct(start, into[:count])
            else:
                count = min(len(into), int(ends[block]) - start)
                self._copy(block, start - int(starts[block]), into[:count])
            start, into = start + count, into[count:]

    def forget(self, path: str, start: int, length: int) -> None:
        """Drop the blocks of a range, so that the next read asks the store, whoever reads of them now."""
        first, last = self._table.row.get(path, (0, 0))
        for block in range(first, last):
            if self._table.start[block] < start + length and start < self._table.end[block]:
                with self._lock:
                    loaded = self._loaded.get(block)
                    # Nobody has read one that is on its way: it is not what came altered.
                    if loaded is None or not loaded.future.done():
                        continue
                    if loaded.users:  # they keep its memory, which nobody else gets
                        del self._loaded[block]
                    else:
                        self._drop(block)

    def close(self) -> None:
        """Give up what is in flight, and free the memory."""
        with self._lock:
            self._closed = True
            for loaded in self._loaded.values():
                loaded.future.cancel()
            self._loaded.clear()
            self._free.clear()

    def _copy(self, block: int, offset: int, into: Buffer) -> None:
        loaded = self._take(block)
        good = False
        try:
            loaded.future.result()
            with loaded.lock:
                if not loaded.counted:
                    path = self._table.paths[int(self._table.file[block])]
                    self._arrived(path, int(self._table.start[block]), loaded.view)
                    loaded.counted = True
            into[:] = loaded.view[offset : offset + len(into)]
            good = True
        finally:
            with self._lock:
                loaded.users -= 1
                self._left[block] -= len(into)
                self._needed[block] -= cover(self._read.setdefault(block, []), offset, offset + len(into))
                if self._loaded.get(block) is loaded and not loaded.users:
                    # The next reader asks the store for it once more.
                    if not good:
                        self._drop(block)
                    elif self._is_done(block) and self._next == len(self._table.order):
                        # Nobody needs its memory any more. All of it at the end would take 50 ms.
                        del self._loaded[block]
                self._advance()
                self._lock.notify_all()

    def _take(self, block: int) -> _Loaded:
        with self._lock:
            # Blocks that cannot be given up are on their way, or are copied from: both end.
            self._lock.wait_for(
                lambda: block in self._loaded or len(self._loaded) < self._capacity or self._give_up()
            )
            loaded = self._loaded.get(block) or self._begin(block)
            # Counted before the lock is given back: a block with a user is never given up.
            loaded.users += 1
            self._advance()
            return loaded

    def _advance(self) -> None:
        """Fetch the next blocks as far as memory and window allow."""
        order = self._table.order
        while self._in_flight < self._window and self._next < len(order) and not self._closed:
            block = int(order[self._next])
            missing = block not in self._loaded and not self._is_done(block)
            if missing and self._unused() >= _AHEAD * self._window:
                return
            if missing and len(self._loaded) >= self._capacity and not self._free_done():
                return
            self._next += 1
            if missing:
                self._begin(block)

    def _unused(self) -> int:
        """Count the blocks that nobody has read from yet. More of them would only be new memory."""
        return sum(bool(self._left[block] == self._table.read_bytes[block]) for block in self._loaded)

    def _begin(self, block: int) -> _Loaded:
        if not self._free:  # new memory costs more than a search for a block that is done
            self._free_done()
        buffer = self._free.pop() if self._free else untouched(self._size)
        length = int(self._table.end[block] - self._table.start[block])
        view = buffer[:length]
        path = self._table.paths[int(self._table.file[block])]
        self._in_flight += 1
        start_time = time.perf_counter()
        future = self._fetch(path, int(self._table.start[block]), view)
        loaded = self._loaded[block] = _Loaded(buffer, view, future)
        future.add_done_callback(lambda request: self._landed(request, start_time))
        return loaded

    def _landed(self, future: Future[Any], start_time: float) -> None:
        with self._lock:
            self._in_flight -= 1
            if not future.cancelled() and future.exception() is None:
                answered, elapsed_s = self._answer_s(), time.perf_counter() - start_time
                # Of the time until it arrived, what the store took to answer is not the line's.
                self._window = _in_flight(answered, max(elapsed_s - answered, 1e-3))
            self._advance()
            self._lock.notify_all()

    def _is_done(self, block: int) -> bool:
        """Report whether a block was read to its end: as much as is wanted of it, and every part of that.

        Headers are read with some bytes behind them, which are read again with the elements.
        """
        return bool(self._left[block] <= 0 and self._needed[block] <= 0)

    def _free_done(self) -> bool:
        """Free a block that is read to its end; return whether there is one."""
        for block, loaded in self._loaded.items():
            if self._is_done(block) and not loaded.users and loaded.future.done():
                self._drop(block)
                return True
        return False

    def _give_up(self) -> bool:
        """Free a block for one that is needed now; return whether there is one."""
        if self._free_done():
            return True
        idle = [block for block, loaded in self._loaded.items() if not loaded.users and loaded.future.done()]
        if not idle:
            return False
        # The block that is needed latest (Belady's rule).
        self._drop(max(idle, key=self._next_use))
        return True

    def _next_use(self, block: int) -> float:
        """Return when a block is needed next, as far as its bytes were read in the expected order."""
        table = self._table
        first, last = int(table.first[block]), int(table.first[block + 1])
        nbytes_read = int(table.read_bytes[block] - self._left[block])
        turn = first + int(np.searchsorted(table.used_bytes[first:last], nbytes_read, "right"))
        return float(table.uses[turn]) if turn < last else float("inf")

    def _drop(self, block: int) -> None:
        loaded = self._loaded.pop(block)
        if len(self._free) + len(self._loaded) < self._capacity:
            self._free.append(loaded.buffer)
