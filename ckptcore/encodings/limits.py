"""Refuse metadata that is far larger than its bytes, and list refused values in a tree."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, islice
from typing import Any, NamedTuple

from ckptcore.core.metadata_budget import CONTAINER, SLOT, meter
from ckptcore.core.object_tree import SCALARS, Named, Refused, are_their_forms, is_its_form
from ckptcore.errors import MalformedCheckpoint

_MAX_DEPTH = 150  # nesting of containers
_TEXT = 64  # characters of text, counted at each reference through the memo, per byte of pickle
_VALUES = 16  # values, counted at each reference through the memo, per byte of pickle
_CHAR, _BYTE = 4, 6  # bytes that a character or a byte of a value takes in all stages
_CONTAINERS = (dict, list, tuple, set, frozenset)


def absent(present: Collection[int], stop: int, limit: int) -> list[int]:
    """Return the first ``limit`` numbers of ``[0, stop)`` that are not present.

    The cost depends on how many are present, however large a number in a file's name is.

    >>> absent({0, 2, 5}, 10**30, 3)
    [1, 3, 4]
    """
    have = frozenset(present)
    return list(islice((n for n in range(min(stop, len(have) + limit)) if n not in have), limit))


def bound_tree(tree: Any, nbytes: int, label: str) -> None:
    """Count a tree, written out, on the reading's meter; refuse one that is far larger than its pickle.

    Values shared through the memo make a few bytes an endless tree, or endless names. Both are summed over
    the shared values, each visited once; plain values inside one container are summed at once.

    Args:
        tree: The unpickled tree.
        nbytes: Bytes of the pickle.
        label: The file, for messages.

    Raises:
        MalformedCheckpoint: The tree is far larger than its pickle.
        MetadataTooLarge: The tree is over the budget of metadata.
    """
    below = _Sums(label).of(tree)
    if below.text > _TEXT * nbytes + (1 << 20):
        raise MalformedCheckpoint(
            f"{label}: a pickle of {nbytes} bytes expands to {below.text} characters of text"
        )
    if below.raw > 4 * nbytes + (1 << 20):
        raise MalformedCheckpoint(
            f"{label}: a pickle of {nbytes} bytes expands to {below.raw} bytes of binary values"
        )
    if below.values > _VALUES * nbytes + 10_000:
        raise MalformedCheckpoint(f"{label}: a pickle of {nbytes} bytes expands to {below.values} values")
    cost = CONTAINER * (below.named + below.containers) + CONTAINER // 2 * below.forms
    cost += SLOT * below.values
    cost += _CHAR * below.text + _BYTE * below.raw
    meter().take(cost, label)
    meter().require(below.chars, label)


class _Below(NamedTuple):
    """Sums over a value and everything below it, counted at each reference.

    Attributes:
        values: Values.
        named: Values that are not plain scalars and therefore get names.
        containers: Those of them that hold others.
        forms: Values whose JSON form is an object or a list.
        chars: Characters of all names.
        raw: Bytes of binary values.
        text: Characters of text.
    """

    values: int
    named: int
    containers: int
    forms: int
    chars: int
    raw: int
    text: int


class _Sums:
    """Sums over the values of a tree."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._sums_by_id: dict[int, _Below] = {}
        self._open: set[int] = set()
        self._count, self._structured = meter(), 0

    def of(self, value: Any, depth: int = 0) -> _Below:
        """Return the sums of a value and everything below it."""
        while type(value) is Named and isinstance(value.value, (dict, list, tuple, str, bytes)):
            value = value.value  # such as a namespace or an array
        if not isinstance(value, _CONTAINERS):
            return _of_scalars([value]) if type(value) in SCALARS else _ONE
        earlier_sums = self._sums_by_id.get(id(value))
        if earlier_sums is not None:
            return earlier_sums
        # What contains itself nests without end.
        if depth > _MAX_DEPTH or id(value) in self._open:
            raise MalformedCheckpoint(f"{self._label} nests deeper than {_MAX_DEPTH} levels")
        self._open.add(id(value))
        sums = self._inside(value, depth)
        self._open.discard(id(value))
        self._sums_by_id[id(value)] = sums
        return sums

    def _inside(self, value: Any, depth: int) -> _Below:
        """Count what is in a container, before it is visited item by item."""
        plain, rest, pairs = [], [], 0
        is_dict = isinstance(value, dict)
        if is_dict:
            keys = [k for k in value if type(k) not in SCALARS]
            plain = [_of_scalars(value.keys() if not keys else [k for k in value if type(k) in SCALARS])]
            plain += [self.of(k, depth + 1) for k in keys]
            pairs = 0 if set(map(type, value)) <= {str} else len(value)
        inside = value.values() if is_dict else value
        self._structured += len(inside) - sum(map(SCALARS.__contains__, map(type, inside)))
        # Before millions are visited one by one.
        self._count.require(CONTAINER * self._structured, self._label)
        if set(map(type, inside)) <= SCALARS:
            plain.append(_of_scalars(inside))
        else:
            plain.append(_of_scalars([v for v in inside if type(v) in SCALARS]))
            items = value.items() if is_dict else enumerate(value)
            rest = [(k, self.of(v, depth + 1)) for k, v in items if type(v) not in SCALARS]
        below = [*plain, *(b for _, b in rest)]
        return _Below(
            1 + sum(b.values for b in below),
            1 + sum(b.named for b in below),
            1 + sum(b.containers for b in below),
            sum(b.forms for b in below) + pairs,
            sum(b.chars + b.named * (_key_length(k) + 1) for k, b in rest),
            sum(b.raw for b in below),
            sum(b.text for b in below),
        )


