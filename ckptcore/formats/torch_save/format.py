"""Read and write a `torch.save` file with a full state dict: `.pt`, `.pth`, `.bin`, `.ckpt`.

Dicts, and lists with tensors, are walked. A tensor's FQN is its path joined with dots, and every other leaf
is an object. Written files are a flat dict of FQN -> tensor or value that
``torch.load(weights_only=True, mmap=True)`` opens. Numpy arrays among the objects, such as random states,
need `torch.serialization.safe_globals`, as in any torch file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from ckptcore.core.manifest import Manifest
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import passing
from ckptcore.core.object_tree import Named, TensorRef, decode
from ckptcore.core.tree_paths import Paths
from ckptcore.encodings.limits import bound_views
from ckptcore.encodings.torchzip.archive import TAR_BLOCK, is_tar, is_zip
from ckptcore.encodings.torchzip.before_zip import BEFORE_ZIP
from ckptcore.encodings.torchzip.reader import Objects, head_holds, is_torch, read_objects
from ckptcore.errors import AmbiguousModel, MalformedCheckpoint, NameMismatch, UnsupportedFormat
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
from ckptcore.formats.common.files_beside import (
    files_of,
    index_findings,
    indexes_of,
    parameters,
    read_index,
    take_index,
    unlike_index,
    unlike_total,
)
from ckptcore.formats.common.part_proof import lack, part_findings
from ckptcore.formats.common.rank_file_names import (
    is_adapter,
    is_run,
    is_state,
    numbered_model,
    part_name,
    require_one_model,
    unlinked,
    unread_optimizers,
    without_links,
)
from ckptcore.formats.common.torch_file import Inline, arrays_as_tensors, torch_file
from ckptcore.formats.common.torch_xla import refuse_shards
from ckptcore.formats.common.trees import kind_of, leaves_below
from ckptcore.formats.torch_save.tree import TorchTree
from ckptcore.store.subfolder import FileRange

if TYPE_CHECKING:
    from ckptcore.encodings.tar_members import TarMember

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
DEFAULT = "model.pt"
_MEGATRON_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_MAX_PADDING = 1 << 16  # bytes of zeros behind the last file of a tar; Python's are 10 KiB
_TAR, _COMPOSER = ".tar", "composer_states.pt"
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
    """Recognise a torch zip that the user named, or the only one of a folder, or all parts of one model."""
    names = [name for name in files_of_model(source) if name in source.listing]
    if not names:
        return None
    name = names[0]
    size = source.listing[name]
    if in_tar(source, name) is not None:
        return Evidence("torch_save", (f"{name} is a tar with {_COMPOSER}",))
    first = source.store.read(name, 0, min(size, BEFORE_ZIP))
    if not is_torch(first):
        return None
    # Another suffix proves nothing: an .npz is a zip, too.
    if not name.endswith(SUFFIXES) and not head_holds(
        lambda start, n: source.store.read(name, start, n), size, "", name
    ):
        return None
    if not is_zip(first):
        return Evidence("torch_save", (f"{name} is of torch.save before 1.6",))
    if len(names) > 1:
        return Evidence("torch_save", (f"{name} and {len(names) - 1} more are torch zips",))
    return Evidence("torch_save", (f"{name} is a torch zip",))


def files_of_model(source: Source) -> list[str]:
    """Return the files that are the model: the named one, or those of a folder; none where it is ambiguous.

    In a folder these are the files of its index, of its only series, or its only file without those of a
    trainer's state. Files of the index may be missing.
    """
    if source.name is not None:
        return [source.name]
    # Beside another format's own files it is not the checkpoint: meta.pt of a DCP folder, for example.
    if any(p.endswith((".metadata", ".distcp", ".safetensors")) for p in source.listing):
        return []
    index = _index_of(source)
    if index is not None:
        return sorted(files_of(read_index(source, index)), key=natural)
    files = _torch_files(source)
    if any(p.endswith(_TAR) for p in files):
        return without_links(source, files)[:1]  # `read` asks which
    files = [p for p in files if not is_state(p)] or files
    files = [p for p in files if not is_adapter(p)] or files
    # Two names may be a save and a link to it, such as `latest-rank0`; more than two are several saves.
    files = without_links(source, files) if len(files) == 2 else files
    if len(files) < 2:
        return files
    models = [p for p in files if numbered_model(p)]
    if len(models) == len(files):
        return models[:1]  # `read` asks which
    return sorted(files, key=natural) if is_run(files) else []


def _torch_files(source: Source) -> list[str]:
    """Return the torch files of a folder, and its tars: beside a torch file, those of Composer alone."""
    files = [p for p in source.listing if p.endswith(SUFFIXES) and "/" not in p]
    tars = [p for p in source.listing if p.endswith(_TAR) and "/" not in p]
    return files + [p for p in tars if not files or _is_composer(source, p)]


def _is_composer(source: Source, name: str) -> bool:
    try:
        return in_tar(source, name) is not None
    except MalformedCheckpoint:
        return False  # a tar that was cut is nothing of the torch file beside it


def in_tar(source: Source, name: str) -> TarMember | None:
    """Return the state of Composer inside a tar (composer/utils/checkpoint.py), None for another file."""
    size = source.listing[name]
    if size < TAR_BLOCK or not is_tar(source.store.read(name, 0, TAR_BLOCK)):
        return None
    from ckptcore.encodings.tar_members import tar_members

    members = tar_members(partial(source.store.read, name), size, name)
    states = [member for member in members if member.name.removeprefix("./") == _COMPOSER]
    return states[0] if len(states) == len(members) == 1 else None


def _index_of(source: Source) -> str | None:
    """Return the index of a folder's files, that without a variant before others; None without one."""
    indexes = indexes_of(source, "bin")
    return next((p for p in indexes if p.endswith(".bin.index.json")), next(iter(indexes), None))


