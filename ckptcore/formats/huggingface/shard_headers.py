"""Shards of torch's HuggingFaceStorageWriter: what does each file hold, and of which save is it?

A file ``shard-RRRRR-model-MMMMM-of-NNNNN.safetensors`` holds what rank R - 1 keeps of model file M of
N; its header's ``__metadata__`` has ``DCP_SHARDING_INFO``, a JSON text {name: {"saved_offsets":
[...]}} (torch/distributed/checkpoint/_hf_utils.py, filesystem.py). Offsets are all it has: no global
shape, no world size, no save id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
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
from ckptcore.utils.text import shown

INFO, VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"
_NAME = re.compile(r"(?:shard-(\d{5,9})-)?model-(\d{5,9})-of-(\d{5,9})\.safetensors")
_MAX_OFFSET = 1 << 50
_PART = 700  # bytes of a piece while it is collected
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class Part:
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
class Shards:
    """All shards of a folder. present: (rank, model) of every file. of: the counts that names claim."""

    parts: Mapping[str, tuple[Part, ...]]
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


def load(source: Source, paths: list[str]) -> Shards:
    """The shards of these files; reads headers only.

    Raises `MalformedCheckpoint`, and `DamagedCheckpoint` for files that cannot be of one save.
    """
    parts: dict[str, list[Part]] = {}
    present: set[tuple[int, int]] = set()
    counts: set[int] = set()
    for path in sorted(paths, key=natural):
        rank, model, of = named(path) or (None, 1, 1)
        counts.add(of)
        if rank is not None:
            present.add((rank, model))
        with passing():
            held = _parts(source, path, rank, model)
        for fqn, part in held:
            parts.setdefault(fqn, []).append(part)
    for fqn, found in parts.items():
        _require_one_save(fqn, found)
    return Shards(
        {k: tuple(v) for k, v in parts.items()},
        {p: source.listing[p] for p in paths},
        frozenset(present),
        frozenset(counts),
    )


def _parts(source: Source, path: str, rank: int | None, model: int) -> list[tuple[str, Part]]:
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
        raise UnsupportedFormat(f"{path} says {VERSION} {shown(version, 40)}; only 1.0 is read", file=path)
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
                f"{path}: {fqn} {list(shape)} is placed at {shown(list(offset))}", file=path, fqn=fqn
            )
        out.append((fqn, Part(path, rank, model, dtype, offset, shape, data + start, stop - start)))
    return out


def _offsets(raw: Any, path: str) -> dict[str, tuple[int, ...]]:
    if type(raw) is not str:
        raise MalformedCheckpoint(f"{path} is named like a shard, but its header has no {INFO}", file=path)
    try:
        top = parse(raw, path)
        rows = {str(k): v["saved_offsets"] for k, v in top.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedCheckpoint(f"{path}: {INFO} cannot be read: {shown(error, 120)}", file=path) from error
    for fqn, row in rows.items():
        if type(row) is not list or any(type(n) is not int or not 0 <= n < _MAX_OFFSET for n in row):
            raise MalformedCheckpoint(f"{path}: {fqn} is placed at {shown(row)}", file=path, fqn=fqn)
    return {k: tuple(v) for k, v in rows.items()}


def _require_one_save(fqn: str, parts: list[Part]) -> None:
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
