"""Fingerprint a model of transformers in memory, as the folder that `save_pretrained` would write.

The maps of live modules say which elements of the parameters each tensor of the files has. These views of
the parameters are summed where they are: nothing is copied but pieces of 16 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ckptcore.api import speaks_python
from ckptcore.core.box import Box
from ckptcore.core.manifest import Chunk, Item, Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.errors import CkptError, UnsupportedDtype, UsageError
from ckptcore.fingerprints.result import Fingerprints
from ckptcore.live_model.skeleton import transformers_for
from ckptcore.live_model.views import corner_of, dims_of, row_major
from ckptcore.loading.live_fingerprint import LiveParts, fingerprint_parts
from ckptcore.loading.live_tensors import SUM, pieces
from ckptcore.naming.peft import holds_adapter
from ckptcore.naming.rename import Mapped
from ckptcore.naming.worlds import HUB
from ckptcore.planning.live_maps import map_live_names
from ckptcore.planning.name_maps import NameRequest
from ckptcore.planning.transformers_conversion import written_tensors
from ckptcore.reading.gather import index_of
from ckptcore.utils.foreign_text import load_json_object

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@speaks_python
def fingerprint_model(model: Any, mesh: DeviceMesh | None = None) -> Fingerprints:
    """Fingerprint a model of transformers, as `fingerprint` does the folder that it would be saved in.

    Tensors have the names of the hub, and stacked and joined ones are taken apart. Tied tensors count once.
    Nothing is cast: a model that was loaded in another dtype has another fingerprint. It detects accidents,
    not forgery.

    Args:
        model: A model of transformers, on any device. Its parameters may be DTensors (FSDP2, HSDP, tensor
            parallelism).
        mesh: The ranks that hold it together, which all call this function; as for `fingerprint_state`.

    Returns:
        The fingerprint, and one for each tensor. ``differing`` names what differs from another one.

    Raises:
        UsageError: It is not comparable: no model of transformers, one with a LoRA adapter, one with a tensor
            without values, or one whose parameters no map leads to files.
        UnsupportedDtype: It is not comparable: it is quantised.
        NameMismatch: It is not comparable: its parameters are not those of its class.
        DamagedCheckpoint: Ranks have different values in equal boxes.
        MissingDependency: transformers is not installed.
    """
    library = transformers_for("fingerprint a model")
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if not isinstance(model, library.PreTrainedModel):
        raise UsageError(
            f"cannot fingerprint: not comparable: {type(model).__name__} is no model of transformers",
            hint="try ckptcore.fingerprint_state with its state dict",
        )
    return fingerprint_parts(partial(_parts, model), mesh)


def _parts(model: Any, rank: int) -> LiveParts:
    """Return what this rank holds of the files of a model."""
    method = getattr(model, "quantization_method", None)
    if method is not None:
        raise UnsupportedDtype(
            f"cannot fingerprint: not comparable: {type(model).__name__} is quantised ({method})",
            hint="load it without quantisation",
        )
    state = written_tensors(model)
    if holds_adapter(state):
        raise UsageError(
            f"cannot fingerprint: not comparable: {type(model).__name__} has a LoRA adapter",
            hint="unload or merge it first",
        )
    files = _under_file_names(model, state)
    names, parts = list(state), LiveParts(rank)
    for row, spec in enumerate(files.tensors):
        parts.add_tensor(spec.fqn, spec.dtype, spec.shape)
        for chunk in files.chunks_of(row):
            name = names[chunk.item]
            for box, memory in _views(spec.fqn, chunk, name, state[name]):
                parts.add_part(spec.fqn, box, memory)
    return parts


def _under_file_names(model: Any, state: Mapping[str, torch.Tensor]) -> Manifest:
    """Return the tensors of a model's files, as boxes of its parameters: item n is the n-th of the state."""
    config = load_json_object(model.config.to_json_string(use_diff=False))
    config["architectures"] = [
        type(model).__name__.removeprefix("FSDP")
    ]  # which `fully_shard` puts before it
    builder = Builder()
    file = builder.file("memory", None)
    for name, tensor in state.items():
        spec = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if builder.tensor(spec) < 0:
            raise UnsupportedDtype(f"cannot fingerprint: not comparable: {name} is {spec.dtype}")
        item = builder.item(Item(file, 0, spec.nbytes))
        builder.chunk(len(builder.tensors) - 1, (0,) * len(spec.shape), spec.shape, item)
    manifest = builder.build("memory", "memory://model", {})
    try:
        named = map_live_names(
            Mapped(manifest, (), ()), NameRequest(to=HUB, source=manifest, config=config, url="of the model")
        )
    except CkptError as error:
        message = f"cannot fingerprint: not comparable: {error.message}"
        raise type(error)(message, hint="save it, and fingerprint the folder") from error
    return manifest if named is None else named.mapped.manifest


def _views(fqn: str, chunk: Chunk, name: str, tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield boxes of a file's tensor, with this rank's memory of their elements.

    chunk: a box of it, and which elements of a parameter it is. name, tensor: of the parameter.
    """
    shape = tuple(tensor.size())
    view = chunk.view
    if view is None:  # the entire parameter, in its own order
        yield from ((box.translate(chunk.box.offset), memory) for memory, box in pieces(fqn, tensor, SUM))
        return
    start = view.start // tensor.element_size()
    strides = view.strides if view.strides is not None else row_major(chunk.box.shape)
    for memory, box in pieces(fqn, tensor, SUM):
        if box == Box.full(shape):
            flat = memory.detach().contiguous()
            yield chunk.box, flat.as_strided(chunk.box.shape, strides, flat.storage_offset() + start)
            continue
        dims = dims_of(shape, start, strides, chunk.box.shape)
        if dims is None:
            raise UsageError(
                f"cannot fingerprint: not comparable: {name} is sharded, and {fqn} is no box of it",
                hint="gather the model, or fingerprint the folder that it is saved in",
            )
        yield from _common(chunk.box, corner_of(shape, start), dims, box, memory)


def _common(
    target: Box, corner: tuple[int, ...], dims: list[int | None], box: Box, memory: torch.Tensor
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the part of a view that a rank's box of the parameter has, if there is one.

    Args:
        target: The view's box of the file's tensor.
        corner: Index of the view's first element in the parameter.
        dims: Of `dims_of`.
        box: The rank's box of the parameter.
        memory: Its elements.
    """
    lengths = dict.fromkeys(range(len(corner)), 1)
    lengths |= {dim: n for dim, n in zip(dims, target.shape, strict=True) if dim is not None}
    common = Box(corner, tuple(lengths.values())).intersect(box)
    if common is None or not common.numel:
        return
    offset = tuple(
        first + (0 if dim is None else common.offset[dim] - corner[dim])
        for first, dim in zip(target.offset, dims, strict=True)
    )
    part = Box(offset, tuple(1 if dim is None else common.shape[dim] for dim in dims))
    along = [dim for dim in dims if dim is not None]
    rest = [dim for dim in range(len(corner)) if dim not in along]
    yield part, memory[index_of(common, box)].permute(*along, *rest).reshape(part.shape)
