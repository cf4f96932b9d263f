"""Read a safetensors file, or a Hugging Face folder of them, into a manifest.

A folder has ``model.safetensors``, or files like ``*-0000i-of-0000n.safetensors`` and
``model.safetensors.index.json``, or an index of another stem or variant. Releases of torch whose ranks
consolidate together wrote no index (`consolidate_safetensors_files_on_every_rank` before PR 171885); there,
the names count the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ckptcore.core.manifest import Blob, Manifest, TensorSpec, Unread
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import meter
from ckptcore.core.object_tree import MAX_DEPTH, VERSION, decode
from ckptcore.encodings.json_text import parse
from ckptcore.encodings.pickle.trainer_classes import foreign_classes
from ckptcore.encodings.safetensors_header import SHARDS, read_header
from ckptcore.errors import AmbiguousModel, MalformedCheckpoint, finding
from ckptcore.formats.base import Source, natural
from ckptcore.formats.common.part_names import part_name, series
from ckptcore.formats.common.part_proof import part_findings
from ckptcore.formats.common.same_files import without_links
from ckptcore.store import inner_path
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.foreign_text import InvalidText, parsing
from ckptcore.utils.late_pattern import late_pattern
from ckptcore.utils.text import short_repr

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FILES, _ABOUT, _TOTAL, _PARAMETERS = "weight_map", "metadata", "total_size", "total_parameters"
# Of other stems, such as diffusers', and of variants: `model.safetensors.index.fp16.json`.
_ANY_INDEX = late_pattern(r"^[^/]+\.safetensors\.index(?:\.[^./]+)?\.json$")
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
    """Return the index that a folder is read by: that of `SINGLE`'s parts before others; None without one."""
    if source.name is not None:
        return None
    if INDEX in source.listing:
        return INDEX
    return next((p for p in _other_indexes(source)), None) if SINGLE not in source.listing else None


def _other_indexes(source: Source) -> list[str]:
    return sorted(p for p in source.listing if p.endswith(".json") and _ANY_INDEX.match(p))


def unindexed(source: Source) -> tuple[str, ...]:
    """Return the files of a source without an index; () for a folder where they are ambiguous.

    Of a series (``-00001-of-00002``) these are the files that exist.
    """
    if source.name is not None:
        return (source.name,)
    loose = _loose(source)
    if SINGLE in loose:
        return (SINGLE,)
    loose = without_links(source, loose) if len(loose) == 2 else loose
    if len(loose) < 2:
        return tuple(loose)
    groups = series(loose)
    parts = next(iter(groups.values()), ())
    numbers = {p.axes[0].number for p in parts if len(p.axes) == 1 and p.count is not None}
    return tuple(loose) if len(groups) == 1 and len(numbers) == len(loose) else ()


def _loose(source: Source) -> list[str]:
    return [p for p in source.listing if p.endswith(".safetensors") and "/" not in p]


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """The content of a `model.safetensors.index.json`.

    Attributes:
        files: Tensor -> file.
        about: ``metadata``.
        more: The other entries.
    """

    files: Mapping[str, str]
    about: Mapping[str, Any]
    more: Mapping[str, Any]

    @property
    def total(self) -> int | None:
        """Return the bytes of all tensors, or None if it does not record them.

        transformers and huggingface_hub write the number (`split_torch_state_dict_into_shards`), and no
        loader reads it.
        """
        total = self.about.get(_TOTAL)
        return total if type(total) is int else None

    def carried(self, parameters: int) -> dict[str, Any]:
        """Return what is not computed from tensors: a count of other than ``parameters`` is not, either."""
        about = dict(self.about)
        if self.total is not None:
            del about[_TOTAL]
        if type(about.get(_PARAMETERS)) is int and about[_PARAMETERS] == parameters:
            del about[_PARAMETERS]
        return {**self.more, **({_ABOUT: about} if about else {})}


def fits_index(entries: Mapping[str, Any]) -> bool:
    """Report whether an index may have these entries beside its own: none is one that it has itself."""
    about = entries.get(_ABOUT, {})
    return _FILES not in entries and type(about) is dict and not {_TOTAL, _PARAMETERS} & about.keys()


def read_index(source: Source, path: str = INDEX) -> WeightIndex:
    """Read an index.

    Raises:
        MalformedCheckpoint: The file is not an index.
        UnsafeContent: A path leaves the folder.
        MetadataTooLarge: It is over the budget of metadata.
    """
    meter().require(source.listing[path], path)
    raw = source.store.read(path, 0, source.listing[path])
    try:
        with parsing("an index"):
            form = parse(raw, path)
            rows = form[_FILES]
            inner = {file: inner_path(file, what=path) for file in set(rows.values())}
            files = {str(name): inner[file] for name, file in rows.items()}
    except InvalidText as error:
        raise MalformedCheckpoint(f"{path} is not an index: {error}", file=path) from error
    about = form.get(_ABOUT)
    is_dict = type(about) is dict
    more = {k: v for k, v in form.items() if k != _FILES and not (is_dict and k == _ABOUT)}
    return WeightIndex(files, about if is_dict else {}, more)


