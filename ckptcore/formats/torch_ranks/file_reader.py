"""Read one rank's file: the tensors, shards and objects in its pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from blake3 import blake3

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Item, View
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import Refused, RefusedTensor, encode
from ckptcore.core.tree_paths import Path
from ckptcore.encodings.limits import bound_views
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.pickle.unpickler import Record
from ckptcore.encodings.torchzip.before_zip import BEFORE_ZIP
from ckptcore.encodings.torchzip.reader import check_view, is_torch, read_objects, refused_in
from ckptcore.errors import MalformedCheckpoint, NameMismatch, UnsupportedFormat
from ckptcore.formats.base import Source
from ckptcore.formats.common.optimizer_numbers import Shape
from ckptcore.formats.common.torch_xla import refuse_shards
from ckptcore.formats.common.trees import kind_of, leaves_below
from ckptcore.formats.torch_ranks.optimizer import Params, names_of, numbered
from ckptcore.formats.torch_ranks.placement import DIST_TABLE, DTENSOR, SHARDED, Placed, Placer
from ckptcore.store.subfolder import FileRange, explain

_SMALL = 64 << 10  # plain tensors without a checksum are marked by a hash of their bytes up to this size


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A tensor in the file.

    Attributes:
        box: Its box of the global tensor.
        item: Number of the item with its bytes.
        view: Its place in the item; None for the first bytes, row-major.
    """

    box: Box
    item: int
    view: View | None


@dataclass(frozen=True, slots=True)
class LocalShards:
    """A rank's shards of a distributed tensor.

    Attributes:
        name: FQN.
        path: Path in the rank's tree.
        placed: The tensor with its boxes.
        pieces: The shards.
    """

    name: str
    path: Path
    placed: Placed
    pieces: tuple[LocalShard, ...]


@dataclass(frozen=True, slots=True)
class Plain:
    """A tensor that is not distributed.

    Attributes:
        name: FQN.
        path: Path in the rank's tree.
        dtype: Its dtype.
        shape: Its shape.
        piece: Its place in the file.
        mark: Text that identifies its bytes, or None when that would need a read of many bytes.
    """

    name: str
    path: Path
    dtype: str
    shape: Shape
    piece: LocalShard
    mark: str | None


@dataclass(slots=True)
class Content:
    """What one rank saved.

    Attributes:
        shards: Distributed tensors.
        plain: Other tensors.
        objects: Name -> (digest, value in JSON form, path).
        refused: Name -> (whether all of the value was refused, globals, file).
        unread: Name -> (what it is, path, file), of tensors that are not read.
        hidden: Bytes of tensors that only refused objects can contain.
        params: Parameters of the model.
        numbers: Whether an optimizer's states kept their numbers; None without such an optimizer.
        names: Every name in the file, in order.
    """

    shards: list[LocalShards] = field(default_factory=list)
    plain: list[Plain] = field(default_factory=list)
    objects: dict[str, tuple[str, Any, Path]] = field(default_factory=dict)
    refused: dict[str, tuple[bool, tuple[str, ...], str]] = field(default_factory=dict)
    unread: dict[str, tuple[RefusedTensor, Path, str]] = field(default_factory=dict)
    hidden: int = 0
    params: Params = ()
    numbers: bool | None = None
    names: list[str] = field(default_factory=list)


