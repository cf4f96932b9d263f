"""Read the items of a DCP folder that hold a tensor of a class, such as torchao's: the tensors that it wraps.

DCP saves such a tensor as one that it shows itself as: its metadata has that dtype and shape, and an item is
what `torch.save` writes of the tensor. Each shard wraps shards of the inner tensors.

The layouts are those of torchao 0.18: torchao/optim/subclass_8bit.py, subclass_4bit.py and subclass_fp8.py;
torchao/quantization/quantize_/workflows/int8/int8_tensor.py, float8/float8_tensor.py and
intx/intx_unpacked_to_int8_tensor.py. A tensor X of another class, and each with ``--keep-quantized``, is read
as its inner tensors, ``X.codes`` and the like, with the object ``X.tensor_class``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from ckptcore.core.box import Box
from ckptcore.core.dequantize import FUNCTIONS
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Blob, Item, Manifest, TensorSpec, Unread
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import meter, passing
from ckptcore.core.object_tree import Named, RefusedTensor, decode, encode
from ckptcore.core.subset import derive
from ckptcore.core.tree_paths import Paths
from ckptcore.encodings.limits import expands, refused_in
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.pickle.wrapped_tensors import (
    CLASS,
    WRAPPED_TABLE,
    WrappedTensor,
    described,
    plain_sizes,
)
from ckptcore.encodings.torchzip.reader import Objects, check_view, read_objects
from ckptcore.errors import CkptError
from ckptcore.store import Readable
from ckptcore.store.subfolder import FileRange

Shape = tuple[int, ...]
_Made = tuple[TensorSpec, str, tuple[str, ...], Shape]  # tensor, function, inputs, params
# How an inner tensor of a shard belongs to that of the whole: it has the shard's own box, one element per
# block of it, one per run of its elements, or it is the same on all ranks.
_BOX, _BLOCKS, _RUNS, _SAME = "box", "blocks", "runs", "same"
_KEPT = 4096  # bytes that a shard's description takes
_LOCAL = "_shape"  # the attribute of OptimState4bit that is the shape of the shard


@dataclass(frozen=True, slots=True)
class _Layout:
    """A class of tensors.

    Attributes:
        parts: Inner tensor -> how those of shards are joined.
        functions: Inner tensors that its values are computed from -> function of `ckptcore.core.dequantize`,
            of which the attribute ``block_size`` is the parameter.
    """

    parts: Mapping[str, str]
    functions: Mapping[tuple[str, ...], str]


_STATE = {"codes": _BOX, "scale": _RUNS, "qmap": _SAME}
_WEIGHT = {"qdata": _BOX, "scale": _BLOCKS, "zero_point": _BLOCKS}
_OF_WEIGHT = {("qdata", "scale", "zero_point"): "affine_block", ("qdata", "scale"): "fp8_block"}
_LAYOUTS: Mapping[str, _Layout] = {
    "OptimState8bit": _Layout(_STATE, {("codes", "scale", "qmap"): "flat_mapped"}),
    "OptimState4bit": _Layout({**_STATE, "codes": _RUNS}, {("codes", "scale", "qmap"): "flat_mapped_4bit"}),
    "OptimStateFp8": _Layout(_STATE, {("codes", "scale"): "flat_scaled"}),
    "Int8Tensor": _Layout(_WEIGHT, _OF_WEIGHT),
    "IntxUnpackedToInt8Tensor": _Layout(_WEIGHT, _OF_WEIGHT),
    "Float8Tensor": _Layout(_WEIGHT, _OF_WEIGHT),
}


def inner_box(kind: str, part: str, shape: Shape, box: Box, outer: Shape) -> tuple[Box, Shape] | None:
    """Return the box of a shard's inner tensor, and the shape of the whole one; None where nothing says it.

    Args:
        kind: The class of the outer tensor.
        part: Name of the inner one.
        shape: Its shape in the shard.
        box: The shard's box of the outer tensor.
        outer: Shape of the outer tensor.
    """
    if box.shape == outer:
        return Box((0,) * len(shape), shape), shape
    layout = _LAYOUTS.get(kind.rpartition(".")[2])
    joining = layout.parts.get(part) if layout is not None else None
    if joining == _BOX and shape == box.shape:
        return box, outer
    if joining == _SAME:
        return Box((0,) * len(shape), shape), shape
    if joining == _BLOCKS and len(shape) == len(outer) and 0 not in shape:
        steps = [n // m if n % m == 0 else 0 for n, m in zip(box.shape, shape, strict=True)]
        if all(s and o % s == 0 and n % s == 0 for s, o, n in zip(steps, box.offset, outer, strict=True)):
            offset = tuple(o // s for o, s in zip(box.offset, steps, strict=True))
            return Box(offset, shape), tuple(n // s for n, s in zip(outer, steps, strict=True))
    # Rows of dim 0 follow each other in memory.
    if joining == _RUNS and len(shape) == 1 and shape[0] and box.shape[1:] == outer[1:]:
        step, left = divmod(box.numel, shape[0])
        start = box.offset[0] * box.numel // max(box.shape[0], 1)
        total = outer[0] * box.numel // max(box.shape[0], 1)
        if not left and start % step == 0 and total % step == 0:
            return Box((start // step,), shape), (total // step,)
    return None


def with_values(manifest: Manifest) -> Manifest:
    """Return the manifest with the values of torchao's tensors, as float32, in place of what they wrap."""
    class_blobs = [blob for blob in manifest.blobs if blob.known and blob.key.endswith(f".{CLASS}")]
    if not class_blobs or manifest.inputs is not None:
        return manifest
    inner: dict[str, list[TensorSpec]] = {}
    for spec in manifest.tensors:
        inner.setdefault(spec.fqn.rpartition(".")[0], []).append(spec)
    names = {blob.key for blob in manifest.blobs} | manifest.index.keys()
    computed_tensors: dict[str, _Made] = {}
    for blob in class_blobs:
        name, description = blob.key.removesuffix(f".{CLASS}"), described(decode(blob.tree))
        computed = (
            None if description is None or name in names else _values(name, description, inner.get(name, []))
        )
        if computed is not None:
            computed_tensors[computed[2][0]] = computed
    return _with_computed_tensors(manifest, computed_tensors) if computed_tensors else manifest


