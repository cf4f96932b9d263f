"""Lay out one `torch.save` file: data.pkl, byteorder, the storages, version, directory."""

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
_KEPT = 8  # layouts that other files may share: megabytes each in a large job


def torch_file(
    path: str,
    tree: Any,
    tensors: Sequence[TensorSpec],
    order: Sequence[int],
    *,
    commit: bool = False,
    classes: write.Classes = write.Classes.PLAIN,
    inline: Mapping[str, Inline] | None = None,
) -> FileLayout:
    """Lay out the file of a tree.

    Args:
        path: Path of the file below the root of the output.
        tree: A value as returned by `ckptcore.core.object_tree.decode`.
        tensors: All tensors of the output.
        order: Positions in ``tensors`` of those in the tree, in file order.
        commit: See `FileLayout`.
        classes: See `Pickled`.
        inline: Tensors in the tree with known bytes.

    Raises:
        TypeError: A value has no pickled form.
    """
    inline = inline or {}
    specs = [tensors[i] for i in order]
    pickled = write.Pickled(lookup(specs, inline).__getitem__, classes=classes)
    pickled.value(tree)
    sizes = tuple(spec.nbytes for spec in specs)
    return Around().of(path, pickled.finish(), tuple(order), sizes, data_of(inline), commit=commit)


def lookup(tensors: Sequence[TensorSpec], inline: Mapping[str, Inline]) -> dict[str, tuple[str, TensorSpec]]:
    """Return storage key and spec of each tensor of a file by name: in file order, then the inline ones."""
    specs = [*((t.fqn, t) for t in tensors), *((name, inline[name][0]) for name in sorted(inline))]
    return {name: (str(n), spec) for n, (name, spec) in enumerate(specs)}


def data_of(inline: Mapping[str, Inline]) -> tuple[bytes, ...]:
    """Return the bytes of inline tensors, in file order."""
    return tuple(inline[name][1] for name in sorted(inline))


@dataclass(frozen=True, slots=True)
class _Tail:
    """What follows the first records of a file.

    Attributes:
        slots: Where the tensors' bytes go.
        literals: Other bytes before the directory.
        rows: The rest of the directory, with its end.
        patches: (position in the directory, slot) of each slot's CRC-32.
        end: First byte of the directory.
    """

    slots: tuple[Slot, ...]
    literals: tuple[Literal, ...]
    rows: bytes
    patches: tuple[tuple[int, int], ...]
    end: int


class Around:
    """Lay out files around their pickles.

    Files whose storages have the same sizes and places share everything after the pickle, as do most ranks of
    a mesh.
    """

    def __init__(self) -> None:
        self._tails: dict[tuple[Any, ...], _Tail] = {}

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
        """Lay out a file.

        Args:
            path: Path of the file below the root of the output.
            pickled: Bytes of data.pkl.
            tensors: See `FileLayout`.
            sizes: Bytes of each tensor's slot.
            inline: Storages after the slots.
            commit: See `FileLayout`.
        """
        literals, rows, offset = [], b"", 0
        for name, data in (("data.pkl", pickled), ("byteorder", b"little")):
            body, row = write.small_record(f"archive/{name}", offset, data)
            literals.append(Literal(offset, body))
            rows += row
            offset += len(body)
        key = offset, len(rows), sizes, inline
        if key not in self._tails:
            while len(self._tails) >= _KEPT:
                del self._tails[next(iter(self._tails))]
            self._tails[key] = _tail(offset, len(rows), sizes, inline)
        tail = self._tails[key]
        directory = Literal(tail.end, rows + tail.rows, tail.patches)
        end = directory.start + len(directory.data)
        return FileLayout(path, end, tensors, tail.slots, (*literals, *tail.literals, directory), commit)


def _tail(offset: int, before: int, sizes: Sequence[int], inline: Sequence[bytes]) -> _Tail:
    """Lay out storages, version and directory, after ``before`` bytes of it for the two records before."""
    literals: list[Literal] = []
    slots: list[Slot] = []
    patches: list[tuple[int, int]] = []
    rows = bytearray()
    for n, nbytes in enumerate(sizes):
        name = f"archive/data/{n}"
        head = write.local_header(name, offset)
        # The CRC-32 of a record is at byte 16 of its directory entry, and at byte 4 of its descriptor.
        patches.append((before + len(rows) + 16, n))
        rows += write.central_entry(name, offset, 0, nbytes)
        literals.append(Literal(offset, head))
        slots.append(Slot(n, offset + len(head)))
        offset += len(head) + nbytes
        tail = write.descriptor(0, nbytes)
        literals.append(Literal(offset, tail, ((4, n),)))
        offset += len(tail)
    last_records = [*((f"data/{n}", data) for n, data in enumerate(inline, len(sizes))), ("version", b"3\n")]
    for name, data in last_records:
        body, row = write.small_record(f"archive/{name}", offset, data)
        literals.append(Literal(offset, body))
        rows += row
        offset += len(body)
    rows += write.end_records(2 + len(sizes) + len(last_records), offset, before + len(rows))
    return _Tail(tuple(slots), tuple(literals), bytes(rows), tuple(patches), offset)


def arrays_as_tensors(value: Any, inline: dict[str, Inline]) -> Any:
    """Return the tree with a tensor in place of every numpy array, and put their bytes into ``inline``.

    ``torch.load(weights_only=True)`` does not support numpy. An array of text becomes nested lists.
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
        name = f"\0{len(inline)}"  # no tensor has such a name
        inline[name] = TensorSpec(name, dtype.name, array.shape), array.tobytes()
        return TensorRef(name)
    if isinstance(value, dict):
        return type(value)((k, arrays_as_tensors(v, inline)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)([arrays_as_tensors(v, inline) for v in value])
    return value
