"""Unpickle plain values by an allow-list, without executing any of a pickle.

A small virtual machine for pickle protocols 2 to 5 (Lib/pickletools.py, CPython). It builds None,
bools, numbers, strings, bytes, lists, tuples, dicts and sets, and calls nothing but the builders
of the given table. Any other global is refused: an error (strict), or a `Refused` value in
its place. Work and memory are linear in the input's length, and counted on the reading's meter: opcodes
that could need more are bounded or unknown, keys that would be slow to hash are rejected.
"""

from __future__ import annotations

import gc
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any

from ckptcore.core.metadata_budget import CONTAINER, meter
from ckptcore.core.object_tree import Named, Refused
from ckptcore.encodings.pickle.columns import Columns, Names, Sizes
from ckptcore.encodings.pickle.container_items import LargeKeys, extend, keys, set_items
from ckptcore.encodings.pickle.record_runs import RecordRuns
from ckptcore.encodings.pickle.records import Call, Memo, Record, Shortcuts, by_name
from ckptcore.errors import MalformedCheckpoint, UnsafeContent
from ckptcore.utils.memory import reuse_memory

__all__ = [
    "MEMBERS",
    "Call",
    "Columns",
    "Names",
    "Record",
    "Sizes",
    "enum_record",
    "is_member_name",
    "loads",
    "member_of",
    "record",
]
_MAX_LONG_BYTES = 64
_MAX_STACK = 100_000  # nesting of marks, far beyond any real pickle
# Limit of arguments to calls per byte of pickle: an argument shared through the memo costs a call
# two bytes, and its builder a copy.
_MAX_GIVEN, _ENTRY = 64, 32
_SIZED: dict[type[Any], int] = {
    str: 1,
    bytes: 1,
    list: _ENTRY,
    tuple: _ENTRY,
    dict: _ENTRY,
    OrderedDict: _ENTRY,
    set: _ENTRY,
}
# Costs are counted in blocks of opcodes: bytes per opcode (its value and its time), per item of a
# dict or set, per character, per record of a declared class, per row of columns, per far memo entry.
_BLOCK, _OP, _ITEM, _CHAR, _RECORD, _ROW, _FAR = 1 << 14, 96, 64, 4, 256, 64, 128


def record(kind: str, *fields: str, run: tuple[str, ...] = (), opens: bool = False) -> Call:
    """Return a table entry for a class whose instances are kept as `Record`.

    Args:
        kind: Name of the class.
        *fields: When given, a dict state is kept as a tuple of these values, None where absent. A dict per
            object would make large metadata cost gigabytes.
        run: See `Call`.
        opens: See `Call`.
    """
    return Call(kind, lambda *args: Record(kind, args, fields), fields=fields, run=run, opens=opens)


def enum_record(kind: str) -> Call:
    """Return a table entry for an enum whose members are kept as `Record`, with their value or their name."""
    return Call(kind, lambda *args: Record(kind, args), member=lambda name: Record(kind, (name,)))


def member_of(owner: Any, name: Any) -> Any:
    """Return the member of an enum with a name, or the refused class that it is of.

    CPython 3.11.0 to 3.11.3 pickle a member as ``getattr(its class, its name)``, all others as
    ``its class(its value)`` (bpo-44342, Lib/enum.py). Debian 12 has 3.11.2.

    Raises:
        LookupError: What is asked for is no member of an enum: the attribute of an object may be anything.
    """
    if type(owner) is Refused:
        return owner
    if type(owner) is not Call or owner.member is None or not is_member_name(name):
        raise LookupError(name)
    return owner.member(name)


def is_member_name(name: Any) -> bool:
    """Report whether a value may be the name of a member of an enum, and no other attribute of the class."""
    return type(name) is str and name.isidentifier() and not name.startswith("_")


_MEMBER = Call("builtins.getattr", member_of)
MEMBERS = {"builtins.getattr": _MEMBER, "__builtin__.getattr": _MEMBER}  # of a table that has enums


