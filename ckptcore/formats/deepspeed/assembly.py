"""Put the tensors of many rank files into one manifest.

Several ranks hold the same elements (replicated parameters, tied stages): every copy becomes a chunk, and
copies are compared while they are moved. A rank's run of elements becomes boxes of the tensor. A job of
hundreds of ranks has a million of them: chunks are kept by the builder alone, and layers of one shape are cut
once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptcore.core.box import Box, flat_start, from_flat_range, is_run
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec, Unread, View, row_major
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import Named, Refused, RefusedTensor, encode
from ckptcore.encodings.pickle.torch_globals import StoredView, storages_in
from ckptcore.errors import MalformedCheckpoint
from ckptcore.formats.common.shard_pieces import ShardPlacement, same
from ckptcore.formats.common.trees import holds_tensor, kind_of
from ckptcore.formats.deepspeed.rank_files import StatesFile
from ckptcore.formats.torch_save.tree import TorchTree, add_object, add_odd_piece

_CRC_BYTES = 4  # as many have one CRC-32 as values
_MAX_CUTS = 1 << 22  # pieces of a copy, each compared with every chunk that is there


_MAX_CUT_SHAPES = 1 << 16  # shards whose cut is remembered


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of one file."""

    file: StatesFile
    value: StoredView


@dataclass(frozen=True, slots=True)
class PlacedBuffer:
    """A tensor of one file whose bytes are an item of the manifest.

    Attributes:
        path: Of the file.
        value: The tensor.
        item: Number of the item.
        view: Of the tensor in the item.
    """

    path: str
    value: StoredView
    item: int
    view: View

    @property
    def dtype(self) -> str:
        """Dtype of its elements."""
        return self.value.dtype


@dataclass(frozen=True, slots=True)
class _Cut:
    """A box of a run: in the tensor, and its first element behind the run's."""

    box: Box
    offset_in_run: int
    strides: tuple[int, ...] | None


