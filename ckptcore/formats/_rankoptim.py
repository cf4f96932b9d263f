"""A rank's numbered optimizer: where does it stand in the rank's tree, and which names does it get?

What proves the names is the model's own state dict, or the optimizer itself. Anything less is no
proof, and the numbers stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptcore.formats import _optimnames
from ckptcore.formats._optimnames import Numbered, prove, told_names
from ckptcore.formats._shapefit import Shape

Params = tuple[tuple[str, Shape], ...]  # (name, global shape) of a model's parameters, in order


@dataclass(frozen=True, slots=True)
class Inside:
    """An optimizer inside a tree. path: () for the tree itself, else the one key that it lies under."""

    path: tuple[Any, ...]
    optimizer: Numbered

    def renamed(self, tree: dict[Any, Any], names: Mapping[int, str]) -> dict[Any, Any]:
        """``tree`` with names in place of the numbers."""
        inner = tree[self.path[0]] if self.path else tree
        state, groups = self.optimizer.state, self.optimizer.groups
        made = {
            **inner,
            "state": {names[i]: value for i, value in state.items()},
            "param_groups": [{**g, "params": [names[i] for i in g["params"]]} for g in groups],
        }
        return {**tree, self.path[0]: made} if self.path else made


def numbered(tree: dict[Any, Any]) -> Inside | None:
    """The one optimizer of a tree whose states are numbered, or None."""
    places = [((), tree), *(((k,), v) for k, v in tree.items())]
    found = [Inside(path, o) for path, v in places if (o := _optimnames.numbered(v)) is not None]
    return found[0] if len(found) == 1 else None


def names_of(
    optimizer: Numbered, params: Params, shape: Callable[[Any], Shape | None]
) -> dict[int, str] | None:
    """Number -> parameter, or None when that cannot be proven.

    shape: the global shape of a tensor in the tree, None for anything else.
    """
    return prove(params, [optimizer], shape)[0].names or told_names(optimizer)


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
    proven = names_of(Numbered(ordered, plain), params, shape)
    if proven != {n: name for name, n in number.items()}:
        plain = [{**p, "param_names": g["params"]} for p, g in zip(plain, groups, strict=True)]
    return {**tree, "state": ordered, "param_groups": plain}
