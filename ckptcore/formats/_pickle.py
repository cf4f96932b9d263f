"""The allow-list unpickler: what plain values does a pickle hold, without running any of it?

A small virtual machine for pickle protocols 2 to 5 (Lib/pickletools.py, CPython). It builds None,
bools, numbers, strings, bytes, lists, tuples, dicts and sets, and calls nothing but the builders
of the table it is given. Any other global is refused: an error (strict), or a `Refused` value in
its place. Work and memory are linear in the input's length: opcodes that could ask for more are
bounded or not known, keys that would be slow to hash are rejected.
"""

from __future__ import annotations

import gc
import re
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from ckptcore.errors import MalformedCheckpoint, UnsafeContent
from ckptcore.objects import Named, Refused, TensorRef

_MAX_LONG_BYTES = 64
_MAX_STACK = 100_000  # nesting of marks, far over any real pickle
_SCALARS = frozenset({str, int, bytes, float, bool, type(None)})


class Call:
    """A permitted global that may be called: ``build`` makes the value from plain arguments.

    is_size: it is torch.Size and builds the tuple it is given; metadata holds millions of them.
    fields: for a record class, the names whose values a dict state is kept as, in this order.
    """

    __slots__ = ("build", "fields", "is_size", "name")

    def __init__(
        self, name: str, build: Callable[..., Any], *, is_size: bool = False, fields: tuple[str, ...] = ()
    ) -> None:
        self.name, self.build, self.is_size, self.fields = name, build, is_size, fields


class Record:
    """An instance of a permitted class, never instantiated: its name, arguments and state.

    state: what was pickled; for a class with declared fields, a tuple of their values.
    """

    __slots__ = ("args", "fields", "kind", "state")

    def __init__(self, kind: str, args: tuple[Any, ...] = (), fields: tuple[str, ...] = ()) -> None:
        self.kind, self.args, self.fields, self.state = kind, args, fields, None

    state: Any

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def record(kind: str, *fields: str) -> Call:
    """A table entry for a class whose instances are kept as `Record`.

    fields: when given, a dict state is kept as a tuple of these values, None where absent; a dict
    per object is what would make large metadata cost gigabytes.
    """
    return Call(kind, lambda *args: Record(kind, args, fields), fields=fields)


def loads(data: bytes, table: Mapping[str, Any], *, what: str,
          persistent: Callable[[Any], Any] | None = None,
          refused: list[str] | None = None) -> Any:  # fmt: skip
    """The value that ``data`` pickles.

    table: ``module.name`` -> a `Call`, or a constant that stands for the global itself.
    what: the file or record, for messages. persistent: resolves persistent ids.
    refused: when given, globals outside the table become `Refused` and are listed here;
        otherwise they raise `UnsafeContent`.
    Raises `MalformedCheckpoint` when the bytes are not a whole, bounded pickle.
    """
    # Nothing below makes cycles, and a collection walks everything built so far.
    collecting = gc.isenabled() and len(data) > 1 << 20
    if collecting:
        gc.disable()
    try:
        return _run(data, table, what, persistent, refused)
    except (IndexError, struct.error) as error:
        raise MalformedCheckpoint(f"{what} is not a whole pickle: it ends in the middle") from error
    except (TypeError, ValueError, AttributeError, UnicodeDecodeError, KeyError, OverflowError,
            RecursionError, MemoryError) as error:  # fmt: skip
        raise MalformedCheckpoint(f"{what} is not a sound pickle: {error}") from error
    finally:
        if collecting:
            gc.enable()


# A class from the memo, and what follows it when it is a `torch.Size` or a record with declared
# fields. Metadata is a few million of these; matching each as a whole is what makes it quick.
_REF = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....)"
_SIZE = rb"(?:" + _INT + rb"{1,3}[\x85-\x87]|\(" + _INT + rb"+t)\x94\x85\x94R\x94"
_VALUE = rb"(" + _REF + rb"(?:" + _SIZE + rb")?|" + _INT + rb"|N|\x8a\x05.{5}|\x8a\x06.{6}|\x8c.[ -~]+\x94)"
_PAIR = rb"(" + _REF + rb")" + _VALUE
_match_size = re.compile(_SIZE, re.DOTALL).match
_match_record = re.compile(
    # EMPTY_TUPLE, NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK, names and values, SETITEMS, BUILD
    rb"\)\x81\x94}\x94\(" + _PAIR + _PAIR + rb"(?:" + _PAIR + rb")?(?:" + _PAIR + rb")?ub",
    re.DOTALL,
).match
_DIM = re.compile(rb"K(.)|M(..)|J(....)", re.DOTALL)


