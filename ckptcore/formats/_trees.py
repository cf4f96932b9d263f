"""Trees of plain values: which leaves are there, and where do they stand?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def leaves_below(
    tree: Any, name: str, tensor: type | tuple[type, ...]
) -> Iterator[tuple[str, tuple[str | int, ...], Any]]:
    """(dotted name, path below ``tree``, value) of what a tree holds.

    Only containers that hold a ``tensor`` somewhere are taken apart. In a path, list positions are
    ints and dict keys are text, as in DCP's ``planner_data``.
    """
    holds = _holders(tree, tensor)

    def walk(value: Any, name: str, path: tuple[str | int, ...]) -> Iterator[Any]:
        if isinstance(value, (dict, list, tuple)) and id(value) in holds:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            is_dict = isinstance(value, dict)
            for k, v in items:
                yield from walk(v, f"{name}.{k}", (*path, str(k) if is_dict else k))
        else:
            yield name, path, value

    return walk(tree, name, ())


def _holders(tree: Any, tensor: type | tuple[type, ...]) -> set[int]:
    """ids of the containers that hold a tensor somewhere below."""
    holds: set[int] = set()
    seen: set[int] = set()

    def visit(value: Any, depth: int) -> bool:
        if isinstance(value, tensor):
            return True
        if not isinstance(value, (dict, list, tuple)) or depth > 200:
            return False
        if id(value) in seen:  # shared through the memo: visited once
            return id(value) in holds
        seen.add(id(value))
        inside = value.values() if isinstance(value, dict) else value
        found = [visit(v, depth + 1) for v in inside]  # every one: `any` would stop at the first
        if any(found):
            holds.add(id(value))
            return True
        return False

    visit(tree, 0)
    return holds
