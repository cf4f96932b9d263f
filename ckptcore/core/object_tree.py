"""Encode trees of plain values as JSON, so that they never travel as a pickle.

Everything that is not a tensor is kept as JSON. JSON's own values are themselves. An object
``{"$": kind, ...}`` represents a Python value that JSON does not have. A reference to a
tensor is ``{"$": "tensor", "fqn": name}``. ``docs/reference/objects.md`` is the specification.
"""

from __future__ import annotations

import base64
import math
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ckptcore.core.metadata_budget import CONTAINER, SLOT, meter
from ckptcore.core.named_values import normal, restated
from ckptcore.utils.foreign_text import parsing

# The version of the JSON form, where it is stored outside of this project's own files. A new kind that an
# older reader would misread needs a new version.
VERSION = 1
MAX_DEPTH = 500  # containers of a JSON form; a tree of a pickle has 150 levels, and a form has three for one
# Values that hold no others; long runs of them are encoded and decoded at once.
SCALARS: frozenset[type] = frozenset({type(None), bool, int, float, complex, str, bytes})
_AS_IS: frozenset[type] = frozenset({type(None), bool, str})  # JSON has these types
_NUMBERS: frozenset[type] = frozenset({bool, int})
_WIDE = 1 << 53  # JSON readers that use doubles lose integers from here on
_DIGITS = 160  # of the widest integer of a pickle that is read, 64 bytes


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A reference in a tree to the tensor of this FQN."""

    fqn: str


@dataclass(frozen=True, slots=True)
class Named:
    """A value with a name in torch or the standard library: ``torch.Size``, a dtype, a path.

    Attributes:
        kind: ``size``, ``dtype``, ``path``, ... (``docs/reference/objects.md`` lists them).
        value: A plain value, in the form of `ckptcore.core.named_values.normal`.
    """

    kind: str
    value: Any

    def in_messages(self) -> str:
        """Return what a message calls it."""
        return f"<{self.kind}>"

    def __str__(self) -> str:
        """Return the text of the plain form, which is what a key of this value is called in a name."""
        return str(restated(self.kind, self.value))


@dataclass(frozen=True, slots=True)
class Refused:
    """A value that was not built because its class is not on the allow-list."""

    name: str

    def in_messages(self) -> str:
        """Return what a message calls it."""
        return f"<{self.name or 'a tensor'}>"


@dataclass(frozen=True, slots=True)
class RefusedTensor(Refused):
    """A tensor whose elements are not plain: quantised, sparse, nested, of an unsupported class or dtype.

    Attributes:
        name: The global that is the reason.
        reason: Why, as a text.
        foreign: Whether the reason is a class that is not on the allow-list.
        dtype: As far as it is known.
        shape: As far as it is known.
        storages: Keys of the storages under it.
    """

    reason: str = ""
    foreign: bool = False
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    storages: tuple[str, ...] = ()


def encode(value: Any, _left: list[int] | None = None) -> Any:
    """Return the JSON form of a tree of plain values, `TensorRef`, `Named` and `Refused`.

    >>> encode({"betas": (0.9, 0.95), 3: None})
    {'$': 'dict', 'items': [['betas', {'$': 'tuple', 'items': [0.9, 0.95]}], [3, None]]}

    Raises:
        TypeError: The tree holds anything else.
        MetadataTooLarge: The tree is over the budget of metadata.
    """
    # A pickle's memo shares values, so that a small file can be an endless tree.
    budget = [meter().limit] if _left is None else _left
    # Counted down while the form grows, and compared here at the next value: the form itself is never
    # larger than one container beyond the budget.
    if budget[0] < 0:
        meter().require(meter().limit - budget[0], "an object")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        # A readable number where every reader keeps it, a text of
        # digits where one with doubles would round it.
        return value if abs(value) < _WIDE else {"$": "int", "value": str(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
    if isinstance(value, complex):
        return {"$": "complex", "items": [encode(value.real, budget), encode(value.imag, budget)]}
    if isinstance(value, (bytes, bytearray)):
        return {"$": "bytes", "value": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, list):
        return _encode_all(value, budget)
    if isinstance(value, TensorRef):
        return {"$": "tensor", "fqn": value.fqn}
    if isinstance(value, Named):
        return {"$": value.kind, "value": encode(value.value, budget)}
    if isinstance(value, Refused):
        return {"$": "refused", "name": value.name}
    # The subclass first: an OrderedDict is a dict, too, and would lose its kind.
    for kind, cls in (("odict", OrderedDict), ("dict", dict)):
        if isinstance(value, cls):
            # A dict with the key "$" would be taken for the form of
            # another kind, and JSON has text keys only.
            if kind == "dict" and "$" not in value and all(isinstance(k, str) for k in value):
                return dict(zip(value, _encode_all(value.values(), budget), strict=True))
            # Pairs: each is a list of its own beside its two values.
            budget[0] -= CONTAINER + 4 * SLOT * len(value)
            items = [[encode(k, budget), encode(v, budget)] for k, v in value.items()]
            return {"$": kind, "items": items}
    for kind, seq in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, seq):
            items = _encode_all(value, budget)
            # The order of a set depends on the hashes of one process, and forms are digested.
            return {"$": kind, "items": items if kind == "tuple" else sorted(items, key=repr)}
    raise TypeError(f"cannot encode {type(value).__name__}: not a plain value")


def _encode_all(values: Collection[Any], budget: list[int]) -> list[Any]:
    """Encode several values; runs of numbers or texts are encoded at once."""
    budget[0] -= CONTAINER + SLOT * len(values)
    return list(values) if are_their_forms(values) else [encode(v, budget) for v in values]


def are_their_forms(values: Collection[Any]) -> bool:
    """Report whether JSON has all of these values, like most numbers and texts; False for some it has."""
    kinds = set(map(type, values))
    if kinds <= _AS_IS:
        return True
    if kinds <= _NUMBERS:
        # The ends decide for all: `min` and `max` are two calls, not one for every number.
        return bool(min(values) > -_WIDE and max(values) < _WIDE)
    return kinds == {float} and all(map(math.isfinite, values))


def is_its_form(value: Any) -> bool:
    """Report whether JSON has this value, so that its form is the value itself."""
    if type(value) is int:
        return -_WIDE < value < _WIDE
    return type(value) in _AS_IS or (type(value) is float and math.isfinite(value))


def is_plain_json(form: Any) -> bool:
    """Report whether a JSON form is the value itself, with everything in it.

    >>> is_plain_json({"a": [1, None]}), is_plain_json({"a": {"$": "float", "value": "inf"}})
    (True, False)
    """
    queue = [form]
    while queue:
        # A queue instead of a recursion: forms from files may be nested more deeply than Python's stack.
        value = queue.pop()
        if isinstance(value, dict) and "$" in value:
            return False
        if isinstance(value, (dict, list)):
            queue += value.values() if isinstance(value, dict) else value
    return True


def weight(form: Any) -> int:
    """Estimate the bytes that a JSON form and its decoded value take.

    >>> weight({"a": [True] * 10}), weight("abc")
    (2532, 52)
    """
    nbytes, queue = 0, [form]
    while queue:
        value = queue.pop()
        if not isinstance(value, (list, dict)):
            nbytes += _weight_of([value])
            continue
        # Keys of an object are texts of their own; positions of a list are nothing.
        inside = value.values() if isinstance(value, dict) else value
        nbytes += CONTAINER + _weight_of(inside) + (_weight_of(value) if isinstance(value, dict) else 0)
        queue += [v for v in inside if type(v) not in SCALARS]
    return nbytes


def _weight_of(values: Collection[Any]) -> int:
    texts = str in set(map(type, values))
    return SLOT * len(values) + (4 * sum(len(v) for v in values if type(v) is str) if texts else 0)


def _wide(text: Any) -> int:
    """Return the integer of a text of decimal digits; int() takes quadratic time for long ones."""
    if type(text) is not str or len(text) > _DIGITS:
        raise ValueError(f"an integer must be a text of at most {_DIGITS} digits")
    return int(text)


_DECODE: dict[str, Any] = {
    "int": lambda v: _wide(v["value"]),
    "float": lambda v: float(v["value"]),
    "complex": lambda v: complex(*(_decode(x) for x in v["items"])),
    "bytes": lambda v: base64.b64decode(v["value"]),
    "tensor": lambda v: TensorRef(v["fqn"]),
    "refused": lambda v: Refused(v["name"]),
    "odict": lambda v: OrderedDict((_decode(k), _decode(x)) for k, x in v["items"]),
    "dict": lambda v: {_decode(k): _decode(x) for k, x in v["items"]},
    "tuple": lambda v: tuple(_decode(v["items"])),
    "set": lambda v: set(_decode(v["items"])),
    "frozenset": lambda v: frozenset(_decode(v["items"])),
}


def decode(form: Any) -> Any:
    """Return the tree of `encode`'s JSON form; no class is looked up by a name in it.

    >>> decode(encode({"a": (1, float("inf")), 2: b"x"}))
    {'a': (1, inf), 2: b'x'}

    Raises:
        InvalidText: It is no such form, or a value is none of its kind.
    """
    with parsing("an object tree"):
        return _decode(form)


def _decode(form: Any) -> Any:
    if isinstance(form, list):
        # A list of numbers or texts is copied in one step: they are their own values.
        return list(form) if set(map(type, form)) <= SCALARS else [_decode(v) for v in form]
    if not isinstance(form, dict):
        return form
    if "$" not in form:
        return {k: _decode(v) for k, v in form.items()}
    kind = form["$"]
    if kind in _DECODE:
        return _DECODE[kind](form)
    # Through `normal`: a form in a file may hold any value, and what is
    # built of it later must be one of the kind.
    return Named(kind, normal(kind, _decode(form["value"])))


def references(form: Any) -> list[str]:
    """Return the FQNs of the tensors that a JSON form refers to."""
    fqns, queue = [], [form]
    while queue:
        value = queue.pop()
        if isinstance(value, list):
            queue += [v for v in value if type(v) not in SCALARS]
        elif isinstance(value, dict):
            if value.get("$") == "tensor":
                fqns.append(value["fqn"])
            else:
                queue += [v for v in value.values() if type(v) not in SCALARS]
    return fqns


def tensors_in(value: Any) -> list[str]:
    """Return the FQNs of the tensors that a decoded tree refers to, each once, in the tree's order."""
    fqns: dict[str, None] = {}
    queue = [value]
    while queue:
        v = queue.pop()
        if isinstance(v, TensorRef):
            fqns[v.fqn] = None
        elif isinstance(v, Named):
            queue.append(v.value)
        elif isinstance(v, (dict, list, tuple)):
            inside = v.values() if isinstance(v, dict) else v
            # Reversed, as the end of the queue is next: names come in the order of the tree.
            # Depth first in the tree's order needs the first member on top of the queue.
            queue += reversed([x for x in inside if type(x) not in SCALARS])
    return [*fqns]