class Assembly:
    """Collects tensors and objects of a checkpoint under their names."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self._tensors: dict[str, int] = {}
        self._trees: dict[str, TorchTree] = {}
        self._objects: dict[str, tuple[Any, str]] = {}
        self._rows: dict[str, array[int]] = {}  # tensor -> its chunks, by their row in the builder
        self._cuts: dict[tuple[tuple[int, ...], int, int, ShardPlacement], tuple[_Cut, ...]] = {}
        self._refused: dict[str, dict[str, Any]] = {}  # path -> name -> what was refused
        self._left_out: dict[str, set[str]] = {}  # path -> storages of values in the place of tensors
        self._odd: set[tuple[str, int]] = set()
        self._below: dict[str, list[str]] = {}  # name without its last part -> tensors

    def tree(self, file: StatesFile) -> TorchTree:
        """Return the tree of a file, whose storages become items of the manifest once."""
        if file.path not in self._trees:
            index = self.builder.file(file.path, file.size)
            self._trees[file.path] = TorchTree(self.builder, index, file.objects, file.path)
        return self._trees[file.path]

    def tensor(self, name: str, stored: FileTensor, placement: ShardPlacement | None = None) -> None:
        """Add one file's copy or shard of a tensor, whatever its strides are.

        Copies are compared box by box: where the tensor has chunks already, this one is cut like them.
        """
        value = stored.value
        placement = same(value.shape) if placement is None else placement
        # A shard that does not fit is still noted: its bytes are read by
        # nobody, but belong to a file of the save.
        if not self._can_place(name, stored.file.path, value.dtype, value.shape, placement):
            self.place(stored, name)
            return
        item, view = self.tree(stored.file).place(value, name)
        steps = view.strides if view.strides is not None else row_major(value.shape)
        width = BY_NAME[value.dtype].itemsize
        before = list(dict.fromkeys(self._boxes(name))) if value.shape else []
        # Each piece is compared with each chunk: a crafted file with a
        # thousand times a thousand would take hours.
        if len(before) * len(placement.pieces) > _MAX_CUTS:
            raise MalformedCheckpoint(
                f"{stored.file.path}: {name} is cut into too many pieces", file=stored.file.path
            )
        for piece in placement.pieces:
            for box in _cut_like(Box(piece.offset, piece.local.shape), before):
                inside = box.within(Box(piece.offset, piece.local.shape)).offset
                index = (i + o for i, o in zip(inside, piece.local.offset, strict=True))
                first_element = sum(i * s for i, s in zip(index, steps, strict=True))
                # A box that is one run needs no strides; most boxes are, and a chunk without a view costs
                # less.
                plain = view.strides is None and is_run(value.shape, box.shape)
                place = View(view.start + first_element * width, None if plain else steps, view.flags)
                self._chunk(name, box, item, place)

    def fits(self, name: str, dtype: str, placement: ShardPlacement) -> bool:
        """Return whether a copy of a tensor that is there can be cut like the chunks that it has."""
        number = self._tensors.get(name, -1)
        if number < 0 or self.builder.tensors[number] != TensorSpec(name, dtype, placement.shape):
            return False
        pieces = [Box(p.offset, p.local.shape) for p in placement.pieces]
        boxes = list(self._boxes(name))
        return len(pieces) * len(boxes) <= _MAX_CUTS and all(
            any(p.contains(b) for p in pieces) or not any(p.intersect(b) for p in pieces) for b in boxes
        )

    def place(self, stored: FileTensor, name: str) -> PlacedBuffer:
        """Note a buffer that is known, though no element of it may be part of a tensor."""
        item, view = self.tree(stored.file).place(stored.value, name)
        return PlacedBuffer(stored.file.path, stored.value, item, view)

    def scalars(self, names: Iterable[str], stored: Sequence[FileTensor]) -> None:
        """Add tensors of rank 0 that all have the values of one element, of which ranks have copies.

        Four bytes with one CRC-32 are equal: then one tensor has every copy, so that each is verified, and
        the others have the first.
        """
        placed = [self.place(tensor, "a scalar") for tensor in stored]
        sums = {self.builder.item_crc32(p.item) for p in placed}
        complete = all(p.value.storage_bytes <= _CRC_BYTES and p.value.shape == () for p in placed)
        same_form = len({(p.dtype, p.view, p.value.storage_bytes) for p in placed}) == 1
        # Without checksums, or with more bytes than a CRC-32 tells apart, every name has all copies.
        equal = complete and same_form and len(sums) == 1 and None not in sums
        for place, name in enumerate(names):
            for tensor in stored[:1] if equal and place else stored:
                self.tensor(name, tensor)

    def run(
        self,
        name: str,
        buffer: PlacedBuffer,
        buffer_start: int,
        shape: tuple[int, ...],
        start: int,
        stop: int,
        placement: ShardPlacement,
    ) -> None:
        """Add a run of a shard's row-major elements.

        Args:
            name: Of the tensor.
            buffer: The flat one that holds the run.
            buffer_start: The first of its elements in that buffer.
            shape: Of the shard.
            start: First element of the shard.
            stop: One behind the last.
            placement: Where the shard is in the tensor.

        Raises:
            MalformedCheckpoint: The buffer is not flat.
        """
        value, view = buffer.value, buffer.view
        if not self._can_place(name, buffer.path, value.dtype, shape, placement):
            return
        # A partition is one flat buffer by ZeRO's own definition; anything else was not written by it.
        if len(value.shape) != 1 or view.strides is not None:
            raise MalformedCheckpoint(
                f"{buffer.path}: the buffer with {name} must be flat (got shape {list(value.shape)})",
                file=buffer.path,
            )
        width = BY_NAME[value.dtype].itemsize
        for cut in self._cut(shape, start, stop, placement):
            first = view.start + (buffer_start + cut.offset_in_run) * width
            self._chunk(name, cut.box, buffer.item, View(first, cut.strides, view.flags))

    def declare(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Add a tensor that has no element, or whose chunks may be missing."""
        self._declare(name, dtype, shape, None)

    def alias(self, name: str, owner: str) -> bool:
        """Add a tensor that shares the bytes of ``owner``; return False where no tensor has that name."""
        if owner not in self._tensors or name in self._tensors:
            return owner in self._tensors
        # Marked, so that a later copy under this name does not become a tensor either.
        if self._tensors[owner] < 0:  # its dtype is not read: neither is the alias
            self._tensors[name] = -1
            self.unread(name, f"it is {owner}, which cannot be read", "")
            return True
        spec = self.builder.tensors[self._tensors[owner]]
        self._declare(name, spec.dtype, spec.shape, None)
        # Lists, because `_chunk` adds to the columns that these iterators read.
        rows, builder = self._rows.get(owner, ()), self.builder
        for row, box in zip(list(rows), list(self._boxes(owner)), strict=True):
            self._chunk(name, box, builder.chunk_item(row), builder.chunk_view(row) or View())
        return True

    def alias_all(self, alias: str, owner: str, prefixes: Sequence[str]) -> None:
        """Add every tensor of an owner, its optimizer states too, under the name of its alias."""
        model, *states = prefixes
        self.alias(model + alias, model + owner)
        for prefix in states:
            for name in list(self._below.get(prefix + owner, ())):
                self.alias(prefix + alias + name.removeprefix(prefix + owner), name)

    def odd(self, name: str, value: Any, path: str) -> None:
        """Add a value that is no tensor where one belongs, as a part that cannot be read."""
        # Its storages are left out once, though many names are without a value because of it.
        if (path, id(value)) not in self._odd:  # one value may be in the place of many tensors
            self._odd.add((path, id(value)))
            self._left_out.setdefault(path, set()).update(storages_in(value, refused=True))
        if isinstance(value, Refused):
            if not isinstance(value, RefusedTensor):
                self._refused.setdefault(path, {})[name] = value
            add_odd_piece(self.builder, name, value, path)
            if isinstance(value, RefusedTensor):
                # Reserved: a copy of another rank must not become the
                # tensor while this one's part is missing.
                self._tensors.setdefault(name, -1)
        else:
            self.builder.withdraw(name, Unread(f"it is a {kind_of(value)} in {path}", file=path))

    def unread(self, name: str, reason: str, path: str) -> None:
        """Add a tensor that cannot be read, whatever of it is there."""
        self.builder.withdraw(name, Unread(reason, file=path))

    def misfit(self, name: str, stored: FileTensor, expected: str, reason: str) -> None:
        """Report a tensor that cannot be read because of its shape, whose bytes belong to the checkpoint."""
        path = stored.file.path
        message = f"{path} has shape {list(stored.value.shape)}, {expected}"
        self.builder.report("item-mismatch", "files", message, fqn=name, file=path)
        self.unread(name, reason, path)
        self.place(stored, name)

    def value(self, name: str, value: Any, file: StatesFile, *, per_file: bool) -> None:
        """Add any value of one file: what holds tensors under a name of that file's (``per_file``) part."""
        if holds_tensor(value, (StoredView, RefusedTensor)):
            self.tree(file).add(f"{name}/{file.path.removesuffix('.pt')}" if per_file else name, value)
        else:
            self.object(name, value, file.path)

    def object(self, name: str, value: Any, path: str) -> None:
        """Add an object; a finding where ranks do not agree on it."""
        value = _as_dict(value)
        if name not in self._objects:
            self._objects[name] = value, path
            if add_object(self.builder, name, value, path):
                self._refused.setdefault(path, {})[name] = value
            return
        first, where = self._objects[name]
        # Values that compare as different, such as NaN with itself, may still have one form in the manifest.
        if first != value and _comparable(first) != _comparable(value):
            message = f"{name} of {path} is not that of {where}"
            self.builder.report("rank-object", "files", message, fqn=name, file=path)

    def has(self, name: str) -> bool:
        """Return whether a tensor of this name was added."""
        return name in self._tensors

    def same_bytes(self, name: str, stored: FileTensor) -> bool:
        """Note a copy of a tensor that is left out; False where its checksum is not that of a chunk."""
        item, view = self.tree(stored.file).place(stored.value, name)
        crc = self.builder.item_crc32(item)
        chunk_sums = [
            (self.builder.item_crc32(self.builder.chunk_item(row)), self.builder.chunk_view(row) or View())
            for row in self._rows.get(name, ())
        ]
        # A checksum that is missing says nothing: only two that differ are a difference.
        return crc is None or not chunk_sums or (crc, view) in chunk_sums

    def add_unused(self, files: Iterable[StatesFile]) -> None:
        """Note what no tensor was made of: storages that only refused values can hold.

        Raises:
            UnsupportedFormat: Nothing in a file refers to tensors that it holds.
        """
        for file in files:
            tree = self.tree(file)
            tree.refused |= self._refused.get(file.path, {})
            # After all names: only then is it known which storages no tensor uses.
            tree.leave_out(self._left_out.get(file.path, ()))
            tree.require_all()

    def _can_place(
        self, name: str, path: str, dtype: str, shape: tuple[int, ...], placement: ShardPlacement
    ) -> bool:
        """Return whether a shard can be added: it has the placed shape, and the tensor the same form."""
        if shape == placement.shard:
            return self._declare(name, dtype, placement.shape, path)
        message = f"{path}: {name} has shape {list(shape)}, in another file it has {list(placement.shard)}"
        self.builder.report("mixed-saves", "coverage", message, fqn=name, file=path)
        self.unread(name, "its files do not agree on its shape", path)
        return False

    def _boxes(self, name: str) -> Iterator[Box]:
        return self.builder.chunk_boxes(self._rows.get(name, ()))

    def _cut(
        self, shape: tuple[int, ...], start: int, stop: int, placement: ShardPlacement
    ) -> tuple[_Cut, ...]:
        """Return the boxes of a run; those of states and layers of the same shape are the same."""
        key = shape, start, stop, placement
        cuts = self._cuts.get(key)
        if cuts is None:
            # Cleared as a unit: which shapes recur is decided by layers in
            # sequence, and recent ones come again soon.
            if len(self._cuts) >= _MAX_CUT_SHAPES:
                self._cuts.clear()
            cuts = self._cuts[key] = tuple(_cut_run(shape, start, stop, placement))
        return cuts

    def _declare(self, name: str, dtype: str, shape: tuple[int, ...], path: str | None) -> bool:
        number = self._tensors.get(name)
        if number is None:
            self._tensors[name] = self.builder.tensor(TensorSpec(name, dtype, shape), path)
            self._below.setdefault(name.rpartition(".")[0], []).append(name)
            return self._tensors[name] >= 0
        if number < 0:
            return False
        first = self.builder.tensors[number]
        if first.dtype != dtype or first.shape != shape:
            message = (
                f"{path}: {name} is {dtype} {list(shape)}, in another rank's file it is {first.dtype} "
                f"{list(first.shape)}"
            )
            self.builder.report("mixed-saves", "coverage", message, fqn=name, file=path)
            return False
        return True

    def _chunk(self, name: str, box: Box, item: int, view: View) -> None:
        # No element, no bytes; a scalar has the shape () and is one.
        if prod(box.shape) == 0 and box.shape:
            return
        self._rows.setdefault(name, array("q")).append(self.builder.chunk_count)
        plain = view.strides is None and not view.flags and not view.start
        self.builder.chunk(self._tensors[name], box.offset, box.shape, item, None if plain else view)