def read(source: Source) -> Manifest:
    """Read the manifest of a full state dict, in one file or several.

    Raises:
        MalformedCheckpoint: A file cannot be parsed, or two have a tensor of one name.
        AmbiguousModel: The folder has several models.
        UnsupportedFormat: A file has no state dict, or its tensors are shards, or of a class whose bytes
            are not plain.
    """
    from ckptcore.encodings.pickle.wrapped_tensors import WRAPPED_TABLE

    names = files_of_model(source)
    builder = Builder()
    path = _index_of(source)
    index = None if path is None else read_index(source, path)
    listed = {} if index is None else files_of(index)
    stated: int | None = None
    origin: dict[str, str] = {}  # name -> file
    paths = Paths()
    if source.name is None:
        require_one_model(source, path or names[0], listed)
        _require_one_tar(source)
    for name in names:
        if name not in source.listing:
            builder.file(name, None)
            builder.findings.append(lack(source, "missing-file", "files", f"{name} is missing", file=name))
            continue
        with passing() if len(names) > 1 else nullcontext():
            objects = _read(source, name, WRAPPED_TABLE)
        tensor_names, unread = _add_file(builder, source, name, objects, paths)
        twice = min(tensor_names & origin.keys(), default=None)
        if twice is not None:
            raise MalformedCheckpoint(f"{twice} is in {origin[twice]} and in {name}", file=name)
        origin |= dict.fromkeys(tensor_names, name)
        stated = stated_parts(name, objects.tree) if len(names) == 1 else None
        if path is not None:
            builder.findings += unlike_index(tensor_names | unread & listed[name], listed[name], name, path)
    if index is None or path is None:
        shapes = {t.fqn: t.shape for t in builder.tensors}
        builder.findings += part_findings(source, names, shapes, stated, origin, builder.blobs)
    else:
        take_index(source, path, index, builder.tensors)
        shapes = {t.fqn: t.shape for t in builder.tensors}
        builder.findings += unlike_total(builder, index, path)
        builder.findings += index_findings(
            source, path, index, shapes, _unread_files(source, names), partial(_names_in, source)
        )
    builder.findings += unread_optimizers(source, names)
    # A flat dict has none: names are its keys.
    form = (
        paths.form([t.fqn for t in builder.tensors], [b.key for b in builder.blobs]) if paths.nest else None
    )
    return builder.build("torch_save", source.store.url, {"paths": form} if form else {})


