"""Read the files of torch's HuggingFaceStorageWriter (hf_shards), with or without consolidation.

With ``save_distributed`` every rank writes ``shard-*-model-*-of-*.safetensors``, shards with offsets.
Global shapes are not stored: a tensor ends where its shards end, once it is proven that no
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

A file ``shard-RRRRR-model-MMMMM-of-NNNNN.safetensors`` has the shards of rank R - 1 of model file M of N. Its
header's ``__metadata__`` has ``DCP_SHARDING_INFO``, a JSON text {name: {"saved_offsets": [...]}}
(torch/distributed/checkpoint/_hf_utils.py, filesystem.py). It records offsets only: no global shape, no world
size, no save id. These facts prove that no shard is missing:

1. Ranks are numbered from 1. Every rank that has elements writes a file, and no number is left out.
2. torch.chunk cuts n elements for k ranks into parts of ceil(n / k), a shorter one, then empty ones. So a
   shorter or an empty last part ends its tensor. If only one k gives the lengths of the parts, k ranks wrote
   them. If the files of all these ranks exist, every tensor is complete.
3. Parts of equal length prove nothing by themselves: without the last rank they would still have equal
   length. If another file gives the length of one tensor, its parts prove how many ranks wrote. The ``-of-``
   in a file name counts model files, not ranks.
4. If the tensors have as many bytes as an index records, all of them are complete: the sum would lack each
   missing part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from operator import add
from typing import Any

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Item, Manifest, TensorSpec, View
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import meter, passing
from ckptcore.core.redundant_copies import FullTensor, with_copies
from ckptcore.encodings.json_text import parse
from ckptcore.encodings.safetensors_header import SHARDS, read_header
from ckptcore.errors import (
    CkptError,
    DamagedCheckpoint,
    Finding,
    MalformedCheckpoint,
    MetadataTooLarge,
    NotComplete,
    UnsupportedFormat,
    finding,
)
from ckptcore.formats.base import Evidence, Format, Reader, Source, natural
from ckptcore.formats.common.files_beside import INDEX, WeightIndex, read_index, take_index
from ckptcore.formats.common.join import Part, join, joined_paths
from ckptcore.formats.common.part_proof import evidence_beside, is_complete_model, json_beside, lack
from ckptcore.formats.dcp.reader import dcp_folders, read_folder
from ckptcore.utils.foreign_text import InvalidText, parsing
from ckptcore.utils.text import listed as some_of
from ckptcore.utils.text import short_repr

Shape = tuple[int, ...]
INFO, VERSION = SHARDS
_NAME = re.compile(r"(?:shard-(\d{5,9})-)?model-(\d{5,9})-of-(\d{5,9})\.safetensors")
_MAX_OFFSET = 1 << 50
_PART = 700  # bytes of memory per part while parts are collected
_ZIP = b"PK\x03\x04"
_BYTES = 500  # bytes of memory per consolidated tensor while tensors are compared
FOLDER = "sharded"  # torch's SHARDED_DIR_NAME
_OPTIMIZER = ("optimizer.", "optim.")
_AWAY = f"find the rank's file; to read the consolidated files instead, move {FOLDER}/ away"
_MAX_COMPARED = 1000  # values of 0-d tensors that are compared: a few bytes each
_MAX_LISTED = 100  # missing files, tensors that differ or have another shape
_ALONE = "find the rank's file; if no rank wrote one, read the others with --allow-incomplete"
_Consolidated = dict[str, "ConsolidatedTensor"]
_MAX_INDEX = 256 << 20
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
class ShardPart:
    """One rank's shard of a tensor.

    Attributes:
        file: Path of its file.
        rank: Number in the file's name, from 1; None if the name has none.
        model: Number of the model file in the file's name, from 1.
        dtype: dtype of the tensor.
        offset: First element in each dim.
        shape: Elements in each dim.
        start: First byte in the file.
        nbytes: Number of bytes.
    """

    file: str
    rank: int | None
    model: int
    dtype: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class FolderShards:
    """All shards of a folder.

    Attributes:
        parts: Tensor -> its shards.
        sizes: Path -> bytes of every file.
        present: (rank, model) of every file.
        of: Numbers of model files according to the names.
    """

    parts: Mapping[str, tuple[ShardPart, ...]]
    sizes: Mapping[str, int]
    present: frozenset[tuple[int, int]]
    of: frozenset[int]

    @property
    def ranks(self) -> int:
        """Return the highest rank with a file, from 1; 0 when names have no ranks."""
        return max((rank for rank, _ in self.present), default=0)


def name_numbers(path: str) -> tuple[int | None, int, int] | None:
    """Return (rank, model file, number of model files) of a name.

    >>> name_numbers("shard-00002-model-00001-of-00003.safetensors")
    (2, 1, 3)
    """
    match = _NAME.fullmatch(path)
    if match is None:
        return None
    rank, model, of = match.groups()
    return (None if rank is None else int(rank)), int(model), int(of)


def is_shard(path: str) -> bool:
    """Return whether a name is that of one rank's shard."""
    numbers = name_numbers(path) if path.startswith("shard-") else None
    return numbers is not None and numbers[0] is not None