def _values(name: str, description: Mapping[str, Any], inner: Sequence[TensorSpec]) -> _Made | None:
    """Return how a tensor's values are computed; None for a class that is not known, or another layout."""
    layout = _LAYOUTS.get(str(description["class"]).rpartition(".")[2])
    specs = {spec.fqn.rpartition(".")[2]: spec for spec in inner}
    ways = layout.functions.items() if layout is not None else ()
    parts, function = next(((p, f) for p, f in ways if specs.keys() == {*p}), ((), ""))
    sizes, shape = description.get("block_size"), tuple(description["shape"].value)
    params = (sizes, *shape) if type(sizes) is int else plain_sizes(sizes)
    if not parts or params is None or FUNCTIONS[function].shape([specs[p] for p in parts], params) != shape:
        return None
    spec = TensorSpec(name, FUNCTIONS[function].dtype, shape)
    return spec, function, tuple(specs[part].fqn for part in parts), params


def _with_computed_tensors(manifest: Manifest, computed_tensors: Mapping[str, _Made]) -> Manifest:
    """Return the manifest with computed tensors, and the record of its names and paths with them."""
    outer = {name: spec.fqn for spec, _, inputs, _ in computed_tensors.values() for name in inputs}
    class_keys = {f"{name}.{CLASS}" for name in outer.values()}
    blobs = tuple(blob for blob in manifest.blobs if blob.key not in class_keys)
    order = tuple(dict.fromkeys(outer.get(name, name) for name in manifest.order))
    paths, stored = Paths(), Paths.of(manifest)
    for name in stored:
        if name in outer:
            # The last step of an inner tensor's path is its own name; the rest is the outer one's.
            paths.add(outer[name], stored[name][:-1])
        elif name not in class_keys:
            paths.add(name, stored[name])
    computed = replace(derive(manifest, computed_tensors), blobs=blobs, order=order)
    form = paths.form([spec.fqn for spec in computed.tensors], [blob.key for blob in blobs])
    origin = {key: value for key, value in manifest.origin.items() if key != "paths"}
    return replace(
        computed, origin={**origin, **({"paths": form} if form else {}), "dequantised": len(computed_tensors)}
    )


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
        self._builder.report("refused-global", "files", f"object {name} needs {', '.join(classes)}", fqn=name)
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
