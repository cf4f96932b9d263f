"""Objects: how does a tree of plain values travel, without ever being a pickle?

Everything that is not a tensor is kept as JSON. JSON's own values stand for themselves, except
that an object ``{"$": kind, ...}`` stands for a Python value JSON does not have. A reference to a
tensor is ``{"$": "tensor", "fqn": name}``.
"""

from __future__ import annotations

import base64
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

_MAX_NODES = 4_000_000


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A place in a tree where the tensor of this FQN stands."""

    fqn: str


@dataclass(frozen=True, slots=True)
class Named:
    """A value that torch or the standard library has a name for: ``torch.Size``, a dtype, a path.

    kind: ``size``, ``dtype``, ``device``, ``path``, ``layout``, ``ndarray``. value: plain.
    """

    kind: str
    value: Any


@dataclass(frozen=True, slots=True)
class Refused:
    """A value that was not built because its class is not on the allow-list."""

    name: str


@dataclass(frozen=True, slots=True)
class RefusedTensor(Refused):
    """A tensor whose elements are not plain: quantised, sparse, nested, of a class or dtype that is not held.

    name: the global that makes it so. what: the same in words. foreign: whether that is a class that is not
    on the allow-list. dtype, shape: as far as they are known. storages: keys of the storages under it.
    """

    what: str = ""
    foreign: bool = False
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    storages: tuple[str, ...] = ()


def encode(value: Any, _budget: list[int] | None = None) -> Any:
    """The JSON form of a tree of plain values, `TensorRef`, `Named` and `Refused`.

    Raises TypeError for anything else.

    >>> encode({"betas": (0.9, 0.95), 3: None})
    {'$': 'dict', 'items': [['betas', {'$': 'tuple', 'items': [0.9, 0.95]}], [3, None]]}
    """
    # Values shared through a pickle's memo can make a small file an endless tree.
    budget = [_MAX_NODES] if _budget is None else _budget
    budget[0] -= 1
    if budget[0] < 0:
        raise TypeError(f"object tree has more than {_MAX_NODES} values")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 53 else {"$": "int", "value": str(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
    if isinstance(value, complex):
        return {"$": "complex", "items": [encode(value.real, budget), encode(value.imag, budget)]}
    if isinstance(value, (bytes, bytearray)):
        return {"$": "bytes", "value": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, list):
        return [encode(v, budget) for v in value]
    if isinstance(value, TensorRef):
        return {"$": "tensor", "fqn": value.fqn}
    if isinstance(value, Named):
        return {"$": value.kind, "value": encode(value.value, budget)}
    if isinstance(value, Refused):
        return {"$": "refused", "name": value.name}
    for kind, cls in (("odict", OrderedDict), ("dict", dict)):
        if isinstance(value, cls):
            if kind == "dict" and "$" not in value and all(isinstance(k, str) for k in value):
                return {k: encode(v, budget) for k, v in value.items()}
            return {
                "$": kind,
                "items": [[encode(k, budget), encode(v, budget)] for k, v in value.items()],
            }
    for kind, seq in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, seq):
            items = [encode(v, budget) for v in value]
            return {"$": kind, "items": items if kind == "tuple" else sorted(items, key=repr)}
    raise TypeError(f"{type(value).__name__} is not a plain value")


_DECODE: dict[str, Any] = {
    "int": lambda v: int(v["value"]),
    "float": lambda v: float(v["value"]),
    "complex": lambda v: complex(*(decode(x) for x in v["items"])),
    "bytes": lambda v: base64.b64decode(v["value"]),
    "tensor": lambda v: TensorRef(v["fqn"]),
    "refused": lambda v: Refused(v["name"]),
    "odict": lambda v: OrderedDict((decode(k), decode(x)) for k, x in v["items"]),
    "dict": lambda v: {decode(k): decode(x) for k, x in v["items"]},
    "tuple": lambda v: tuple(decode(x) for x in v["items"]),
    "set": lambda v: {decode(x) for x in v["items"]},
    "frozenset": lambda v: frozenset(decode(x) for x in v["items"]),
}


def decode(form: Any) -> Any:
    """The tree of `encode`'s JSON form.

    >>> decode(encode({"a": (1, float("inf")), 2: b"x"}))
    {'a': (1, inf), 2: b'x'}
    """
    if isinstance(form, list):
        return [decode(v) for v in form]
    if not isinstance(form, dict):
        return form
    if "$" not in form:
        return {k: decode(v) for k, v in form.items()}
    kind = form["$"]
    if kind in _DECODE:
        return _DECODE[kind](form)
    return Named(kind, decode(form["value"]))


def references(form: Any) -> list[str]:
    """FQNs of the tensors that a JSON form refers to."""
    found, queue = [], [form]
    while queue:
        value = queue.pop()
        if isinstance(value, list):
            queue += value
        elif isinstance(value, dict):
            if value.get("$") == "tensor":
                found.append(value["fqn"])
            else:
                queue += value.values()
    return found


def tensors_in(value: Any) -> list[str]:
    """FQNs of the tensors that a decoded tree refers to, each once, in the tree's order."""
    found: dict[str, None] = {}
    queue = [value]
    while queue:
        v = queue.pop()
        if isinstance(v, TensorRef):
            found[v.fqn] = None
        elif isinstance(v, Named):
            queue.append(v.value)
        elif isinstance(v, (dict, list, tuple)):
            queue += reversed([*v.values()] if isinstance(v, dict) else v)
    return [*found]
