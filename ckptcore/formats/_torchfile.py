"""Laying out one `torch.save` file: data.pkl, byteorder, the storages, version, directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptcore.formats import _torchwrite as write
from ckptcore.formats.base import FileLayout, Literal, Slot
from ckptcore.manifest import TensorSpec


def torch_file(path: str, tree: Any, tensors: Sequence[TensorSpec], order: Sequence[int], *,
               commit: bool = False, classes: bool = False,
               inline: Mapping[str, bytes] | None = None) -> FileLayout:  # fmt: skip
    """The file that holds ``tree``, a value as `ckptcore.objects.decode` gives it.

    order: positions into ``tensors`` of those that the tree refers to, in file order. classes: see `Pickled`.
    inline: byte tensors that the tree refers to and whose bytes are known.
    Raises TypeError for a value that has no pickled form.
    """
    key = {tensors[i].fqn: (str(n), tensors[i]) for n, i in enumerate(order)}
    known = sorted((inline or {}).items())
    for n, (name, data) in enumerate(known, start=len(order)):
        key[name] = str(n), TensorSpec(name, "uint8", (len(data),))
    pickled = write.Pickled(key.__getitem__, classes=classes)
    pickled.value(tree)
    literals: list[Literal] = []
    slots: list[Slot] = []
    rows: list[tuple[bytes, int | None]] = []  # directory row, the slot whose CRC it needs
    at = 0
    for name, data in (("data.pkl", pickled.finish()), ("byteorder", b"little")):
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
    for n, (_, data) in enumerate(known, start=len(order)):
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


def _directory(rows: Sequence[tuple[bytes, int | None]], at: int) -> Literal:
    data, patches = bytearray(), []
    for row, slot in rows:
        if slot is not None:
            patches.append((len(data) + 16, slot))
        data += row
    data += write.end_records(len(rows), at, len(data))
    return Literal(at, bytes(data), tuple(patches))
