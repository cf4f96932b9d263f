"""Read and write a `torch.save` file with a full state dict: `.pt`, `.pth`, `.bin`, `.ckpt`.

Dicts, and lists with tensors, are walked. A tensor's FQN is its path joined with dots, and every other leaf
is an object. Written files are a flat dict of FQN -> tensor or value that
``torch.load(weights_only=True, mmap=True)`` opens. Numpy arrays among the objects, such as random states,
need `torch.serialization.safe_globals`, as in any torch file.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ckptcore.core.manifest import Manifest
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import TensorRef, decode
from ckptcore.encodings.torchzip.archive import is_zip
from ckptcore.encodings.torchzip.reader import Objects, head_holds, read_objects
from ckptcore.errors import MalformedCheckpoint, NameMismatch, UnsupportedFormat
from ckptcore.formats.base import (
    Arrangement,
    Evidence,
    FileLayout,
    Format,
    Layout,
    Reader,
    Source,
    Writer,
    natural,
)
from ckptcore.formats.common.part_names import part_name
from ckptcore.formats.common.part_proof import part_findings
from ckptcore.formats.common.same_files import without_links
from ckptcore.formats.common.trees import leaves_below
from ckptcore.formats.torch_save.layout import Inline, arrays_as_tensors, torch_file
from ckptcore.formats.torch_save.tree import TorchTree
from ckptcore.store.subfolder import FileRange

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
DEFAULT = "model.pt"
# Globals of tensor data in forms that this reader does not support.
_TENSOR_CLASSES = (
    "torch._tensor.",
    "torch._utils.",
    "torch.distributed",
    "torch.nested",
    "torch.ao.",
    "torchao.",
    "torch.sparse",
)


def detect(source: Source) -> Evidence | None:
    """Recognise a torch zip that the user named, or the only one of a folder."""
    name = source.name or _only(source)
    size = source.listing.get(name or "", 0)
    if name is None or size < 4 or not is_zip(source.store.read(name, 0, 4)):
        return None
    # Another suffix proves nothing: an .npz is a zip, too.
    if not name.endswith(SUFFIXES) and not head_holds(
        lambda start, n: source.store.read(name, start, n), size, "", name
    ):
        return None
    return Evidence("torch_save", (f"{name} is a torch zip",))


def read(source: Source) -> Manifest:
    """Read the manifest of a full state dict.

    Raises:
        MalformedCheckpoint: The file cannot be parsed.
        UnsupportedFormat: The file has no state dict, or its tensors are shards, or of a class whose bytes
            are not plain.
    """
    name = source.name or _only(source)
    assert name is not None  # by `detect`
    size, store = source.listing[name], source.store
    objects = read_objects(FileRange(store, name, 0, size), name)
    builder = Builder()
    file = builder.file(name, size)
    if not isinstance(objects.tree, dict):
        raise UnsupportedFormat(f"{name} must contain a state dict (got {type(objects.tree).__name__})")
    tree = TorchTree(builder, file, objects, name)
    for key, value in objects.tree.items():
        tree.add(str(key), value)
    if not builder.tensors:
        _refuse_tensor_classes(objects, name)
    tree.require_all()
    shapes = {t.fqn: t.shape for t in builder.tensors}
    builder.findings += part_findings(source, (name,), shapes, stated_parts(name, objects.tree))
    total = sum(t.nbytes for t in builder.tensors)
    if total > 1024 * size + (64 << 20):  # for example, expanded views of one element
        raise MalformedCheckpoint(f"{name}: {size} stored bytes expand to tensors of {total} bytes")
    return builder.build("torch_save", store.url, {})


def stated_parts(name: str, tree: Mapping[Any, Any]) -> int | None:
    """Return how many files a save has according to one of them; None if it does not state it.

    Model states of DeepSpeed count the model-parallel ranks, and the data-parallel ones, by which ZeRO-3
    names them too; shards of torch_xla count all ranks.
    """
    part, shards = part_name(name), tree.get("shard_metadata")
    if part is None:
        return None
    counts: list[Any]
    if type(shards) is dict:
        counts = [shards.get("world_size")]
    else:
        counts = [tree.get(key) for key in ("mp_world_size", "dp_world_size")[: len(part.axes)]]
    return prod(counts) if all(type(n) is int and n > 0 for n in counts) else None


def arrange(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out one file: data.pkl, byteorder, the storages in natural name order, version, directory."""
    order = sorted(range(len(request.tensors)), key=lambda i: natural(request.tensors[i].fqn))
    tree: dict[str, Any] = {request.tensors[i].fqn: TensorRef(request.tensors[i].fqn) for i in order}
    for name in sorted(request.objects, key=natural):
        value = decode(request.objects[name])
        if value == TensorRef(name):
            continue  # an object that consists of one tensor
        if name in tree:
            raise NameMismatch(f"an object and a tensor both have the name {name}")
        # An object with tensors inside is written leaf by leaf: its tensors have names of their own.
        leaves = leaves_below(value, name, TensorRef)
        tree |= {path: leaf for path, _, leaf in leaves if not isinstance(leaf, TensorRef)}
    inline: dict[str, Inline] = {}
    tree = arrays_as_tensors(tree, inline)
    path = request.single or DEFAULT
    return (torch_file(path, tree, request.tensors, order, commit=True, inline=inline),)


def _only(source: Source) -> str | None:
    found = [p for p in source.listing if p.endswith(SUFFIXES) and "/" not in p]
    found = without_links(source, found) if len(found) == 2 else found
    # Beside another format's own files it is not the checkpoint: meta.pt of a DCP folder, for example.
    others = any(p.endswith((".metadata", ".distcp", ".safetensors")) for p in source.listing)
    return found[0] if len(found) == 1 and not others else None


def _refuse_tensor_classes(objects: Objects, name: str) -> None:
    classes = [g for g in objects.refused if g.startswith(_TENSOR_CLASSES)]
    if classes:
        raise UnsupportedFormat(
            f"{name} must be a plain full state dict (got tensors of {', '.join(sorted(classes)[:4])})",
            hint="name its folder if it is one rank's part of a distributed save",
            globals=classes,
        )


FORMAT = Format(
    name="torch_save",
    title="torch.save file of a full state dict",
    recognised_by="a torch zip named `.pt`, `.pth`, `.bin` or `.ckpt`",
    detect=detect,
    reader=Reader(read, checksums="CRC-32 per record", objects=True),
    writer=Writer(Layout(arrange, values="plain", torch_load=True)),
)