def _unread_files(source: Source, names: Collection[str]) -> list[str]:
    """Return the torch files of a folder that are not read and may be of the model."""
    paths = [p for p in _torch_files(source) if p not in names and not is_state(p) and not is_adapter(p)]
    return unlinked(source, paths, names)


def _names_in(source: Source, path: str) -> Collection[str]:
    """Return the parameters of a file that is not read, for evidence only."""
    return {name for name, _ in parameters(source, path)}


def _require_one_tar(source: Source) -> None:
    """Raise `AmbiguousModel` where a folder has several saves of Composer: each is a step."""
    files = _torch_files(source)
    saves = without_links(source, files) if any(p.endswith(_TAR) for p in files) else []
    if len(saves) > 1:
        raise AmbiguousModel(
            f"the folder has {len(saves)} saves: {', '.join(sorted(saves, key=natural)[:8])}",
            hint=f"name one, such as {max(saves, key=natural)}",
            candidates=saves,
        )


def _read(source: Source, name: str, table: Mapping[str, Any]) -> Objects:
    """Read the objects of a file, or of the state inside a tar, with the places of storages in the file."""
    size = source.listing[name]
    member = in_tar(source, name)
    if member is None:
        return read_objects(FileRange(source.store, name, 0, size), name, table)
    source.explain(name, 0, member.start)
    end = member.start + member.length
    if size - end <= _MAX_PADDING and not any(source.store.read(name, end, size - end)):
        source.explain(name, end)
    else:
        FileRange(source.store, name, 0, size).add_unused(end, size, "the end of the tar")
    objects = read_objects(FileRange(source.store, name, member.start, member.length), name, table)
    moved = {key: (start + member.start, n, crc) for key, (start, n, crc) in objects.storages.items()}
    return replace(objects, storages=moved)


def _add_file(
    builder: Builder, source: Source, name: str, objects: Objects, paths: Paths
) -> tuple[set[str], set[str]]:
    """Add the state dict of one file, and return the names of its tensors, and of its other values."""
    size, before = source.listing[name], len(builder.tensors)
    file = builder.file(name, size)
    if not isinstance(objects.tree, dict):
        raise UnsupportedFormat(
            f"{name} must contain a state dict (got {kind_of(objects.tree)})",
            hint="load it where its class is installed, and save its state_dict()",
        )
    refuse_shards(objects.tree, name)
    tree = TorchTree(builder, file, objects, name, paths)
    for key, value in objects.tree.items():
        tree.add(str(key), value)
    tensors = builder.tensors[before:]
    if not tensors:
        _refuse_tensor_classes(objects, name)
    tree.require_all()
    bound_views(sum(t.nbytes for t in tensors), size, name)
    read = {t.fqn for t in tensors}
    return read, tree.names - read


def stated_parts(name: str, tree: Mapping[Any, Any]) -> int | None:
    """Return how many files a save has according to one of them; None if it does not state it.

    Model states of DeepSpeed count the model-parallel ranks, and the data-parallel ones, by which ZeRO-3
    names them too. Megatron's arguments state two sizes.
    """
    part, args = part_name(name), tree.get("args")
    counts: list[Any]
    if isinstance(args, Named) and args.kind == "namespace":
        counts = [dict(args.value).get(key, 1) for key in _MEGATRON_SIZES]
    else:
        numbers = 1 if part is None else len(part.axes)
        counts = [tree.get(key) for key in ("mp_world_size", "dp_world_size")[:numbers]]
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
    recognised_by="a torch file named `.pt`, `.pth`, `.bin` or `.ckpt`, or `*.bin.index.json`",
    detect=detect,
    suffixes=frozenset({"pt", "pth", "bin", "ckpt", "tar", "json"}),
    reader=Reader(read, checksums="CRC-32 per record", objects=True),
    writer=Writer(Layout(arrange, values="plain", torch_load=True)),
)
