"""Read the items of a DCP folder that hold a tensor of a class, such as torchao's: the tensors that it wraps.

DCP saves such a tensor as one that it shows itself as: its metadata has that dtype and shape, and an item is
what `torch.save` writes of the tensor. Each shard wraps shards of the inner tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Blob, Item, TensorSpec, Unread
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import meter, passing
from ckptcore.core.object_tree import Named, RefusedTensor, encode
from ckptcore.encodings.limits import expands, refused_in
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.pickle.wrapped_tensors import CLASS, WRAPPED_TABLE, WrappedTensor
from ckptcore.encodings.torchzip.reader import Objects, check_view, read_objects
from ckptcore.errors import CkptError, finding
from ckptcore.formats.common.torchao_tensors import inner_box
from ckptcore.store import Readable
from ckptcore.store.subfolder import FileRange

_KEPT = 4096  # bytes that a shard's description takes
_LOCAL = "_shape"  # the attribute of OptimState4bit that is the shape of the shard


@dataclass(frozen=True, slots=True)
class _Shard:
    """One item. box: in the outer tensor. file, start: where it is. objects: what is in it."""

    box: Box
    file: int
    start: int
    objects: Objects


@dataclass(frozen=True, slots=True)
class _Part:
    """An inner tensor of all shards. boxes: of each shard."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class WrappedTensors:
    """Collect the tensors of classes of one checkpoint, over all of its metadata files.

    Attributes:
        inner: Name of a tensor that was read -> that of the tensor that wraps it.
    """

    def __init__(self, builder: Builder, store: Readable) -> None:
        self._builder, self._store = builder, store
        self._shards: dict[int, list[_Shard]] = {}
        self._damaged: set[int] = set()
        self.inner: dict[str, str] = {}

    def add(self, tensor: int, box: Box, place: tuple[int, int, int]) -> bool:
        """Open an item, and return whether it holds a tensor of a class.

        Args:
            tensor: Number of the tensor in the builder.
            box: Of the chunk.
            place: File, first byte and bytes of the item.
        """
        (file, start, length), spec = place, self._builder.tensors[tensor]
        path, size = self._files[file]
        value: Any = None
        if start + length <= (size or 0):
            try:
                with passing():
                    content = FileRange(self._store, path, start, length)
                    objects = read_objects(content, f"{spec.fqn} in {path}", WRAPPED_TABLE)
                    value = objects.tree
            except CkptError:
                value = None  # any other content is damage, or hostile
        if isinstance(value, WrappedTensor):
            meter().keep(_KEPT, path)
            self._shards.setdefault(tensor, []).append(_Shard(box, file, start, objects))
            return True
        if isinstance(value, RefusedTensor):
            kind = value.reason or value.name
            self._builder.withdraw(
                spec.fqn, Unread(f"its item in {path} is {kind}", spec.dtype, spec.shape, path)
            )
        return False

    @cached_property
    def _files(self) -> list[tuple[str, int | None]]:
        """Path and size of each file: all are known when the first item is opened."""
        return list(zip(self._builder.file_names(), self._builder.file_sizes(), strict=True))

    def keep_as_described(self, tensor: int) -> None:
        """Leave a tensor as its metadata describes it: not all of its items hold tensors of a class."""
        self._damaged.add(tensor)

    @property
    def tensors(self) -> list[int]:
        """The numbers of the tensors that wrap others."""
        return list(self._shards)

    def finish(self) -> None:
        """Add what the tensors wrap, each in the place of one that shows itself as another."""
        names = {spec.fqn for spec in self._builder.tensors}
        for tensor, shards in self._shards.items():
            spec = self._builder.tensors[tensor]
            if tensor in self._damaged:
                continue  # an item of it is damaged, which `check` reports
            parts = _join_shards(spec, shards)
            if parts is None or any(f"{spec.fqn}.{name}" in names for name in (*parts, CLASS)):
                kind = shards[0].objects.tree[CLASS]["class"]
                why = f"its shards of class {kind} wrap tensors that cannot be joined"
                path = self._files[shards[0].file][0]
                self._builder.withdraw(spec.fqn, Unread(why, spec.dtype, spec.shape, path))
            else:
                self._builder.withdraw(spec.fqn, None)
                self._add(spec, shards, parts)

    def _add(self, spec: TensorSpec, shards: list[_Shard], parts: Mapping[str, _Part]) -> None:
        builder = self._builder
        path = self._files[shards[0].file][0]
        for name, part in parts.items():
            inner = f"{spec.fqn}.{name}"
            self.inner[inner] = spec.fqn
            number = builder.tensor(TensorSpec(inner, part.dtype, part.shape), path)
            for shard, box in zip(shards, part.boxes, strict=True):
                value = shard.objects.tree[name]
                start, length, crc = shard.objects.storages[value.key]
                item = builder.item(Item(shard.file, shard.start + start, length, crc32=crc))
                view = check_view(value, length, 0, f"{inner} in {path}", shard.objects.swapped)
                builder.chunk(number, box.offset, box.shape, item, view)
        tree = shards[0].objects.tree
        description = {key: value for key, value in tree[CLASS].items() if key != _LOCAL}
        description["shape"] = Named("size", spec.shape)
        self.inner[f"{spec.fqn}.{CLASS}"] = spec.fqn
        builder.blobs.append(Blob(f"{spec.fqn}.{CLASS}", -1, encode(description)))
        for name, value in tree.items():
            if name not in parts and name != CLASS:
                self._leave_out(f"{spec.fqn}.{name}", value)

    def _leave_out(self, name: str, value: Any) -> None:
        """Report an attribute of a class that is not on the allow-list."""
        classes = refused_in(value)
        message = f"object {name} needs {', '.join(classes)}"
        self._builder.findings.append(finding("refused-global", "files", message, fqn=name))
        self._builder.blobs.append(Blob(name, -1, None, classes, known=False))


def _join_shards(spec: TensorSpec, shards: list[_Shard]) -> dict[str, _Part] | None:
    """Return the inner tensors of all shards; None where they do not fit together."""
    first, description = shards[0].objects.tree, shards[0].objects.tree[CLASS]
    names = [name for name, value in first.items() if isinstance(value, StoredView)]
    local = {"shape", _LOCAL}
    parts: dict[str, _Part] = {}
    for shard in shards:
        tree = shard.objects.tree
        same = all(tree[CLASS].get(key) == value for key, value in description.items() if key not in local)
        if tree.keys() != first.keys() or not same or tree[CLASS]["shape"].value != shard.box.shape:
            return None
    for name in names:
        boxes, wholes = [], set()
        for shard in shards:
            value = shard.objects.tree[name]
            inner = _box(description["class"], name, value, shard, spec.shape)
            if inner is None:
                return None
            boxes.append(inner[0])
            wholes.add((value.dtype, inner[1]))
        if len(wholes) > 1:
            return None
        ((dtype, shape),) = wholes
        parts[name] = _Part(dtype, shape, tuple(boxes))
    return parts


def _box(
    kind: str, name: str, value: Any, shard: _Shard, outer: tuple[int, ...]
) -> tuple[Box, tuple[int, ...]] | None:
    """Return the box of a shard's inner tensor and the shape of the whole; None where it has none."""
    storage = shard.objects.storages.get(value.key) if isinstance(value, StoredView) else None
    if storage is None or storage[1] != value.storage_bytes:
        return None
    if expands(prod(value.shape) * BY_NAME[value.dtype].itemsize, storage[1]):
        return None
    return inner_box(kind, name, value.shape, shard.box, outer)
