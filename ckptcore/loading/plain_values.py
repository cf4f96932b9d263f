"""Find the plain value of a name in a checkpoint, and build it in Python.

One format keeps every leaf as an object of its own, another complete dicts: a name may be that of an object,
or a path into one. Values are built from a closed set of kinds; a class from the checkpoint is never looked
up.
"""

from __future__ import annotations

import argparse
import datetime
import io
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from ckptcore.core.manifest import Blob
from ckptcore.core.named_values import CONTAINERS, content_of, moment_of, uuid_of, zone_of
from ckptcore.core.object_tree import Named, Refused, TensorRef, decode

Forms = Mapping[str, Blob]
_MAPPINGS = (None, "dict", "odict", "defaultdict", "counter")  # kinds of forms that are mappings
ReadTensor = Callable[[str], Any]


class NotBuilt(Exception):
    """A value is, or holds, something that cannot be built as a plain value; the text names it."""


def find(objects: Forms, fqn: str) -> tuple[str, Any] | None:
    """Return (key of the object, JSON form) of a name in a checkpoint; None where it has nothing.

    Raises:
        NotBuilt: The object there was refused, or could not be read.
    """
    end = len(fqn)
    # From the longest name down: an object of the very name comes before a path into another.
    while end > 0:
        blob = objects.get(fqn[:end])
        if blob is not None:
            if not blob.known:
                raise NotBuilt(", ".join(blob.refused) or "an object that cannot be read")
            form = next(_within(blob.tree, fqn[end + 1 :]), None)
            if form is not None:
                return blob.key, form[0]
        end = fqn.rfind(".", 0, end)
    return None


def leaf_names(blob: Blob) -> Iterator[str]:
    """Yield the names of an object's values as `torch.distributed.checkpoint` flattens a state dict.

    torch enters dicts, and lists that hold a tensor or a dict. Tensors in an object have names of their own.
    """
    queue = [(blob.key, blob.tree if blob.known else None)]
    while queue:
        name, form = queue.pop()
        if _is_entered(form):
            queue += [(f"{name}.{key}", value) for key, value in _entries(form)]
        elif not (isinstance(form, dict) and form.get("$") == "tensor"):
            yield name


def _is_entered(form: Any) -> bool:
    if isinstance(form, list):
        return any(_is_entered(v) or (isinstance(v, dict) and v.get("$") == "tensor") for v in form)
    return isinstance(form, dict) and form.get("$") in _MAPPINGS


def built(form: Any, read: ReadTensor) -> Any:
    """Build the value of a JSON form; ``read`` returns the tensor of a name. Raises `NotBuilt`."""
    try:
        return _built(decode(form), read)
    except ValueError as error:
        raise NotBuilt(f"a value that is none of its kind: {error}") from error


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
    if kind in CONTAINERS:
        return _entries(content_of(kind, form["value"]))
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
        return OrderedDict((_built(k, read), _built(v, read)) for k, v in value.items())
    if isinstance(value, dict):
        return {_built(k, read): _built(v, read) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(_built(v, read) for v in value)
    return value


def _torch(name: str) -> Any:
    import torch

    return getattr(torch, name.removeprefix("torch."))


def _torch_layout(name: str) -> Any:
    import torch

    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise NotBuilt(f"the layout {name[:40]}")
    return layout


def _torch_device(parts: list[str]) -> Any:
    import torch

    return torch.device(":".join(parts))


def _byte_tensor(data: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _numpy_array(form: dict[str, Any]) -> Any:
    flat = np.frombuffer(form["data"], form["dtype"])
    return flat.reshape(form["shape"], order=form.get("order", "C")).copy(order="K")


def _scalar(value: tuple[str, bytes]) -> Any:
    spelled, data = value
    return np.frombuffer(data, spelled)[0] if data else np.zeros(1, spelled)[0]


def _buffer(value: tuple[bytes, int]) -> io.BytesIO:
    stream = io.BytesIO(value[0])
    stream.seek(value[1])
    return stream


def _default(value: dict[str, Any]) -> Any:
    return defaultdict(None if value["factory"] is None else _FACTORIES[value["factory"]], value["items"])


_FACTORIES: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "list": list,
    "set": set,
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "tuple": tuple,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "deque": deque,
}
_MAKERS: dict[str, Callable[[Any], Any]] = {
    "range": lambda v: range(*v),
    "slice": lambda v: slice(*v),
    "ellipsis": lambda _: ...,
    "bytearray": bytearray,
    "bytesio": io.BytesIO,
    "bytesioat": _buffer,
    "deque": lambda v: deque(v["items"], v["maxlen"]),
    "defaultdict": _default,
    "counter": Counter,
    "date": datetime.date.fromisoformat,
    "time": lambda v: moment_of(datetime.time, v),
    "datetime": lambda v: moment_of(datetime.datetime, v),
    "timedelta": lambda v: datetime.timedelta(*v),
    "timezone": zone_of,
    "decimal": Decimal,
    "fraction": lambda v: Fraction(*v),
    "uuid": uuid_of,
    "path": Path,
    "purepath": PurePosixPath,
    "winpath": PureWindowsPath,
    "windowspath": PureWindowsPath,
    "namespace": lambda fields: argparse.Namespace(**fields),
    "simplenamespace": lambda fields: types.SimpleNamespace(**fields),
    "npscalar": _scalar,
    "npdtype": lambda v: np.dtype("".join(reversed(v))),
    "npclass": lambda name: getattr(np, name),  # one of a closed set
    "ndarray": _numpy_array,
    "size": lambda dims: _torch("Size")(dims),
    "dtype": _torch,
    "layout": _torch_layout,
    "qscheme": _torch,
    "device": _torch_device,
    "bytetensor": _byte_tensor,
}
