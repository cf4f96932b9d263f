"""One torch file per rank: state dicts of DTensor, ShardedTensor, or whole tensors.

What FSDP jobs leave that save without torch.distributed.checkpoint: verl, Accelerate with
``use_dcp=False``, OLMo's torch_legacy, and scripts that call torch.save on every rank. Each pickle
says which boxes its rank holds; the ranks' files are one checkpoint together.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ckptcore.builder import Builder
from ckptcore.errors import AmbiguousModel, CkptError, Finding, finding
from ckptcore.formats._parts import Part, join
from ckptcore.formats._rankfiles import RankFiles, rank_files
from ckptcore.formats._rankread import RankReader
from ckptcore.formats._torchzip import is_zip
from ckptcore.formats.base import Abilities, Evidence, Format, Source
from ckptcore.manifest import Manifest

_NAME = "torch_ranks"
# verl keeps a folder per component (actor, critic) in a folder per step.
_BELOW = re.compile(r"^(?P<folder>(?:[^/]+/){1,2})[^/]+_world_size_\d+_rank_\d+\.pt$")
_OTHERS = (".metadata", ".distcp", ".safetensors", ".zarray")


def detect(source: Source) -> Evidence | None:
    """A folder of files that are named by rank, at least one of them a torch zip."""
    if source.name is not None or any(p.endswith(_OTHERS) and "/" not in p for p in source.listing):
        return None
    found = [p for kind in rank_files_of(source) for p in kind.paths.values()]
    if found:
        zips = [p for p in found[:8] if _is_zip(source, p)]
        verl = any("_world_size_" in p for p in found)
        if not zips and not verl:
            return None
        return Evidence(_NAME, (f"{len(found)} files named by rank, {found[0]} for one",), ("torch_save",))
    folders = _folders(source)
    if folders:
        return Evidence(_NAME, (f"files named by rank in {', '.join(folders)}",), ("torch_save",))
    return None


def read(source: Source) -> Manifest:
    """The manifest of all ranks' files; those of a subfolder when there is exactly one.

    Raises `AmbiguousModel` for several components, and as `RankReader.add` does.
    """
    kinds = rank_files(source.listing)
    if kinds:
        return read_ranks(source, kinds, _NAME)
    folders = _folders(source)
    if len(folders) > 1:
        raise AmbiguousModel(
            f"{source.store.url} holds {len(folders)} checkpoints: {', '.join(folders[:8])}",
            hint=f"name one of them, {source.store.url.rstrip('/')}/{folders[0]} say",
            candidates=list(folders),
        )
    inner = source.below(folders[0])
    manifest = read_ranks(inner, rank_files(inner.listing), _NAME)
    return join(_NAME, source.store.url, [Part(manifest, folders[0])], manifest.origin)


def read_ranks(source: Source, kinds: tuple[RankFiles, ...], name: str) -> Manifest:
    """The manifest of the kinds of rank files of one folder, as format ``name``.

    A single kind keeps its names; several are told apart by what their files are called.
    """
    builder = Builder()
    reader = RankReader(source, builder)
    for kind in kinds:
        reader.add(kind, kind.role if len(kinds) > 1 else "")
    for kind in kinds:
        builder.findings += reader.missing(kind)
    builder.findings += _config(source, kinds)
    world = next((k.world for k in kinds if k.world), None) or reader.world
    origin: dict[str, Any] = {"prefix": reader.prefixes, "parts": [k.role for k in kinds]}
    if world:
        origin["world_size"] = world
    return builder.build(name, source.store.url, origin)


def rank_files_of(source: Source) -> tuple[RankFiles, ...]:
    """`rank_files`, or those of one save where the names tell of two: `read` says so."""
    try:
        return rank_files(source.listing)
    except AmbiguousModel:
        return tuple(RankFiles("", None, {0: p}) for p in source.listing if "/" not in p and "rank" in p)


def _folders(source: Source) -> list[str]:
    found = {m["folder"].rstrip("/") for p in source.listing if (m := _BELOW.match(p))}
    return sorted(found)


def _is_zip(source: Source, path: str) -> bool:
    return source.listing[path] >= 4 and is_zip(source.store.read(path, 0, 4))


def _config(source: Source, kinds: tuple[RankFiles, ...]) -> list[Finding]:
    """verl's ``fsdp_config.json`` repeats the world size; older saves have none."""
    name = "fsdp_config.json"
    if not 0 < source.listing.get(name, 0) < 1 << 16:
        return []
    try:
        told = json.loads(source.store.read(name, 0, source.listing[name]))
    except (CkptError, ValueError, RecursionError):
        return [finding("malformed-metadata", "files", f"{name} is no JSON", file=name)]
    world = told.get("world_size") if isinstance(told, dict) else None
    named = next((k.world for k in kinds if k.world), None)
    if type(world) is not int or named is None or world == named:
        return []
    message = f"{name} says {world} ranks, the files' names say {named}"
    return [finding("item-mismatch", "files", message, file=name)]


FORMAT = Format(
    name=_NAME,
    title="torch.save file per rank (verl, Accelerate, OLMo, FSDP scripts)",
    recognised_by="torch zips named by rank: `*_rank_R.pt`, `*_rankR.bin`, `rankR.pt`",
    abilities=Abilities(reads=True, writes=False, checksums="CRC-32 per record", objects=True),
    detect=detect,
    read=read,
)
