"""Store millions of similarly encoded records in columns.

A record's class, names and kinds of values are its *pattern*. The sizes, numbers and texts of the records of
a run differ, and are a column each (`Columns`). `ckptcore.encodings.pickle.record_runs` finds and
decodes runs. Metadata of a large job spells every name once per rank: in `Texts` a hash of the bytes finds
the known name for a complete column, and the bytes are compared, so the hash need not be trusted. Protocol 4
cuts a pickle into frames of about 64 KiB (PEP 3154), whose header may come before any opcode: a
`PickleWindow` removes the headers, and remembers their positions.

`Slots` finds many hashes at once among those that are known: a table of slots answers in one step what a
binary search answers in ten and more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.encodings.pickle.records import RECORD_PATTERN, Memo, Record, RecordSpan
from ckptcore.utils.distinct_values import isin

Hashes = npt.NDArray[np.uint64]
_SPARE = 2  # slots are the next power of two of the hashes, times four: one in seven hashes shares its slot


class Slots:
    """Ascending hashes, and the first of them for each value of their highest bits.

    The time does not depend on how hashes are spread: those that share a slot are found by a binary search.
    """

    def __init__(self, hashes: Hashes) -> None:
        self._hashes = hashes
        self._shift = np.uint64(64 - len(hashes).bit_length() - _SPARE)
        slots = (hashes >> self._shift).astype(np.int64)
        self._first = np.zeros(1 << (64 - int(self._shift)), np.int64)
        # Of equal slots the first hash is written last.
        self._first[slots[::-1]] = np.arange(len(hashes))[::-1]

    def find(self, hashes: Hashes) -> Ints:
        """Return the position of each hash; any position for one that is unknown.

        Args:
            hashes: uint64 [n].

        Returns:
            int64 [n].
        """
        positions = self._first[(hashes >> self._shift).astype(np.int64)]
        if not len(self._hashes):
            return positions
        unequal = np.flatnonzero(self._hashes[positions] != hashes)
        if len(unequal):
            searched = np.searchsorted(self._hashes, hashes[unequal])
            positions[unequal] = np.minimum(searched, len(self._hashes) - 1)
        return positions


Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_KINDS: dict[int, str | bytes] = {0x8C: "text", 0x4E: b"N"}  # SHORT_BINUNICODE, NONE


@dataclass(frozen=True, slots=True)
class Sizes:
    """A column of sizes: ``dims`` int64 [n, r], 0 behind a size's own rank; ``rank`` int8 [n]."""

    dims: Ints
    rank: npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Names:
    """A column of texts.

    Attributes:
        ids: int64 [n], into ``values``.
        spelled: bool [n], whether the record has the text itself or its memo number.
        values: The distinct texts.
    """

    ids: Ints
    spelled: Bools
    values: list[str]


Column = Sizes | Names | Ints | None


class Columns:
    """The records of a run: ``count`` times one instance of each of ``kinds``, in turn.

    ``fields`` has per kind the columns of its declared fields; None for a field that is None or absent.
    """

    __slots__ = ("count", "fields", "kinds")

    def __init__(self, kinds: tuple[str, ...], count: int, fields: tuple[tuple[Column, ...], ...]) -> None:
        self.kinds, self.count, self.fields = kinds, count, fields

    def __repr__(self) -> str:
        return f"<{self.count} {' and '.join(self.kinds)}>"

    def state(self, kind: int, row: int) -> tuple[Any, ...]:
        """Return the fields of one instance, like a record's state."""
        return tuple(_one(column, row) for column in self.fields[kind])


def _one(column: Column, row: int) -> Any:
    if column is None:
        return None
    if isinstance(column, Sizes):
        return tuple(column.dims[row, : int(column.rank[row])].tolist())
    if isinstance(column, Names):
        return column.values[int(column.ids[row])]
    return int(column[row])


