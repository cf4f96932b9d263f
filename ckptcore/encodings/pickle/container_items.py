"""Add items to a pickle's lists, dicts and sets, and bound the cost of their keys.

Keys are checked before they are hashed: tuples nested through the memo can take 2**n steps, and
integers that differ by 2**61 - 1 all have one hash, so that n of them take n**2.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ckptcore.core.object_tree import Named, Refused, TensorRef
from ckptcore.encodings.pickle.columns import Columns
from ckptcore.encodings.pickle.records import Record
from ckptcore.errors import MalformedCheckpoint

_MAX_KEY_PARTS = 256
_FAR = 1 << 64  # at most 17 smaller integers have one hash
_ALIKE = 10_000  # allowed keys per pickle that share a hash with another
_SCALARS = frozenset({str, int, bytes, float, bool, type(None)})


class LargeKeys:
    """The large integers used as keys; refuses more than ``alike`` that share a hash with another."""

    __slots__ = ("_alike", "_first")

    def __init__(self, alike: int = _ALIKE) -> None:
        self._first: dict[int, int] = {}
        self._alike = alike

    def add(self, key: int, label: str) -> None:
        """Record a key; raises `MalformedCheckpoint`."""
        if self._first.setdefault(hash(key), key) != key:
            self._alike -= 1
            if self._alike < 0:
                raise MalformedCheckpoint(f"{label} uses many integers of one hash as keys")


def set_items(target: Any, items: list[Any], large_keys: LargeKeys, label: str) -> None:
    """Put alternating keys and values into a dict; raises `MalformedCheckpoint`."""
    if type(target) is Named and target.kind == "defaultdict":
        target = target.value["items"]
    if type(target) is dict or type(target) is OrderedDict:
        if len(items) % 2:
            raise MalformedCheckpoint(f"{label} has a key without a value")
        keys = items[::2]
        for key in keys:
            if type(key) is str:  # nearly all
                continue
            if type(key) is int and not -_FAR < key < _FAR:
                large_keys.add(key, label)
            if type(key) not in _SCALARS and type(key) is not Record and type(key) is not Columns:
                _check_key(key, large_keys, label)
        target.update(zip(keys, items[1::2], strict=True))
    elif type(target) is not Refused:
        raise MalformedCheckpoint(f"{label}: cannot set items of a {type(target).__name__}")


def extend(target: Any, items: list[Any], label: str) -> None:
    """Append values to a list; raises `MalformedCheckpoint`."""
    if type(target) is list:
        target.extend(items)
    elif type(target) is Named and target.kind == "deque":
        target.value["items"].extend(items)
        longest = target.value["maxlen"]
        if longest is not None and len(target.value["items"]) > longest:
            raise MalformedCheckpoint(f"{label}: a deque of at most {longest} values has more")
    elif type(target) is not Refused:
        raise MalformedCheckpoint(f"{label}: cannot append to a {type(target).__name__}")


def keys(items: list[Any], large_keys: LargeKeys, label: str) -> list[Any]:
    """Return the items if all of them can be hashed at little cost; raises `MalformedCheckpoint`."""
    for item in items:
        _check_key(item, large_keys, label)
    return items


def _check_key(key: Any, large_keys: LargeKeys, label: str) -> None:
    """Refuse tuples that, nested through the memo, can take 2**n steps to hash; real keys are small."""
    left = _MAX_KEY_PARTS
    parts = [(key, 0)]
    while parts:
        part, depth = parts.pop()
        kind, left = type(part), left - 1
        if kind is int and not -_FAR < part < _FAR:
            large_keys.add(part, label)
        if left < 0 or depth > 4:
            raise MalformedCheckpoint(f"{label} uses a key of too many parts")
        if kind in _SCALARS or kind is Record or kind is Refused or kind is TensorRef:
            continue
        if kind is Named:
            parts.append((part.value, depth + 1))
        elif (kind is tuple or kind is frozenset) and len(part) <= left:
            parts += [(p, depth + 1) for p in part]
        else:
            raise MalformedCheckpoint(f"{label} uses a {kind.__name__} as a key")