class _Memo:
    """Numbered values. Temporaries of a shortcut have a number, but nobody may fetch them."""

    __slots__ = ("_far", "rows")

    def __init__(self) -> None:
        self.rows: list[Any] = []  # a list: a dict entry costs ten times as much
        self._far: dict[int, Any] = {}  # so that a huge explicit number costs nothing

    def put(self, index: int, value: Any) -> None:
        if index < len(self.rows):
            self.rows[index] = value
        elif index == len(self.rows):
            self.rows.append(value)
        else:
            self._far[index] = value

    def get(self, index: int) -> Any:
        value = self.rows[index] if index < len(self.rows) else self._far[index]
        if value is _SKIPPED:
            raise ValueError(f"memo entry {index} is a temporary")
        return value


_SKIPPED = object()
_AS_IS: tuple[int, ...] = (-2,)  # names come in the declared order; compared by identity


class _Shortcuts:
    """Whole sizes and records at once; what does not match is left to the single opcodes."""

    def __init__(self, data: bytes, memo: _Memo) -> None:
        self._data, self._memo = data, memo
        self._known: dict[bytes, Any] = {}  # spelling -> integer, or tuple of a size
        self._orders: dict[tuple[Any, ...], tuple[int, ...]] = {}

    def size(self, at: int) -> tuple[Any, int]:
        """(dims, end) of a size behind its class at ``at``; end 0 when it does not match."""
        found = _match_size(self._data, at)
        if found is None:
            return None, 0
        dims = self._size(found[0])
        self._memo.rows += (_SKIPPED, _SKIPPED, dims)
        return dims, found.end()

    def record(self, call: Call, at: int) -> tuple[Record | None, int]:
        """(record, end) of an instance behind its class at ``at``; end 0 when it does not match."""
        found = _match_record(self._data, at)
        if found is None:
            return None, 0
        made = Record(call.name, (), call.fields)
        rows = self._memo.rows
        rows += (made, _SKIPPED)
        n0, v0, n1, v1, n2, v2, n3, v3 = found.groups()
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
            order = self._orders[key] = self._order(call, (n0, n1, n2, n3)[: len(values)])
        made.state = values if order is _AS_IS else tuple([None if i < 0 else values[i] for i in order])
        return made, found.end()

    def _order(self, call: Call, names: tuple[bytes, ...]) -> tuple[int, ...]:
        """For each declared field, which of the named values it is; -1: none."""
        told = [self._memo.get(n[1] if len(n) == 2 else _long(n, 1)) for n in names]
        if any(type(n) is not str for n in told):
            raise ValueError("a record is filled with something else than named values")
        if tuple(told) == call.fields:
            return _AS_IS
        return tuple(told.index(f) if f in told else -1 for f in call.fields)

    def _value(self, raw: bytes) -> Any:
        seen = self._known.get(raw, _SKIPPED)
        if seen is not _SKIPPED:
            if type(seen) is tuple:
                self._memo.rows += (_SKIPPED, _SKIPPED, seen)
            return seen
        kind = raw[0]
        if kind in (0x68, 0x6A):  # BINGET, LONG_BINGET
            width = 2 if kind == 0x68 else 5
            value = self._memo.get(raw[1] if width == 2 else _long(raw, 1))
            if len(raw) == width:
                return value
            if type(value) is not Call or not value.is_size:
                raise ValueError("something else than a size is called like one")
            dims = self._known[raw] = self._size(raw[width:])
            self._memo.rows += (_SKIPPED, _SKIPPED, dims)
            return dims
        if kind == 0x4E:  # NONE
            return None
        if kind == 0x8C:  # SHORT_BINUNICODE, MEMOIZE
            if raw[1] != len(raw) - 3:
                raise ValueError("text of another length than it says")
            text = sys.intern(raw[2:-1].decode())
            self._memo.rows.append(text)
            return text
        start = 2 if kind == 0x8A else 1
        number = int.from_bytes(raw[start:], "little", signed=kind in (0x4A, 0x8A))
        self._known[raw] = number
        return number

    def _size(self, raw: bytes) -> tuple[int, ...]:
        dims: tuple[int, ...] | None = self._known.get(raw)
        if dims is None:
            end = raw.index(b"\x94\x85\x94R\x94", len(raw) - 5)
            dims = self._known[raw] = tuple(
                one[0] if one else int.from_bytes(two or four, "little", signed=bool(four))
                for one, two, four in _DIM.findall(raw, raw[0] == 0x28, end - 1)
            )
        return dims


