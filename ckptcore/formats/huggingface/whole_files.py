"""Whole files beside shards: which whole tensors do they hold, and which of them are copies?

A folder of ranks' parts may hold the same model once more, in safetensors files of whole tensors. The ranks'
parts are what is read; the whole files are held against them: elements by `ckptcore.core.redundant_copies`,
everything else by the headers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ckptcore.core.manifest import Manifest
from ckptcore.core.metadata_budget import meter
from ckptcore.core.redundant_copies import FullTensor, with_copies
from ckptcore.encodings.json_text import parse
from ckptcore.encodings.safetensors_header import read_header
from ckptcore.errors import CkptError, Finding, MetadataTooLarge, finding
from ckptcore.formats.base import Source, natural
from ckptcore.formats.huggingface.shard_headers import INFO

INDEX = "model.safetensors.index.json"
_BYTES = 500  # of a tensor of the whole files while they are compared
_MAX_TOLD = 100  # tensors of another shape


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor of a whole file. start: its first byte there."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    path: str


def whole_tensors(source: Source, paths: list[str]) -> tuple[dict[str, WholeTensor], list[Finding]]:
    """The tensors of whole files by name, and a finding for each file that cannot be read.

    Files with offsets of ranks in their headers are shards, and are passed over. Reads headers only.
    """
    found: dict[str, WholeTensor] = {}
    told: list[Finding] = []
    for path in sorted(paths, key=natural):
        try:
            tensors, metadata, data = read_header(source.store, path, source.listing[path])
        except MetadataTooLarge:
            raise
        except CkptError as error:
            told.append(differs(f"{path} cannot be read: {error.message}", file=path))
            continue
        if INFO not in metadata:
            meter().keep(_BYTES * len(tensors), path)
            found |= {
                n: WholeTensor(dtype, shape, data + at, path) for n, (dtype, shape, at, _) in tensors.items()
            }
    return found, told


def with_whole_folder(
    manifest: Manifest, source: Source, folder: str, name_of: Callable[[str], str]
) -> Manifest:
    """A manifest of ranks' parts with the model that a folder of whole files holds once more.

    folder: below the manifest's root, which is ``source``. name_of: what a whole file's tensor is called in
    the manifest. Tensors of equal dtype and shape become copies; what differs in these is a finding, as is a
    tensor that no rank has. One that the folder lacks is not: tied ones are saved once. Without such files
    nothing changes.
    """
    prefix = f"{folder}/"
    inside = {p for p in source.listing if p.startswith(prefix) and "/" not in p[len(prefix) :]}
    paths = sorted((p for p in inside if p.endswith(".safetensors")), key=natural)
    if not paths:
        return manifest
    told: list[Finding] = []
    index = prefix + INDEX
    listed: Mapping[str, str] | None = None
    if index in inside:
        listed, told = _weight_map(source, index)
        if listed is not None:  # others are of another save: no loader looks there
            paths = [p for p in paths if p[len(prefix) :] in set(listed.values())]
    whole, more = whole_tensors(source, paths)
    specs = {t.fqn: t for t in manifest.tensors}
    wholes: dict[str, FullTensor] = {}
    alone, cast = list[str](), list[str]()
    for name, one in whole.items():
        if listed is not None and prefix + listed.get(name, "") != one.path:
            continue  # another file has it, by the index
        fqn = name_of(name)
        spec = specs.get(fqn)
        if spec is None:
            alone += [fqn] if fqn not in manifest.unread else []
        elif spec.shape != one.shape:
            ranks = f"{list(spec.shape)} in the ranks' files"
            told.append(differs(f"{fqn} is {list(one.shape)} in {one.path}, and {ranks}", fqn))
        elif spec.dtype != one.dtype:
            cast.append(fqn)
        else:
            wholes[fqn] = FullTensor(one.path, one.start)
    del told[_MAX_TOLD:]
    told += more
    if alone:
        told.append(differs(f"{_subject_of(alone)} in {folder}/, and in no rank's file", file=paths[0]))
    if cast:
        told.append(
            differs(
                f"{_subject_of(cast)} of another dtype in {folder}/: values are not compared", file=paths[0]
            )
        )
    made = with_copies(manifest, wholes, source.listing)
    return replace(made, findings=(*made.findings, *told))


def _subject_of(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more are" if names[1:] else f"{names[0]} is"


def differs(message: str, fqn: str | None = None, file: str | None = None) -> Finding:
    """The warning that a second copy is not what the ranks hold, where no elements are compared."""
    return finding("consolidated-differs", "cover", message, fqn=fqn, file=file)


def _weight_map(source: Source, index: str) -> tuple[Mapping[str, str] | None, list[Finding]]:
    """Tensor -> file name as an index says; None, and a finding, where it cannot be read."""
    try:
        meter().require(source.listing[index], index)
        rows = parse(source.store.read(index, 0, source.listing[index]), index)["weight_map"]
        return {str(name): str(path) for name, path in rows.items()}, []
    except MetadataTooLarge:
        raise
    except (CkptError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return None, [differs(f"{index} is not an index: {error}", file=index)]