def has_info(source: Source, path: str) -> bool:
    """Return whether a file's header has offsets; False also for other files than safetensors."""
    try:
        _, metadata, _ = read_header(source.store, path, source.listing[path], None)
    except MetadataTooLarge:
        raise
    except CkptError:
        return False  # its own reader reports what is wrong
    return INFO in metadata


def load(source: Source, paths: list[str]) -> FolderShards:
    """Read the shards of these files, from the headers only.

    Raises:
        MalformedCheckpoint: A header is not valid.
        DamagedCheckpoint: The files cannot belong to one save.
    """
    parts: dict[str, list[ShardPart]] = {}
    present: set[tuple[int, int]] = set()
    counts: set[int] = set()
    for path in sorted(paths, key=natural):
        rank, model, of = name_numbers(path) or (None, 1, 1)
        counts.add(of)
        if rank is not None:
            present.add((rank, model))
        # One file is parsed after the other: only what is kept of it counts in the end.
        with passing():
            rows = _shard_parts(source, path, rank, model)
        for fqn, part in rows:
            parts.setdefault(fqn, []).append(part)
    for fqn, tensor_parts in parts.items():
        _require_one_save(fqn, tensor_parts)
    return FolderShards(
        {k: tuple(v) for k, v in parts.items()},
        {p: source.listing[p] for p in paths},
        frozenset(present),
        frozenset(counts),
    )


def _shard_parts(source: Source, path: str, rank: int | None, model: int) -> list[tuple[str, ShardPart]]:
    """Read the header of one shard file; return (name, part) of each tensor in it."""
    size = source.listing[path]
    if size >= 4 and source.store.read(path, 0, 4) == _ZIP:
        raise MalformedCheckpoint(
            f"{path} begins with a zip: the state had values other than tensors, and torch wrote them before "
            "the header. torch itself cannot read the file",
            hint="save tensors only, or save with the default writer of torch.distributed.checkpoint",
            file=path,
        )
    tensors, metadata, data = read_header(source.store, path, size, SHARDS)
    version = metadata.get(VERSION, "1.0")
    if version != "1.0":
        raise UnsupportedFormat(f"{path}: {VERSION} must be 1.0 (got {short_repr(version, 40)})", file=path)
    offsets = _offsets(metadata.get(INFO), path)
    if offsets.keys() != tensors.keys():
        odd = min(offsets.keys() ^ tensors.keys())
        raise MalformedCheckpoint(f"{path}: the header and its {INFO} disagree about {odd!r}", file=path)
    meter().keep(_PART * len(tensors), path)
    out = []
    for fqn, (dtype, shape, start, stop) in tensors.items():
        offset = offsets[fqn]
        if len(offset) != len(shape):
            raise MalformedCheckpoint(
                f"{path}: the offset of {fqn} must have {len(shape)} dims (got {short_repr(list(offset))})",
                file=path,
                fqn=fqn,
            )
        out.append((fqn, ShardPart(path, rank, model, dtype, offset, shape, data + start, stop - start)))
    return out


