"""Read the headers of shards of torch's HuggingFaceStorageWriter, and prove that none is missing.

A file ``shard-RRRRR-model-MMMMM-of-NNNNN.safetensors`` holds what rank R - 1 keeps of model file M of
N; its header's ``__metadata__`` has ``DCP_SHARDING_INFO``, a JSON text {name: {"saved_offsets":
[...]}} (torch/distributed/checkpoint/_hf_utils.py, filesystem.py). Offsets are all it has: no global
shape, no world size, no save id. What proves that no shard is missing, then:

1. Ranks are numbered from 1, and those that hold something write a file without leaving one out.
2. torch.chunk cuts n elements for k ranks into parts of ceil(n / k), a shorter one, then empty ones. So a
   shorter or an empty last part ends its tensor, and where only one k gives the lengths that are
   there, k is how many ranks wrote. If those ranks are all there, every tensor is whole.
3. Parts of equal length prove nothing by themselves: without the last rank they would be parts of equal
   length, too. Where something beside them tells how long one of them is, its parts prove how many ranks
   wrote. A file's ``-of-`` counts model files, and tells nothing of ranks.
4. Tensors that hold as many bytes as an index tells of are all whole: each missing part would be missing in
   the sum.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from ckptcore.core.metadata_budget import meter, passing
from ckptcore.encodings.json_text import parse
from ckptcore.encodings.safetensors_header import read_header
from ckptcore.errors import (
    CkptError,
    DamagedCheckpoint,
    MalformedCheckpoint,
    MetadataTooLarge,
    UnsupportedFormat,
    finding,
)
from ckptcore.formats.base import Source, natural
from ckptcore.utils.text import short_repr

Shape = tuple[int, ...]
INFO, VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"
_NAME = re.compile(r"(?:shard-(\d{5,9})-)?model-(\d{5,9})-of-(\d{5,9})\.safetensors")
_MAX_OFFSET = 1 << 50
_PART = 700  # bytes of a piece while it is collected
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class ShardPart:
    """One rank's piece of a tensor. file: its path. start: its first byte there.

    rank, model: numbers in the file's name, from 1; rank None: the name has none.
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
    """All shards of a folder. present: (rank, model) of every file. of: the counts that names claim."""

    parts: Mapping[str, tuple[ShardPart, ...]]
    sizes: Mapping[str, int]
    present: frozenset[tuple[int, int]]
    of: frozenset[int]

    @property
    def ranks(self) -> int:
        """The highest rank, from 1, that a file is there of; 0 when names tell no ranks."""
        return max((rank for rank, _ in self.present), default=0)


def named(path: str) -> tuple[int | None, int, int] | None:
    """(rank, model file, number of model files) of a name.

    >>> named("shard-00002-model-00001-of-00003.safetensors")
    (2, 1, 3)
    """
    found = _NAME.fullmatch(path)
    if found is None:
        return None
    rank, model, of = found.groups()
    return (None if rank is None else int(rank)), int(model), int(of)


def is_shard(path: str) -> bool:
    """Whether a name is that of one rank's shard."""
    found = named(path)
    return found is not None and found[0] is not None


def has_info(source: Source, path: str) -> bool:
    """Whether a file's header has offsets; False also for what is no safetensors file."""
    try:
        _, metadata, _ = read_header(source.store, path, source.listing[path])
    except MetadataTooLarge:
        raise
    except CkptError:
        return False  # its own reader will say what is wrong
    return INFO in metadata


def load(source: Source, paths: list[str]) -> FolderShards:
    """The shards of these files; reads headers only.

    Raises `MalformedCheckpoint`, and `DamagedCheckpoint` for files that cannot be of one save.
    """
    parts: dict[str, list[ShardPart]] = {}
    present: set[tuple[int, int]] = set()
    counts: set[int] = set()
    for path in sorted(paths, key=natural):
        rank, model, of = named(path) or (None, 1, 1)
        counts.add(of)
        if rank is not None:
            present.add((rank, model))
        with passing():
            held = _shard_parts(source, path, rank, model)
        for fqn, part in held:
            parts.setdefault(fqn, []).append(part)
    for fqn, found in parts.items():
        _require_one_save(fqn, found)
    return FolderShards(
        {k: tuple(v) for k, v in parts.items()},
        {p: source.listing[p] for p in paths},
        frozenset(present),
        frozenset(counts),
    )


