"""Read and write safetensors: one file, or files with a Hugging Face index.

A file has a u64 little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, and the
tensors' bytes without holes (https://github.com/huggingface/safetensors). A folder has
``model.safetensors``, or ``*-0000i-of-0000n.safetensors`` and ``model.safetensors.index.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ckptcore.core.columnar_file import canonical_json
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.core.object_tree import VERSION, is_plain_json
from ckptcore.encodings.safetensors_header import FOR_TORCH, MAX_HEADER, METADATA, HeaderText, is_free
from ckptcore.errors import NameMismatch, UnsupportedDtype
from ckptcore.formats.base import (
    Arrangement,
    Evidence,
    FileLayout,
    Format,
    Layout,
    Literal,
    Reader,
    Slot,
    Source,
    Writer,
    natural,
)
from ckptcore.formats.common.files_beside import INDEX, fits_index, index_name
from ckptcore.formats.common.thinning import thin_files
from ckptcore.formats.huggingface.folder import OBJECTS, OBJECTS_VERSION, read_folder, recognised
from ckptcore.formats.huggingface.quantized import lost_scales

ADAPTER = "adapter_model.safetensors"
COMPONENT = "diffusion_pytorch_model"  # of diffusers (diffusers/utils/constants.py)


def detect(source: Source) -> Evidence | None:
    """Recognise a .safetensors file, a folder with an index, or one with a single safetensors file."""
    because = recognised(source)
    return None if because is None else Evidence("safetensors", (because,))


def read(source: Source) -> Manifest:
    """Read the manifest of a safetensors file or folder; raise `MalformedCheckpoint` as `read_folder`."""
    return lost_scales(source, read_folder(source, "safetensors"))


def arrange(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out files as the hub packs them: names in natural order, a new file when the next does not fit.

    Raises:
        UnsupportedDtype: safetensors has no such dtype.
        NameMismatch: A safetensors file cannot have such a name.
    """
    for spec in request.tensors:
        require_dtype(spec)
    limit = request.max_file_bytes if request.single is None else None
    groups = pack(request.tensors, limit)
    single = request.single or f"{request.stem}.safetensors"
    count = len(groups)
    objects, texts, index_entries = _in_place(request.objects, indexed=count > 1)
    layouts = []
    for number, group in enumerate(groups):
        path = single if count == 1 else f"{request.stem}-{number + 1:05d}-of-{count:05d}.safetensors"
        metadata = dict([FOR_TORCH])
        if number == 0:
            metadata |= texts
        if number == 0 and objects:
            metadata[OBJECTS] = canonical_json(objects).decode()
            metadata[OBJECTS_VERSION] = str(VERSION)
        layouts.append(file_layout(path, group, request.tensors, metadata, commit=count == 1))
    if count > 1:
        layouts.append(_index(index_name(request.stem), layouts, request.tensors, {}, index_entries))
    return tuple(layouts)


def require_dtype(spec: TensorSpec) -> None:
    """Raise `UnsupportedDtype` for a tensor that no safetensors file can hold."""
    if BY_NAME[spec.dtype].safetensors is None:
        raise UnsupportedDtype(
            f"safetensors has no dtype {spec.dtype} ({spec.fqn})", fqn=spec.fqn, dtype=spec.dtype
        )


def _in_place(
    objects: Mapping[str, Any], *, indexed: bool
) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """Return objects, entries of `__metadata__`, and entries of the index, if there is one.

    What a reader would take as its own there, and what is no text or JSON, stays an object.
    """
    left, texts, index_entries = dict(objects), dict[str, str](), dict[str, Any]()
    metadata = left.get(METADATA)
    if type(metadata) is dict and "$" not in metadata:
        texts = {key: metadata[key] for key in sorted(metadata) if is_free(key, metadata[key])}
        left[METADATA] = {key: value for key, value in metadata.items() if key not in texts}
    of_index = left.get(INDEX)
    if indexed and type(of_index) is dict and is_plain_json(of_index) and fits_index(of_index):
        index_entries = {key: of_index[key] for key in sorted(of_index)}
        del left[INDEX]
    if left.get(METADATA) == {} and texts:
        del left[METADATA]
    return left, texts, index_entries


