"""Find the leaves of a caller's state dict, and where a new value of each goes.

Leaves and their names are those of `torch.distributed.checkpoint`, so that what it saved is found again.
Dicts are entered, and lists that hold tensors or dicts. An object with ``state_dict`` and ``load_state_dict``
is entered through the first, and gets its state through the second when everything is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import field
from typing import Any

from ckptcore.errors import NameMismatch, UsageError
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.text import some

Put = Callable[[Any], None]


@dataclass(slots=True)
class LiveLeaf:
    """A tensor, or a value that is replaced as a unit.

    Attributes:
        fqn: Its name.
        value: The current value.
        put: Stores another value in its place; None where the container accepts none.
        owner: The object with ``load_state_dict`` that it belongs to, if any.
    """

    fqn: str
    value: Any
    put: Put | None
    owner: Any = None


@dataclass(slots=True)
class LiveState:
    """The leaves of a state dict, and the calls (``finish``) to make, in order, when all are filled."""

    leaves: list[LiveLeaf] = field(default_factory=list)
    finish: list[Callable[[], None]] = field(default_factory=list)


def live_state(state_dict: Any) -> LiveState:
    """Return every leaf of a state dict, or of an object; objects return their state, and nothing is changed.

    Raises:
        NameMismatch: Two leaves have one name.
        UsageError: It is neither a mapping nor an object with ``state_dict`` and ``load_state_dict``.
    """
    state = LiveState()
    if isinstance(state_dict, Mapping):
        _enter(state, state_dict, "", None)
    elif stateful(state_dict):
        _visit(state, state_dict, "", None, None)
    else:
        raise UsageError(
            f"cannot load into a {type(state_dict).__name__}",
            hint="name a state dict, a module, or a dict of them: {'model': model}",
        )
    twice = [n for n, count in Counter(leaf.fqn for leaf in state.leaves).items() if count > 1]
    if twice:
        raise NameMismatch(
            f"cannot load into two leaves of one name: {some(twice)}",
            hint="try other keys: `{'a.b': ...}` and `{'a': {'b': ...}}` have one name in a checkpoint",
        )
    return state


def stateful(value: Any) -> bool:
    """Report whether a value is like `torch.distributed.checkpoint.stateful.Stateful`."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def _enter(state: LiveState, values: Mapping[Any, Any], path: str, owner: Any) -> None:
    into = values if isinstance(values, MutableMapping) else None
    # torch loads the objects' states in the order of their names.
    items = list(values.items())
    for key, value in items if path else sorted(items, key=lambda item: str(item[0])):
        put = None if into is None else _setter(into, key)
        _visit(state, value, f"{path}.{key}" if path else str(key), put, owner)


def _visit(state: LiveState, value: Any, path: str, put: Put | None, owner: Any) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        state.leaves.append(LiveLeaf(path, value, put, owner))
    elif stateful(value):
        inside = value.state_dict()
        if not isinstance(inside, Mapping):
            raise UsageError(
                f"cannot load into {path or type(value).__name__}: its state_dict() must be a mapping "
                f"(got {type(inside).__name__})",
                hint="try to return a dict of tensors and plain values",
            )
        _enter(state, inside, path, value)
        state.finish.append(lambda: value.load_state_dict(inside))
    elif isinstance(value, Mapping):
        _enter(state, value, path, owner)
    elif isinstance(value, (list, tuple)) and _holds(value, (torch.Tensor, Mapping)):
        _enter_sequence(state, value, path, put, owner)
    else:
        state.leaves.append(LiveLeaf(path, value, put, owner))


def _enter_sequence(state: LiveState, values: Sequence[Any], path: str, put: Put | None, owner: Any) -> None:
    items = values if isinstance(values, list) else list(values)
    takes = isinstance(values, list) or put is not None
    for place, value in enumerate(list(items)):
        _visit(state, value, f"{path}.{place}", _setter(items, place) if takes else None, owner)
    if isinstance(values, tuple) and put is not None:  # rebuilt if an item was replaced

        def rebuild() -> None:
            if any(a is not b for a, b in zip(items, values, strict=True)):
                put(type(values)(*items) if hasattr(values, "_fields") else tuple(items))

        state.finish.append(rebuild)


def _holds(values: Sequence[Any], kinds: tuple[type, ...]) -> bool:
    """Report whether a sequence is entered: it holds such a value, at any depth of sequences."""
    return any(isinstance(v, kinds) or (isinstance(v, (list, tuple)) and _holds(v, kinds)) for v in values)


def _setter(container: Any, key: Any) -> Put:
    return lambda value: container.__setitem__(key, value)
