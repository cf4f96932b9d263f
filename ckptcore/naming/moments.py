"""Find the parameters that an optimizer has state for, by the names of the states.

Optimizers name a state ``<optimizer>.state.<parameter>.<key>``, as `torch.distributed.checkpoint` does, or
``<optimizer>.state.<key>.<parameter>``, as Megatron's distributed optimizer does. A parameter is a name, or a
number where its name is not stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckptcore.naming.trainer_keys import AVERAGES, STATES, all_keys, telling

_NAME = re.compile(r"^(?:(?P<root>.*?)\.)?state\.(?P<rest>.+)$")
# A saved ``state`` may hold optimizers itself.
_INNER = re.compile(r"^(?P<root>(?:optim|optimizers?)(?:\.[A-Za-z0-9_]+)?)\.state\.(?P<rest>.+)$")
_POSITION = re.compile(r"\d+|rank\d+")  # of a list under a key, or of the rank that saved a flat state
_KEYS = all_keys(STATES) | all_keys(AVERAGES)
# What Megatron puts before the parameter.
_FIRST = frozenset({"exp_avg", "exp_avg_sq", "fp32_param", "param", "momentum_buffer", "max_exp_avg_sq"})
_TELLING = telling(STATES)
# States that have the shape of their parameter.
SHAPED = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "prev"),
    }
)
_BLOCK = re.compile(r'\["(block_\d+|step)"[^\]]*\]')  # DistributedShampoo's keys are JSON lists


class ParameterState(NamedTuple):
    """One state of one parameter.

    Attributes:
        root: The optimizer; "" for the top level.
        parameter: Its name or number, as the optimizer has it; "" where the state is of all parameters.
        key: The state.
        rest: The name below the optimizer's ``state``.
    """

    root: str
    parameter: str
    key: str
    rest: str

    @property
    def is_telling(self) -> bool:
        """Whether nothing but an optimizer has such a name."""
        return self.key in _TELLING or self.parameter.isdigit() or self.key.startswith("[")


def state_of(name: str) -> ParameterState | None:
    """Return the state that a name is, or None: no known key of a known optimizer.

    >>> state_of("optim.state.layers.0.w.exp_avg")[:3], state_of("optimizer.state.exp_avg.w")[:3]
    (('optim', 'layers.0.w', 'exp_avg'), ('optimizer', 'w', 'exp_avg'))
    >>> state_of("optim.state.w.GG.0")[:3], state_of("model.state.encoder.weight")
    (('optim', 'w', 'GG'), None)
    """
    matched = _NAME.match(name) if "state." in name else None
    if matched is None:
        return None
    root, rest = matched["root"] or "", matched["rest"]
    while (inner := _INNER.match(rest)) is not None:  # Composer: ``state.optimizers.AdamW.state.<parameter>``
        root, rest = f"{root}.state.{inner['root']}".lstrip("."), inner["rest"]
    return state_below(rest, root)


def state_below(rest: str, root: str = "") -> ParameterState | None:
    """Return the state that a name below an optimizer's ``state`` is, or None."""
    parameter, _, key = rest.rpartition(".")
    if key not in _KEYS and _POSITION.fullmatch(key):  # rare
        elements = rest.split(".")
        while len(elements) > 1 and _POSITION.fullmatch(elements[-1]) and elements[-1] not in _KEYS:
            elements.pop()
        parameter, key = ".".join(elements[:-1]), elements[-1]
    if key in _KEYS or (key.startswith("[") and _BLOCK.fullmatch(key)):
        return ParameterState(root, parameter, key, rest)
    first, _, parameter = rest.partition(".")
    return ParameterState(root, parameter, first, rest) if first in _FIRST and parameter else None


def trained_parameters(names: Iterable[str]) -> dict[str, set[str]]:
    """Return optimizer -> names or numbers of the parameters that it has state for."""
    states: dict[str, set[str]] = {}
    for name in names:
        state = state_of(name)
        if state is not None and state.parameter:
            states.setdefault(state.root, set()).add(state.parameter)
    return states


def endings(name: str) -> Iterator[str]:
    """Yield a name, and without its first elements.

    >>> list(endings("a.b.c"))
    ['a.b.c', 'b.c', 'c']
    """
    yield name
    dot = name.find(".")
    while dot >= 0:
        yield name[dot + 1 :]
        dot = name.find(".", dot + 1)