def take_index(source: Source, path: str, index: WeightIndex, tensors: Iterable[TensorSpec]) -> None:
    """Record an index as read: what is not computed from the tensors becomes an object."""
    source.explain(path)
    source.carry(path, INDEX, index.carried(sum(t.numel for t in tensors)))


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
    if listed not in (None, INDEX) and (others := _other_indexes(source))[1:]:
        raise AmbiguousModel(
            f"{source.store.url} has several indexes: {', '.join(others[:8])}",
            hint="move the files of one of them into a folder of their own",
            candidates=others,
        )
    index: WeightIndex | None = None
    files: dict[str, set[str] | None]
    if source.name is not None:
        files = {source.name: None}
    elif listed is not None:
        index = read_index(source, listed)
        files = _indexed(source, builder, index, listed)
    else:
        files = dict.fromkeys(unindexed(source))
        builder.findings += [
            finding("stray-file", "files", f"{path} is not part of {', '.join(files)}", file=path)
            for path in _loose(source)
            if path not in files
        ]
    seen: dict[str, str] = {}
    for path in sorted(files, key=natural):
        wanted = files[path]
        if source.listing.get(path) is None:
            builder.file(path, None)
            code = "missing-part" if source.recover else "missing-file"
            builder.findings.append(finding(code, "files", f"{path} is missing", file=path))
            continue
        names, metadata = _add_file(builder, source, path, seen)
        for name in sorted((wanted or set()) - names):
            builder.findings.append(
                finding(
                    "hole",
                    "coverage",
                    f"{name} is missing in {path}, where {listed} lists it",
                    fqn=name,
                    file=path,
                )
            )
        builder.findings += [
            finding(
                "unlisted-tensor",
                "coverage",
                f"{path} contains {name}, which {listed} does not list",
                fqn=name,
                file=path,
            )
            for name in sorted(names - wanted if wanted is not None else ())
        ]
        _add_objects(builder, metadata, path)
        if "format" in metadata:
            origin["written_for"] = str(metadata["format"])[:64]
    if index is None:
        builder.findings += part_findings(source, files, {t.fqn: t.shape for t in builder.tensors})
    elif listed is not None:
        take_index(source, listed, index, builder.tensors)
    total = None if index is None else index.total
    stored = builder.item_bytes  # as the writer counts: of every dtype
    if total is not None and stored != total and not any(f.severity == "error" for f in builder.findings):
        message = f"{listed} records {total} bytes of tensors, but the files contain {stored}"
        builder.findings.append(finding("total-mismatch", "coverage", message, file=listed))
    return builder.build(format, source.store.url, origin)


def _indexed(source: Source, builder: Builder, index: WeightIndex, listed: str) -> dict[str, set[str] | None]:
    files: dict[str, set[str] | None] = {}
    for name, path in index.files.items():
        names = files.setdefault(path, set())
        assert names is not None
        names.add(name)
    if SINGLE in source.listing and SINGLE not in files:
        builder.findings.append(
            finding(
                "stale-file",
                "files",
                f"{SINGLE} is beside {listed}, but not part of it: transformers would load it instead",
                file=SINGLE,
            )
        )
    for path in source.listing:
        if path.endswith(".safetensors") and "/" not in path and path not in files and path != SINGLE:
            builder.findings.append(finding("stray-file", "files", f"{path} is not in {listed}", file=path))
    return files


def _add_file(
    builder: Builder, source: Source, path: str, seen: dict[str, str]
) -> tuple[set[str], dict[str, Any]]:
    size = source.listing[path]
    tensors, metadata, begin = read_header(source.store, path, size, (OBJECTS, OBJECTS_VERSION, *SHARDS))
    builder.file(path, size)
    if not seen.keys().isdisjoint(tensors):
        name = next(name for name in tensors if name in seen)
        raise MalformedCheckpoint(f"{name} is in {seen[name]} and in {path}", file=path)
    seen |= dict.fromkeys(tensors, path)
    specs = [TensorSpec(name, dtype, shape) for name, (dtype, shape, _, _) in tensors.items()]
    places = np.array([row[2:] for row in tensors.values()], np.int64).reshape(-1, 2)
    places[:, 1] -= places[:, 0]
    places[:, 0] += begin
    builder.raw_tensors(specs, path, places)
    return set(tensors), metadata


def _add_objects(builder: Builder, metadata: Mapping[str, Any], path: str) -> None:
    raw = metadata.get(OBJECTS)
    if raw is None:
        return
    version = metadata.get(OBJECTS_VERSION, "1")  # files of release 0.1 have none
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
            builder.findings.append(finding("refused-global", "files", message, fqn=key, file=path))
        builder.blobs.append(Blob(key, -1, None, names, known=False) if names else Blob(key, -1, tree))
