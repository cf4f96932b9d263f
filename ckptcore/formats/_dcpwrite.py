"""Laying out DCP folders: which items go where in which `.distcp` file, and what tells of them?

An item is a torch zip of one tensor or of one object, as `torch.distributed.checkpoint`'s
FileSystemWriter puts them back to back into ``__R_I.distcp``: objects first, then tensors. Item
payloads are aligned relative to the item, and their CRC-32 is filled in when they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptcore.formats import _torchwrite as write
from ckptcore.formats._metadatawrite import Path, Place, StoredTensor, metadata_pickle
from ckptcore.formats._trees import leaves_below
from ckptcore.formats.base import Arrangement, FileLayout, Literal, Slot, natural
from ckptcore.manifest import TensorSpec
from ckptcore.objects import TensorRef, decode

METADATA = ".metadata"


def arrange_folder(
    request: Arrangement,
    *,
    folder: str = "",
    paths: bool = True,
    wrap: Callable[[str, Any], Any] = lambda key, value: value,
    commit: bool = True,
) -> tuple[FileLayout, ...]:
    """The files of a DCP folder that one rank saved.

    folder: where it lies below the output's root. paths: whether `.metadata` tells each name's
    place in the saved tree. wrap: what is stored for the object of a key. commit: whether
    `.metadata` is what makes the output whole.
    """
    order = sorted(range(len(request.tensors)), key=lambda i: natural(request.tensors[i].fqn))
    objects, places_in_tree = _objects(request)
    files = Files(request, f"{folder}/" if folder else "")
    for key, value in objects.items():
        files.object(key, wrap(key, value))
    for i in order:
        files.tensor(i)
    layouts = files.finish()
    told = metadata_pickle(
        [stored(request.tensors[i], files.tensors[i]) for i in order], files.objects,
        {**request.paths, **places_in_tree} if paths else None,
    )  # fmt: skip
    name = f"{folder}/{METADATA}" if folder else METADATA
    return (*layouts, FileLayout(name, len(told), (), (), (Literal(0, told),), commit))


def object_zip(value: Any) -> bytes:
    """What `torch.save` writes for an object without tensors."""
    pickled = write.Pickled(_no_tensor)
    pickled.value(value)
    records = (("data.pkl", pickled.finish()), ("byteorder", b"little"), ("version", b"3\n"))
    body, rows = bytearray(), bytearray()
    for name, data in records:
        record, row = write.small_record(f"archive/{name}", len(body), data)
        body += record
        rows += row
    return bytes(body + rows + write.end_records(len(records), len(body), len(rows)))


def tensor_zip(spec: TensorSpec) -> tuple[bytes, bytes, tuple[int, int]]:
    """What `torch.save` writes around a contiguous tensor's bytes.

    Gives (what stands before them, what follows, positions in the latter of the payload's CRC-32).
    """
    pickled = write.Pickled(lambda _: ("0", spec))
    pickled.value(TensorRef(spec.fqn))
    head, rows = bytearray(), bytearray()
    for name, data in (("data.pkl", pickled.finish()), ("byteorder", b"little")):
        record, row = write.small_record(f"archive/{name}", len(head), data)
        head += record
        rows += row
    payload_row = write.central_entry("archive/data/0", len(head), 0, spec.nbytes)
    head += write.local_header("archive/data/0", len(head))
    at = len(head) + spec.nbytes
    tail = bytearray(write.descriptor(0, spec.nbytes))
    version, version_row = write.small_record("archive/version", at + len(tail), b"3\n")
    tail += version
    directory_at, crc_row = at + len(tail), len(tail) + len(rows) + 16
    rows += payload_row + version_row
    tail += rows + write.end_records(4, directory_at, len(rows))
    return bytes(head), bytes(tail), (4, crc_row)


class Files:
    """Fills `__0_I.distcp` files one after the other."""

    def __init__(self, request: Arrangement, prefix: str) -> None:
        self._request, self._prefix = request, prefix
        self._layouts: list[FileLayout] = []
        self.objects: dict[str, Place] = {}
        self.tensors: dict[int, Place] = {}
        self._at = self._held = 0
        self._begin()

    def object(self, key: str, value: Any) -> None:
        data = object_zip(value)
        self.objects[key] = self._place(len(data))
        self._literals.append(Literal(self._at, data))
        self._at += len(data)

    def whole(self, key: str, layout: FileLayout) -> None:
        """An object with its tensors inside: a torch file of its own, as one item."""
        if set(layout.tensors) & set(self._tensors):  # a tensor has one place in a file
            self._end()
        self.objects[key] = self._place(layout.nbytes)
        n = len(self._tensors)
        self._tensors += layout.tensors
        self._slots += [Slot(slot.tensor + n, slot.start + self._at) for slot in layout.slots]
        for one in layout.literals:
            patches = tuple((at, slot + n) for at, slot in one.crc_at)
            self._literals.append(Literal(one.start + self._at, one.data, patches))
        self._at += layout.nbytes

    def tensor(self, index: int) -> None:
        spec = self._request.tensors[index]
        if self._held and self._held + spec.nbytes > self._request.max_file_bytes:
            self._end()
        head, tail, crc_at = tensor_zip(spec)
        self.tensors[index] = self._place(len(head) + spec.nbytes + len(tail))
        n = len(self._tensors)
        self._tensors.append(index)
        self._literals.append(Literal(self._at, head))
        self._slots.append(Slot(n, self._at + len(head)))
        end = self._at + len(head) + spec.nbytes
        self._literals.append(Literal(end, tail, tuple((at, n) for at in crc_at)))
        self._at = end + len(tail)
        self._held += spec.nbytes

    def finish(self) -> list[FileLayout]:
        if self._literals or not self._layouts:
            self._end()
        return self._layouts

    def _place(self, length: int) -> Place:
        return Place(self._name(), self._at, length)

    def _name(self) -> str:
        return f"__0_{len(self._layouts)}.distcp"

    def _begin(self) -> None:
        self._at = self._held = 0
        self._tensors: list[int] = []
        self._slots: list[Slot] = []
        self._literals: list[Literal] = []

    def _end(self) -> None:
        self._layouts.append(
            FileLayout(self._prefix + self._name(), self._at, tuple(self._tensors), tuple(self._slots),
                       tuple(self._literals))
        )  # fmt: skip
        self._begin()


def _objects(request: Arrangement) -> tuple[dict[str, Any], dict[str, Path]]:
    """Objects to store by name; one with tensors inside is taken apart into its leaves."""
    found: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    for key in sorted(request.objects, key=natural):
        base = request.paths.get(key, (key,))
        for name, inner, leaf in leaves_below(decode(request.objects[key]), key, TensorRef):
            if inner:
                paths[name] = (*base, *inner)
            if not isinstance(leaf, TensorRef):
                found[name] = leaf
    return found, paths


def stored(spec: TensorSpec, place: Place) -> StoredTensor:
    """What `.metadata` tells of a tensor that is one chunk."""
    return StoredTensor(spec.fqn, spec.dtype, spec.shape, [((0,) * len(spec.shape), spec.shape, place)])


def _no_tensor(fqn: str) -> tuple[str, TensorSpec]:
    raise TypeError(f"an object refers to the tensor {fqn}")
