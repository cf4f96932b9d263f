"""Compare the parts of ranks with safetensors files of complete tensors beside them.

A folder of ranks' parts may contain the same model a second time, in safetensors files of complete tensors.
The parts are read, and the consolidated files are compared with them: elements by
`ckptcore.core.redundant_copies`, everything else by the headers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.core.metadata_budget import meter
from ckptcore.core.redundant_copies import FullTensor, with_copies
from ckptcore.encodings.safetensors_header import SHARDS, read_header
from ckptcore.errors import CkptError, Finding, MetadataTooLarge, finding
from ckptcore.formats.base import Source, natural
from ckptcore.formats.common.weight_index import INDEX, WeightIndex, read_index, take_index
from ckptcore.formats.huggingface.shard_headers import INFO
from ckptcore.utils.text import listed as some_of

_BYTES = 500  # bytes of memory per consolidated tensor while tensors are compared
_MAX_LISTED = 100  # tensors of another shape


@dataclass(frozen=True, slots=True)
class ConsolidatedTensor:
    """A tensor of a consolidated file.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        start: Its first byte in the file.
        path: Path of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    path: str


def consolidated_tensors(
    source: Source, paths: list[str]
) -> tuple[dict[str, ConsolidatedTensor], list[Finding]]:
    """Return the tensors of consolidated files by name, and a finding for each file that cannot be read.

    Files with offsets of ranks in their headers are shards, and are skipped. Only headers are read.
    """
    consolidated: dict[str, ConsolidatedTensor] = {}
    findings: list[Finding] = []
    for path in sorted(paths, key=natural):
        try:
            tensors, metadata, data_start = read_header(source.store, path, source.listing[path], SHARDS)
        except MetadataTooLarge:
            raise
        except CkptError as error:
            findings.append(differs(f"cannot read {path}: {error.message}", file=path))
            continue
        if INFO not in metadata:
            meter().keep(_BYTES * len(tensors), path)
            consolidated |= {
                n: ConsolidatedTensor(dtype, shape, data_start + start, path)
                for n, (dtype, shape, start, _) in tensors.items()
            }
    return consolidated, findings


def with_consolidated_folder(
    manifest: Manifest,
    source: Source,
    folder: str,
    name_of: Callable[[str], str],
    required: Collection[str] = (),
) -> Manifest:
    """Add the copies in a folder of consolidated files to a manifest of ranks' parts.

    Tensors of equal dtype and shape become copies. A tensor of another dtype or shape is a finding, as is one
    that no rank has. So is a required one that the folder lacks, unless it is tied to one that the folder
    has: tied tensors are saved once. Without such files nothing changes.

    Args:
        manifest: The manifest of the parts.
        source: Root of the manifest.
        folder: Folder of the consolidated files, below the root; "" for the root itself.
        name_of: Name in a consolidated file -> name in the manifest.
        required: Names in the manifest that a complete copy of the model has.
    """
    prefix = f"{folder}/" if folder else ""
    inside = {p for p in source.listing if p.startswith(prefix) and "/" not in p[len(prefix) :]}
    paths = sorted((p for p in inside if p.endswith(".safetensors")), key=natural)
    if not paths:
        return manifest
    findings: list[Finding] = []
    index = prefix + INDEX
    listed: Mapping[str, str] | None = None
    read: WeightIndex | None = None
    if index in inside:
        read, findings = _readable_index(source, index)
        listed = None if read is None else read.files
        if listed is not None:  # other files belong to another save: no loader reads them
            paths = [p for p in paths if p[len(prefix) :] in set(listed.values())]
    consolidated, header_findings = consolidated_tensors(source, paths)
    if read is not None:
        full = [TensorSpec(name, tensor.dtype, tensor.shape) for name, tensor in consolidated.items()]
        take_index(source, index, read, full)
    specs = {t.fqn: t for t in manifest.tensors}
    copies: dict[str, FullTensor] = {}
    alone, cast = list[str](), list[str]()
    for name, tensor in consolidated.items():
        if listed is not None and prefix + listed.get(name, "") != tensor.path:
            continue  # the index names another file
        fqn = name_of(name)
        spec = specs.get(fqn)
        if spec is None:
            alone += [fqn] if fqn not in manifest.unread else []
        elif spec.shape != tensor.shape:
            ranks = f"{list(spec.shape)} in the ranks' files"
            findings.append(differs(f"{fqn} is {list(tensor.shape)} in {tensor.path}, but {ranks}", fqn))
        elif spec.dtype != tensor.dtype:
            cast.append(fqn)
        else:
            copies[fqn] = FullTensor(tensor.path, tensor.start)
    # Cut before the findings about files are added, which must not be lost.
    del findings[_MAX_LISTED:]
    findings += header_findings
    if alone:
        findings.append(
            differs(f"{_subject_of(alone)} in {prefix or 'the root'}, but in no rank's file", file=paths[0])
        )
    if cast:
        findings.append(
            differs(
                f"{_subject_of(cast)} of another dtype in {prefix or 'the root'}: values are not compared",
                file=paths[0],
            )
        )
    if lacking := _lacking(manifest, required, {name_of(name) for name in consolidated}):
        message = f"{_subject_of(lacking)} in the ranks' files, but not in {some_of(paths, 2)}"
        findings.append(differs(message, file=paths[0]))
    merged = with_copies(manifest, copies, source.listing)
    return replace(merged, findings=(*merged.findings, *findings))


def _lacking(manifest: Manifest, required: Collection[str], copied: Set[str]) -> list[str]:
    """Return the required tensors that are not copied, and share their bytes with none that is.

    Of files that cannot be read nothing is copied, and other findings report it.
    """
    lacking = [name for name in required if name not in copied]
    if not copied or not lacking:
        return []
    index = manifest.index

    def places(name: str) -> frozenset[tuple[Any, ...]]:
        return frozenset((chunk.box, chunk.item, chunk.view) for chunk in manifest.chunks_of(index[name]))

    copied_places = {places(name) for name in copied if name in index}
    return [name for name in lacking if places(name) not in copied_places]


def _subject_of(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more are" if names[1:] else f"{names[0]} is"


def differs(message: str, fqn: str | None = None, file: str | None = None) -> Finding:
    """Return the warning that a copy differs from the ranks' parts, where no elements are compared."""
    return finding("consolidated-differs", "coverage", message, fqn=fqn, file=file)


def _readable_index(source: Source, index: str) -> tuple[WeightIndex | None, list[Finding]]:
    """Return an index; None, and a finding, if it cannot be read."""
    try:
        return read_index(source, index), []
    except MetadataTooLarge:
        raise
    except CkptError as error:
        return None, [differs(error.message, file=index)]