def read_rank(source: Source, path: str, prefix: str, builder: Builder, params: Params) -> Content:
    """Read a rank's file.

    The only tensor bytes read are those of meshes and of small plain tensors without a checksum.

    Args:
        source: The folder of the file.
        path: Path of the file.
        prefix: First part of all names, "" for none.
        builder: Receives the items of the file, and nothing else.
        params: Parameters of the model, if another file has it.

    Raises:
        MalformedCheckpoint: The file cannot be parsed.
        UnsafeContent: The file names globals that are not permitted.
        NameMismatch: Two values have one name.
        UnsupportedFormat: The file contains no state dict, or a local state dict of FSDP.
    """
    size, store = source.listing[path], source.store
    if not is_torch(store.read(path, 0, min(size, BEFORE_ZIP))):
        raise MalformedCheckpoint(f"{path} ({size} bytes) is not a file of torch.save", file=path)
    file = _File(source, path, builder)
    tree = file.objects.tree
    content = Content()
    if not isinstance(tree, dict):
        if not prefix:
            raise UnsupportedFormat(f"{path} must contain a state dict (got {kind_of(tree)})")
        for name, path_, value in leaves_below(tree, prefix, (StoredView, Record)):
            file.add(content, name, (prefix, *path_), value)
        content.hidden = file.hidden(bool(content.refused or content.unread))
        return content
    refuse_shards(tree, path)
    inside = numbered(tree)
    content.params = _model_parameters(tree, inside.path if inside else None)
    if inside is not None:
        names = names_of(inside.optimizer, params or content.params, _global_shape)
        content.numbers = names is None
        tree = inside.renamed(tree, names) if names is not None else tree
    leaf_names: set[str] = set()
    for name, where, value in _leaves(tree, prefix):
        if name in leaf_names:
            raise NameMismatch(f"{path}: two values have the name {name}")
        leaf_names.add(name)
        file.add(content, name, where, value)
    content.hidden = file.hidden(bool(content.refused or content.unread))
    return content


class _File:
    """A torch zip whose storages become raw items, shared ones once."""

    def __init__(self, source: Source, path: str, builder: Builder) -> None:
        size, self._store = source.listing[path], source.store
        self._path, self._size, self._builder = path, size, builder
        self.objects = read_objects(FileRange(source.store, path, 0, size), path, DIST_TABLE)
        self._file = builder.file(path, size)
        self._items: dict[str, int] = {}
        self._unread: set[str] = set()  # storages of tensors that are not read
        self._bytes = 0
        self._placer = Placer(self._integers, path, size)

    def add(self, content: Content, name: str, path: Path, value: Any) -> None:
        """Add one value of the tree to the content."""
        content.names.append(name)
        if isinstance(value, Record) and value.kind in (DTENSOR, SHARDED):
            if value.kind == SHARDED and name.endswith("flat_param"):
                raise _flat_refusal(self._path, name)
            placed = self._placer.place(value, name)
            if isinstance(placed, Placed):
                pieces = tuple(self._piece(view, box, name) for view, box in placed.pieces)
                content.shards.append(LocalShards(name, path, placed, pieces))
                return
            value = placed
        if isinstance(value, StoredView):
            piece = self._piece(value, Box.full(value.shape), name)
            mark = self._mark(value, piece)
            content.plain.append(Plain(name, path, value.dtype, value.shape, piece, mark))
        elif isinstance(value, RefusedTensor):
            self._unread.update(value.storages)
            content.unread[name] = value, path, self._path
        elif isinstance(value, Record):  # a mesh or a placement outside of a tensor
            content.refused[name] = False, (value.kind,), self._path
        elif refused := refused_in(value):
            content.refused[name] = isinstance(value, Refused), refused, self._path
        else:
            try:
                tree = encode(value)
            except (TypeError, RecursionError) as error:
                raise MalformedCheckpoint(f"{self._path}: object {name}: {error}") from error
            content.objects[name] = blake3(json.dumps(tree).encode()).hexdigest(), tree, path

    def hidden(self, has_refused: bool) -> int:
        """Return the bytes of unused storages, which refused values may contain; 0 if there are none."""
        for key in self._placer.meshes & self.objects.storages.keys():
            start, length, _ = self.objects.storages[key]
            explain(self._store, self._path, start, start + length)
        used_keys = self._items.keys() | self._placer.meshes | self._placer.storages | self._unread
        left = sum(n for key, (_, n, _) in self.objects.storages.items() if key not in used_keys)
        bound_views(self._bytes, self._size, self._path)
        return left if has_refused else 0

    def _piece(self, value: StoredView, box: Box, name: str) -> LocalShard:
        if value.key not in self.objects.storages:
            raise MalformedCheckpoint(f"{self._path} has no storage {value.key!r} for {name}")
        start, length, crc = self.objects.storages[value.key]
        if value.key not in self._items:
            self._items[value.key] = self._builder.item(Item(self._file, start, length, crc32=crc))
        view = check_view(value, length, 0, self._path, self.objects.swapped)
        self._bytes += _nbytes(value)
        # A trivial view would cost more memory than the chunk itself.
        return LocalShard(box, self._items[value.key], None if view == View() else view)

    def _mark(self, value: StoredView, piece: LocalShard) -> str | None:
        start, length, crc = self.objects.storages[value.key]
        nbytes, view = _nbytes(value), piece.view or View()
        if not nbytes:
            return "empty"
        if view.strides is not None or view.flags:
            return None
        if view.start == 0 and nbytes == length and crc is not None:
            return f"crc {crc}"
        if nbytes > _SMALL:
            return None
        return blake3(self._store.read(self._path, start + view.start, nbytes)).hexdigest()

    def _integers(self, value: StoredView) -> tuple[int, ...]:
        """Return the elements of a small integer tensor."""
        if value.key not in self.objects.storages or BY_NAME[value.dtype].kind != "i":
            raise ValueError(f"ranks as {value.dtype}")
        start, length, _ = self.objects.storages[value.key]
        view = check_view(value, length, 0, self._path, self.objects.swapped)
        if view.strides is not None:
            raise ValueError("a mesh that is not contiguous")
        raw = self._store.read(self._path, start + view.start, _nbytes(value))
        order = ">" if self.objects.swapped else "<"
        return tuple(np.frombuffer(raw, f"{order}i{BY_NAME[value.dtype].itemsize}").tolist())


