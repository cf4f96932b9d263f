"""Bounds: is what a checkpoint stands for far larger than its bytes, and what of it was refused?"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Any

from ckptcore.errors import MalformedCheckpoint
from ckptcore.objects import Named, Refused

_MAX_DEPTH = 150  # nesting of containers
_TEXT = 64  # characters that text shared through the memo may stand for, per byte of pickle


def absent(present: Collection[int], stop: int, limit: int) -> list[int]:
    """The first ``limit`` numbers of ``[0, stop)`` that are not there.

    Costs as much as what is there, however large a number some file's name tells.

    >>> absent({0, 2, 5}, 10**30, 3)
    [1, 3, 4]
    """
    have = frozenset(present)
    return list(islice((n for n in range(min(stop, len(have) + limit)) if n not in have), limit))


def bound_tree(tree: Any, nbytes: int, what: str) -> None:
    """Refuses a tree that is far larger, written out, than the pickle it came from.

    Values shared through the memo make a few bytes an endless tree, or endless names. Both are
    summed over the shared values, each visited once. A tree without sharing takes a byte a value.
    """
    # id -> (values below, characters of all paths below, bytes of binary values below, of text)
    sums: dict[int, tuple[int, int, int, int]] = {}
    open_: set[int] = set()

    def visit(value: Any, depth: int) -> tuple[int, int, int, int]:
        if isinstance(value, Named) and isinstance(value.value, dict):
            value = value.value  # a namespace or an array, say
        if isinstance(value, Named) and isinstance(value.value, (str, bytes)):
            value = value.value
        if not isinstance(value, (dict, list, tuple, set, frozenset)):
            n = len(value) if isinstance(value, (str, bytes)) else 0
            return 1, 0, n if isinstance(value, bytes) else 0, n if isinstance(value, str) else 0
        if id(value) in sums:
            return sums[id(value)]
        if depth > _MAX_DEPTH or id(value) in open_:
            raise MalformedCheckpoint(f"{what} nests deeper than {_MAX_DEPTH} levels")
        open_.add(id(value))
        count, chars, raw, text = 1, 0, 0, 0
        for k, v in value.items() if isinstance(value, dict) else enumerate(value):
            below, names, inside, told = visit(v, depth + 1)
            count += below
            raw += inside
            text += told
            chars += below * (_spelled(k) + 1) + names
        open_.discard(id(value))
        sums[id(value)] = count, chars, raw, text
        return count, chars, raw, text

    count, chars, raw, text = visit(tree, 0)
    if text > _TEXT * nbytes + (1 << 20):
        raise MalformedCheckpoint(f"{what}: a pickle of {nbytes} bytes stands for {text} characters of text")
    if raw > 4 * nbytes + (1 << 20):
        raise MalformedCheckpoint(
            f"{what}: a pickle of {nbytes} bytes stands for {raw} bytes of binary values"
        )
    if count > nbytes + 10_000 or chars > 4 * nbytes + (1 << 20):
        raise MalformedCheckpoint(
            f"{what}: a pickle of {nbytes} bytes stands for {count} values with {chars} characters of names"
        )


def bound_views(nbytes: int, stored: int, what: str) -> None:
    """Refuses tensors of far more bytes than are stored: expanded views of one element, say."""
    if nbytes > 1024 * stored + (64 << 20):
        raise MalformedCheckpoint(f"{what}: {stored} bytes stand for tensors of {nbytes} bytes")


def _spelled(key: Any) -> int:
    """About as many characters as a key has in a name; a tuple of text may share its parts."""
    if isinstance(key, (str, bytes)):
        return len(key) if isinstance(key, str) else 4 * len(key)
    if isinstance(key, Named):
        return 8 + _spelled(key.value)
    return sum(map(_spelled, key)) + 2 * len(key) if isinstance(key, (tuple, list)) else 7


def refused_in(tree: Any, kinds: tuple[type[Any], ...] = (Refused,)) -> tuple[str, ...]:
    """What was refused in a tree: globals by name, and numpy arrays of something else than numbers.

    kinds: classes with a ``name`` whose instances are refused.
    """
    found: set[str] = set()
    seen: set[int] = set()
    queue = [tree]
    while queue:
        v = queue.pop()
        if isinstance(v, kinds):
            found.add(v.name)
        elif isinstance(v, Named) and v.kind == "ndarray" and "refused" in v.value:
            found.add(v.value["refused"])
        elif isinstance(v, (dict, list, tuple, set, frozenset)) and id(v) not in seen:
            seen.add(id(v))
            queue += [*v, *v.values()] if isinstance(v, dict) else v
    return tuple(sorted(found))
