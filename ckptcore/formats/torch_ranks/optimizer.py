"""A rank's numbered optimizer: where does it stand in the rank's tree, and which names does it get?

What proves the names is the model's own state dict, or the optimizer itself. Anything less is no
proof, and the numbers stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptcore.errors import UnprovenCheckpoint
from ckptcore.formats.base import natural
from ckptcore.formats.common import optimizer_numbers as _optimnames
from ckptcore.formats.common.optimizer_numbers import Numbered, prove, recorded_names
from ckptcore.formats.common.shape_matching import Shape

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
    return prove(params, [optimizer], shape)[0].names or recorded_names(optimizer)


def numbers_for(
    tree: dict[Any, Any], params: Params, shape: Callable[[Any], Shape | None], order: Sequence[str] = ()
) -> dict[Any, Any]:
    """The tree of an optimizer with numbers in place of names, as ``Optimizer.state_dict`` has it.

    order: names of the model in its own order, where ``params`` are not all of them. A loader goes by the
    places in the groups' lists alone, and jobs list parameters as their model has them: so do the lists that
    are written. Groups tell ``param_names`` where the numbers alone would not prove them. Gives the tree
    itself where states are by number already, or where its groups do not list all that have states.
    Raises `UnprovenCheckpoint` when a list is in another order, and nothing says why.
    """
    state, groups = tree.get("state"), tree.get("param_groups")
    if not isinstance(state, dict) or type(groups) is not list or not _lists_params(groups):
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
    groups = in_model_order(groups, order or [name for name, _ in params])
    number = {name: n for n, name in enumerate(n for g in groups for n in g["params"])}
    ordered = {n: state[name] for name, n in number.items() if name in state}
    plain = [{**g, "params": [number[n] for n in g["params"]]} for g in groups]
    proven = names_of(Numbered(ordered, plain), params, shape)
    if proven != {n: name for name, n in number.items()}:
        plain = [{**p, "param_names": g["params"]} for p, g in zip(plain, groups, strict=True)]
    return {**tree, "state": ordered, "param_groups": plain}


def in_model_order(groups: list[dict[str, Any]], order: Sequence[str]) -> list[dict[str, Any]]:
    """Groups that list names, each list in the order of the model.

    FSDP1 without ``use_orig_params`` lists what is left to the root module first, and then the modules that
    it wraps, one after the other (torch/distributed/fsdp/_optim_utils.py, `_unflatten_param_groups`): such
    lists are put into the model's order. Any other may be the optimizer's own, or the model's may be lost:
    raises `UnprovenCheckpoint`.
    """
    place = {name: n for n, name in enumerate(order)}
    known = list(order) != sorted(order, key=natural)  # sorted names tell no model's order
    made = []
    for number, group in enumerate(groups):
        names = group["params"]
        if len(names) < 2 or _proves_its_own(group):
            made.append(group)
            continue
        lost = next((n for n in names if n not in place), None)
        if lost is not None:
            raise _unproven_error(number, f"{lost} is not in the model beside it")
        right = sorted(names, key=place.__getitem__)
        if names != right and not (known and _by_unit(names, place)):
            first = next(n for n, (a, b) in enumerate(zip(names, right, strict=True)) if a != b)
            raise _unproven_error(number, f"it lists {names[first]} where the model has {right[first]}")
        made.append(group if names == right else {**group, "params": right})
    return made


def _unproven_error(group: int, why: str) -> UnprovenCheckpoint:
    return UnprovenCheckpoint(
        f"cannot number the optimizer's parameters: nothing proves the order of group {group} ({why}), and "
        "in a wrong one parameters get the states of others",
        hint="leave the optimizer out (--exclude 'optim*'), or write --to dcp, whose loaders go by names",
    )


def _lists_params(groups: list[Any]) -> bool:
    return bool(groups) and all(isinstance(g, dict) and type(g.get("params")) is list for g in groups)


def _proves_its_own(group: Mapping[str, Any]) -> bool:
    """Whether an optimizer that knows its parameters by name (torch >= 2.6) lists them in this order
    itself."""
    return bool(group.get("param_names") == group["params"])


def _by_unit(names: Sequence[str], place: Mapping[str, int]) -> bool:
    """Whether names are those of a root module, in order, and behind them those of whole modules, in
    order."""
    falls = [n for n in range(1, len(names)) if place[names[n]] < place[names[n - 1]]]
    if len(falls) != 1:
        return False
    rest, units = names[: falls[0]], names[falls[0] :]
    of_root = {name[:at] for name in rest for at, c in enumerate(name) if c == "."}
    modules = [name.rpartition(".")[0] for name in units]
    return all(m and m not in of_root for m in modules)
