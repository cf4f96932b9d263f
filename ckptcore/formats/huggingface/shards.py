"""Read the files of torch's HuggingFaceStorageWriter (hf_shards), with or without consolidation.

With ``save_distributed`` every rank writes ``shard-*-model-*-of-*.safetensors``, shards with offsets
(`shard_headers`). Global shapes are not stored: a tensor ends where its shards end, once it is proven that no
shard is missing. What cannot be proven is a finding. Replicated tensors are in one shard only.

With ``enable_consolidation`` torch merges the shards into consolidated files, and keeps both: shards in
``sharded/``, consolidated files above. Such a checkpoint, named by its root, is read from ``sharded/``, which
is what the ranks saved. torch's consolidation writes 0-d tensors as 0.0, writes zeros where a shard is
missing, and shortens a tensor whose last shard is missing. The consolidated files still serve as evidence:
their names, shapes, dtypes and 0-d values are compared with the shards, they prove the shapes, and every
difference is a finding. Tensors with equal shape and dtype in both are copies
(`ckptcore.core.redundant_copies`): their elements are compared at level ``bytes`` and during a conversion. To
read the consolidated files instead, move ``sharded/`` away.

transformers 5 saves a model so, and its optimizer as a DCP folder below, of any name
(`save_optimizer_distributed`).

Files beside the shards prove their shapes: an index, or a model's config. Ranks' parts of other formats are
compared with safetensors files of complete tensors, too (`with_consolidated_folder`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Item, Manifest, TensorSpec, View
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import meter
from ckptcore.core.redundant_copies import FullTensor, with_copies
from ckptcore.encodings.json_text import parse
from ckptcore.encodings.safetensors_header import SHARDS, read_header
from ckptcore.errors import CkptError, Finding, MetadataTooLarge, NotComplete, UnsupportedFormat, finding
from ckptcore.formats.base import Evidence, Format, Reader, Source, natural
from ckptcore.formats.common.join import Part, join, joined_paths
from ckptcore.formats.common.part_proof import evidence_beside, is_complete_model
from ckptcore.formats.common.weight_index import INDEX, WeightIndex, read_index, take_index
from ckptcore.formats.dcp.reader import dcp_folders, read_folder
from ckptcore.formats.huggingface.shard_headers import (
    INFO,
    FolderShards,
    Shape,
    extent,
    has_info,
    is_shard,
    load,
    missing,
    name_numbers,
    unproven,
)
from ckptcore.formats.huggingface.shard_headers import ShardPart as Shard
from ckptcore.utils.foreign_text import InvalidText
from ckptcore.utils.text import listed as some_of

_BYTES = 500  # bytes of memory per consolidated tensor while tensors are compared
FOLDER = "sharded"  # torch's SHARDED_DIR_NAME
_OPTIMIZER = ("optimizer.", "optim.")
_AWAY = f"find the rank's file; to read the consolidated files instead, move {FOLDER}/ away"
_MAX_COMPARED = 1000  # values of 0-d tensors that are compared: a few bytes each
_MAX_LISTED = 100  # missing files, tensors that differ or have another shape
_ALONE = "find the rank's file; if no rank wrote one, read the others with --allow-incomplete"
_Consolidated = dict[str, "ConsolidatedTensor"]
_CONFIG = "config.json"
_MAX_INDEX, _MAX_CONFIG = 256 << 20, 1 << 20
# Ends of names in transformers' models whose shape is given by sizes in config.json. Only embeddings: no
# option of a model changes their shape.
_EMBEDDINGS = (
    "embed_tokens.weight",
    "lm_head.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "embed_out.weight",
)
_VOCABULARY, _WIDTH = ("vocab_size",), ("hidden_size", "n_embd", "d_model")


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


def detect(source: Source) -> Evidence | None:
    """Recognise the writer's file names, here or in ``sharded/``, or, without an index, its headers."""
    if source.name is not None:
        if not source.name.endswith(".safetensors") or not has_info(source, source.name):
            return None
        if not is_shard(source.name):
            return None  # a full state dict of rank 0: every tensor is complete
        return Evidence("hf_shards", (f"the header of {source.name} has {INFO}",), ("safetensors",))
    inside = [p for p in source.listing if p.startswith(f"{FOLDER}/") and is_shard(p[len(FOLDER) + 1 :])]
    shard_paths = _shard_paths(source)
    if shard_paths:
        return Evidence("hf_shards", (f"found {shard_paths[0]}",), ("safetensors", "hf_quantized"))
    if inside:
        because = (
            f"found {inside[0]}, which is read; consolidated files beside {FOLDER}/ are compared with it"
        )
        return Evidence("hf_shards", (because,), ("safetensors", "hf_quantized"))
    loose = [p for p in source.listing if p.endswith(".safetensors") and "/" not in p]
    if loose and INDEX not in source.listing and has_info(source, loose[0]):
        return Evidence("hf_shards", (f"the header of {loose[0]} has {INFO}",), ("safetensors",))
    return None