def _cut_run(shape: tuple[int, ...], start: int, stop: int, placement: ShardPlacement) -> Iterator[_Cut]:
    steps = row_major(shape)
    for box in from_flat_range(shape, start, stop):
        for piece in placement.pieces:
            common = box.intersect(piece.local)
            if common is None:
                continue
            offset = tuple(
                g + o - p for g, o, p in zip(piece.offset, common.offset, piece.local.offset, strict=True)
            )
            strides = None if is_run(shape, common.shape) else steps
            yield _Cut(Box(offset, common.shape), flat_start(shape, common.offset) - start, strides)


def _cut_like(box: Box, boxes: Sequence[Box]) -> list[Box]:
    """Cut a box into those of ``boxes`` that are inside it, and what is left."""
    inside = [b for b in boxes if box.contains(b) and b.numel]
    # Equal cuts, the usual case of copies, need no subtraction.
    if not inside or inside == [box]:
        return [box]
    left = [box]
    for part in inside:
        left = [rest for b in left for rest in b.subtract(part)]
    return [*inside, *left]


def _as_dict(value: Any) -> Any:
    """Return an instance of a class of DeepSpeed as the dict of its fields, which every writer can store."""
    if isinstance(value, Named) and value.kind == "record":
        name, fields = value.value
        # The class stays as text beside the fields, as the formats that
        # are written to have no place for a class.
        return {"class": name, **fields}
    return value


def _comparable(value: Any) -> Any:
    try:
        return encode(value)
    except TypeError:
        return repr(value)