def _shard_parts(source: Source, path: str, rank: int | None, model: int) -> list[tuple[str, ShardPart]]:
    size = source.listing[path]
    if size >= 4 and source.store.read(path, 0, 4) == _ZIP:
        raise MalformedCheckpoint(
            f"{path} begins with a zip: the state had values that are no tensors, torch wrote them in front "
            "of the header, and cannot read the file itself",
            hint="save tensors only, or save with the default writer of torch.distributed.checkpoint",
            file=path,
        )
    tensors, metadata, data = read_header(source.store, path, size)
    version = metadata.get(VERSION, "1.0")
    if version != "1.0":
        raise UnsupportedFormat(
            f"{path} says {VERSION} {short_repr(version, 40)}; only 1.0 is read", file=path
        )
    offsets = _offsets(metadata.get(INFO), path)
    if offsets.keys() != tensors.keys():
        odd = min(offsets.keys() ^ tensors.keys())
        raise MalformedCheckpoint(f"{path}: its header and its {INFO} disagree about {odd!r}", file=path)
    meter().keep(_PART * len(tensors), path)
    out = []
    for fqn, (dtype, shape, start, stop) in tensors.items():
        offset = offsets[fqn]
        if len(offset) != len(shape):
            raise MalformedCheckpoint(
                f"{path}: {fqn} {list(shape)} is placed at {short_repr(list(offset))}", file=path, fqn=fqn
            )
        out.append((fqn, ShardPart(path, rank, model, dtype, offset, shape, data + start, stop - start)))
    return out


