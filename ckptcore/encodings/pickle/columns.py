"""Columns: what stands for millions of records that are spelled alike, and which spelling that is.

A record's class, names and kinds of values are its *pattern*; what differs between the records of a run are
sizes, numbers and texts, a column of each. `ckptcore.encodings.pickle.record_runs` finds and decodes runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.encodings.pickle.records import Memo, Record, Seen

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_KINDS: dict[int, str | bytes] = {0x8C: "text", 0x4E: b"N"}  # SHORT_BINUNICODE, NONE


@dataclass(frozen=True, slots=True)
class Sizes:
    """A column of sizes. dims: int64 [n, r], 0 behind a size's own rank. rank: int64 [n]."""

    dims: Ints
    rank: Ints


@dataclass(frozen=True, slots=True)
class Names:
    """A column of texts.

    ids: int64 [n], into ``values``. spelled: whether the text itself stands there, or its memo number.
    """

    ids: Ints
    spelled: Bools
    values: list[str]


Column = Sizes | Names | Ints | None


class Columns:
    """What a run stands for: ``count`` times one instance of each of ``kinds``, in turn.

    fields: per kind, the columns of its declared fields; None for a field that is None or absent.
    """

    __slots__ = ("count", "fields", "kinds")

    def __init__(self, kinds: tuple[str, ...], count: int, fields: tuple[tuple[Column, ...], ...]) -> None:
        self.kinds, self.count, self.fields = kinds, count, fields

    def __repr__(self) -> str:
        return f"<{self.count} {' and '.join(self.kinds)}>"

    def state(self, kind: int, row: int) -> tuple[Any, ...]:
        """The fields of one instance, as a record has them."""
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
    """How the instances of one class of a run are spelled.

    kind: its name. prefix: the class. names, values: per pair, the name's spelling, and "size",
    "number", "text", or the spelling of a value that is always the same. places: per pair, the declared
    field it is. fields: what is declared. size: how torch.Size is spelled.
    """

    kind: str
    prefix: bytes
    names: tuple[bytes, ...]
    values: tuple[str | bytes, ...]
    places: tuple[int, ...]
    fields: tuple[str, ...]
    size: bytes


def pattern_of(seen: Seen, data: bytes, memo: Memo) -> Pattern | None:
    """The spelling of a record, when a run of them can be read; None otherwise."""
    call, at, match = seen
    names, values = match.groups()[::2], match.groups()[1::2]
    names, values = tuple(n for n in names if n), tuple(v for v in values if v)
    told = [memo.get(int.from_bytes(n[1:], "little")) for n in names]
    if len(set(told)) != len(told) or not set(told) <= set(call.fields):
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
    places = tuple(call.fields.index(n) for n in told)
    return Pattern(
        call.name, data[at : match.start()], names, tuple(kinds), places, call.fields, next(iter(sizes), b"")
    )


class Taken:
    """A run that was taken: what of it has a number in the memo?"""

    def __init__(self, columns: Columns, patterns: Sequence[Pattern], starts: Ints) -> None:
        self._columns, self._patterns, self._starts = columns, patterns, starts
        self._made: dict[int, Record] = {}

    def get(self, number: int) -> Any:
        """The value with a number of the memo; raises `ValueError` for a temporary."""
        row = int(np.searchsorted(self._starts, number, side="right")) - 1
        left = number - int(self._starts[row])
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
        made = Record(pattern.kind, (), pattern.fields)
        made.state = self._columns.state(k, row)
        return made