def read(source: Source) -> Manifest:
    """Read the manifest of a folder of shards.

    Raises:
        MalformedCheckpoint: A header is not valid.
        DamagedCheckpoint: The files cannot belong to one save.
        UnsupportedFormat: The source is one rank's file.
    """
    if source.name is not None:
        raise UnsupportedFormat(
            f"cannot read {source.name}: it has the shards of one rank only", hint="name its folder"
        )
    shard_paths = _shard_paths(source)
    folder = source if shard_paths else source.below(FOLDER)
    paths = shard_paths or _shard_paths(folder)
    if not paths:
        folder = source
        paths = [p for p in source.listing if p.endswith(".safetensors") and "/" not in p]
    shards = load(folder, paths)
    consolidated, findings = _consolidated(source)
    manifest = _shards_manifest(shards, folder, source, consolidated, findings)
    for beside in (folder, source) if folder is not source else (source,):
        if INDEX in beside.listing and (index := _index(beside)) is not None:
            take_index(beside, INDEX, index, manifest.tensors)
    if folder is not source:
        manifest = join("hf_shards", source.store.url, [Part(manifest, FOLDER)], manifest.origin)
    manifest = _with_optimizers(source, manifest)
    return with_copies(manifest, _consolidated_copies(shards, consolidated), source.listing)


def _with_optimizers(source: Source, model: Manifest) -> Manifest:
    """Add the optimizers in DCP folders below; one that cannot be read is a finding."""
    parts, findings = [Part(model)], list[Finding]()
    for folder in dcp_folders(source):
        try:
            optimizer = read_folder(source.below(folder), "hf_shards")
        except MetadataTooLarge:
            raise
        except CkptError as error:
            code = "not-complete" if isinstance(error, NotComplete) else "malformed-metadata"
            findings.append(finding(code, "files", f"{folder}: {error.message}", file=f"{folder}/.metadata"))
            continue
        if all(spec.fqn.startswith(_OPTIMIZER) for spec in optimizer.tensors):
            parts.append(Part(optimizer, folder))
        else:
            message = f"the checkpoint in {folder} is not read with the model"
            findings.append(finding("unread-state", "files", message, file=f"{folder}/.metadata"))
    if not parts[1:]:
        return replace(model, findings=(*model.findings, *findings)) if findings else model
    joined = join("hf_shards", source.store.url, parts, model.origin, findings)
    form = joined_paths(parts).form([t.fqn for t in joined.tensors], [b.key for b in joined.blobs])
    return replace(joined, origin={**joined.origin, "paths": form}) if form else joined


def _index(source: Source) -> WeightIndex | None:
    """Return the index beside the shards, None for one that proves nothing because it cannot be read."""
    try:
        return read_index(source)
    except MetadataTooLarge:
        raise
    except CkptError:
        return None


def _shard_paths(source: Source) -> list[str]:
    return [p for p in source.listing if is_shard(p)]


def _shards_manifest(
    shards: FolderShards, folder: Source, source: Source, consolidated: _Consolidated, findings: list[Finding]
) -> Manifest:
    builder = Builder()
    builder.findings += [
        *findings,
        *_incomplete(shards, folder, source, consolidated),
        *_consolidated_findings(shards, folder, source, consolidated),
    ]
    files = {path: builder.file(path, size) for path, size in shards.sizes.items()}
    for fqn, parts in shards.parts.items():
        shape = extent(parts)
        if fqn in consolidated and len(consolidated[fqn].shape) == len(shape):
            # With the complete shape, a missing shard is a hole.
            shape = tuple(max(a, b) for a, b in zip(shape, consolidated[fqn].shape, strict=True))
        row = builder.tensor(TensorSpec(fqn, parts[0].dtype, shape), parts[0].file)
        for part in parts:
            item = builder.item(Item(files[part.file], part.start, part.nbytes))
            builder.chunk(row, part.offset, part.shape, item, View())
    origin = {"ranks": shards.ranks, "model_files": max(shards.of, default=1)}
    return builder.build("hf_shards", folder.store.url, origin)


