"""Decode runs of similarly encoded records, millions of them, column by column.

Metadata of a large job is one list of chunks per tensor and one dict of locations; nearly all of its bytes
are instances of three classes, one after the other. `ckptcore.encodings.pickle.records` reads the first of a
run; all others must have its pattern: the same class, the same names in the same order, and for each name a
size, a number or a text. Instances are found by the opcodes they begin with, and decoded all at once. They
are accepted as long as each ends where the next begins, so that bytes inside a text that look like an
instance change nothing. The unpickler's single opcodes read everything else.

Tensors of one shape have lists of chunks with equal bytes. Such a run is decoded once, and recognised after
that (`_Repeats`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.encodings.pickle.columns import (
    Bools,
    Column,
    Columns,
    Ints,
    Names,
    Pattern,
    PickleWindow,
    RunMemo,
    Sizes,
    Texts,
    pattern_of,
)
from ckptcore.encodings.pickle.records import Call, Memo, Shortcuts

_HEAD = 6  # bytes of `PickleWindow`'s head
_MOST_DIMS = 8
_WORTH = 32  # instances from which on decoding at once is faster than one by one
_FEWEST, _USUAL, _MOST = 64, 2048, 1 << 15  # instances to decode at once
_REPEATS, _REPEATED = 16, 1 << 20  # runs to recognise, and the bytes of the longest
_BEGINNING = 96  # bytes by which such a run is looked up
_PATIENCE = 1 << 12  # records read alone before a run is looked for again, at most
# Opcode -> its total bytes, and the bits of its number: BININT1, BININT2, BININT.
_WIDTH = np.zeros(256, np.int64)
_WIDTH[[0x4B, 0x4D, 0x4A]] = 2, 3, 5
_BITS = np.zeros(256, np.uint64)
_BITS[[0x4B, 0x4D, 0x4A]] = 0xFF, 0xFFFF, 0xFFFF_FFFF
# How a size ends, by its number of dims: TUPLE1 to 3 or TUPLE, MEMOIZE, TUPLE1, MEMOIZE, REDUCE, MEMOIZE.
_SIZE_END = np.array(
    [int.from_bytes(bytes([op]) + b"\x94\x85\x94R\x94", "little") for op in b"\x85\x86\x87t"], np.uint64
)
_NO_DIMS = int.from_bytes(b")\x85\x94R\x94", "little")
_LOW = [np.uint64((1 << 8 * n) - 1) for n in range(9)]
_BYTE = np.uint64(0xFF)


class RecordRuns:
    """Finds runs in a pickle, and decodes them."""

    def __init__(self, data: bytes, memo: Memo) -> None:
        self._data, self._memo = data, memo
        self._texts = Texts()
        self._repeats = _Repeats()
        self._window: PickleWindow | None = None
        self._skip = self._pause = 0
        self._usual = _USUAL
        self.frame_end = len(data) + 1
        self.rows = 0  # decoded so far, an instance each

    def follow(
        self, shortcuts: Shortcuts, call: Call, position: int, stack: list[Any], marks: list[list[Any]]
    ) -> int:
        """Decode the run behind the last record onto the stack and into the memo.

        The record ends at ``position``. Return the position behind the run, the same when there is none. A
        dict's run is a key without a value.
        """
        if self._skip:  # where runs are short, looking for them costs more than they save
            self._skip -= 1
            return position
        container = marks[-1][-1] if marks and marks[-1] else None
        pair = len(call.run) == 2
        before, last = shortcuts.before, shortcuts.last
        if last is None or (pair and before is None) or type(container) is not (dict if pair else list):
            return position
        records = [last]
        if pair and before is not None:
            if len(stack) % 2 or before[3] != last[1] or before[0].name != call.run[0]:
                return position
            records = [before, last]
        patterns = [pattern_of(record, self._data, self._memo) for record in records]
        run_patterns = [p for p in patterns if p is not None]
        if len(run_patterns) < len(patterns):
            self._skip = _PATIENCE
            return position
        pieces, position = self.take(run_patterns, position, b"u(" if pair else b"e(")
        for columns in pieces:
            stack += (columns, None) if pair else (columns,)
        return position

    def take(self, patterns: Sequence[Pattern], position: int, batch: bytes) -> tuple[list[Columns], int]:
        """Return the run that begins at ``position``, in pieces, and the position behind it.

        ``batch`` is the opcodes that may come between two rows: they end a batch of items and begin the next.
        """
        pieces: list[Columns] = []
        taken = 0
        while True:
            window = self._window
            begin = window.place(position) if window is not None else None
            if window is None or begin is None or not window.holds(begin, len(patterns)):
                window = self._window = PickleWindow(self._data, position, self.frame_end)
                begin = window.place(position)
            if begin is None:
                break
            run = self._repeats.find(window, begin, patterns)
            if run is None:
                run = _Rows(window, self._texts, self._memo, patterns, batch).decode(begin, self._usual)
                if run is None:
                    break
                self._repeats.keep(window, begin, patterns, run)
            pieces.append(run.columns)
            taken += run.columns.count
            self.rows += run.columns.count * len(patterns)
            first = self._memo.next
            self._memo.skip(RunMemo(run.columns, patterns, first, run.starts), first + run.numbers)
            position, self.frame_end = window.raw(begin + run.length)
            if run.broken:
                break
            # Rows behind the end of a run are decoded in vain, so pieces begin small.
            self._usual = min(2 * self._usual, _MOST)
        # Where runs are short, they are looked for less and less often.
        self._pause = min(2 * self._pause + 16, _PATIENCE) if taken < _WORTH else 0
        self._skip = max(self._pause, 1)  # the record behind a run is read alone
        if taken:
            self._usual = max(_FEWEST, min(taken + (taken >> 3) + 16, _MOST))
        return pieces, position


@dataclass(frozen=True, slots=True)
class _Run:
    """Decoded rows of a run.

    Attributes:
        columns: Columns of the rows.
        begins: int64 [n], position of each row, counted from where the run begins.
        starts: int64 [n], first memo number of each row, counted from the first row's.
        numbers: Memo numbers of all rows.
        length: Bytes.
        broken: Whether the run ends there, in the same window.
    """

    columns: Columns
    begins: Ints
    starts: Ints
    numbers: int
    length: int
    broken: bool


class _Repeats:
    """The last few different runs of numbers, by how they begin.

    Texts have references to other memo numbers each time. Without texts, equal bytes of equal patterns are
    equal rows.
    """

    def __init__(self) -> None:
        self._run_by_beginning: dict[tuple[tuple[Pattern, ...], bytes], tuple[bytes, _Run]] = {}

    def find(self, window: PickleWindow, begin: int, patterns: Sequence[Pattern]) -> _Run | None:
        """Return the run that begins at a position of the window, if its bytes are known."""
        key = tuple(patterns), window.data[begin : begin + _BEGINNING]
        spelled, run = self._run_by_beginning.get(key, (b"", None))
        if run is None or not window.data.startswith(spelled, begin):
            return None
        begins = run.begins + begin
        if _sound_frames(window, begins, begin + run.length) < len(begins):
            return None
        # The run that was used longest ago is the first to be forgotten.
        self._run_by_beginning[key] = self._run_by_beginning.pop(key)
        return run

    def keep(self, window: PickleWindow, begin: int, patterns: Sequence[Pattern], run: _Run) -> None:
        """Remember a run that was decoded, if it is complete and has no texts."""
        if not run.broken or run.length > _REPEATED or any("text" in p.values for p in patterns):
            return
        key = tuple(patterns), window.data[begin : begin + _BEGINNING]
        if key not in self._run_by_beginning and len(self._run_by_beginning) >= _REPEATS:
            del self._run_by_beginning[next(iter(self._run_by_beginning))]
        self._run_by_beginning[key] = window.data[begin : begin + run.length], run


class _Rows:
    """Decodes the rows of a run that are in a window."""

    def __init__(
        self, window: PickleWindow, texts: Texts, memo: Memo, patterns: Sequence[Pattern], batch: bytes
    ) -> None:
        self._window, self._texts, self._memo = window, texts, memo
        self._patterns, self._batch = patterns, batch
        self._qwords = window.qwords

    def decode(self, begin: int, most: int) -> _Run | None:
        """Decode at most ``most`` rows from a position of the window on; return None when there are none."""
        prefix, cycle, heads = self._patterns[0].prefix, len(self._patterns), self._window.heads
        run = begin
        if self._window.data.startswith(self._batch, begin):
            begin += len(self._batch)
        first = int(np.searchsorted(heads, begin + len(prefix)))
        # A row is accepted by where the next begins: the last one of a window waits for the next window.
        left = (len(heads) - first - 1) // cycle
        count = min(most, left)
        if count <= 0 or heads[first] != begin + len(prefix):
            return None
        heads = heads[first : first + count * cycle + 1]
        following = heads[cycle::cycle] - len(prefix)
        good = self._match(following, prefix)
        numbers = np.zeros(count, np.int64)  # memo numbers per row
        begins = heads[:-1:cycle] - len(prefix)
        ends = begins
        values_by_pattern: list[list[Any]] = []
        for k, pattern in enumerate(self._patterns):
            head = heads[k:-1:cycle]
            good &= ends == head - len(pattern.prefix)
            good &= self._match(head - len(pattern.prefix), pattern.prefix)
            values, ends = self._instance(pattern, head + _HEAD, good, numbers)
            values_by_pattern.append(values)
        gap = following - ends
        good &= (gap == 0) | ((gap == len(self._batch)) & self._match(ends, self._batch))
        rows = count if good.all() else int(good.argmin())
        rows = _sound_frames(self._window, begins[:rows], int(following[rows - 1])) if rows else 0
        if not rows:
            return None
        total = np.cumsum(numbers)
        starts = total - numbers
        fields, rows = self._fields(values_by_pattern, starts, rows)
        if not rows:
            return None
        columns = Columns(tuple(p.kind for p in self._patterns), rows, fields)
        numbered, length = int(total[rows - 1]), int(following[rows - 1]) - run
        return _Run(columns, begins[:rows] - run, starts[:rows].copy(), numbered, length, rows < count)

    def _match(self, positions: Ints, spelling: bytes) -> Bools:
        """Report for each position whether up to eight bytes are there."""
        want = np.uint64(int.from_bytes(spelling, "little"))
        return np.asarray((self._qwords[positions] & _LOW[len(spelling)]) == want)

    def _instance(
        self, pattern: Pattern, positions: Ints, good: Bools, numbers: Ints
    ) -> tuple[list[Any], Ints]:
        """Decode an instance per row; clear ``good``, add to ``numbers``.

        A text is (number of its row in the memo, position, length or memo number, whether it is spelled).

        Returns:
            (values, the positions behind it).
        """
        values: list[Any] = []
        numbers += 2
        for name, kind in zip(pattern.names, pattern.values, strict=True):
            good &= self._match(positions, name)
            positions = positions + len(name)
            if kind == "size":
                good &= self._match(positions, pattern.size)
                size, positions = self._size(positions + len(pattern.size), good)
                numbers += np.where(size.rank > 0, 3, 2)
                values.append(size)
            elif kind == "number":
                number, positions = self._number(positions, good)
                values.append(number)
            elif kind == "text":
                text, after = self._text(positions, good)
                values.append((numbers.copy(), positions + 2, *text))
                numbers += text[1]
                positions = after
            else:
                assert isinstance(kind, bytes)
                good &= self._match(positions, kind)
                positions = positions + len(kind)
                values.append(None)
        good &= self._match(positions, b"ub")
        return values, positions + 2

    def _number(self, positions: Ints, good: Bools) -> tuple[Ints, Ints]:
        word = self._qwords[positions]
        op = word & _BYTE
        width, value = _WIDTH[op], (word >> np.uint64(8)) & _BITS[op]
        good &= value < 1 << 31
        long = np.flatnonzero(op == 0x8A)  # LONG1, of 5 or 6 bytes
        if len(long):
            size = ((word[long] >> np.uint64(8)) & _BYTE).astype(np.int64)
            size[(size != 5) & (size != 6)] = 0
            value[long] = (word[long] >> np.uint64(16)) & np.array(_LOW, np.uint64)[size]
            good[long] &= value[long] >> (8 * np.maximum(size, 1) - 1).astype(np.uint64) == 0
            width[long] = np.where(size > 0, size + 2, 0)
        good &= width > 0
        return value.astype(np.int64), positions + width

    def _size(self, positions: Ints, good: Bools) -> tuple[Sizes, Ints]:
        word = self._qwords[positions]
        marked = (word & _BYTE) == 0x28
        if marked.any():
            positions = positions + marked
            word = self._qwords[positions]
        dims: list[npt.NDArray[np.uint64]] = []
        rank = np.zeros(len(positions), np.int64)
        for _ in range(_MOST_DIMS):
            op = word & _BYTE
            width = _WIDTH[op]
            if not width.any():
                break
            value = (word >> np.uint64(8)) & _BITS[op]
            good &= value < 1 << 31  # BININT is signed
            dims.append(value)
            rank += width > 0
            positions = positions + width
            word = self._qwords[positions]
        good &= marked == (rank > 3)
        none = (word & _LOW[5]) == _NO_DIMS
        some = (word & _LOW[6]) == _SIZE_END[np.minimum(rank, 4) - 1]
        good &= np.where(rank > 0, some, none)
        table = np.stack(dims, axis=1) if dims else np.zeros((len(positions), 0), np.uint64)
        return Sizes(table.astype(np.int64), rank.astype(np.int8)), positions + np.where(rank > 0, 6, 5)

    def _text(self, positions: Ints, good: Bools) -> tuple[tuple[Ints, Bools], Ints]:
        word = self._qwords[positions]
        op = word & _BYTE
        spelled, near, far = op == 0x8C, op == 0x68, op == 0x6A
        good &= spelled | near | far
        value = ((word >> np.uint64(8)) & np.where(far, _LOW[4], _BYTE)).astype(np.int64)
        behind = np.where(spelled, value + 2, 0)
        good &= ~spelled | ((self._qwords[positions + behind] & _BYTE) == 0x94)
        return (value, spelled), positions + np.where(spelled, value + 3, np.where(near, 2, 5))

    def _fields(
        self, values_by_pattern: list[list[Any]], starts: Ints, rows: int
    ) -> tuple[tuple[tuple[Column, ...], ...], int]:
        """Return the columns by declared field, and the number of rows whose texts are known."""
        decoded: list[list[Column]] = []
        for pattern, values in zip(self._patterns, values_by_pattern, strict=True):
            columns: list[Column] = [None] * len(pattern.fields)
            for kind, place, value in zip(pattern.values, pattern.places, values, strict=True):
                if kind == "text":
                    before, *text = (v[:rows] for v in value)
                    columns[place], rows = self._names(self._memo.next + starts[:rows] + before, *text)
                elif value is not None:
                    columns[place] = value
            decoded.append(columns)
        return tuple(tuple(_first_rows(c, rows) for c in columns) for columns in decoded), rows

    def _names(self, number: Ints, positions: Ints, value: Ints, spelled: Bools) -> tuple[Names, int]:
        """Return a column of texts that ends before the first unknown memo number, and its length.

        ``number`` is the memo number that each text has, or would have.
        """
        ids = np.zeros(len(positions), np.int64)
        spelled_rows = np.flatnonzero(spelled)
        ids[spelled_rows] = self._texts.find(self._window.data, positions[spelled_rows], value[spelled_rows])
        memo_rows = np.flatnonzero(~spelled)
        rows = len(positions)
        if len(memo_rows):
            asked = value[memo_rows]
            # Names of files are mostly those of the row before: one of each streak is enough to sort.
            heads = np.flatnonzero(np.concatenate([[True], asked[1:] != asked[:-1]]))
            memo_numbers, place = np.unique(asked[heads], return_inverse=True)
            text_ids = np.array(
                [self._text_id(int(n), number, spelled_rows, ids) for n in memo_numbers], np.int64
            )
            ids[memo_rows] = np.repeat(text_ids[place], np.diff(heads, append=len(asked)))
            wrong = (ids[memo_rows] < 0) | (asked >= number[memo_rows])
            if wrong.any():
                rows = int(memo_rows[wrong.argmax()])
        return Names(ids, spelled, self._texts.values), rows

    def _text_id(self, memo_number: int, number: Ints, spelled_rows: Ints, ids: Ints) -> int:
        """Return the text of a memo number: spelled before, or in this column; else -1."""
        if memo_number < self._memo.next:
            value = self._memo.get(memo_number)
            return self._texts.add(value.encode("utf-8", "surrogatepass")) if type(value) is str else -1
        place = int(np.searchsorted(number[spelled_rows], memo_number))
        return (
            int(ids[spelled_rows[place]])
            if place < len(spelled_rows) and number[spelled_rows[place]] == memo_number
            else -1
        )


def _sound_frames(window: PickleWindow, begins: Ints, end: int) -> int:
    """Count the rows of a window before a frame that begins in the middle of an opcode."""
    cuts = window.cuts
    for cut in cuts[(cuts > begins[0]) & (cuts < end)].tolist():
        row = int(np.searchsorted(begins, cut, side="right")) - 1
        if not _is_boundary(window.data, int(begins[row]), cut):
            return row
    return len(begins)


def _first_rows(column: Column, rows: int) -> Column:
    """Return the first rows as a column that keeps no longer one alive."""
    if isinstance(column, Sizes):
        return Sizes(column.dims[:rows].copy(), column.rank[:rows].copy())
    if isinstance(column, Names):
        return Names(column.ids[:rows].copy(), column.spelled[:rows].copy(), column.values)
    return None if column is None else column[:rows].copy()


# Bytes of the opcodes of a run: without an argument, of one byte, two, four.
_LENGTHS = {**dict.fromkeys(b")(}\x81\x94\x85\x86\x87tRubeN", 1), 0x68: 2, 0x4B: 2, 0x4D: 3, 0x6A: 5, 0x4A: 5}


def _is_boundary(data: bytes, position: int, cut: int) -> bool:
    """Report whether an opcode begins at ``cut``, counted from the one at ``position``."""
    while position < cut:
        op = data[position]
        position += 2 + data[position + 1] if op in (0x8C, 0x8A) else _LENGTHS.get(op, 1)
    return position == cut