@dataclass(frozen=True, slots=True)
class Pattern:
    """The encoding of the instances of one class in a run.

    Attributes:
        kind: Name of the class.
        prefix: Bytes of the class.
        names: Bytes of the name, per pair.
        values: Per pair "size", "number", "text", or the bytes of a value that is always the same.
        places: Per pair, the declared field that it is.
        fields: The declared fields.
        size: Bytes of torch.Size.
    """

    kind: str
    prefix: bytes
    names: tuple[bytes, ...]
    values: tuple[str | bytes, ...]
    places: tuple[int, ...]
    fields: tuple[str, ...]
    size: bytes


def pattern_of(record: RecordSpan, data: bytes, memo: Memo) -> Pattern | None:
    """Return the pattern of a record if a run of such records can be read, else None."""
    call, start, behind, _ = record
    match = RECORD_PATTERN.match(data, behind)
    assert match is not None  # it was read
    names, values = match.groups()[::2], match.groups()[1::2]
    names, values = tuple(n for n in names if n), tuple(v for v in values if v)
    texts = [memo.get(int.from_bytes(n[1:], "little")) for n in names]
    if len(set(texts)) != len(texts) or not set(texts) <= set(call.fields):
        return None
    if any(value[0] == 0x5D for value in values):  # lists stay objects
        return None
    kinds: list[str | bytes] = []
    sizes: set[bytes] = set()
    for value in values:
        width = {0x68: 2, 0x6A: 5}.get(value[0], 0)
        if width and len(value) > width:
            kinds.append("size")
            sizes.add(value[:width])
        elif width:
            if type(memo.get(int.from_bytes(value[1:], "little"))) is not str:
                return None
            kinds.append("text")
        else:
            kinds.append(_KINDS.get(value[0], "number"))
    if len(sizes) > 1:
        return None
    places = tuple(call.fields.index(n) for n in texts)
    return Pattern(
        call.name, data[start:behind], names, tuple(kinds), places, call.fields, next(iter(sizes), b"")
    )


class RunMemo:
    """The memo's view of a decoded run: its values by memo number.

    ``first`` is the first of its numbers; ``starts``, int64 [n], are those of the rows, counted from it.
    """

    def __init__(self, columns: Columns, patterns: Sequence[Pattern], first: int, starts: Ints) -> None:
        self._columns, self._patterns, self._first, self._starts = columns, patterns, first, starts
        self._made: dict[int, Record] = {}

    def get(self, number: int) -> Any:
        """Return the value with a number of the memo; raises `ValueError` for a temporary."""
        behind = number - self._first
        row = int(np.searchsorted(self._starts, behind, side="right")) - 1
        left = behind - int(self._starts[row])
        for k, pattern in enumerate(self._patterns):
            if not left:  # an instance is one object, however often it is fetched
                return self._made.setdefault(number, self._record(k, row))
            left -= 2
            for place in pattern.places:
                if left < 0:
                    break
                column = self._columns.fields[k][place]
                took = 0
                if isinstance(column, Names):
                    took = int(column.spelled[row])
                elif isinstance(column, Sizes):
                    took = 3 if column.rank[row] else 2
                if took and left == took - 1:
                    return _one(column, row)
                left -= took
            if left < 0:
                break
        raise ValueError(f"memo entry {number} is a temporary")

    def _record(self, k: int, row: int) -> Record:
        pattern = self._patterns[k]
        record = Record(pattern.kind, (), pattern.fields)
        record.state = self._columns.state(k, row)
        return record


_QUICK = 1 << 16  # texts found by hash; sorting more would cost more than it saves
_WORD = 8
_FACTORS = np.array([(0x9E3779B97F4A7C15 * (2 * k + 1)) & (1 << 64) - 1 for k in range(33)], np.uint64)
_LONGEST = 32  # uint64 of a text
# Masks of the bytes that belong to a text, by its length: uint64 [256, 32].
_TAILS = np.array([(1 << 8 * n) - 1 for n in range(_WORD + 1)], np.uint64)[
    np.clip(np.arange(256)[:, None] - _WORD * np.arange(_LONGEST), 0, _WORD)
]
_NO_SLOTS = Slots(np.zeros(0, np.uint64))  # most pickles are small, and a file's names may be 100,000 of them
_ALL = np.uint64(int.from_bytes(b"\x01" * _WORD, "little"))  # eight times True


