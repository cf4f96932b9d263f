"""Take trees of plain values apart into leaves with paths, and build trees from leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckptcore.core.named_values import CONTAINERS, content_of
from ckptcore.core.object_tree import SCALARS, Named, Refused, RefusedTensor
from ckptcore.core.tree_paths import Path
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.pickle.unpickler import Record
from ckptcore.errors import NameMismatch

_MAX_GAP = 10_000  # list entries that may be missing before the next one


def kind_of(value: Any) -> str:
    """Return what people call a value of a pickle, for messages.

    >>> kind_of({}), kind_of(Refused("torchao.Int8Tensor")), kind_of(Named("path", "a"))
    ('dict', 'torchao.Int8Tensor', 'path')
    """
    if isinstance(value, StoredView):
        return "tensor"
    if isinstance(value, Refused):
        return value.name or "tensor"
    return str(value.kind) if isinstance(value, (Named, Record)) else type(value).__name__


def leaves_below(
    tree: Any, name: str, tensor: type | tuple[type, ...], opened: list[tuple[str, str]] | None = None
) -> Iterator[tuple[str, tuple[str | int, ...], Any]]:
    """Yield (dotted name, path below ``tree``, value) of the leaves of a tree.

    Only containers with a tensor inside, or a refused one, are taken apart; those of libraries, such as a
    defaultdict, are then a dict or list. In a path, list positions are
    ints and dict keys are text, as in DCP's ``planner_data``.

    Args:
        tree: Any value.
        name: Name of ``tree`` itself.
        tensor: Classes of tensors.
        opened: Receives (name, kind) of the containers of libraries that are taken apart.
    """
    holds = _holders(tree, tensor)
    if opened is not None:
        opened += _taken_apart(tree, name, holds)

    def walk(value: Any, name: str, path: tuple[str | int, ...]) -> Iterator[Any]:
        inside = _unwrap_container(value)
        value = inside if id(inside) in holds else value
        if isinstance(value, (dict, list, tuple)) and id(value) in holds:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            is_dict = isinstance(value, dict)
            for k, v in items:
                yield from walk(v, f"{name}.{k}", (*path, str(k) if is_dict else k))
        else:
            yield name, path, value

    return walk(tree, name, ())


def holds_tensor(value: Any, kinds: type | tuple[type, ...] = StoredView) -> bool:
    """Return whether a value is a tensor of a file, or has one inside."""
    return any(isinstance(leaf, kinds) for _, _, leaf in leaves_below(value, "", StoredView))


def built(rows: Iterable[tuple[str, Path, Any]]) -> dict[Any, Any]:
    """Build the nested dict of (name, path, value) rows, in their order.

    Same as set_element in torch/distributed/checkpoint/_traverse.py, but each place is filled once.

    Raises:
        NameMismatch: The names do not nest.
    """
    tree: dict[Any, Any] = {}
    container_ids = {id(tree)}
    for name, path, value in rows:
        _put(tree, path, value, container_ids, name)
    _require_lists(tree, "")
    return tree


def _put(tree: Any, path: Path, value: Any, container_ids: set[int], name: str) -> None:
    """Set the value at a path; nothing is added to a container that is not one of those made for paths."""
    container = tree
    for key, below in zip(path, (*path[1:], None), strict=True):
        if id(container) not in container_ids or isinstance(container, list) is not isinstance(key, int):
            raise _name_taken(name)
        if isinstance(container, list):
            container += [_Gap] * min(int(key) + 1 - len(container), _MAX_GAP)
            free = int(key) < len(container) and container[int(key)] is _Gap
            if not free and int(key) >= len(container):
                raise _name_taken(name)
        else:
            free = key not in container
        if free:
            container[key] = value if below is None else {} if type(below) is str else []
            if below is not None:
                container_ids.add(id(container[key]))
        elif below is None:
            raise _name_taken(name)
        container = container[key]


def _name_taken(name: str) -> NameMismatch:
    return NameMismatch(
        f"cannot nest {name}: another entry has its place", hint="leave one out with --exclude"
    )


class _Gap:
    """A list position without a value."""


def _require_lists(tree: Any, where: str) -> None:
    if isinstance(tree, dict):
        for key, value in tree.items():
            _require_lists(value, f"{where}.{key}" if where else str(key))
    elif isinstance(tree, list) and not set(map(type, tree)) <= SCALARS:
        for n, value in enumerate(tree):
            if value is _Gap:
                raise NameMismatch(
                    f"{where}.{n} is left out, but a later entry of the list is not",
                    hint="leave out all of the list, or none of it",
                )
            _require_lists(value, f"{where}.{n}")


def _taken_apart(value: Any, name: str, holds: set[int]) -> list[tuple[str, str]]:
    inside = _unwrap_container(value)
    if not isinstance(inside, (dict, list, tuple)) or id(inside) not in holds:
        return []
    containers = [(name, value.kind)] if isinstance(value, Named) else []
    for key, below in inside.items() if isinstance(inside, dict) else enumerate(inside):
        containers += _taken_apart(below, f"{name}.{key}", holds)
    return containers


def _unwrap_container(value: Any) -> Any:
    """Return the dict or list inside a container of a library; any other value as it is."""
    if isinstance(value, Named) and value.kind in CONTAINERS:
        return content_of(value.kind, value.value)
    return value


def _holders(tree: Any, tensor: type | tuple[type, ...]) -> set[int]:
    """Return the ids of the containers with a tensor anywhere below."""
    holds: set[int] = set()
    visited: set[int] = set()
    kinds = (tensor, RefusedTensor) if isinstance(tensor, type) else (*tensor, RefusedTensor)

    def visit(value: Any, depth: int) -> bool:
        if isinstance(value, kinds):
            return True
        value = _unwrap_container(value)
        # A pickle may nest without limit, the interpreter's stack may not.
        if not isinstance(value, (dict, list, tuple)) or depth > 200:
            return False
        if id(value) in visited:  # shared through the memo: visited once
            return id(value) in holds
        visited.add(id(value))
        inside = value.values() if isinstance(value, dict) else value
        # Visit every value: `any` would stop at the first.
        has_tensor = [visit(v, depth + 1) for v in inside if type(v) not in SCALARS]
        if any(has_tensor):
            holds.add(id(value))
            return True
        return False

    visit(tree, 0)
    return holds
