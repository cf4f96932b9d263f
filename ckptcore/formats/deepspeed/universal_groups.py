"""Collect the parameter groups of an optimizer from the objects of any checkpoint.

| objects | writer |
|---|---|
| ``optimizer.param_groups`` | DeepSpeed, `torch.save` |
| ``optim.param_groups.<i>``, ``optim.param_groups.<i>.<option>`` | torch's DCP, OLMo-core |
| ``optim.param_groups.<parameter>.<option>`` | flattened optimizer state of torch's DCP, torchtitan |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptcore.core.object_tree import Refused, TensorRef
from ckptcore.errors import UnsupportedFormat
from ckptcore.utils.foreign_text import is_number
from ckptcore.utils.text import short_repr

_PART = "param_groups"
_NAMES = ("param_names", "_param_names")
_OF_PARAMETERS = frozenset({"params", *_NAMES})


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """A parameter group.

    Attributes:
        options: Learning rate, betas and so on.
        parameters: Its parameters by name, or None where the source does not name them.
    """

    options: Mapping[str, Any]
    parameters: tuple[str, ...] | None


def is_group_part(name: str) -> bool:
    """Whether an object is a part of parameter groups."""
    return _PART in name.split(".")


def collect_groups(
    objects: Mapping[str, Any], parameter: Callable[[str], str | None]
) -> tuple[ParameterGroup, ...]:
    """Return the groups of the only optimizer; empty if nothing describes any.

    Args:
        objects: Name -> value of the objects for which `is_group_part` holds.
        parameter: Maps the name that an optimizer uses to that of the parameter, or None.

    Raises:
        UnsupportedFormat: There are groups of several optimizers, or a group is no plain values.
    """
    roots: dict[str, dict[str, Any]] = {}
    for name, value in objects.items():
        parts = name.split(".")
        position = parts.index(_PART)
        roots.setdefault(".".join(parts[: position + 1]), {})[".".join(parts[position + 1 :])] = value
    if len(roots) > 1:
        raise UnsupportedFormat(
            f"cannot write the parameter groups of {len(roots)} optimizers ({', '.join(sorted(roots))}): a "
            "universal folder holds one",
            hint=f"leave the others out, for example --exclude '{max(roots)}*'",
        )
    for root, values in roots.items():
        return tuple(_group(root, n, group, parameter) for n, group in enumerate(_listed(values)))
    return ()


def _listed(values: Mapping[str, Any]) -> list[Any]:
    """Return the raw groups, whatever form they are stored in."""
    if "" in values:
        groups = values[""]
        return list(groups) if isinstance(groups, (list, tuple)) else [groups]
    numbered: dict[int, dict[str, Any]] = {}
    by_parameter: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        number, _, option = name.partition(".")
        if is_number(number) and len(number) < 8 and (option or isinstance(value, dict)):
            numbered.setdefault(int(number), {}).update({option: value} if option else value)
        else:
            fqn, _, option = name.rpartition(".")
            by_parameter.setdefault(fqn, {})[option] = value
    if numbered and not by_parameter:
        return [numbered[n] for n in sorted(numbered)]
    return _joined(by_parameter)


def _joined(options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join parameters with equal options to one group, in the order of each group's first parameter."""
    groups: dict[str, dict[str, Any]] = {}
    for fqn in sorted(options):
        values = options[fqn]
        group = groups.setdefault(repr(sorted(values.items())), {**values, "params": []})
        group["params"].append(fqn)
    return list(groups.values())


def _group(root: str, number: int, group: Any, parameter: Callable[[str], str | None]) -> ParameterGroup:
    if not isinstance(group, dict) or any(type(k) is not str for k in group):
        raise UnsupportedFormat(
            f"cannot read parameter group {number} of {root}: it must be a dict with text as keys "
            f"(got {short_repr(group, 60)})",
            hint=f"leave the groups out with --exclude '{root}*': the engine's own options then stay",
        )
    options = {k: v for k, v in group.items() if k not in _OF_PARAMETERS}
    for key, value in options.items():
        if _opaque(value):
            raise UnsupportedFormat(
                f"cannot write {key} of parameter group {number} of {root}: it is no plain value",
                hint=f"leave the groups out with --exclude '{root}*': the engine's own options then stay",
            )
    names = next((group[k] for k in (*_NAMES, "params") if _all_text(group.get(k))), None)
    return ParameterGroup(options, None if names is None else tuple(parameter(n) or n for n in names))


def _all_text(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(type(v) is str for v in value)


def _opaque(value: Any) -> bool:
    inside: Iterable[Any] = ()
    if isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, (list, tuple)):
        inside = value
    return isinstance(value, (TensorRef, Refused)) or any(map(_opaque, inside))