def loads(
    data: bytes,
    table: Mapping[str, Any],
    *,
    label: str,
    persistent: Callable[[Any], Any] | None = None,
    refused: list[str] | None = None,
    behind: list[int] | None = None,
) -> Any:
    """Return the value that ``data`` pickles.

    Args:
        data: The pickle.
        table: ``module.name`` -> a `Call`, or a constant that replaces the global itself.
        label: The file or record, for messages.
        persistent: Resolves persistent ids.
        refused: When given, globals outside the table become `Refused` and are added to this list.
        behind: When given, receives the number of bytes behind the pickle, if there are any; otherwise such
            bytes are an error.

    Raises:
        UnsafeContent: A global is outside the table, and ``refused`` is None.
        MalformedCheckpoint: The bytes are not a complete, bounded pickle.
        MetadataTooLarge: The values are over the budget.
    """
    # Nothing below makes cycles, and a collection visits everything built so far.
    collecting = gc.isenabled() and len(data) > 1 << 20
    if collecting:
        gc.disable()
    reuse_memory(len(data))
    try:
        value, end = _run(data, table, label, persistent, refused)
    except (IndexError, struct.error) as error:
        raise MalformedCheckpoint(f"{label} is not a complete pickle: it ends in the middle") from error
    except (
        TypeError,
        ValueError,
        AttributeError,
        UnicodeDecodeError,
        KeyError,
        OverflowError,
        RecursionError,
        MemoryError,
    ) as error:
        raise MalformedCheckpoint(f"{label} is not a valid pickle: {error}") from error
    finally:
        if collecting:
            gc.enable()
    if end < len(data):
        if behind is None:
            raise MalformedCheckpoint(f"{label} has {len(data) - end} bytes behind its pickle")
        behind.append(len(data) - end)
    return value


