"""Read a safetensors file, or a Hugging Face folder of them, into a manifest.

A folder has ``model.safetensors``, or files like ``*-0000i-of-0000n.safetensors`` and
``model.safetensors.index.json``, or an index of another stem or variant. Releases of torch whose ranks
consolidate together wrote no index (`consolidate_safetensors_files_on_every_rank` before PR 171885); there,
the names count the files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import numpy as np

from ckptcore.core.manifest import Blob, Manifest, TensorSpec, Unread
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import MAX_DEPTH, VERSION, decode
from ckptcore.encodings.json_text import parse
from ckptcore.encodings.pickle.trainer_classes import foreign_classes
from ckptcore.encodings.safetensors_header import SHARDS, read_header
from ckptcore.errors import AmbiguousModel, MalformedCheckpoint, finding
from ckptcore.formats.base import Source, natural
from ckptcore.formats.common.files_beside import (
    INDEX,
    WeightIndex,
    continued_findings,
    files_of,
    fuller_torch_form,
    index_findings,
    indexes_of,
    read_index,
    take_index,
    unlike_index,
    unlike_total,
)
from ckptcore.formats.common.part_proof import lack, part_findings
from ckptcore.formats.common.rank_file_names import (
    TORCH_SUFFIXES,
    is_run,
    part_name,
    require_one_model,
    unlinked,
    unread_optimizers,
    without_links,
)
from ckptcore.store.subfolder import unrecorded
from ckptcore.utils.foreign_text import InvalidText, parsing
from ckptcore.utils.text import short_repr

SINGLE = "model.safetensors"
# Keys of `__metadata__`: the non-tensor values as JSON, and its version. See docs/reference/objects.md.
OBJECTS, OBJECTS_VERSION = "ckptcore.objects", "ckptcore.objects.version"


def recognised(source: Source) -> str | None:
    """Return the evidence for a .safetensors file, a folder with an index, or one with a single file."""
    if source.name is not None:
        if not source.name.endswith(".safetensors"):
            return None
        return f"{source.name} is named .safetensors"
    index = index_of(source)
    if index is not None:
        return f"found {index}"
    files = unindexed(source)
    if not files:
        return None
    count = part.count if (part := part_name(files[0])) is not None else None
    if len(files) == 1 and count in (None, 1):
        return f"found {files[0]}"
    return f"found {len(files)} of {count} files"


def index_of(source: Source) -> str | None:
    """Return the index that a folder is read by: `INDEX` before others; None without one.

    One of another stem, such as that of diffusers, or of a variant gives way to `SINGLE`.
    """
    if source.name is not None:
        return None
    if INDEX in source.listing:
        return INDEX
    return None if SINGLE in source.listing else next(iter(indexes_of(source, "safetensors")), None)


def unindexed(source: Source) -> tuple[str, ...]:
    """Return the files of a source without an index; () for a folder where they are ambiguous.

    Of a series (``-00001-of-00002``) these are the files that exist.
    """
    if source.name is not None:
        return (source.name,)
    loose = _loose(source)
    if SINGLE in loose:
        return (SINGLE,)
    # Two names may be a save and a link to it, such as `latest-rank0`; more than two are several saves.
    loose = without_links(source, loose) if len(loose) == 2 else loose
    if len(loose) < 2:
        return tuple(loose)
    return tuple(loose) if is_run(loose) else ()


def _loose(source: Source) -> list[str]:
    return [p for p in source.listing if p.endswith(".safetensors") and "/" not in p]


def read_folder(source: Source, format: str) -> Manifest:
    """Read the manifest of a safetensors file or folder.

    Args:
        source: The file or folder.
        format: Name of the format of the manifest.

    Raises:
        MalformedCheckpoint: The index, a header or the objects cannot be read, or files share a tensor.
    """
    builder, origin = Builder(), dict[str, Any]()
    listed = index_of(source)
    if listed not in (None, INDEX) and (indexes := indexes_of(source, "safetensors"))[1:]:
        raise AmbiguousModel(
            f"{source.store.url} has several indexes: {', '.join(indexes[:8])}",
            hint="move the files of one of them into a folder of their own",
            candidates=indexes,
        )
    index: WeightIndex | None = None
    files: dict[str, set[str] | None]
    if source.name is not None:
        files = {source.name: None}
    elif listed is not None:
        index = read_index(source, listed)
        require_one_model(source, listed, files_of(index))
        files = _indexed(source, builder, index, listed)
    else:
        files = dict.fromkeys(unindexed(source))
        require_one_model(source, next(iter(files)))
        builder.findings += [
            finding("stray-file", "files", f"{path} is not part of {', '.join(files)}", file=path)
            for path in unlinked(source, _loose(source), files)
            if path not in files
        ]
    file_of: dict[str, str] = {}
    for path in sorted(files, key=natural):
        listed_names = files[path]
        if source.listing.get(path) is None:
            builder.file(path, None)
            builder.findings.append(lack(source, "missing-file", "files", f"{path} is missing", file=path))
            continue
        names, metadata = _add_file(builder, source, path, file_of)
        if listed is not None and listed_names is not None:
            builder.findings += unlike_index(names, listed_names, path, listed)
        _add_objects(builder, metadata, path)
        if "format" in metadata:
            origin["written_for"] = str(metadata["format"])[:64]
    shapes = {t.fqn: t.shape for t in builder.tensors}
    unread = [path for path in unlinked(source, _loose(source), files) if path not in files]
    names_beside = partial(_names_in, source)
    if index is None:
        builder.findings += part_findings(source, files, shapes, files=file_of)
        builder.findings += continued_findings(source, min(files), shapes, unread, names_beside)
    elif listed is not None:
        take_index(source, listed, index, builder.tensors)
        builder.findings += unlike_total(builder, index, listed)
        builder.findings += index_findings(source, listed, index, shapes, unread, names_beside)
    if source.name is None and any(path.endswith(TORCH_SUFFIXES) for path in source.listing):
        builder.findings += fuller_torch_form(source, files, shapes)
    builder.findings += unread_optimizers(source, files)
    return builder.build(format, source.store.url, origin)


def _indexed(source: Source, builder: Builder, index: WeightIndex, listed: str) -> dict[str, set[str] | None]:
    files: dict[str, set[str] | None] = {**files_of(index)}
    if SINGLE in source.listing and SINGLE not in files:
        builder.report(
            "stale-file",
            "files",
            f"{SINGLE} is beside {listed}, but not part of it: transformers would load it instead",
            file=SINGLE,
        )
    for path in unlinked(source, _loose(source), files):
        if path not in files and path != SINGLE:
            builder.report("stray-file", "files", f"{path} is not in {listed}", file=path)
    return files


def _add_file(
    builder: Builder, source: Source, path: str, file_of: dict[str, str]
) -> tuple[set[str], dict[str, Any]]:
    size = source.listing[path]
    tensors, metadata, begin = read_header(source.store, path, size, (OBJECTS, OBJECTS_VERSION, *SHARDS))
    builder.file(path, size)
    if not file_of.keys().isdisjoint(tensors):
        name = next(name for name in tensors if name in file_of)
        raise MalformedCheckpoint(f"{name} is in {file_of[name]} and in {path}", file=path)
    file_of |= dict.fromkeys(tensors, path)
    specs = [TensorSpec(name, dtype, shape) for name, (dtype, shape, _, _) in tensors.items()]
    places = np.array([row[2:] for row in tensors.values()], np.int64).reshape(-1, 2)
    places[:, 1] -= places[:, 0]
    places[:, 0] += begin
    builder.raw_tensors(specs, path, places)
    return set(tensors), metadata


def _names_in(source: Source, path: str) -> Collection[str]:
    """Return the tensors of a file that is not read, for evidence only."""
    return read_header(unrecorded(source.store), path, source.listing[path], ())[0].keys()


def _add_objects(builder: Builder, metadata: Mapping[str, Any], path: str) -> None:
    raw = metadata.get(OBJECTS)
    if raw is None:
        return
    version = metadata.get(OBJECTS_VERSION, "1")  # files of version 1 do not say it
    if version != str(VERSION):
        why = f"its version must be {VERSION} (got {short_repr(version, 20)}): upgrade ckptcore"
        builder.unread(OBJECTS, Unread(why, file=path))
        return
    try:
        with parsing("an object tree"):
            items = sorted(parse(raw, path, MAX_DEPTH).items())
            foreign = {key: foreign_classes(decode(tree)) for key, tree in items}
    except InvalidText as error:
        raise MalformedCheckpoint(f"{path}: cannot read {OBJECTS}: {error}", file=path) from error
    for key, tree in items:
        names = foreign[key]
        if names:  # what loads an output would look this name up, and call it
            message = f"object {key} needs {', '.join(names)}"
            builder.report("refused-global", "files", message, fqn=key, file=path)
        builder.blobs.append(Blob(key, -1, None, names, known=False) if names else Blob(key, -1, tree))
