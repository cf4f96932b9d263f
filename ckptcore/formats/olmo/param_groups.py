"""Read parameter groups of every generation into one list of groups.

| objects | writer |
|---|---|
| ``optim.param_groups.<i>`` | OLMo-core 0.1, as read here |
| ``optim.param_groups`` | OLMo's local and unsharded checkpoints, `torch.save` |
| ``optim.param_groups.<i>.<option>`` | OLMo-core 1.x and torch's DCP |
| ``optim.param_groups.<fqn>.<option>`` | flattened optimizer state: OLMo-core 2 on, torch's DCP |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptcore.core.object_tree import Refused, TensorRef
from ckptcore.errors import UnsupportedFormat
from ckptcore.formats.olmo.common import plain_name
from ckptcore.utils.foreign_text import is_number

_PREFIX = "optim.param_groups"
_NAMES = ("_param_names", "param_names")


def groups_of(objects: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the groups as 0.1 pickles them: options, ``params`` as numbers, ``_param_names`` as FQNs.

    Raises:
        UnsupportedFormat: There are no groups, or their parameters have no names.
    """
    collected = _collect_groups(objects)
    if not collected:
        raise UnsupportedFormat(
            "cannot name the optimizer's state: it has no parameter groups",
            hint="leave the optimizer out with --exclude 'optim.*'",
        )
    groups: list[dict[str, Any]] = []
    count = 0
    for n, group in enumerate(collected):
        names = next((group[k] for k in _NAMES if k in group), None)
        params = group.get("params")
        if type(params) is not list or _opaque(group):
            raise UnsupportedFormat(
                f"cannot read parameter group {n} of the optimizer: its parameters are not plain values",
                hint="leave the optimizer out with --exclude 'optim.*'",
            )
        if names is None and all(type(p) is str for p in params):
            # Groups that list names have no numbers; 0.1 counts parameters over all groups.
            names, params = params, list(range(count, count + len(params)))
        if type(names) is not list or len(names) != len(params):
            raise UnsupportedFormat(
                f"cannot name the parameters of group {n} of the optimizer: it has numbers, no names",
                hint="leave the optimizer out with --exclude 'optim.*'",
            )
        count += len(params)
        groups.append({**group, "params": params, "_param_names": names})
    return groups


def _collect_groups(objects: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = objects.get(_PREFIX)
    if type(groups) is list and all(isinstance(g, dict) for g in groups):
        return [dict(g) for g in groups]
    below = {k[len(_PREFIX) + 1 :]: v for k, v in objects.items() if k.startswith(_PREFIX + ".")}
    if below and all(map(is_number, below)):
        return [dict(below[k]) for k in sorted(below, key=int) if isinstance(below[k], dict)]
    if below and all(is_number(k.split(".", 1)[0]) and "." in k for k in below):
        numbered: dict[int, dict[str, Any]] = {}
        for key, value in below.items():
            number, option = key.split(".", 1)
            numbered.setdefault(int(number), {})[option] = value
        return [numbered[n] for n in sorted(numbered)]
    return _regrouped(below)


def _regrouped(below: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Group parameters with equal options, in the order of each group's first parameter."""
    options: dict[str, dict[str, Any]] = {}
    for key, value in below.items():
        fqn, _, option = key.rpartition(".")
        options.setdefault(fqn, {})[option] = value
    groups: dict[str, dict[str, Any]] = {}
    for fqn, values in options.items():
        group = groups.setdefault(repr(sorted(values.items())), {**values, "params": []})
        group["params"].append(fqn)
    return list(groups.values())


def _opaque(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_opaque(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(_opaque(v) for v in value)
    return isinstance(value, (TensorRef, Refused))


def names_by_number(groups: Any) -> dict[int, str] | None:
    """Return number of a parameter -> its plain FQN; None where the groups have no names."""
    fqn_of: dict[int, str] = {}
    if type(groups) is not list:
        return None
    for group in groups:
        if not isinstance(group, dict):
            return None
        params, names = group.get("params"), next((group[k] for k in _NAMES if k in group), None)
        if type(params) is not list or type(names) is not list or len(params) != len(names):
            return None
        if any(type(p) is not int for p in params) or any(type(n) is not str for n in names):
            return None
        fqn_of |= {p: plain_name(n) for p, n in zip(params, names, strict=True)}
    return fqn_of if len(set(fqn_of.values())) == len(fqn_of) else None


def plain_groups(groups: Any) -> dict[str, Any]:
    """Return object name -> group, with plain FQNs; a value that is not a list of groups gets one name."""
    if type(groups) is not list or not all(isinstance(g, dict) for g in groups):
        return {_PREFIX: groups}
    return {f"{_PREFIX}.{i}": _renamed_group(g) for i, g in enumerate(groups)}


def _renamed_group(group: dict[Any, Any]) -> dict[Any, Any]:
    return {
        k: [plain_name(n) if type(n) is str else n for n in v] if k in _NAMES and type(v) is list else v
        for k, v in group.items()
    }
