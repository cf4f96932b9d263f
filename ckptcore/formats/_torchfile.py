"""Laying out one `torch.save` file: data.pkl, byteorder, the storages, version, directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ckptcore.dtype import BY_ZARR
from ckptcore.formats import _torchwrite as write
from ckptcore.formats.base import FileLayout, Literal, Slot
from ckptcore.manifest import TensorSpec
from ckptcore.objects import Named, TensorRef

Inline = tuple[TensorSpec, bytes]
Lookup = Callable[[str], tuple[str, TensorSpec]]


def torch_file(path: str, tree: Any, tensors: Sequence[TensorSpec], order: Sequence[int], *,
               commit: bool = False, classes: bool = False,
               inline: Mapping[str, Inline] | None = None,
               pickled: Callable[[Lookup], write.Pickled] | None = None) -> FileLayout:  # fmt: skip
    """The file that holds ``tree``, a value as `ckptcore.objects.decode` gives it.

    order: positions into ``tensors`` of those that the tree refers to, in file order. classes: see `Pickled`.
    inline: tensors that the tree refers to and whose bytes are known. pickled: how the pickle is built
    where tensors are not plain, given FQN -> (storage key, spec).
    Raises TypeError for a value that has no pickled form.
    """
    key = {tensors[i].fqn: (str(n), tensors[i]) for n, i in enumerate(order)}
    known = sorted((inline or {}).items())
    for n, (name, (spec, _)) in enumerate(known, start=len(order)):
        key[name] = str(n), spec
    made = pickled(key.__getitem__) if pickled else write.Pickled(key.__getitem__, classes=classes)
    made.value(tree)
    literals: list[Literal] = []
    slots: list[Slot] = []
    rows: list[tuple[bytes, int | None]] = []  # directory row, the slot whose CRC it needs
    at = 0
    for name, data in (("data.pkl", made.finish()), ("byteorder", b"little")):
        body, row = write.small_record(f"archive/{name}", at, data)
        literals.append(Literal(at, body))
        rows.append((row, None))
        at += len(body)
    for n, i in enumerate(order):
        name, nbytes = f"archive/data/{n}", tensors[i].nbytes
        head = write.local_header(name, at)
        rows.append((write.central_entry(name, at, 0, nbytes), n))
        literals.append(Literal(at, head))
        slots.append(Slot(n, at + len(head)))
        at += len(head) + nbytes
        tail = write.descriptor(0, nbytes)
        literals.append(Literal(at, tail, ((4, n),)))
        at += len(tail)
    for n, (_, (_, data)) in enumerate(known, start=len(order)):
        body, row = write.small_record(f"archive/data/{n}", at, data)
        literals.append(Literal(at, body))
        rows.append((row, None))
        at += len(body)
    body, row = write.small_record("archive/version", at, b"3\n")
    literals.append(Literal(at, body))
    rows.append((row, None))
    at += len(body)
    literals.append(_directory(rows, at))
    end = at + len(literals[-1].data)
    return FileLayout(path, end, tuple(order), tuple(slots), tuple(literals), commit)


def arrays_as_tensors(value: Any, inline: dict[str, Inline]) -> Any:
    """The tree with a tensor in place of every numpy array; their bytes go into ``inline``.

    ``torch.load(weights_only=True)`` knows no numpy. An array of text becomes nested lists.
    """
    if isinstance(value, Named):
        if value.kind != "ndarray":
            return Named(value.kind, arrays_as_tensors(value.value, inline))
        form = value.value
        array = np.frombuffer(form["data"], form["dtype"])
        array = array.reshape(form["shape"], order="F" if form.get("order") == "F" else "C")
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(form["shape"])
        dtype = BY_ZARR.get(array.dtype.str)
        if dtype is None:
            return array.tolist()
        name = f"\0{len(inline)}"  # no tensor is called so
        inline[name] = TensorSpec(name, dtype.name, array.shape), array.tobytes()
        return TensorRef(name)
    if isinstance(value, dict):
        return type(value)((k, arrays_as_tensors(v, inline)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)([arrays_as_tensors(v, inline) for v in value])
    return value


def _directory(rows: Sequence[tuple[bytes, int | None]], at: int) -> Literal:
    data, patches = bytearray(), []
    for row, slot in rows:
        if slot is not None:
            patches.append((len(data) + 16, slot))
        data += row
    data += write.end_records(len(rows), at, len(data))
    return Literal(at, bytes(data), tuple(patches))
