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
from ckptcore.core.named_values import CONTAINERS, content_of, restated
from ckptcore.core.object_tree import Named, Refused, decode, encode
from ckptcore.utils.text import short_repr

_TEXT_LENGTH = 60
_WRAPPERS = ("namespace", "path", "bytesio", "bytetensor")  # kinds of `Named`
_SPLIT = ("tensor", "ndarray")  # formats that store these separately split the tuples around them


@dataclass(slots=True)
class ObjectLeaf:
    """The value at a path.

    Attributes:
        root: The object it is in, under its compared name.
        stored: The object's stored name.
        values: JSON forms; several if paths collide.
    """

    root: str
    stored: str
    values: list[Any] = field(default_factory=list)


Leaves = dict[str, ObjectLeaf]


def leaves(blobs: Iterable[Blob], named: Callable[[str], str], valued: Callable[[str, Any], Any]) -> Leaves:
    """Return the plain values of objects by path.

    Args:
        blobs: The objects.
        named: Path -> name under which it is compared.
        valued: (that name, value) -> value that is compared.
    """
    leaf_by_name: Leaves = {}
    for blob in blobs:
        tree = blob.tree if blob.known else {"$": "refused", "name": ", ".join(blob.refused) or "unreadable"}
        for path, value in _walk(tree, blob.key):
            name = named(path)
            leaf = leaf_by_name.setdefault(name, ObjectLeaf(named(blob.key), blob.key))
            leaf.values.append(valued(name, value))
    return leaf_by_name


def exact_leaves(blob: Blob) -> Iterator[tuple[str, list[Any]]]:
    """Yield (path, form) of every leaf of an object; equal forms are equal values in equal containers."""
    todo: list[tuple[Any, str, list[Any]]] = [(blob.tree, blob.key, [])]
    while todo:
        tree, path, around = todo.pop()
        if isinstance(tree, dict) and tree.get("$") in _WRAPPERS:
            todo.append((tree["value"], path, [*around, tree["$"]]))
            continue
        below = _children(tree)
        if not below:
            yield path, [around, tree]
        kind = "list" if isinstance(tree, list) else tree.get("$") if isinstance(tree, dict) else None
        inside = around if kind is None else [*around, kind]
        todo += [(value, f"{path}.{key}", inside) for key, value in below]


def compare(a: Leaves, b: Leaves) -> tuple[list[ObjectDifference], int, list[tuple[str, str]]]:
    """Return (differences, number of equal leaves, (name, reason) of leaves that cannot be compared)."""
    different: list[ObjectDifference] = []
    skipped: list[tuple[str, str]] = []
    equal = 0
    for name in [*a, *(n for n in b if n not in a)]:
        ours, theirs = (x[name].values if name in x else None for x in (a, b))
        if ours is None or theirs is None:
            kind = ONLY_B if ours is None else ONLY_A
            different.append(ObjectDifference(name, kind, _texts(ours), _texts(theirs)))
        elif _canonical(ours) != _canonical(theirs) and not _restated(ours, theirs):
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
        return [(_key(decode(k)), v) for k, v in tree["items"]]
    if kind in CONTAINERS:
        return _children(content_of(kind, tree["value"]))
    # Other tuples are values, such as (0.9, 0.95).
    return list(enumerate(tree["items"])) if kind == "tuple" and _contains(tree, _SPLIT) else []


def _key(value: Any) -> Any:
    """Return a key as it is in a path: that of a library as its plain form."""
    return restated(value.kind, value.value) if isinstance(value, Named) else value


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


def _restated(ours: list[Any], theirs: list[Any]) -> bool:
    """Report whether one side has the plain forms of the other's values, as a format without classes does."""
    if len(ours) != len(theirs):
        return False
    for our_form, their_form in zip(ours, theirs, strict=True):
        forms = {_canonical(our_form), _canonical(their_form)}
        plain = {_canonical(_plain(our_form)), _canonical(_plain(their_form))}
        # Two values of different classes are not equal, even if their plain forms are.
        if len(forms) > 1 and (len(plain) > 1 or not forms & plain):
            return False
    return True


def _plain(form: Any) -> Any:
    """Return the JSON form of a value without the classes of libraries."""
    if isinstance(form, list):
        return [_plain(v) for v in form]
    if not isinstance(form, dict):
        return form
    kind = form.get("$")
    if kind is None:
        return {k: _plain(v) for k, v in form.items()}
    if kind in ("dict", "odict"):
        items = [[_plain_key(k), _plain(v)] for k, v in form["items"]]
        named = kind == "dict" and all(type(k) is str and k != "$" for k, _ in items)
        return dict(items) if named else {"$": kind, "items": items}
    if kind == "tuple":
        return {"$": kind, "items": [_plain(v) for v in form["items"]]}
    if kind in ("set", "frozenset"):
        return {"$": "set", "items": sorted(map(_plain_key, form["items"]), key=repr)}
    if "value" not in form or kind in ("int", "float", "bytes", "ndarray"):
        return form
    value = decode(form)
    return _plain(encode(restated(kind, value.value))) if isinstance(value, Named) else form


def _plain_key(form: Any) -> Any:
    """Return the plain form of what must be hashed: a frozen set is a tuple there."""
    plain = _plain(form)
    frozen = isinstance(form, dict) and form.get("$") == "frozenset"
    return {**plain, "$": "tuple"} if frozen else plain


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