def _long(raw: bytes, at: int) -> int:
    return int.from_bytes(raw[at : at + 4], "little")


def _by_name(fields: tuple[str, ...], names: list[Any], values: list[Any]) -> tuple[Any, ...]:
    if len(names) != len(values) or any(type(n) is not str for n in names):
        raise ValueError("a record is filled with something else than named values")
    state = dict(zip(names, values, strict=True))
    return tuple(state.get(f) for f in fields)


def _run(
    data: bytes,
    table: Mapping[str, Any],
    what: str,
    persistent: Callable[[Any], Any] | None,
    refused: list[str] | None,
) -> Any:
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo = _Memo()
    rows = memo.rows
    shortcuts = _Shortcuts(data, memo)
    at, size = 0, len(data)
    quick = True  # until explicit memo numbers turn up, which protocol 4 does not use
    append = stack.append
    while True:
        op = data[at]
        at += 1
        # Ordered by how often real `.metadata` files use them.
        if op == 0x68 or op == 0x6A:  # BINGET, LONG_BINGET
            if op == 0x68:
                value = memo.get(data[at])
                at += 1
            else:
                value = memo.get(int.from_bytes(data[at : at + 4], "little"))
                at += 4
            if type(value) is Call and quick and (value.fields or value.is_size):
                made, end = shortcuts.size(at) if value.is_size else shortcuts.record(value, at)
                if end:
                    append(made)
                    at = end
                    continue
            append(value)
        elif op == 0x94:  # MEMOIZE
            rows.append(stack[-1])
        elif op == 0x4B:  # BININT1
            append(data[at])
            at += 1
        elif op == 0x28:  # MARK
            marks.append(stack)
            if len(marks) > _MAX_STACK:
                raise MalformedCheckpoint(f"{what} nests deeper than {_MAX_STACK} levels")
            stack = []
            append = stack.append
        elif op == 0x7D:  # EMPTY_DICT
            append({})
        elif op == 0x75:  # SETITEMS
            items, stack = stack, marks.pop()
            append = stack.append
            _set_items(stack[-1], items, what)
        elif op == 0x62:  # BUILD
            state = stack.pop()
            _build(stack[-1], state, what)
        elif op == 0x81 or op == 0x52:  # NEWOBJ
            args = stack.pop()
            stack[-1] = _call(stack[-1], args, what)
        elif op == 0x85:  # TUPLE1
            stack[-1] = (stack[-1],)
        elif op == 0x86:  # TUPLE2
            last = stack.pop()
            stack[-1] = (stack[-1], last)
        elif op == 0x4D:  # BININT2
            append(data[at] | data[at + 1] << 8)
            at += 2
        elif op == 0x4A:  # BININT
            append(int.from_bytes(_take(data, at, 4), "little", signed=True))
            at += 4
        elif op == 0x29:  # EMPTY_TUPLE
            append(())
        elif op == 0x8C:  # SHORT_BINUNICODE
            n = data[at]
            append(_take(data, at + 1, n).decode("utf-8", "surrogatepass"))
            at += 1 + n
        elif op == 0x58:  # BINUNICODE
            n = int.from_bytes(_take(data, at, 4), "little")
            append(_take(data, at + 4, n).decode("utf-8", "surrogatepass"))
            at += 4 + n
        elif op == 0x4E:  # NONE
            append(None)
        elif op == 0x5D:  # EMPTY_LIST
            append([])
        elif op == 0x65:  # APPENDS
            items, stack = stack, marks.pop()
            append = stack.append
            _extend(stack[-1], items, what)
        elif op == 0x61:  # APPEND
            last = stack.pop()
            _extend(stack[-1], [last], what)
        elif op == 0x74:  # TUPLE
            items, stack = stack, marks.pop()
            append = stack.append
            append(tuple(items))
        elif op == 0x87:  # TUPLE3
            last = stack.pop()
            middle = stack.pop()
            stack[-1] = (stack[-1], middle, last)
        elif op == 0x71:  # BINPUT
            memo.put(data[at], stack[-1])
            quick = False
            at += 1
        elif op == 0x72:  # LONG_BINPUT
            memo.put(int.from_bytes(_take(data, at, 4), "little"), stack[-1])
            quick = False
            at += 4
        elif op == 0x93:  # STACK_GLOBAL
            name, module = stack.pop(), stack.pop()
            append(_global(module, name, table, what, refused))
        elif op == 0x63:  # GLOBAL
            end = data.index(b"\n", at)
            stop = data.index(b"\n", end + 1)
            module, name = data[at:end].decode(), data[end + 1 : stop].decode()
            append(_global(module, name, table, what, refused))
            at = stop + 1
        elif op == 0x51:  # BINPERSID
            if persistent is None:
                raise MalformedCheckpoint(f"{what} refers to storages that are not there")
            stack[-1] = persistent(stack[-1])
        elif op == 0x88:  # NEWTRUE
            append(True)
        elif op == 0x89:  # NEWFALSE
            append(False)
        elif op == 0x73:  # SETITEM
            value, key = stack.pop(), stack.pop()
            _set_items(stack[-1], [key, value], what)
        elif op == 0x47:  # BINFLOAT
            append(struct.unpack(">d", _take(data, at, 8))[0])
            at += 8
        elif op == 0x8A:  # LONG1
            n = data[at]
            if n > _MAX_LONG_BYTES:
                raise MalformedCheckpoint(f"{what} holds an integer of {n} bytes")
            append(int.from_bytes(_take(data, at + 1, n), "little", signed=True))
            at += 1 + n
        elif op == 0x95:  # FRAME
            at += 8
        elif op == 0x80:  # PROTO
            if data[at] > 5:
                raise MalformedCheckpoint(f"{what} is pickle protocol {data[at]}, known are 2 to 5")
            at += 1
        elif op == 0x43:  # SHORT_BINBYTES
            n = data[at]
            append(_take(data, at + 1, n))
            at += 1 + n
        elif op in (0x42, 0x54):  # BINBYTES, BINSTRING
            n = int.from_bytes(_take(data, at, 4), "little")
            append(_text_or_bytes(op == 0x54, _take(data, at + 4, n)))
            at += 4 + n
        elif op == 0x55:  # SHORT_BINSTRING
            n = data[at]
            append(_text_or_bytes(True, _take(data, at + 1, n)))
            at += 1 + n
        elif op in (0x8D, 0x8E):  # BINUNICODE8, BINBYTES8
            n = int.from_bytes(_take(data, at, 8), "little")
            raw = _take(data, at + 8, n)
            append(raw.decode("utf-8", "surrogatepass") if op == 0x8D else raw)
            at += 8 + n
        elif op == 0x8F:  # EMPTY_SET
            append(set())
        elif op == 0x90:  # ADDITEMS
            items, stack = stack, marks.pop()
            append = stack.append
            if type(stack[-1]) is not set:
                raise MalformedCheckpoint(f"{what} adds set items to something else")
            stack[-1].update(_keys(items, what))
        elif op == 0x91:  # FROZENSET
            items, stack = stack, marks.pop()
            append = stack.append
            append(frozenset(_keys(items, what)))
        elif op == 0x92:  # NEWOBJ_EX
            kwargs, args = stack.pop(), stack.pop()
            if kwargs:
                raise MalformedCheckpoint(f"{what} makes an object with keyword arguments")
            stack[-1] = _call(stack[-1], args, what)
        elif op == 0x30:  # POP
            if stack:
                stack.pop()
            else:
                stack = marks.pop()
                append = stack.append
        elif op == 0x31:  # POP_MARK
            stack = marks.pop()
            append = stack.append
        elif op == 0x32:  # DUP
            append(stack[-1])
        elif op == 0x2E:  # STOP
            if len(stack) != 1 or marks:
                raise MalformedCheckpoint(f"{what} ends with {len(stack)} values on the stack")
            return stack[0]
        else:
            raise MalformedCheckpoint(f"{what} uses pickle opcode {op:#04x} at {at - 1} of {size}")