def _offsets(raw: Any, path: str) -> dict[str, tuple[int, ...]]:
    if type(raw) is not str:
        raise MalformedCheckpoint(f"{path} is named like a shard, but its header has no {INFO}", file=path)
    try:
        with parsing("offsets"):
            rows = {str(k): v["saved_offsets"] for k, v in parse(raw, path).items()}
    except InvalidText as error:
        raise MalformedCheckpoint(f"{path}: cannot read {INFO}: {error}", file=path) from error
    for fqn, row in rows.items():
        if type(row) is not list or any(type(n) is not int or not 0 <= n < _MAX_OFFSET for n in row):
            raise MalformedCheckpoint(
                f"{path}: the offset of {fqn} must be non-negative integers (got {short_repr(row)})",
                file=path,
                fqn=fqn,
            )
    return {k: tuple(v) for k, v in rows.items()}


def _require_one_save(fqn: str, parts: list[ShardPart]) -> None:
    """Require one dtype, number of dims and model file for all shards of a tensor."""
    first = parts[0]
    for part in parts:
        if (part.dtype, len(part.shape), part.model) != (first.dtype, len(first.shape), first.model):
            message = (
                f"{fqn} is {first.dtype} {list(first.shape)} in {first.file} and {part.dtype} "
                f"{list(part.shape)} in {part.file}: the files belong to different saves"
            )
            mixed = finding("mixed-saves", "coverage", message, fqn=fqn, file=part.file)
            raise DamagedCheckpoint(message, hint=mixed.hint, findings=(mixed,), fqn=fqn)


@dataclass(frozen=True, slots=True)
class Missing:
    """A missing file.

    Attributes:
        path: Path of the file.
        why: Why the file should exist.
        sure: Whether the rank must have written it.
    """

    path: str
    why: str
    sure: bool


def extent(parts: Sequence[ShardPart]) -> Shape:
    """Return the end of the parts of a tensor, including empty ones, which follow the last."""
    ends = [tuple(map(add, p.offset, p.shape)) for p in parts]
    return ends[0] if len(ends) == 1 else tuple(map(max, zip(*ends, strict=True)))


def ended(parts: Sequence[ShardPart]) -> bool:
    """Return whether the parts themselves prove that nothing follows the last of them."""
    shape = extent(parts)
    if not shape or any(n == 0 for p in parts for n in p.shape):
        return True
    cut = _cuts(parts, shape)
    return len(cut) == 1 and _shorter(next(iter(cut.values())))


def writers(parts: Sequence[ShardPart], full_shape: Shape | None = None) -> int | None:
    """Return the number of ranks that the parts of a tensor were cut for, or None if ambiguous.

    Args:
        parts: All parts of the tensor.
        full_shape: The tensor's shape, if another file gives it.
    """
    shape = extent(parts)
    if full_shape is not None and full_shape != shape:
        return None
    filled = [p for p in parts if 0 not in p.shape]
    ranks = [p.rank for p in filled]
    cut = _cuts(filled, shape)
    if None in ranks or len(set(ranks)) != len(filled) or not cut:
        return None
    least, most = 1, 1
    grid = 1
    for lengths in cut.values():
        low, high = _ranks_for(lengths, full_shape is not None)
        if high == inf:
            return None
        least, most, grid = least * low, most * int(high), grid * len(lengths)
    if len(cut) == 1:  # an empty part belongs to one more rank
        least = max(least, grid + (len(parts) > len(filled)))
    return least if least == most and grid == len(filled) else None