def _offsets(raw: Any, path: str) -> dict[str, tuple[int, ...]]:
    if type(raw) is not str:
        raise MalformedCheckpoint(f"{path} is named like a shard, but its header has no {INFO}", file=path)
    try:
        top = parse(raw, path)
        rows = {str(k): v["saved_offsets"] for k, v in top.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedCheckpoint(
            f"{path}: {INFO} cannot be read: {short_repr(error, 120)}", file=path
        ) from error
    for fqn, row in rows.items():
        if type(row) is not list or any(type(n) is not int or not 0 <= n < _MAX_OFFSET for n in row):
            raise MalformedCheckpoint(f"{path}: {fqn} is placed at {short_repr(row)}", file=path, fqn=fqn)
    return {k: tuple(v) for k, v in rows.items()}


def _require_one_save(fqn: str, parts: list[ShardPart]) -> None:
    """Every shard of a tensor has its dtype and rank, and lies in the same model file."""
    first = parts[0]
    for part in parts:
        if (part.dtype, len(part.shape), part.model) != (first.dtype, len(first.shape), first.model):
            message = (
                f"{fqn} is {first.dtype} {list(first.shape)} in {first.file} and {part.dtype} "
                f"{list(part.shape)} in {part.file}: they are not of one save"
            )
            told = finding("mixed-saves", "cover", message, fqn=fqn, file=part.file)
            raise DamagedCheckpoint(message, hint=told.hint, findings=(told,), fqn=fqn)


@dataclass(frozen=True, slots=True)
class Missing:
    """A file that is not there, and why it should be. sure: whether a rank without it cannot be."""

    path: str
    why: str
    sure: bool


def extent(parts: Sequence[ShardPart]) -> Shape:
    """As far as the parts of a tensor reach, empty ones included: those lie behind the last."""
    ends = [tuple(o + n for o, n in zip(p.offset, p.shape, strict=True)) for p in parts]
    return tuple(max(column) for column in zip(*ends, strict=True))


def ended(parts: Sequence[ShardPart]) -> bool:
    """Whether the parts themselves show that nothing follows the last of them."""
    shape = extent(parts)
    if not shape or any(n == 0 for p in parts for n in p.shape):
        return True
    cut = _cuts(parts, shape)
    return len(cut) == 1 and _shorter(next(iter(cut.values())))


def writers(parts: Sequence[ShardPart], whole: Shape | None = None) -> int | None:
    """How many ranks the parts of a tensor were cut for, where their lengths leave only one answer.

    whole: the tensor's shape, where something else tells it.
    """
    shape = extent(parts)
    if whole is not None and whole != shape:
        return None
    held = [p for p in parts if 0 not in p.shape]
    ranks = [p.rank for p in held]
    cut = _cuts(held, shape)
    if None in ranks or len(set(ranks)) != len(held) or not cut:
        return None
    least, most = 1, 1
    grid = 1
    for lengths in cut.values():
        low, high = _ranks_for(lengths, whole is not None)
        if high == inf:
            return None
        least, most, grid = least * low, most * int(high), grid * len(lengths)
    if len(cut) == 1:  # an empty part is a rank more
        least = max(least, grid + (len(parts) > len(held)))
    return least if least == most and grid == len(held) else None


def missing(shards: FolderShards) -> Iterator[Missing]:
    """Files that are not there although there are some of higher ranks, or of their rank.

    A rank that holds nothing of a model file writes none of it, and torch drops replicas: only where a
    tensor ends just before that rank, as if cut off, it is sure that the file is missing.
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
    """The rank from which on the parts of a tensor look cut off; None where they do not."""
    held = {p.rank for p in parts}
    if held != set(range(1, len(held) + 1)) or ended(parts) or (len(held) == 1 and ranks != 2):
        return None
    return len(held) + 1


def unproven(shards: FolderShards, known: Mapping[str, Shape]) -> tuple[str, ...]:
    """Tensors that would be longer if ranks behind the last were lost; nothing here tells.

    known: shapes of tensors that something else tells.
    """
    ranks = shards.ranks
    if ranks > 1 and any(writers(parts, known.get(fqn)) == ranks for fqn, parts in shards.parts.items()):
        return ()
    # Among several ranks, a tensor of which all hold the same part was never cut.
    return tuple(
        fqn
        for fqn, parts in shards.parts.items()
        if not ended(parts) and (ranks < 2 or len({p.offset for p in parts}) > 1)
    )


def _cuts(parts: Sequence[ShardPart], shape: Shape) -> dict[int, tuple[int, ...]]:
    """dim -> lengths in order of offset, of every dim in which no part is whole."""
    found = {}
    for dim, whole in enumerate(shape):
        lengths = {p.offset[dim]: p.shape[dim] for p in parts if 0 not in p.shape}
        if lengths and any(n != whole for n in lengths.values()):
            found[dim] = tuple(lengths[at] for at in sorted(lengths))
    return found


def _shorter(lengths: tuple[int, ...]) -> bool:
    """
    >>> _shorter((3, 3, 1)), _shorter((3, 3)), _shorter((3, 1, 3))
    (True, False, False)
    """
    return len(set(lengths[:-1])) == 1 and lengths[-1] < lengths[0]


def _ranks_for(lengths: tuple[int, ...], whole: bool = False) -> tuple[int, float]:
    """The fewest and the most ranks for which torch.chunk gives these lengths.

    whole: whether nothing follows them.

    >>> _ranks_for((26, 26, 26, 25)), _ranks_for((2, 2, 1)), _ranks_for((1, 1)), _ranks_for((8, 8), True)
    ((4, 4), (3, 4), (2, inf), (2, 2))
    """
    even = whole and len(set(lengths)) == 1
    total, step = sum(lengths), lengths[0]
    if not (even or _shorter(lengths)) or step < 2:
        return (len(lengths), inf)
    return -(-total // step), -(-total // (step - 1)) - 1


def _path(rank: int, model: int, of: int) -> str:
    return f"shard-{rank:05d}-model-{model:05d}-of-{of:05d}.safetensors"