def _run(
    data: bytes,
    table: Mapping[str, Any],
    label: str,
    persistent: Callable[[Any], Any] | None,
    refused: list[str] | None,
) -> tuple[Any, int]:
    """Return the value, and the position behind it."""
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo = Memo()
    rows = memo.rows
    shortcuts = Shortcuts(data, memo)
    runs = RecordRuns(data, memo)
    position, size = 0, len(data)
    argument_bytes, limit = 0, _MAX_GIVEN * size + (1 << 20)
    count, spent, large_keys = meter(), size, LargeKeys()
    fresh: dict[Any, Any] | None = None  # the last new dict, until it becomes a record's state
    # Dicts that are the state of a record: Python copies the items, so that later ones are not the record's.
    # They are kept: the id of one that is gone would be another's.
    states: dict[int, Any] = {}
    quick = True  # until explicit memo numbers appear, which protocol 4 does not use
    append = stack.append
    while True:
        count.require(_cost(spent, argument_bytes, memo, runs), label)
        spent += _BLOCK * _OP
        for _ in repeat(None, _BLOCK):
            op = data[position]
            position += 1
            # In order of frequency in real `.metadata` files.
            if op == 0x68 or op == 0x6A:  # BINGET, LONG_BINGET
                if op == 0x68:
                    value = memo.get(data[position])
                    position += 1
                else:
                    value = memo.get(int.from_bytes(data[position : position + 4], "little"))
                    position += 4
                if type(value) is Call and quick:
                    if value.fields or value.is_size:
                        instance, end = (
                            shortcuts.size(position)
                            if value.is_size
                            else shortcuts.record(value, position, op)
                        )
                        if end:
                            append(instance)
                            spent += _RECORD
                            position = runs.follow(shortcuts, value, end, stack, marks) if value.run else end
                            rows = memo.rows
                            continue
                    elif value.opens and (opened := shortcuts.opening(value, position)) is not None:
                        instance, fresh, items, end = opened
                        # As its opcodes would.
                        spent += 2 * (_RECORD + CONTAINER) + _OP * (end - position) // 3
                        position = end
                        stack += (instance, fresh)
                        marks.append(stack)
                        if len(marks) > _MAX_STACK:
                            raise _too_deep(label)
                        stack = items
                        append = stack.append
                        continue
                append(value)
            elif op == 0x94:  # MEMOIZE
                rows.append(stack[-1])
            elif op == 0x4B:  # BININT1
                append(data[position])
                position += 1
            elif op == 0x28:  # MARK
                marks.append(stack)
                if len(marks) > _MAX_STACK:
                    raise _too_deep(label)
                stack = []
                append = stack.append
            elif op == 0x7D:  # EMPTY_DICT
                fresh = {}
                append(fresh)
                spent += CONTAINER
            elif op == 0x75:  # SETITEMS
                items, stack = stack, marks.pop()
                append = stack.append
                if id(stack[-1]) in states:
                    raise _set_late(label)
                set_items(stack[-1], items, large_keys, label)
                spent += _ITEM * len(items)
            elif op == 0x62:  # BUILD
                state = stack.pop()
                if type(state) is dict:
                    argument_bytes += len(state) * _ENTRY
                    if state is fresh and type(stack[-1]) is Record and stack[-1].fields:
                        fresh = None  # only its values are kept
                        spent -= CONTAINER - _RECORD
                if argument_bytes > limit:
                    raise _too_much(label, size)
                target = stack[-1]
                if type(target) is Record and target.state is not None:
                    raise MalformedCheckpoint(f"{label} sets the state of a {target.kind} twice")
                if type(target) is Record and not target.fields:
                    target.state = state
                    # Of a pair the second dict has the slots (Lib/pickle.py, load_build).
                    pair = type(state) is tuple and len(state) == 2
                    for state_dict in state if pair else (state,):
                        if type(state_dict) is dict:
                            states[id(state_dict)] = state_dict
                else:
                    _build(target, state, table, label)
            elif op == 0x81 or op == 0x52:  # NEWOBJ
                args = stack.pop()
                if args:
                    argument_bytes += _given(args)
                    if argument_bytes > limit:
                        raise _too_much(label, size)
                stack[-1] = instance = _call(stack[-1], args, label, refused)
                spent += _RECORD // 2 if type(instance) is Record else CONTAINER // 2
            elif op == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif op == 0x86:  # TUPLE2
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif op == 0x4D:  # BININT2
                append(data[position] | data[position + 1] << 8)
                position += 2
            elif op == 0x4A:  # BININT
                append(int.from_bytes(_take(data, position, 4), "little", signed=True))
                position += 4
            elif op == 0x29:  # EMPTY_TUPLE
                append(())
            elif op == 0x8C:  # SHORT_BINUNICODE
                end = position + 1 + data[position]
                if end > size:
                    raise IndexError(position)
                append(data[position + 1 : end].decode("utf-8", "surrogatepass"))
                position = end
            elif op == 0x58:  # BINUNICODE
                n = int.from_bytes(_take(data, position, 4), "little")
                append(_take(data, position + 4, n).decode("utf-8", "surrogatepass"))
                spent += _CHAR * n
                position += 4 + n
            elif op == 0x4E:  # NONE
                append(None)
            elif op == 0x5D:  # EMPTY_LIST
                append([])
                spent += CONTAINER
            elif op == 0x65:  # APPENDS
                items, stack = stack, marks.pop()
                append = stack.append
                extend(stack[-1], items, label)
            elif op == 0x61:  # APPEND
                last = stack.pop()
                target = stack[-1]
                if type(target) is list:
                    target.append(last)
                else:
                    extend(target, [last], label)
            elif op == 0x74:  # TUPLE
                items, stack = stack, marks.pop()
                append = stack.append
                append(tuple(items))
            elif op == 0x87:  # TUPLE3
                last = stack.pop()
                middle = stack.pop()
                stack[-1] = (stack[-1], middle, last)
            elif op == 0x71:  # BINPUT
                memo.put(data[position], stack[-1])
                quick = False
                position += 1
            elif op == 0x72:  # LONG_BINPUT
                memo.put(int.from_bytes(_take(data, position, 4), "little"), stack[-1])
                quick = False
                position += 4
            elif op == 0x93:  # STACK_GLOBAL
                name, module = stack.pop(), stack.pop()
                append(_global(module, name, table, label, refused))
            elif op == 0x63:  # GLOBAL
                end = data.index(b"\n", position)
                stop = data.index(b"\n", end + 1)
                module, name = data[position:end].decode(), data[end + 1 : stop].decode()
                append(_global(module, name, table, label, refused))
                position = stop + 1
            elif op == 0x51:  # BINPERSID
                if persistent is None:
                    raise MalformedCheckpoint(f"{label} refers to storages, and there are none")
                stack[-1] = persistent(stack[-1])
            elif op == 0x88:  # NEWTRUE
                append(True)
            elif op == 0x89:  # NEWFALSE
                append(False)
            elif op == 0x73:  # SETITEM
                value, key = stack.pop(), stack.pop()
                if id(stack[-1]) in states:
                    raise _set_late(label)
                set_items(stack[-1], [key, value], large_keys, label)
            elif op == 0x47:  # BINFLOAT
                append(struct.unpack(">d", _take(data, position, 8))[0])
                position += 8
            elif op == 0x8A:  # LONG1
                n = data[position]
                if n > _MAX_LONG_BYTES:
                    raise MalformedCheckpoint(f"{label} holds an integer of {n} bytes")
                append(int.from_bytes(_take(data, position + 1, n), "little", signed=True))
                position += 1 + n
            elif op == 0x95:  # FRAME
                position += 8
                # Only runs need it: their windows remove the headers of the frames that follow.
                runs.frame_end = position + int.from_bytes(data[position - 8 : position], "little")
            elif op == 0x80:  # PROTO
                if data[position] > 5:
                    raise MalformedCheckpoint(
                        f"{label} must be pickle protocol 2 to 5 (got {data[position]})"
                    )
                position += 1
            elif op == 0x43:  # SHORT_BINBYTES
                n = data[position]
                append(_take(data, position + 1, n))
                position += 1 + n
            elif op in (0x42, 0x54):  # BINBYTES, BINSTRING
                n = int.from_bytes(_take(data, position, 4), "little")
                append(_text_or_bytes(op == 0x54, _take(data, position + 4, n)))
                spent += _CHAR * n
                position += 4 + n
            elif op == 0x55:  # SHORT_BINSTRING
                n = data[position]
                append(_text_or_bytes(True, _take(data, position + 1, n)))
                position += 1 + n
            elif op in (0x8D, 0x8E, 0x96):  # BINUNICODE8, BINBYTES8, BYTEARRAY8
                n = int.from_bytes(_take(data, position, 8), "little")
                raw = _take(data, position + 8, n)
                if op == 0x8D:
                    append(raw.decode("utf-8", "surrogatepass"))
                else:
                    append(raw if op == 0x8E else Named("bytearray", raw))
                spent += _CHAR * n
                position += 8 + n
            elif op == 0x8F:  # EMPTY_SET
                append(set())
                spent += CONTAINER
            elif op == 0x90:  # ADDITEMS
                items, stack = stack, marks.pop()
                append = stack.append
                if type(stack[-1]) is not set:
                    raise MalformedCheckpoint(
                        f"{label}: cannot add set items to a {type(stack[-1]).__name__}"
                    )
                stack[-1].update(keys(items, large_keys, label))
                spent += _ITEM * len(items)
            elif op == 0x91:  # FROZENSET
                items, stack = stack, marks.pop()
                append = stack.append
                append(frozenset(keys(items, large_keys, label)))
                spent += CONTAINER + _ITEM * len(items)
            elif op == 0x92:  # NEWOBJ_EX
                kwargs, args = stack.pop(), stack.pop()
                if kwargs:
                    raise MalformedCheckpoint(f"{label} makes an object with keyword arguments")
                argument_bytes += _given(args)
                if argument_bytes > limit:
                    raise _too_much(label, size)
                stack[-1] = instance = _call(stack[-1], args, label, refused)
                spent += _RECORD // 2 if type(instance) is Record else CONTAINER // 2
            elif op == 0x30:  # POP
                if stack:
                    # One value on the stack is all rows of a run. The pickle would remove the last row only.
                    if type(stack.pop()) is Columns:
                        raise MalformedCheckpoint(f"{label} removes records that it has put into a list")
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
                    raise MalformedCheckpoint(f"{label} ends with {len(stack)} values on the stack")
                spent -= max(_BLOCK - position, 0) * _OP  # a short pickle does not use its complete block
                count.take(_cost(spent, argument_bytes, memo, runs), label)
                return stack[0], position
            else:
                raise MalformedCheckpoint(f"{label} uses pickle opcode {op:#04x} at {position - 1} of {size}")