def arrange_for_hub(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out files as `arrange` does; the index also counts the parameters, as in `save_pretrained`."""
    *layouts, last = arrange(request)
    if last.path == INDEX:
        parameters = sum(t.numel for t in request.tensors)
        last = _index(INDEX, layouts, request.tensors, {"total_parameters": parameters})
    return (*layouts, last)


def arrange_component(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out the files of a diffusers model, which finds them by their stem, as `arrange` does."""
    return arrange(replace(request, stem=COMPONENT))


def arrange_adapter(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out the one file of a LoRA adapter, which peft finds by its name, as `arrange` does."""
    return arrange(replace(request, single=request.single or ADAPTER))


def pack(tensors: Sequence[TensorSpec], max_file_bytes: int | None) -> list[list[int]]:
    """Group tensors by output file, as huggingface_hub packs them.

    A tensor larger than the limit gets a file of its own (huggingface_hub
    serialization/_base.py, `split_state_dict_into_shards_factory`).

    Args:
        tensors: All tensors.
        max_file_bytes: Most tensor bytes in a file; None for one file.

    Returns:
        Per file, positions in ``tensors``.
    """
    order = sorted(range(len(tensors)), key=lambda i: natural(tensors[i].fqn))
    if max_file_bytes is None:
        return [order]
    groups: list[list[int]] = []
    current: list[int] = []
    size = 0
    for i in order:
        nbytes = tensors[i].nbytes
        if nbytes > max_file_bytes:
            groups.append([i])
            continue
        if current and size + nbytes > max_file_bytes:
            groups.append(current)
            current, size = [], 0
        current.append(i)
        size += nbytes
    if current or not groups:
        groups.append(current)
    return groups


def file_layout(
    path: str,
    group: Sequence[int],
    tensors: Sequence[TensorSpec],
    metadata: Mapping[str, str] | None,
    *,
    commit: bool = False,
) -> FileLayout:
    """Lay out a file of some of the tensors, with entries of its `__metadata__`."""
    # Wide elements first, so that every tensor starts at a multiple of its element's width.
    order = sorted(group, key=lambda i: -BY_NAME[tensors[i].dtype].itemsize)
    header = HeaderText(metadata)
    starts = [header.add(t.fqn, t.dtype, t.shape) for t in map(tensors.__getitem__, order)]
    prefix = header.packed(64)
    if len(prefix) - 8 > MAX_HEADER:
        raise NameMismatch(
            f"the header of {path} must have at most {MAX_HEADER} bytes (got {len(prefix) - 8})",
            hint="lower --max-file-size",
        )
    slots = tuple(Slot(n, len(prefix) + start) for n, start in enumerate(starts))
    return FileLayout(path, len(prefix) + header.end, tuple(order), slots, (Literal(0, prefix),), commit)


def _index(
    path: str,
    layouts: Sequence[FileLayout],
    tensors: Sequence[TensorSpec],
    counts: Mapping[str, int],
    other_entries: Mapping[str, Any] = MappingProxyType({}),
) -> FileLayout:
    places = {tensors[i].fqn: layout.path for layout in layouts for i in layout.tensors}
    total = sum(t.nbytes for t in tensors)
    index = {
        **other_entries,
        "metadata": {**other_entries.get("metadata", {}), **counts, "total_size": total},
        "weight_map": {name: places[name] for name in sorted(places, key=natural)},
    }
    data = (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
    return FileLayout(path, len(data), (), (), (Literal(0, data),), commit=True)


FORMAT = Format(
    name="safetensors",
    title="safetensors file or Hugging Face folder",
    recognised_by="`model.safetensors.index.json`, one `*.safetensors` file, or all `*-I-of-N.safetensors`",
    detect=detect,
    suffixes=frozenset({"safetensors", "json"}),
    reader=Reader(read, objects=True),
    writer=Writer(
        Layout(arrange),
        hub=Layout(arrange_for_hub),
        adapter=Layout(arrange_adapter),
        component=Layout(arrange_component),
    ),
    thin=thin_files,
)
