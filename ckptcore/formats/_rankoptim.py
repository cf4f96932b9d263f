"""Optimizer states by number: which parameter does each number mean, and which number has each?

``torch.optim.Optimizer.state_dict`` numbers the parameters in the order of its groups
(torch/optim/optimizer.py). The names are told by ``param_names`` (torch >= 2.6), or follow from the
model's own state dict when there is one group with as many parameters, in their order and of
their shapes. Anything less is no proof, and the numbers stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]
Params = tuple[tuple[str, Shape], ...]  # (name, global shape) of a model's parameters, in order


@dataclass(frozen=True, slots=True)
class Numbered:
    """An optimizer's state dict inside a tree.

    path: () for the tree itself, else the one key that it lies under. state: number -> states.
    groups: as pickled.
    """

    path: tuple[Any, ...]
    state: Mapping[int, Any]
    groups: list[dict[str, Any]]

    @property
    def ids(self) -> list[int]:
        """Every number, in the groups' order."""
        return [i for group in self.groups for i in group["params"]]

    def renamed(self, tree: dict[Any, Any], names: Mapping[int, str]) -> dict[Any, Any]:
        """``tree`` with names in place of the numbers."""
        inner = tree[self.path[0]] if self.path else tree
        made = {
            **inner,
            "state": {names[i]: value for i, value in self.state.items()},
            "param_groups": [{**g, "params": [names[i] for i in g["params"]]} for g in self.groups],
        }
        return {**tree, self.path[0]: made} if self.path else made


def numbered(tree: dict[Any, Any]) -> Numbered | None:
    """The one optimizer of a tree whose states are numbered, or None."""
    places = [((), tree), *(((k,), v) for k, v in tree.items() if isinstance(v, dict))]
    found = [n for path, value in places if (n := _numbered(path, value)) is not None]
    return found[0] if len(found) == 1 else None


def names_of(
    optimizer: Numbered, params: Params, shape: Callable[[Any], Shape | None]
) -> dict[int, str] | None:
    """Number -> parameter, or None when that cannot be proven.

    shape: the global shape of a tensor in the tree, None for anything else.
    """
    ids = optimizer.ids
    told = [g.get("param_names") for g in optimizer.groups]
    if all(
        type(t) is list and len(t) == len(g["params"]) for t, g in zip(told, optimizer.groups, strict=True)
    ):
        names = [name for t in told for name in t or ()]
        if all(type(n) is str for n in names) and len(set(names)) == len(names):
            return dict(zip(ids, names, strict=True))
    if len(optimizer.groups) != 1 or ids != list(range(len(params))):
        return None
    compared = 0
    for i, states in optimizer.state.items():
        for value in states.values() if isinstance(states, dict) else ():
            seen = shape(value)
            if seen:  # a count of steps has no dims
                compared += 1
                if seen != params[i][1]:
                    return None
    return {i: name for i, (name, _) in enumerate(params)} if compared else None


def numbers_for(tree: dict[Any, Any], params: Params, shape: Callable[[Any], Shape | None]) -> dict[Any, Any]:
    """The tree of an optimizer with numbers in place of names, as ``Optimizer.state_dict`` has it.

    Groups tell ``param_names`` where the numbers alone would not prove them. Gives the tree itself where
    states are by number already, or where nothing tells the order of all that have states.
    """
    state, groups = tree.get("state"), tree.get("param_groups")
    if not isinstance(state, dict) or type(groups) is not list or not groups:
        return tree
    if any(not isinstance(g, dict) or type(g.get("params")) is not list for g in groups):
        return tree
    names = [name for g in groups for name in g["params"]]
    if any(type(n) not in (str, int) for n in names):
        return tree
    number = {str(name): n for n, name in enumerate(names)}
    if len(number) != len(names) or not state.keys() <= number.keys():
        return tree
    if all(type(n) is int for n in names):  # they never had names
        return {**tree, "state": {int(k): v for k, v in state.items()}}
    if any(type(n) is int for n in names):
        return tree
    ordered = {n: state[name] for name, n in number.items() if name in state}
    plain = [{**g, "params": [number[n] for n in g["params"]]} for g in groups]
    proven = names_of(Numbered((), ordered, plain), params, shape)
    if proven != {n: name for name, n in number.items()}:
        plain = [{**p, "param_names": g["params"]} for p, g in zip(plain, groups, strict=True)]
    return {**tree, "state": ordered, "param_groups": plain}


def _numbered(path: tuple[Any, ...], value: dict[Any, Any]) -> Numbered | None:
    state, groups = value.get("state"), value.get("param_groups")
    if not isinstance(state, dict) or type(groups) is not list or not groups:
        return None
    if any(not isinstance(g, dict) or type(g.get("params")) is not list for g in groups):
        return None
    ids = [i for g in groups for i in g["params"]]
    if any(type(i) is not int for i in ids) or len(set(ids)) != len(ids) or not set(state) <= set(ids):
        return None
    return Numbered(path, state, groups)