def _leaves(tree: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Path, Any]]:
    for key, top in tree.items():
        name, first = (f"{prefix}.{key}", (prefix, str(key))) if prefix else (str(key), (str(key),))
        for leaf, path, value in leaves_below(top, name, (StoredView, Record)):
            yield leaf, (*first, *path), value


def _model_parameters(tree: dict[Any, Any], optimizer: tuple[Any, ...] | None) -> Params:
    """Return the model's parameters in their order, tied ones once.

    Distributed tensors are parameters, and plain tensors beside them are buffers. In a state dict of plain
    tensors alone, every tensor may be a parameter.

    Args:
        tree: Content of the file.
        optimizer: Path of the optimizer in the tree, None without one.
    """
    if optimizer == ():
        return ()
    rows: list[tuple[str, Shape, bool]] = []
    storages: set[Any] = set()
    for key, top in tree.items():
        if optimizer is not None and key == optimizer[0]:
            continue
        for name, path, value in leaves_below(top, str(key), (StoredView, Record)):
            shape, storage = _global_shape(value), _tie_key(value)
            if shape is not None and storage not in storages:
                storages.add(storage)
                # The optimizer uses the names of the model's own dict.
                rows.append((".".join(map(str, path)) or name, shape, isinstance(value, Record)))
    some = any(distributed for *_, distributed in rows)
    return tuple((name, shape) for name, shape, distributed in rows if distributed or not some)


def _global_shape(value: Any) -> Shape | None:
    """Return the global shape of a tensor, None for any other value."""
    if isinstance(value, StoredView):
        return value.shape
    if isinstance(value, Record) and value.kind in (DTENSOR, SHARDED) and len(value.args) > 2:
        size = value.args[2]
        return tuple(size) if type(size) is tuple else tuple(getattr(size, "value", ()))
    return None


def _tie_key(value: Any) -> Any:
    """Return a key that is equal for two names of one tensor."""
    if isinstance(value, Record) and value.kind == DTENSOR:
        parts = value.state if type(value.state) is tuple else (value.state,)
        value = next(
            (p["_local_tensor"] for p in parts if isinstance(p, dict) and "_local_tensor" in p), value
        )
    return (value.key, value.offset, value.shape) if isinstance(value, StoredView) else id(value)


def _nbytes(value: StoredView) -> int:
    return BY_NAME[value.dtype].itemsize * prod(value.shape)


def _flat_refusal(path: str, name: str) -> UnsupportedFormat:
    return UnsupportedFormat(
        f"cannot read {path}, a local state dict of FSDP: {name} is this rank's part of a module's flattened "
        "parameters, and the file does not record their names, shapes and alignment",
        hint="save a sharded or a full state dict, or save through torch.distributed.checkpoint",
        format="fsdp-local",
    )