def _incomplete(
    shards: FolderShards, folder: Source, source: Source, consolidated: _Consolidated
) -> Iterator[Finding]:
    """Yield findings about missing files, from the names of the files and the lengths of the parts."""
    if len(shards.of) > 1:
        counts = ", ".join(map(str, sorted(shards.of)))
        yield finding(
            "mixed-saves",
            "files",
            f"the shards' names count {counts} model files: they belong to several saves",
            hint="move the files of the older save away",
        )
    beyond = [p for p in shards.sizes if (n := name_numbers(p)) and not 0 < n[1] <= n[2]]
    if beyond:
        yield finding("mixed-saves", "files", f"the number of {beyond[0]} exceeds its count", file=beyond[0])
    proven = (bool(consolidated) and _same_shapes(shards, consolidated)) or any(
        proves_all(beside, shards) for beside in {id(s): s for s in (folder, source)}.values()
    )
    lost = [] if proven else list(islice(missing(shards), _MAX_LISTED))
    for file in lost:
        code = "missing-file" if file.sure and not folder.recover else "missing-part"
        yield finding(
            code,
            "files",
            f"{file.path} is missing, although {file.why}",
            file=file.path,
            hint=_AWAY if consolidated else _ALONE,
        )
    shapes = {fqn: extent(parts) for fqn, parts in shards.parts.items()}
    proven = proven or any(  # not looked at where nothing is to be proven
        is_complete_model(evidence_beside(beside, "config.json"), shapes) for beside in (folder, source)
    )
    names = () if proven else unproven(shards, known_shapes([folder, source], shards))
    if names:
        yield finding(
            "missing-part" if folder.recover else "unproven-shape",
            "coverage",
            f"{some_of(names, 1)} would be larger if ranks after rank "
            f"{max(shards.ranks, 1) - 1} had written shards: no file records the number of ranks",
        )
    expected_paths = shards.sizes.keys() | {tensor.path for tensor in consolidated.values()}
    for path in folder.listing:
        if path.endswith(".safetensors") and "/" not in path and path not in expected_paths:
            yield finding("stray-file", "files", f"{path} is among the shards, but is not a shard", file=path)


def _same_shapes(shards: FolderShards, consolidated: _Consolidated) -> bool:
    """Return whether the consolidated files are complete, with exactly these tensors in these shapes."""
    numbers = {n[1:] for tensor in consolidated.values() if (n := name_numbers(tensor.path)) is not None}
    if any(len({model for model, of in numbers if of == most}) < most for _, most in numbers):
        return False
    return consolidated.keys() == shards.parts.keys() and all(
        extent(parts) == consolidated[fqn].shape for fqn, parts in shards.parts.items()
    )


def _consolidated_copies(shards: FolderShards, consolidated: _Consolidated) -> dict[str, FullTensor]:
    """Return the consolidated tensors with the dtype and shape of the shards, except 0-d tensors.

    torch consolidates 0-d tensors wrongly; their values are compared together with the headers.
    """
    return {
        fqn: FullTensor(tensor.path, tensor.start)
        for fqn, parts in shards.parts.items()
        if (tensor := consolidated.get(fqn)) is not None
        and tensor.shape
        and (tensor.dtype, tensor.shape) == (parts[0].dtype, extent(parts))
    }


def _consolidated(source: Source) -> tuple[_Consolidated, list[Finding]]:
    """Return the tensors of the consolidated files, and a finding for each file that cannot be read."""
    flat = [p for p in source.listing if "/" not in p and p.endswith(".safetensors") and not is_shard(p)]
    return consolidated_tensors(
        source, [p for p in flat if name_numbers(p) is not None or p == "model.safetensors"]
    )


