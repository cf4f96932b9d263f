"""Find the plain value of a name in a checkpoint, and build it in Python.

One format keeps every leaf as an object of its own, another complete dicts: a name may be that of an object,
or a path into one. Values are built from a closed set of kinds; a class from the checkpoint is never looked
up.
"""

from __future__ import annotations

import argparse
import io
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np

from ckptcore.core.manifest import Blob
from ckptcore.core.object_tree import Named, Refused, TensorRef, decode

Forms = Mapping[str, Blob]
ReadTensor = Callable[[str], Any]


class NotBuilt(Exception):
    """A value is, or holds, something that cannot be built as a plain value; the text names it."""


def find(objects: Forms, fqn: str) -> tuple[str, Any] | None:
    """Return (key of the object, JSON form) of a name in a checkpoint; None where it has nothing.

    Raises:
        NotBuilt: The object there was refused, or could not be read.
    """
    at = len(fqn)
    while at > 0:
        blob = objects.get(fqn[:at])
        if blob is not None:
            if not blob.known:
                raise NotBuilt(", ".join(blob.refused) or "an object that cannot be read")
            form = next(_within(blob.tree, fqn[at + 1 :]), None)
            if form is not None:
                return blob.key, form[0]
        at = fqn.rfind(".", 0, at)
    return None


def built(form: Any, read: ReadTensor) -> Any:
    """Build the value of a JSON form; ``read`` returns the tensor of a name. Raises `NotBuilt`."""
    return _built(decode(form), read)


def _within(form: Any, rest: str) -> Iterator[tuple[Any]]:
    """Yield what is under a path in a form; keys may contain dots, so there may be several."""
    if not rest:
        yield (form,)
        return
    for key, value in _entries(form):
        name = str(key)
        if rest == name or rest.startswith(f"{name}."):
            yield from _within(value, rest[len(name) + 1 :])


def _entries(form: Any) -> list[tuple[Any, Any]]:
    if isinstance(form, list):
        return list(enumerate(form))
    if not isinstance(form, dict):
        return []
    kind = form.get("$")
    if kind is None:
        return list(form.items())
    if kind in ("dict", "odict"):
        return [(decode(k), v) for k, v in form["items"]]
    return list(enumerate(form["items"])) if kind == "tuple" else []


def _built(value: Any, read: ReadTensor) -> Any:
    if isinstance(value, TensorRef):
        return read(value.fqn)
    if isinstance(value, Refused):
        raise NotBuilt(value.name)
    if isinstance(value, Named):
        make = _MAKERS.get(value.kind)
        if make is None or (value.kind == "ndarray" and "refused" in value.value):
            raise NotBuilt(f"a value of kind {value.kind}")
        return make(_built(value.value, read))
    if isinstance(value, OrderedDict):
        return OrderedDict((k, _built(v, read)) for k, v in value.items())
    if isinstance(value, dict):
        return {k: _built(v, read) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_built(v, read) for v in value)
    return value


def _torch(name: str) -> Any:
    import torch

    return getattr(torch, name.removeprefix("torch."))


def _torch_device(parts: list[str]) -> Any:
    import torch

    return torch.device(":".join(parts))


def _byte_tensor(data: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _numpy_array(form: dict[str, Any]) -> Any:
    flat = np.frombuffer(form["data"], form["dtype"])
    return flat.reshape(form["shape"], order=form.get("order", "C")).copy(order="K")


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "size": lambda dims: _torch("Size")(dims),
    "dtype": _torch,
    "layout": _torch,
    "device": _torch_device,
    "path": Path,
    "winpath": PureWindowsPath,
    "ndarray": _numpy_array,
    "namespace": lambda fields: argparse.Namespace(**fields),
    "simplenamespace": lambda fields: types.SimpleNamespace(**fields),
    "bytesio": io.BytesIO,
    "bytetensor": _byte_tensor,
}
