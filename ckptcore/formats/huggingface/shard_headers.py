"""Read the headers of shards of torch's HuggingFaceStorageWriter, and prove that none is missing.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import add
from typing import Any

from ckptcore.core.metadata_budget import meter, passing
from ckptcore.encodings.json_text import parse
from ckptcore.encodings.safetensors_header import SHARDS, read_header
from ckptcore.errors import (
    CkptError,
    DamagedCheckpoint,
    MalformedCheckpoint,
    MetadataTooLarge,
    UnsupportedFormat,
    finding,
)
from ckptcore.formats.base import Source, natural
from ckptcore.utils.foreign_text import InvalidText, parsing
from ckptcore.utils.text import short_repr

Shape = tuple[int, ...]
INFO, VERSION = SHARDS
_NAME = re.compile(r"(?:shard-(\d{5,9})-)?model-(\d{5,9})-of-(\d{5,9})\.safetensors")
_MAX_OFFSET = 1 << 50
_PART = 700  # bytes of memory per part while parts are collected
_ZIP = b"PK\x03\x04"


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
