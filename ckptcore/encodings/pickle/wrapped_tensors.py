"""Take torchao's tensors apart: the tensors that such a tensor wraps, under their own names.

A traceable wrapper subclass pickles its attributes as they are (torch/_tensor.py, `__reduce_ex__`): plain
tensors, such as ``codes`` and ``scale``, and values that say how they are meant. The pickle's class is not
imported. In its place is a dict of its attributes, with an entry `CLASS` for all that are no tensors, so that
readers of trees find the inner tensors as they find any. What the outer tensor's values are is decided by
`ckptcore.formats.dcp.wrapped_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptcore.core.object_tree import Named, Refused, RefusedTensor
from ckptcore.encodings.limits import refused_in
from ckptcore.encodings.pickle.torch_globals import OBJECT_TABLE, StoredView, of_class
from ckptcore.encodings.pickle.unpickler import Call

CLASS = "tensor_class"  # the entry that describes the outer tensor
_PACKAGE = "torchao."
_OUTER = ("class", "dtype", "shape")  # of that entry; the others are attributes
_REBUILD = "torch._utils._rebuild_wrapper_subclass"
_TYPED = "torch._tensor._rebuild_from_type_v2"


class WrappedTensor(dict[str, Any]):
    """The attributes of a tensor that wraps others, and `CLASS`."""


def _taken_apart(function: Any, kind: Any, args: Any, *state: Any) -> Any:
    """Replace ``_rebuild_from_type_v2(_rebuild_wrapper_subclass, type, args, state)`` of torchao's types."""
    refused = isinstance(kind, Refused) and isinstance(function, Refused) and function.name == _REBUILD
    if not refused or not kind.name.startswith(_PACKAGE):
        return _plain(function, kind, args, *state)
    outer = of_class(kind, function, args, *state)
    parts = state[0] if state and type(state[0]) is tuple else state
    attributes = {str(name): value for part in parts if type(part) is dict for name, value in part.items()}
    tensors = {name: value for name, value in attributes.items() if isinstance(value, StoredView)}
    plain_attributes = {name: value for name, value in attributes.items() if name not in tensors}
    unplain = any(isinstance(v, (RefusedTensor, WrappedTensor)) for v in plain_attributes.values())
    if not tensors or unplain or CLASS in attributes or outer.shape is None:
        return outer
    description = {
        name: value
        for name, value in plain_attributes.items()
        if name not in _OUTER and not refused_in(value)
    }
    dtype, shape = Named("dtype", outer.dtype), Named("size", outer.shape)
    odd = {name: value for name, value in plain_attributes.items() if name not in description}
    return WrappedTensor(
        {**tensors, **odd, CLASS: {"class": kind.name, "dtype": dtype, "shape": shape, **description}}
    )


def described(value: Any) -> Mapping[str, Any] | None:
    """Return a decoded `CLASS` entry, which describes the outer tensor; None if it is no such entry."""
    if type(value) is not dict or type(value.get("class")) is not str:
        return None
    dtype, shape = value.get("dtype"), value.get("shape")
    if type(dtype) is not Named or type(shape) is not Named or (dtype.kind, shape.kind) != ("dtype", "size"):
        return None
    return value if all(type(n) is int and n >= 0 for n in shape.value) else None


def plain_sizes(value: Any) -> tuple[int, ...] | None:
    """Return a list of sizes as a tuple; None for any other value."""
    value = value.value if type(value) is Named else value
    if type(value) not in (list, tuple) or any(type(n) is not int or n < 1 for n in value):
        return None
    return tuple(value)


_plain = OBJECT_TABLE[_TYPED].build
WRAPPED_TABLE: dict[str, Any] = {**OBJECT_TABLE, _TYPED: Call("_rebuild_from_type_v2", _taken_apart)}