def missing(shards: FolderShards) -> Iterator[Missing]:
    """Yield missing files: files of higher ranks exist, or other files of the same rank.

    A rank without elements of a model file does not write it, and torch drops replicas. So a file is
    certainly missing only if the parts of a tensor stop just before its rank.
    """
    ranks, of = shards.ranks, max(shards.of, default=1)
    models = sorted({parts[0].model for parts in shards.parts.values()})
    ends = {(_next_rank(parts, ranks), parts[0].model) for parts in shards.parts.values()}
    cut = {parts[0].model for parts in shards.parts.values() if len(parts) > 1 and not ended(parts)}
    if len(models) < of:
        first = next(m for m in range(1, of + 1) if m not in models)
        yield Missing(_path(1, first, of), f"{of - len(models)} of {of} model files have no shard", sure=True)
    anywhere = {rank for rank, _ in shards.present}
    for rank in range(1, ranks + 1):
        for model in models:
            if (rank, model) in shards.present:
                continue
            why = f"rank {rank - 1} wrote other model files" if rank in anywhere else "later ranks wrote some"
            sure = (rank, model) in ends
            if sure or rank not in anywhere or model in cut:
                yield Missing(_path(rank, model, of), why, sure)


def _next_rank(parts: Sequence[ShardPart], ranks: int) -> int | None:
    """Return the first rank whose part of a tensor seems to be missing, or None."""
    present = {p.rank for p in parts}
    if present != set(range(1, len(present) + 1)) or ended(parts) or (len(present) == 1 and ranks != 2):
        return None
    return len(present) + 1


def unproven(shards: FolderShards, full_shapes: Mapping[str, Shape]) -> tuple[str, ...]:
    """Return the tensors that would be longer if files of later ranks were lost: no file rules that out.

    Args:
        shards: All shards.
        full_shapes: Shapes of tensors that another file gives.
    """
    ranks = shards.ranks
    if ranks > 1 and any(
        writers(parts, full_shapes.get(fqn)) == ranks for fqn, parts in shards.parts.items()
    ):
        return ()
    # A tensor of which several ranks have the same part was never cut.
    return tuple(
        fqn
        for fqn, parts in shards.parts.items()
        if not ended(parts) and (ranks < 2 or len({p.offset for p in parts}) > 1)
    )


def _cuts(parts: Sequence[ShardPart], shape: Shape) -> dict[int, tuple[int, ...]]:
    """Return dim -> lengths in order of offset, for every dim that is cut."""
    cuts = {}
    for dim, size in enumerate(shape):
        lengths = {p.offset[dim]: p.shape[dim] for p in parts if 0 not in p.shape}
        if lengths and any(n != size for n in lengths.values()):
            cuts[dim] = tuple(lengths[offset] for offset in sorted(lengths))
    return cuts


def _shorter(lengths: tuple[int, ...]) -> bool:
    """Return whether all lengths but the last are equal, and the last is shorter.

    >>> _shorter((3, 3, 1)), _shorter((3, 3)), _shorter((3, 1, 3))
    (True, False, False)
    """
    return len(set(lengths[:-1])) == 1 and lengths[-1] < lengths[0]


def _ranks_for(lengths: tuple[int, ...], complete: bool = False) -> tuple[int, float]:
    """Return the fewest and the most ranks for which torch.chunk gives these lengths.

    Args:
        lengths: Lengths of the parts in one dim.
        complete: Whether nothing follows them.

    >>> _ranks_for((26, 26, 26, 25)), _ranks_for((2, 2, 1)), _ranks_for((1, 1)), _ranks_for((8, 8), True)
    ((4, 4), (3, 4), (2, inf), (2, 2))
    """
    even = complete and len(set(lengths)) == 1
    total, step = sum(lengths), lengths[0]
    if not (even or _shorter(lengths)) or step < 2:
        return (len(lengths), inf)
    return -(-total // step), -(-total // (step - 1)) - 1


def _path(rank: int, model: int, of: int) -> str:
    return f"shard-{rank:05d}-model-{model:05d}-of-{of:05d}.safetensors"


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
        message = f"{some_of(names, 1)} would be larger if ranks after rank {max(shards.ranks, 1) - 1} had "
        message += "written shards: no file records the number of ranks"
        yield lack(folder, "unproven-shape", "coverage", message)
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


def _bytes(source: Source, path: str, part: ShardPart, start: int | None = None) -> bytes:
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
    form = json_beside(source, INDEX, _MAX_INDEX)
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
        config = json_beside(source, "config.json")
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
