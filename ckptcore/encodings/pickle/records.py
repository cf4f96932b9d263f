"""Read the records of a pickle, with a fast path for millions of them.

A permitted class becomes a `Call`, an instance of it a `Record` that is never instantiated. In
metadata of large jobs nearly all opcodes belong to sizes and small records with one encoding;
`Shortcuts` matches each at once. The unpickler's single opcodes read everything else.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from typing import Any


class Call:
    """A permitted global that may be called: ``build`` makes the value from plain arguments.

    Attributes:
        name: Its name.
        build: Makes the value.
        is_size: Whether it is torch.Size, which builds the given tuple; metadata holds millions of them.
        fields: For a record class, the names whose values a dict state is kept as, in this order.
        run: The classes of which metadata holds millions in turn, this one being the last. One class is the
            item of a list; two are the items of a dict. Code that reads such a list or dict must handle
            `Columns`.
        opens: Whether its instances begin as `Shortcuts.opening` reads them.
        member: For an enum, makes the value of a member from its name. See `MEMBER` of the unpickler.
    """

    __slots__ = ("build", "fields", "is_size", "member", "name", "opens", "run")

    def in_messages(self) -> str:
        """Return what a message calls it."""
        return f"<{self.name}>"

    def __init__(
        self,
        name: str,
        build: Callable[..., Any],
        *,
        is_size: bool = False,
        fields: tuple[str, ...] = (),
        run: tuple[str, ...] = (),
        opens: bool = False,
        member: Callable[[str], Any] | None = None,
    ) -> None:
        self.name, self.build, self.is_size, self.fields, self.run = name, build, is_size, fields, run
        self.opens, self.member = opens, member


class Record:
    """An instance of a permitted class, never instantiated: its name, arguments and state.

    ``state`` is what was pickled; for a class with declared fields, a tuple of their values.
    """

    __slots__ = ("args", "fields", "kind", "state")

    def __init__(self, kind: str, args: tuple[Any, ...] = (), fields: tuple[str, ...] = ()) -> None:
        self.kind, self.args, self.fields, self.state = kind, args, fields, None

    state: Any

    def __repr__(self) -> str:
        return f"<{self.kind}>"


# A class from the memo, and what follows it when it is a `torch.Size` or a record with declared
# fields. Metadata is a few million of these; matching each at once makes it fast.
_REF = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....)"
_SIZE = rb"(?:" + _INT + rb"{1,3}[\x85-\x87]|\(" + _INT + rb"+t)\x94\x85\x94R\x94"
# The last: a list of one known value, such as descriptors of a codec.
_VALUE = (
    rb"(" + _REF + rb"(?:" + _SIZE + rb")?|" + _INT + rb"|N|\x8a\x05.{5}|\x8a\x06.{6}|\x8c.[ -~]+\x94"
    rb"|\]\x94" + _REF + rb"a)"
)
_PAIR = rb"(" + _REF + rb")" + _VALUE


class _Pattern:
    """A pattern that is compiled when it is first used: these take 20 ms, and most processes need none."""

    def __init__(self, pattern: bytes) -> None:
        self._pattern = pattern

    @cached_property
    def match(self) -> Callable[[bytes, int], re.Match[bytes] | None]:
        """Match at a position."""
        return re.compile(self._pattern, re.DOTALL).match


_SIZE_PATTERN = _Pattern(_SIZE)
RECORD_PATTERN = _Pattern(
    # EMPTY_TUPLE, NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK, names and values, SETITEMS, BUILD
    rb"\)\x81\x94}\x94\(" + _PAIR + _PAIR + rb"(?:" + _PAIR + rb")?(?:" + _PAIR + rb")?ub"
)
# An instance up to the list at the end of its dict: a record with a tuple as its state, a size, and a list.
_OPENING_PATTERN = _Pattern(
    rb"\)\x81\x94}\x94\((" + _REF + rb")(" + _REF + rb")\)\x81\x94\("
    rb"((?:" + _REF + rb"|" + _INT + rb"|[\x88\x89N])+)t\x94b"
    rb"(" + _REF + rb")(" + _REF + rb")(" + _SIZE + rb")(" + _REF + rb")\]\x94"
)
_PART = re.compile(rb"(" + _REF + rb")|(" + _INT + rb")|(.)", re.DOTALL)
_PLAIN = {b"\x88": True, b"\x89": False, b"N": None}
_DIM = re.compile(rb"K(.)|M(..)|J(....)", re.DOTALL)


class Memo:
    """Values by number. Temporaries of a shortcut have a number, but cannot be fetched.

    ``rows`` is the values behind the last run of columns.
    """

    __slots__ = ("_base", "_far", "_head", "_parts", "_starts", "rows")

    def __init__(self) -> None:
        # A list: a dict entry costs ten times as much. Values before the first run are fetched most.
        self._head: list[Any] = []
        self.rows: list[Any] = self._head
        self._base = 0  # number of the first of the rows
        self._starts: list[int] = []
        self._parts: list[Any] = []  # rows and runs between the head and the rows
        self._far: dict[int, Any] = {}  # so that a huge explicit number costs nothing

    @property
    def next(self) -> int:
        """Return the number that the next value gets."""
        return self._base + len(self.rows)

    @property
    def far(self) -> int:
        """Count the values whose number is beyond the next."""
        return len(self._far)

    def skip(self, run: Any, behind: int) -> None:
        """Give the numbers up to ``behind`` to a run, which has a ``get`` of its own."""
        if self.rows is not self._head:
            self._starts.append(self._base)
            self._parts.append(self.rows)
        self._starts.append(self.next)
        self._parts.append(run)
        self._base, self.rows = behind, []

    def put(self, index: int, value: Any) -> None:
        """Set the value of a number; raises `ValueError` for a number inside a run."""
        if index < len(self._head):
            self._head[index] = value
        elif index < self._base:
            raise ValueError(f"memo entry {index} is set twice")
        elif index < self.next:
            self.rows[index - self._base] = value
        elif index == self.next:
            self.rows.append(value)
        else:
            self._far[index] = value

    def get(self, index: int) -> Any:
        """Return the value of a number; raises `ValueError` for a temporary, `KeyError` if unknown."""
        if index < len(self._head):
            value = self._head[index]
        elif index < self._base:
            value = self._search(index)
        else:
            row = index - self._base
            value = self.rows[row] if row < len(self.rows) else self._far[index]
        if value is _SKIPPED:
            raise ValueError(f"memo entry {index} is a temporary")
        return value

    def _search(self, index: int) -> Any:
        n = bisect_right(self._starts, index) - 1
        part = self._parts[n]
        return part[index - self._starts[n]] if type(part) is list else part.get(index)


# A record that was read: its class, and the positions of the class, behind it, and behind the record.
RecordSpan = tuple[Call, int, int, int]
# What is behind its class: its bytes, its state, and the values of the memo numbers behind its own.
_Read = tuple[bytes, tuple[Any, ...], list[Any]]
_SKIPPED = object()
_AS_IS: tuple[int, ...] = (-2,)  # marks names in the declared order; compared by identity
_ALIKE = 4096  # different encodings whose values are remembered
_OWN = b"\x5d\x8c"  # a list is not shared, and a record with a text of its own has no equal


class Shortcuts:
    """Reads complete sizes and records at once; single opcodes read everything else."""

    def __init__(self, data: bytes, memo: Memo) -> None:
        self._data, self._memo = data, memo
        self.before: RecordSpan | None = None  # the second last record
        self.last: RecordSpan | None = None
        self._parsed_values: dict[bytes, Any] = {}  # bytes -> integer, or tuple of a size
        self._orders: dict[tuple[Any, ...], tuple[int, ...]] = {}
        # Tensors of one shape have records of equal bytes, mostly one after the other: they share values.
        self._states: dict[tuple[Call, bytes], _Read] = {}
        self._last: dict[Call, _Read] = {}
        self._openings: dict[bytes, tuple[Any, ...]] = {}
        self._opened: tuple[bytes, tuple[Any, ...]] = b"", ()

    def size(self, start: int) -> tuple[Any, int]:
        """Return (dims, end) of a size behind its class at ``start``; end 0 when it does not match."""
        match = _SIZE_PATTERN.match(self._data, start)
        if match is None:
            return None, 0
        dims = self._size(match[0])
        self._memo.rows += (_SKIPPED, _SKIPPED, dims)
        return dims, match.end()

    def record(self, call: Call, start: int, op: int) -> tuple[Record | None, int]:
        """Return (record, end) of an instance behind its class at ``start``; end 0 when it does not match.

        ``op`` is the opcode that fetched the class.
        """
        new_record = Record(call.name, (), call.fields)
        rows = self._memo.rows
        # The instance's number comes before those of its values; it is removed where the bytes do not match.
        rows.append(new_record)
        cached = self._last.get(call)
        if cached is None or not self._data.startswith(cached[0], start):
            match = RECORD_PATTERN.match(self._data, start)
            if match is None:
                rows.pop()
                return None, 0
            cached = self._states.get((call, match[0]))
            if cached is None:
                cached = self._read(call, match)
            else:
                self._last[call] = cached
        raw, new_record.state, memo_values = cached
        rows += memo_values
        end = start + len(raw)
        self.before, self.last = self.last, (call, start - (2 if op == 0x68 else 5), start, end)
        return new_record, end

    def _read(self, call: Call, match: re.Match[bytes]) -> _Read:
        rows = self._memo.rows
        first = len(rows)
        rows.append(_SKIPPED)
        read = match[0], self._state(call, match), rows[first:]
        del rows[first:]
        if len(self._states) < _ALIKE and not any(value and value[0] in _OWN for value in match.groups()):
            self._states[call, match[0]] = self._last[call] = read
        return read

    def _state(self, call: Call, match: re.Match[bytes]) -> tuple[Any, ...]:
        n0, v0, n1, v1, n2, v2, n3, v3 = match.groups()
        value = self._value
        if n2 is None:
            values: tuple[Any, ...] = (value(v0), value(v1))
        elif n3 is None:
            values = (value(v0), value(v1), value(v2))
        else:
            values = (value(v0), value(v1), value(v2), value(v3))
        key = (call.name, n0, n1, n2, n3)
        order = self._orders.get(key)
        if order is None:
            order = self._orders[key] = self.order(call, (n0, n1, n2, n3)[: len(values)])
        return values if order is _AS_IS else tuple([None if i < 0 else values[i] for i in order])

    def opening(self, call: Call, start: int) -> tuple[Record, dict[Any, Any], list[Any], int] | None:
        """Read an instance behind its class at ``start``, up to the list that ends its dict.

        That is the metadata of a tensor (its dtype and layout, its size, and its chunks), of which there may
        be a hundred thousand. Single opcodes would have left the same on the stack and in the memo.

        Returns:
            (the instance without its state, the empty dict, [name, record, name, dims, name, empty list], the
            position behind); None when it does not match.
        """
        raw, values = self._opened
        if not raw or not self._data.startswith(raw, start):
            match = _OPENING_PATTERN.match(self._data, start)
            if match is None:
                return None
            raw = match[0]
            values = self._openings.get(raw) or self._opening(match)
            if not values:
                return None
            self._opened = raw, values
            if len(self._openings) < _ALIKE:
                self._openings[raw] = values
        n0, kind, state, n1, dims, n2 = values
        instance, part = call.build(), kind.build()
        part.state = state
        named: dict[Any, Any] = {}
        last: list[Any] = []
        self._memo.rows += (instance, named, part, state, _SKIPPED, _SKIPPED, dims, last)
        return instance, named, [n0, part, n1, dims, n2, last], start + len(raw)

    def _opening(self, match: re.Match[bytes]) -> tuple[Any, ...]:
        """Return (name, class of the record, its state, name, dims, name); () for other classes."""
        n0, kind, parts, n1, of, size, n2 = match.groups()
        rows = _PART.findall(parts)
        if max(map(_number, (n0, kind, n1, of, n2, *(ref for ref, *_ in rows if ref)))) >= self._memo.next:
            return ()  # it refers to itself
        record, dims = self._reference(kind), self._reference(of)
        if type(record) is not Call or record.is_size or type(record.build()) is not Record:
            return ()
        if type(dims) is not Call or not dims.is_size:
            return ()
        state = tuple(
            self._reference(ref) if ref else self._value(number) if number else _PLAIN[plain]
            for ref, number, plain in rows
        )
        return self._reference(n0), record, state, self._reference(n1), self._size(size), self._reference(n2)

    def _reference(self, raw: bytes) -> Any:
        return self._memo.get(_number(raw))

    def order(self, call: Call, names: tuple[bytes, ...]) -> tuple[int, ...]:
        """Return for each declared field the index of its value; -1 for none."""
        texts = [self._reference(n) for n in names]
        if any(type(n) is not str for n in texts):
            raise ValueError("a record is filled with something else than named values")
        if tuple(texts) == call.fields:
            return _AS_IS
        last = {text: i for i, text in enumerate(texts)}  # as in a dict, a name's last value counts
        return tuple(last.get(f, -1) for f in call.fields)

    def _value(self, raw: bytes) -> Any:
        earlier_value = self._parsed_values.get(raw, _SKIPPED)
        if earlier_value is not _SKIPPED:
            if type(earlier_value) is tuple:
                self._memo.rows += (_SKIPPED, _SKIPPED, earlier_value)
            return earlier_value
        kind = raw[0]
        if kind in (0x68, 0x6A):  # BINGET, LONG_BINGET
            width = 2 if kind == 0x68 else 5
            value = self._memo.get(raw[1] if width == 2 else _long(raw, 1))
            if len(raw) == width:
                return value
            if type(value) is not Call or not value.is_size:
                raise ValueError("something else than torch.Size is called like it")
            dims = self._parsed_values[raw] = self._size(raw[width:])
            self._memo.rows += (_SKIPPED, _SKIPPED, dims)
            return dims
        if kind == 0x4E:  # NONE
            return None
        if kind == 0x5D:  # EMPTY_LIST, MEMOIZE, a value from the memo, APPEND
            single_list = [self._memo.get(raw[3] if raw[2] == 0x68 else _long(raw, 3))]
            self._memo.rows.append(single_list)
            return single_list
        if kind == 0x8C:  # SHORT_BINUNICODE, MEMOIZE
            if raw[1] != len(raw) - 3:
                raise ValueError("text of another length than it claims")
            text = sys.intern(raw[2:-1].decode())
            self._memo.rows.append(text)
            return text
        start = 2 if kind == 0x8A else 1
        number = int.from_bytes(raw[start:], "little", signed=kind in (0x4A, 0x8A))
        self._parsed_values[raw] = number
        return number

    def _size(self, raw: bytes) -> tuple[int, ...]:
        dims: tuple[int, ...] | None = self._parsed_values.get(raw)
        if dims is None:
            end = raw.index(b"\x94\x85\x94R\x94", len(raw) - 5)
            dims = self._parsed_values[raw] = tuple(
                byte[0] if byte else int.from_bytes(short or word, "little", signed=bool(word))
                for byte, short, word in _DIM.findall(raw, raw[0] == 0x28, end - 1)
            )
            if raw[end - 1] not in (0x74, 0x84 + len(dims)):  # TUPLE, or TUPLE1 to TUPLE3
                raise ValueError(f"a size of {len(dims)} dims from a tuple of others")
        return dims


def _number(raw: bytes) -> int:
    """Return the memo number that BINGET or LONG_BINGET names."""
    return raw[1] if len(raw) == 2 else _long(raw, 1)


def _long(raw: bytes, start: int) -> int:
    return int.from_bytes(raw[start : start + 4], "little")


def by_name(fields: tuple[str, ...], names: list[Any], values: list[Any]) -> tuple[Any, ...]:
    """Return the values of the declared fields, None where absent."""
    if len(names) != len(values) or any(type(n) is not str for n in names):
        raise ValueError("a record is filled with something else than named values")
    state = dict(zip(names, values, strict=True))
    return tuple(state.get(f) for f in fields)
