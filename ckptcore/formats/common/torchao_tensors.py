"""Read torchao's tensors: the tensors that they wrap by name, and their values by a closed table of classes.

The layouts are those of torchao 0.18: torchao/optim/subclass_8bit.py, subclass_4bit.py and subclass_fp8.py;
torchao/quantization/quantize_/workflows/int8/int8_tensor.py, float8/float8_tensor.py and
intx/intx_unpacked_to_int8_tensor.py. A tensor X of another class, and each with ``--keep-quantized``, is read
as its inner tensors, ``X.codes`` and the like, with the object ``X.tensor_class``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptcore.core.box import Box
from ckptcore.core.dequantize import FUNCTIONS
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.core.object_tree import decode
from ckptcore.core.subset import derive
from ckptcore.core.tree_paths import Paths
from ckptcore.encodings.pickle.wrapped_tensors import CLASS, described, plain_sizes

Shape = tuple[int, ...]
_Made = tuple[TensorSpec, str, tuple[str, ...], Shape]  # tensor, function, inputs, params
# How an inner tensor of a shard belongs to that of the whole: it has the shard's own box, one element per
# block of it, one per run of its elements, or it is the same on all ranks.
_BOX, _BLOCKS, _RUNS, _SAME = "box", "blocks", "runs", "same"


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
