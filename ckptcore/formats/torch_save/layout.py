"""Laying out one `torch.save` file: data.pkl, byteorder, the storages, version, directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptcore.core.dtype import BY_ZARR
from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import Named, TensorRef
from ckptcore.encodings.torchzip import writer as write
from ckptcore.formats.base import FileLayout, Literal, Slot

Inline = tuple[TensorSpec, bytes]
_KEPT = 8  # files that others may be like: megabytes each in a large job


def torch_file(
    path: str,
    tree: Any,
    tensors: Sequence[TensorSpec],
    order: Sequence[int],
    *,
    commit: bool = False,
    classes: bool = False,
    inline: Mapping[str, Inline] | None = None,
) -> FileLayout:
    """The file that holds ``tree``, a value as `ckptcore.core.object_tree.decode` gives it.

    order: positions into ``tensors`` of those that the tree refers to, in file order. classes: see `Pickled`.
    inline: tensors that the tree refers to and whose bytes are known.
    Raises TypeError for a value that has no pickled form.
    """
    inline = inline or {}
    held = [tensors[i] for i in order]
    made = write.Pickled(lookup(held, inline).__getitem__, classes=classes)
    made.value(tree)
    sizes = tuple(spec.nbytes for spec in held)
    return Around().of(path, made.finish(), tuple(order), sizes, data_of(inline), commit=commit)


def lookup(held: Sequence[TensorSpec], inline: Mapping[str, Inline]) -> dict[str, tuple[str, TensorSpec]]:
    """Storage key and spec of each tensor of a file, by name. held: in file order; the inline ones follow."""
    specs = [*((t.fqn, t) for t in held), *((name, inline[name][0]) for name in sorted(inline))]
    return {name: (str(n), spec) for n, (name, spec) in enumerate(specs)}


def data_of(inline: Mapping[str, Inline]) -> tuple[bytes, ...]:
    """The bytes of inline tensors, in file order."""
    return tuple(inline[name][1] for name in sorted(inline))


@dataclass(frozen=True, slots=True)
class _Behind:
    """What lies behind the first records of a file. rows: the directory from there on, with its end.
    patches: places in the whole directory that need a slot's CRC. end: first byte of the directory."""

    slots: tuple[Slot, ...]
    literals: tuple[Literal, ...]
    rows: bytes
    patches: tuple[tuple[int, int], ...]
    end: int


class Around:
    """Lays out files around their pickles. Files whose storages have the same sizes and places, as those of
    the ranks of a mesh mostly have, share everything behind the pickle."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _Behind] = {}

    def of(
        self,
        path: str,
        pickled: bytes,
        tensors: tuple[int, ...],
        sizes: tuple[int, ...],
        inline: tuple[bytes, ...],
        *,
        commit: bool = False,
    ) -> FileLayout:
        """A file. tensors: see `FileLayout`. sizes: of their slots, bytes. inline: storages behind them."""
        literals, rows, at = [], b"", 0
        for name, data in (("data.pkl", pickled), ("byteorder", b"little")):
            body, row = write.small_record(f"archive/{name}", at, data)
            literals.append(Literal(at, body))
            rows += row
            at += len(body)
        key = at, len(rows), sizes, inline
        if key not in self._known:
            while len(self._known) >= _KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = _behind(at, len(rows), sizes, inline)
        behind = self._known[key]
        directory = Literal(behind.end, rows + behind.rows, behind.patches)
        end = directory.start + len(directory.data)
        return FileLayout(path, end, tensors, behind.slots, (*literals, *behind.literals, directory), commit)


def _behind(at: int, before: int, sizes: Sequence[int], inline: Sequence[bytes]) -> _Behind:
    """at: first byte. before: bytes of the directory for what is there already, two records."""
    literals: list[Literal] = []
    slots: list[Slot] = []
    patches: list[tuple[int, int]] = []
    rows = bytearray()
    for n, nbytes in enumerate(sizes):
        name = f"archive/data/{n}"
        head = write.local_header(name, at)
        patches.append((before + len(rows) + 16, n))
        rows += write.central_entry(name, at, 0, nbytes)
        literals.append(Literal(at, head))
        slots.append(Slot(n, at + len(head)))
        at += len(head) + nbytes
        tail = write.descriptor(0, nbytes)
        literals.append(Literal(at, tail, ((4, n),)))
        at += len(tail)
    known = [*((f"data/{n}", data) for n, data in enumerate(inline, len(sizes))), ("version", b"3\n")]
    for name, data in known:
        body, row = write.small_record(f"archive/{name}", at, data)
        literals.append(Literal(at, body))
        rows += row
        at += len(body)
    rows += write.end_records(2 + len(sizes) + len(known), at, before + len(rows))
    return _Behind(tuple(slots), tuple(literals), bytes(rows), tuple(patches), at)


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