def _cost(spent: int, argument_bytes: int, memo: Memo, runs: RecordRuns) -> int:
    """Estimate the bytes of what was built so far, its later forms included."""
    return max(spent, 0) + argument_bytes + _ROW * runs.rows + _FAR * memo.far


def _take(data: bytes, position: int, n: int) -> bytes:
    # A slice behind the end is short, and no error. `loads` reports an IndexError as a cut pickle.
    raw = data[position : position + n]
    if len(raw) != n:
        raise IndexError(position)
    return raw


def _text_or_bytes(is_string: bool, raw: bytes) -> str | bytes:
    # Python 2 `str`: torch decodes it as latin-1/utf-8 text; anything else stays bytes.
    if not is_string:
        return raw
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _global(module: Any, name: Any, table: Mapping[str, Any], label: str, refused: list[str] | None) -> Any:
    if not isinstance(module, str) or not isinstance(name, str):
        raise MalformedCheckpoint(f"{label} names a global by a value that is not text")
    full = f"{module}.{name}"
    if full in table:
        return table[full]
    return _refuse(full, label, refused)


def _refuse(full: str, label: str, refused: list[str] | None) -> Refused:
    if refused is None:
        raise UnsafeContent(
            f"cannot load {full!r} for {label}: it is not on the allow-list", **{"global": full}
        )
    if full not in refused:
        refused.append(full)
    return Refused(full)