class Texts:
    """Distinct texts, numbered in order of appearance; ``values`` has the texts."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self._ids: dict[bytes, int] = {}
        self._hashes, self._hashed = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        self._slots = _NO_SLOTS
        self._qwords = np.zeros((0, 0), np.uint64)
        self._lengths = np.zeros(0, np.int64)

    def add(self, raw: bytes) -> int:
        """Return the number of a text; raises `UnicodeDecodeError`."""
        number = self._ids.get(raw)
        if number is None:
            self.values.append(raw.decode("utf-8", "surrogatepass"))
            number = self._ids[raw] = len(self.values) - 1
        return number

    def find(self, data: bytes, begin: Ints, length: Ints) -> Ints:
        """Return the numbers of the texts ``data[begin:begin + length]``.

        Args:
            data: Opcodes, and at least 256 bytes behind the last text.
            begin: int64 [n].
            length: int64 [n], up to 255.

        Returns:
            int64 [n].

        Raises:
            UnicodeDecodeError: A text is not UTF-8.
        """
        if not len(begin):
            return np.zeros(0, np.int64)
        spelled = _padded_texts(data, begin, length)
        hashes = spelled @ _FACTORS[: spelled.shape[1]]
        hashes += length.astype(np.uint64) * _FACTORS[32]
        numbers = self._look(spelled, hashes, length)
        rows = np.flatnonzero(numbers < 0)
        # Sorting once more is worth it for many; a few are looked up one by one.
        if len(self._hashes) >> 3 < len(rows) and len(self._hashes) < _QUICK:
            _, distinct_rows = np.unique(hashes[rows], return_index=True)
            self._learn(data, begin, length, spelled, hashes, rows[distinct_rows])
            numbers[rows] = self._look(spelled[rows], hashes[rows], length[rows])
        for row in np.flatnonzero(numbers < 0).tolist():
            start = int(begin[row])
            numbers[row] = self.add(data[start : start + int(length[row])])
        return numbers

    def _look(self, spelled: npt.NDArray[np.uint64], hashes: npt.NDArray[np.uint64], length: Ints) -> Ints:
        """Return the numbers of the texts that are known by hash, -1 for the others."""
        if not len(self._hashes):
            return np.full(len(hashes), -1, np.int64)
        slots = self._slots.find(hashes)
        numbers = self._hashed[slots]
        # Lengths are equal, so the columns that both have cover the text; both are multiples of eight.
        width = min(spelled.shape[1], self._qwords.shape[1])
        equal = self._qwords.take(slots, axis=0)[:, :width] == spelled[:, :width]
        same = (equal.view(np.uint64) == _ALL).all(axis=1)
        return np.where(same & (self._lengths[slots] == length), numbers, -1)

    def _learn(
        self,
        data: bytes,
        begin: Ints,
        length: Ints,
        spelled: npt.NDArray[np.uint64],
        hashes: npt.NDArray[np.uint64],
        rows: Ints,
    ) -> None:
        rows = rows[~isin(hashes[rows], self._hashes)][: _QUICK - len(self._hashes)]
        ends = (begin[rows] + length[rows]).tolist()
        places = zip(begin[rows].tolist(), ends, strict=True)
        ids = np.array([self.add(data[start:end]) for start, end in places], np.int64)
        all_hashes = np.concatenate([self._hashes, hashes[rows]])
        order = np.argsort(all_hashes)
        self._hashes, self._hashed = all_hashes[order], np.concatenate([self._hashed, ids])[order]
        self._lengths = np.concatenate([self._lengths, length[rows]])[order]
        self._qwords = np.concatenate(_padded(self._qwords, spelled[rows]))[order]
        self._slots = Slots(self._hashes)


def _padded_texts(data: bytes, begin: Ints, length: Ints) -> npt.NDArray[np.uint64]:
    """Return the bytes of each text, padded with zeros, uint64 [n, w]; w is a multiple of eight."""
    width = _WORD * max(-(-int(length.max()) // (_WORD * _WORD)), 1)
    size = _WORD * width
    rows = np.ndarray((len(data) - size + 1,), f"V{size}", buffer=data, strides=(1,))
    out: npt.NDArray[np.uint64] = rows[begin].view(np.uint64).reshape(len(begin), width)
    out &= np.ascontiguousarray(_TAILS[:, :width]).take(length, axis=0)
    return out


def _padded(*tables: npt.NDArray[np.uint64]) -> list[npt.NDArray[Any]]:
    width = max(t.shape[1] for t in tables)
    return [np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t in tables]


_BYTES = 4 << 20
_MOST_FRAMES = 1024  # real frames have 64 KiB
_FRAME, _HEADER = 0x95, 9
_PADDING = bytes(2048)  # decoding a false instance may read behind the last byte
# EMPTY_TUPLE, NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK: an instance, before its attributes.
_HEAD = int.from_bytes(b")\x81\x94}\x94(", "little")
_HEAD_BYTES = np.uint64((1 << 48) - 1)


class PickleWindow:
    """A part of a pickle from ``begin`` on, without frame headers.

    Attributes:
        data: Its opcodes.
        qwords: uint64 per byte of it, the eight bytes there, little-endian.
        heads: Positions of instances, or of bytes that look like one.
        cuts: Positions of frame headers.
    """

    def __init__(self, pickle: bytes, begin: int, frame_end: int) -> None:
        """Cut the window; ``frame_end`` is the end of the frame around ``begin``, or behind the pickle."""
        self._raw: list[int] = []  # of each piece: first byte in the pickle, in the window, frame's end
        self._starts: list[int] = []
        self._ends: list[int] = []
        pieces: list[bytes] = []
        position, used = begin, 0
        view = memoryview(pickle)
        while used < _BYTES and position < len(pickle) and len(pieces) < _MOST_FRAMES:
            end = min(frame_end, position + _BYTES - used, len(pickle))
            if end <= position:
                break
            self._raw.append(position)
            self._starts.append(used)
            self._ends.append(frame_end)
            pieces.append(view[position:end])  # type: ignore[arg-type]
            used += end - position
            if end != frame_end or end + _HEADER > len(pickle) or pickle[end] != _FRAME:
                break
            position = end + _HEADER
            frame_end = position + int.from_bytes(pickle[end + 1 : position], "little")
        self.begin, self.end = begin, position if not self._raw else self._raw[-1] + used - self._starts[-1]
        self._is_last = self.end == len(pickle)
        self.data = b"".join((*pieces, _PADDING))
        self.qwords: npt.NDArray[np.uint64] = np.ndarray(
            (len(self.data) - 7,), "<u8", buffer=self.data, strides=(1,)
        )
        self.cuts = np.array(self._starts[1:], np.int64)
        # 0x81, NEWOBJ, is the second byte of a head.
        candidates = np.flatnonzero(np.frombuffer(self.data, np.uint8, used) == 0x81) - 1
        candidates = candidates[1:] if len(candidates) and candidates[0] < 0 else candidates
        self.heads: Ints = candidates[(self.qwords[candidates] & _HEAD_BYTES) == _HEAD]

    def holds(self, position: int, cycle: int) -> bool:
        """Report whether enough instances follow a position, or the window is the pickle's last."""
        left = len(self.heads) - int(np.searchsorted(self.heads, position))
        return left > cycle or self._is_last

    def place(self, raw: int) -> int | None:
        """Return the window's position of a byte of the pickle; None when it is outside."""
        if not self.begin <= raw < self.end:
            return None
        n = bisect_right(self._raw, raw) - 1
        position = self._starts[n] + raw - self._raw[n]
        # The bytes of a frame header are in no piece.
        return position if n + 1 == len(self._starts) or position < self._starts[n + 1] else None

    def raw(self, position: int) -> tuple[int, int]:
        """Return (the pickle's position of the window's byte ``position``, the end of its frame).

        A position between two frames is the end of the first.
        """
        n = bisect_right(self._starts, position) - 1
        if n and self._starts[n] == position:
            n -= 1
        return self._raw[n] + position - self._starts[n], self._ends[n]
