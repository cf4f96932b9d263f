"""Trees that a pickle stands for: is one far larger than its bytes, and what of it was refused?"""

from __future__ import annotations

from typing import Any

from ckptcore.errors import MalformedCheckpoint
from ckptcore.objects import Named, Refused

_MAX_DEPTH = 150  # nesting of containers


def bound_tree(tree: Any, nbytes: int, what: str) -> None:
    """Refuses a tree that is far larger, written out, than the pickle it came from.

    Values shared through the memo make a few bytes an endless tree, or endless names. Both are
    summed over the shared values, each visited once. A tree without sharing takes a byte a value.
    """
    # id -> (values below, characters of all paths below, bytes of binary values below)
    sums: dict[int, tuple[int, int, int]] = {}
    open_: set[int] = set()

    def visit(value: Any, depth: int) -> tuple[int, int, int]:
        if isinstance(value, Named) and isinstance(value.value, dict):
            value = value.value  # a namespace or an array, say
        if not isinstance(value, (dict, list, tuple)):
            return 1, 0, len(value) if isinstance(value, bytes) else 0
        if id(value) in sums:
            return sums[id(value)]
        if depth > _MAX_DEPTH or id(value) in open_:
            raise MalformedCheckpoint(f"{what} nests deeper than {_MAX_DEPTH} levels")
        open_.add(id(value))
        count, chars, raw = 1, 0, 0
        for k, v in value.items() if isinstance(value, dict) else enumerate(value):
            below, names, inside = visit(v, depth + 1)
            count += below
            raw += inside
            chars += below * (len(k) + 1 if isinstance(k, str) else 8) + names
        open_.discard(id(value))
        sums[id(value)] = count, chars, raw
        return count, chars, raw

    count, chars, raw = visit(tree, 0)
    if raw > 4 * nbytes + (1 << 20):
        raise MalformedCheckpoint(
            f"{what}: a pickle of {nbytes} bytes stands for {raw} bytes of binary values"
        )
    if count > nbytes + 10_000 or chars > 4 * nbytes + (1 << 20):
        raise MalformedCheckpoint(
            f"{what}: a pickle of {nbytes} bytes stands for {count} values with {chars} characters of names"
        )


def refused_in(tree: Any) -> tuple[str, ...]:
    """What was refused in a tree: globals by name, and numpy arrays of something else than numbers."""
    found: set[str] = set()
    seen: set[int] = set()
    queue = [tree]
    while queue:
        v = queue.pop()
        if isinstance(v, Refused):
            found.add(v.name)
        elif isinstance(v, Named) and v.kind == "ndarray" and "refused" in v.value:
            found.add(v.value["refused"])
        elif isinstance(v, (dict, list, tuple, set, frozenset)) and id(v) not in seen:
            seen.add(id(v))
            queue += [*v, *v.values()] if isinstance(v, dict) else v
    return tuple(sorted(found))
