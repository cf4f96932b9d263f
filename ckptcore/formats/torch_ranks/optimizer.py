"""Find a rank's numbered optimizer in its tree, name its parameters, and number them again for a writer.

The names are proven by the model's own state dict, or by the optimizer itself. Without a proof, the numbers
stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptcore.errors import UnprovenCheckpoint, UnsupportedFormat
from ckptcore.formats.base import natural
from ckptcore.formats.common import optimizer_numbers as _optimnames
from ckptcore.formats.common.optimizer_numbers import Numbered, Shape, prove, recorded_names

Params = tuple[tuple[str, Shape], ...]  # (name, global shape) of a model's parameters, in order


@dataclass(frozen=True, slots=True)
class Inside:
    """An optimizer inside a tree.

    Attributes:
        path: () for the tree itself, else the key of the optimizer.
        optimizer: The optimizer.
    """

    path: tuple[Any, ...]
    optimizer: Numbered

    def renamed(self, tree: dict[Any, Any], names: Mapping[int, str]) -> dict[Any, Any]:
        """Return ``tree`` with names in place of the numbers."""
        inner = tree[self.path[0]] if self.path else tree
        state, groups = self.optimizer.state, self.optimizer.groups
        named_tree = {
            **inner,
            "state": {names[i]: value for i, value in state.items()},
            "param_groups": [{**g, "params": [names[i] for i in g["params"]]} for g in groups],
        }
        return {**tree, self.path[0]: named_tree} if self.path else named_tree


def numbered(tree: dict[Any, Any]) -> Inside | None:
    """Return the only optimizer of a tree with numbered states, or None."""
    places = [((), tree), *(((k,), v) for k, v in tree.items())]
    optimizers = [Inside(path, o) for path, v in places if (o := _optimnames.numbered(v)) is not None]
    return optimizers[0] if len(optimizers) == 1 else None


def names_of(
    optimizer: Numbered, params: Params, shape: Callable[[Any], Shape | None]
) -> dict[int, str] | None:
    """Return number -> parameter, or None without a proof.

    Args:
        optimizer: The optimizer.
        params: Parameters of the model, in order.
        shape: Returns the global shape of a tensor in the tree, None for any other value.
    """
    return prove(params, [optimizer], shape)[0].names or recorded_names(optimizer)


def numbers_for(
    tree: dict[Any, Any], params: Params, shape: Callable[[Any], Shape | None], order: Sequence[str] = ()
) -> dict[Any, Any]:
    """Return the tree of an optimizer with numbers in place of names, as from ``Optimizer.state_dict``.

    A loader uses only the positions in the groups' lists, and jobs list parameters in the order of their
    model. The written lists therefore have that order. Groups record ``param_names`` where the numbers alone
    would not prove them.

    Args:
        tree: State dict of the optimizer.
        params: Parameters of the model, in order.
        shape: Returns the global shape of a tensor in the tree, None for any other value.
        order: Names of the model in its own order, if ``params`` are not all of them.

    Returns:
        The tree with numbers; the same tree if its states are numbered already, or if its groups do not list
        every parameter that has states.

    Raises:
        UnprovenCheckpoint: A list has another order without a known reason.
        UnsupportedFormat: The states are numbered, and the reader would find names for them.
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
        by_number = {int(k): v for k, v in state.items()}
        if proven_names := names_of(Numbered(by_number, groups), params, shape):
            raise UnsupportedFormat(
                "the checkpoint is one whose optimizers number their parameters, and beside this model rank "
                f"files name them ({proven_names[min(proven_names)]} for {min(proven_names)}): they would "
                "not read back as they are",
                hint="--to dcp keeps the numbers; or leave the optimizer out with --exclude",
            )
        return {**tree, "state": by_number}
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
    """Return groups that list names, each list in the order of the model.

    FSDP1 without ``use_orig_params`` lists the parameters of the root module first, then those of the wrapped
    modules one after the other (torch/distributed/fsdp/_optim_utils.py, `_unflatten_param_groups`). Such
    lists are sorted into the model's order. Any other order may be the optimizer's own, or the model's order
    may be lost.

    Raises:
        UnprovenCheckpoint: A list has another order.
    """
    place = {name: n for n, name in enumerate(order)}
    is_model_order = list(order) != sorted(order, key=natural)  # sorted names do not prove a model's order
    ordered_groups = []
    for number, group in enumerate(groups):
        names = group["params"]
        # An optimizer that records names (torch >= 2.6) in this order proves it itself.
        if len(names) < 2 or group.get("param_names") == names:
            ordered_groups.append(group)
            continue
        lost = next((n for n in names if n not in place), None)
        if lost is not None:
            raise _unproven_error(number, f"{lost} is not in the model beside it")
        right = sorted(names, key=place.__getitem__)
        if names != right and not (is_model_order and _by_unit(names, place)):
            first = next(n for n, (a, b) in enumerate(zip(names, right, strict=True)) if a != b)
            raise _unproven_error(number, f"it lists {names[first]} where the model has {right[first]}")
        ordered_groups.append(group if names == right else {**group, "params": right})
    return ordered_groups


def _unproven_error(group: int, why: str) -> UnprovenCheckpoint:
    return UnprovenCheckpoint(
        f"cannot number the optimizer's parameters: nothing proves the order of group {group} ({why}), and "
        "in a wrong order parameters would get the states of others",
        hint="leave the optimizer out (--exclude 'optim*'), or write --to dcp, whose loaders use names",
    )


def _lists_params(groups: list[Any]) -> bool:
    return bool(groups) and all(isinstance(g, dict) and type(g.get("params")) is list for g in groups)


def _by_unit(names: Sequence[str], place: Mapping[str, int]) -> bool:
    """Return whether names are those of a root module, then those of complete modules, each in order."""
    falls = [n for n in range(1, len(names)) if place[names[n]] < place[names[n - 1]]]
    if len(falls) != 1:
        return False
    rest, units = names[: falls[0]], names[falls[0] :]
    of_root = {name[:dot] for name in rest for dot, c in enumerate(name) if c == "."}
    modules = [name.rpartition(".")[0] for name in units]
    return all(m and m not in of_root for m in modules)