def _take(data: bytes, at: int, n: int) -> bytes:
    raw = data[at : at + n]
    if len(raw) != n:
        raise IndexError(at)
    return raw


def _text_or_bytes(is_string: bool, raw: bytes) -> str | bytes:
    # Python 2 `str`: torch reads it as text in latin-1/utf-8; anything else stays bytes.
    if not is_string:
        return raw
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _global(module: Any, name: Any, table: Mapping[str, Any], what: str,
            refused: list[str] | None) -> Any:  # fmt: skip
    if not isinstance(module, str) or not isinstance(name, str):
        raise MalformedCheckpoint(f"{what} names a global by something that is not text")
    full = f"{module}.{name}"
    if full in table:
        return table[full]
    if refused is None:
        raise UnsafeContent(f"{what} wants to load {full!r}, which is not on the allow-list",
                            **{"global": full})  # fmt: skip
    if full not in refused:
        refused.append(full)
    return Refused(full)


def _call(function: Any, args: Any, what: str) -> Any:
    if type(function) is Call:
        if type(args) is not tuple:
            raise MalformedCheckpoint(f"{what} calls {function.name} with no argument tuple")
        return function.build(*args)
    if type(function) is Refused:
        return function
    raise MalformedCheckpoint(f"{what} calls {type(function).__name__}, which cannot be called")