def _call(function: Any, args: Any, label: str, refused: list[str] | None) -> Any:
    if type(function) is Call:
        if type(args) is not tuple:
            raise MalformedCheckpoint(f"{label} calls {function.name} without an argument tuple")
        if function is _MEMBER:
            try:
                return member_of(*args)
            except LookupError:
                return _refuse(_MEMBER.name, label, refused)
        return function.build(*args)
    if type(function) is Refused:
        return function
    raise MalformedCheckpoint(f"{label} calls a {type(function).__name__}, which cannot be called")


def _given(args: Any) -> int:
    """Estimate the bytes of arguments that a builder may have to copy."""
    if type(args) is not tuple:
        return 0  # `_call` refuses it
    total = len(args)
    for arg in args:
        weight = _SIZED.get(type(arg))
        if weight is not None:
            total += weight * len(arg)
    return total


def _set_late(label: str) -> MalformedCheckpoint:
    return MalformedCheckpoint(f"{label} sets items of a dict that is already the state of an object")


def _too_deep(label: str) -> MalformedCheckpoint:
    return MalformedCheckpoint(f"{label} nests deeper than {_MAX_STACK} levels")


def _too_much(label: str, size: int) -> MalformedCheckpoint:
    return MalformedCheckpoint(f"{label}: a pickle of {size} bytes calls for far more than it holds")


def _build(target: Any, state: Any, table: Mapping[str, Any], label: str) -> None:
    if type(target) is Record:
        if target.fields and type(state) is dict:
            state = by_name(target.fields, list(state), list(state.values()))
        target.state = state
    elif type(target) is OrderedDict and (state is None or type(state) is dict):
        return  # torch's state dicts have `_metadata` here: module versions, not data
    elif type(target) is Named and f"BUILD {target.kind}" in table:
        table[f"BUILD {target.kind}"](target, state)  # every global has a dot in its name
    elif type(target) is not Refused:
        raise MalformedCheckpoint(f"{label}: cannot set the state of a {type(target).__name__}")
