"""Flatten the objects of checkpoints into plain values by path, and compare them.

One format stores nested dicts and lists as one object, another stores each value under a name of its own.
Flattened, they can be compared: a leaf is a value that is not a dict or list, under the path to it, joined
with dots. Tensors inside objects are not leaves; they are compared by name. Wrappers that only some formats
can store (a namespace, a path, bytes in a buffer) are compared by their content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckptcore.comparison.result import ONLY_A, ONLY_B, VALUES, ObjectDifference
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Blob
from ckptcore.core.object_tree import Named, Refused, decode
from ckptcore.utils.text import short_repr

_TEXT_LENGTH = 60
_WRAPPERS = ("namespace", "path", "bytesio", "bytetensor")  # kinds of `Named`
_SPLIT = ("tensor", "ndarray")  # formats that store these separately split the tuples around them


@dataclass(slots=True)
class ObjectLeaf:
    """The value at a path. root: the object it is stored in. values: JSON forms; several if paths collide."""

    root: str
    values: list[Any] = field(default_factory=list)


Leaves = dict[str, ObjectLeaf]


def leaves(blobs: Iterable[Blob], named: Callable[[str], str]) -> Leaves:
    """Return the plain values of objects by path. named: path -> name under which it is compared."""
    found: Leaves = {}
    for blob in blobs:
        tree = blob.tree if blob.known else {"$": "refused", "name": ", ".join(blob.refused) or "unreadable"}
        for path, value in _walk(tree, blob.key):
            found.setdefault(named(path), ObjectLeaf(named(blob.key))).values.append(value)
    return found


def compare(a: Leaves, b: Leaves) -> tuple[list[ObjectDifference], int, list[tuple[str, str]]]:
    """Return (differences, number of equal leaves, (name, reason) of leaves that cannot be compared)."""
    different: list[ObjectDifference] = []
    skipped: list[tuple[str, str]] = []
    equal = 0
    for name in [*a, *(n for n in b if n not in a)]:
        ours, theirs = (x[name].values if name in x else None for x in (a, b))
        if ours is None or theirs is None:
            what = ONLY_B if ours is None else ONLY_A
            different.append(ObjectDifference(name, what, _texts(ours), _texts(theirs)))
        elif _canonical(ours) != _canonical(theirs):
            different.append(ObjectDifference(name, VALUES, _texts(ours), _texts(theirs)))
        elif refused := _first_refused(ours):
            skipped.append((name, f"the value is not built on either side: {refused}"))
        else:
            equal += 1
    return different, equal, skipped


def as_tensor(value: Any) -> tuple[str, tuple[int, ...], bytes] | None:
    """Return (dtype, shape, row-major little-endian bytes) of a leaf that is a numpy array, else None."""
    if not isinstance(value, dict) or value.get("$") != "ndarray" or "refused" in value["value"]:
        return None
    form = decode(value["value"])
    array = np.frombuffer(form["data"], form["dtype"]).reshape(form["shape"], order=form.get("order", "C"))
    if array.dtype.name not in BY_NAME:
        return None
    little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    return array.dtype.name, array.shape, little.tobytes()


def _walk(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every leaf; an empty dict or list is one."""
    while isinstance(tree, dict) and tree.get("$") in _WRAPPERS:
        tree = tree["value"]
    if isinstance(tree, dict) and tree.get("$") == "tensor":
        return
    below = _children(tree)
    if not below:
        yield path, tree
    for key, value in below:
        yield from _walk(value, f"{path}.{key}")


def _children(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, list):
        return list(enumerate(tree))
    if not isinstance(tree, dict):
        return []
    kind = tree.get("$")
    if kind is None:
        return list(tree.items())
    if kind in ("dict", "odict"):
        return [(decode(k), v) for k, v in tree["items"]]
    # Other tuples are values, such as (0.9, 0.95).
    return list(enumerate(tree["items"])) if kind == "tuple" and _contains(tree, _SPLIT) else []


def _contains(tree: Any, kinds: Sequence[str]) -> bool:
    if isinstance(tree, list):
        return any(_contains(v, kinds) for v in tree)
    return isinstance(tree, dict) and (
        tree.get("$") in kinds or any(_contains(v, kinds) for v in tree.values())
    )


def _first_refused(tree: Any) -> str:
    """Return the first value inside that was not built; empty if there is none."""
    if isinstance(tree, list):
        return next((r for r in map(_first_refused, tree) if r), "")
    if not isinstance(tree, dict):
        return ""
    if tree.get("$") == "ndarray":
        return str(tree["value"].get("refused", ""))
    return str(tree["name"]) if tree.get("$") == "refused" else _first_refused(list(tree.values()))


def _canonical(value: Any) -> str:
    """Return equal text for equal values: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    return json.dumps(value, sort_keys=True)


def _texts(values: list[Any] | None) -> str:
    if values is None:
        return ""
    return ", ".join(_text(decode(v)) for v in values[:3])


def _text(value: Any) -> str:
    if isinstance(value, Named):
        return f"{value.kind} {short_repr(value.value, _TEXT_LENGTH)}"
    return f"not built: {value.name}" if isinstance(value, Refused) else short_repr(value, _TEXT_LENGTH)