def _consolidated_findings(
    shards: FolderShards, folder: Source, source: Source, consolidated: _Consolidated
) -> Iterator[Finding]:
    """Yield findings about tensors of the consolidated files that the shards lack or contradict."""
    if not consolidated:
        return
    for fqn in sorted(consolidated.keys() - shards.parts.keys(), key=natural):
        message = f"{fqn} is in {consolidated[fqn].path}, but in no shard"
        yield finding("hole", "coverage", message, fqn=fqn, hint=_AWAY)
    differences = list(_differences(shards, folder, source, consolidated))
    yield from (differs(message, fqn) for fqn, message in differences[:_MAX_LISTED])
    if len(differences) > _MAX_LISTED:
        yield differs(f"{len(differences) - _MAX_LISTED} more tensors of the consolidated files differ")


def _differences(
    shards: FolderShards, folder: Source, source: Source, consolidated: _Consolidated
) -> Iterator[tuple[str, str]]:
    compared = 0
    for fqn, parts in shards.parts.items():
        if fqn not in consolidated:
            yield fqn, f"{fqn} is in no consolidated file"
            continue
        tensor = consolidated[fqn]
        dtype, shape, start, path = tensor.dtype, tensor.shape, tensor.start, tensor.path
        shard_form = parts[0].dtype, extent(parts)
        if shard_form != (dtype, shape):
            in_shards = f"{shard_form[0]} {list(shard_form[1])} in the shards"
            yield fqn, f"{fqn} is {dtype} {list(shape)} in {path}, but {in_shards}"
        elif not shape and compared < _MAX_COMPARED:
            compared += 1
            if _bytes(folder, parts[0].file, parts[0]) == _bytes(source, path, parts[0], start):
                source.explain(path, start, start + parts[0].nbytes)
            else:
                yield fqn, f"{fqn}, a 0-d tensor, has another value in {path} than in the shards"


def _bytes(source: Source, path: str, part: Shard, start: int | None = None) -> bytes:
    return source.store.read(path, part.start if start is None else start, part.nbytes)


FORMAT = Format(
    name="hf_shards",
    title="shards of torch's HuggingFaceStorageWriter",
    recognised_by="`shard-*-model-*-of-*.safetensors`, here or in `sharded/`",
    detect=detect,
    suffixes=frozenset({"safetensors"}),
    reader=Reader(read),
)


def proves_all(source: Source, shards: FolderShards) -> bool:
    """Return whether an index lists exactly these tensors, and records as many bytes as they have."""
    form = _json(source, INDEX, _MAX_INDEX)
    listed, metadata = form.get("weight_map"), form.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(listed, dict) or type(total) is not int or listed.keys() != shards.parts.keys():
        return False
    size = 0
    for fqn, parts in shards.parts.items():
        if parts[0].dtype not in BY_NAME:
            return False
        size += TensorSpec(fqn, parts[0].dtype, extent(parts)).nbytes
    return size == total


def known_shapes(sources: Sequence[Source], shards: FolderShards) -> Mapping[str, Shape]:
    """Return the shapes of embeddings by the model's configuration; none if any tensor contradicts it."""
    for source in sources:
        config = _json(source, _CONFIG, _MAX_CONFIG)
        rows, width = _number(config, _VOCABULARY), _number(config, _WIDTH)
        names = [n for n in shards.parts if n.endswith(_EMBEDDINGS)]
        if rows and width and names:
            agree = all(extent(shards.parts[n]) == (rows, width) for n in names)
            return dict.fromkeys(names, (rows, width)) if agree else {}
    return {}


def _number(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """Return the size with one of these names, in the configuration or in that of its text model."""
    for part in (config, config.get("text_config")):
        sizes = [part[n] for n in names if n in part] if isinstance(part, dict) else []
        if len(sizes) == 1 and type(sizes[0]) is int and sizes[0] > 0:
            return sizes[0]
    return None


def _json(source: Source, path: str, most: int) -> dict[str, Any]:
    """Return a file's JSON object; {} if there is none, because an unreadable file proves nothing."""
    if not 0 < source.listing.get(path, 0) <= most:
        return {}
    try:
        form = parse(source.store.read(path, 0, source.listing[path]), path)
    except (CkptError, InvalidText):
        return {}
    return form if isinstance(form, dict) else {}