def _of_scalars(values: Collection[Any]) -> _Below:
    """Return the sums of scalars, all at once."""
    kinds = set(map(type, values))
    text = sum(len(v) for v in values if type(v) is str) if str in kinds else 0
    raw = sum(len(v) for v in values if type(v) is bytes) if bytes in kinds else 0
    forms = sum(not is_its_form(v) for v in values) if not are_their_forms(values) else 0
    return _Below(len(values), 0, 0, forms, 0, raw, text)


def expands(nbytes: int, stored: int) -> bool:
    """Return whether tensors have far more bytes than their file stores.

    A mask is often saved as a view that expands a few bytes: of 16,384 x 16,384 float32, to 1 GiB. Beside a
    model of 4 MiB, one of 4 GiB is read, too.
    """
    return nbytes > 1024 * stored + (1 << 30)


def bound_views(nbytes: int, stored: int, label: str) -> None:
    """Refuse tensors of far more bytes than are stored, such as expanded views of one element."""
    if expands(nbytes, stored):
        raise MalformedCheckpoint(f"{label}: {stored} stored bytes expand to tensors of {nbytes} bytes")


_ONE = _Below(1, 1, 0, 0, 0, 0, 0)


def _key_length(key: Any) -> int:
    """Estimate the characters of a key in a name; a tuple of text may share its parts."""
    if isinstance(key, (str, bytes)):
        return len(key) if isinstance(key, str) else 4 * len(key)
    if isinstance(key, Named):
        return 8 + _key_length(key.value)
    return sum(map(_key_length, key)) + 2 * len(key) if isinstance(key, (tuple, list)) else 7


def refused_in(tree: Any, kinds: tuple[type[Any], ...] = (Refused,)) -> tuple[str, ...]:
    """Return what was refused in a tree: globals by name, and numpy arrays of non-numbers.

    Args:
        tree: An unpickled tree.
        kinds: Classes with a ``name`` whose instances are refused.
    """
    refused_names: set[str] = set()
    visited: set[int] = set()
    queue = [tree]
    while queue:
        v = queue.pop()
        if isinstance(v, kinds):
            refused_names.add(v.name)
        elif isinstance(v, Named):
            if v.kind == "ndarray" and "refused" in v.value:
                refused_names.add(v.value["refused"])
            elif type(v.value) not in SCALARS:
                queue.append(v.value)
        elif isinstance(v, (dict, list, tuple, set, frozenset)) and id(v) not in visited:
            visited.add(id(v))
            inside = chain(v, v.values()) if isinstance(v, dict) else v
            queue += [x for x in inside if type(x) not in SCALARS]
    return tuple(sorted(refused_names))