def _build(target: Any, state: Any, what: str) -> None:
    if type(target) is Record:
        if target.fields and type(state) is dict:
            state = _by_name(target.fields, list(state), list(state.values()))
        target.state = state
    elif type(target) is OrderedDict and (state is None or type(state) is dict):
        return  # torch's state dicts carry `_metadata` here: module versions, not data
    elif type(target) is not Refused:
        raise MalformedCheckpoint(f"{what} sets the state of {type(target).__name__}")


def _set_items(target: Any, items: list[Any], what: str) -> None:
    if type(target) is dict or type(target) is OrderedDict:
        if len(items) % 2:
            raise MalformedCheckpoint(f"{what} has a key without a value")
        keys = items[::2]
        for key in keys:
            if type(key) not in _SCALARS and type(key) is not Record:
                _check_key(key, what)
        target.update(zip(keys, items[1::2], strict=True))
    elif type(target) is not Refused:
        raise MalformedCheckpoint(f"{what} sets items of {type(target).__name__}")


def _extend(target: Any, items: list[Any], what: str) -> None:
    if type(target) is list:
        target.extend(items)
    elif type(target) is not Refused:
        raise MalformedCheckpoint(f"{what} appends to {type(target).__name__}")


def _keys(items: list[Any], what: str) -> list[Any]:
    for item in items:
        _check_key(item, what)
    return items


def _check_key(key: Any, what: str, depth: int = 4) -> None:
    """Tuples nested through the memo can take 2**n steps to hash; real keys are small."""
    kind = type(key)
    if kind in _SCALARS or kind is Record or kind is Refused or kind is TensorRef:
        return
    if kind is Named and depth:
        _check_key(key.value, what, depth - 1)
        return
    if kind is tuple and depth and len(key) <= 64:
        for part in key:
            _check_key(part, what, depth - 1)
        return
    raise MalformedCheckpoint(f"{what} uses a {kind.__name__} as a key")
