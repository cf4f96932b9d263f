"""Replaceable: does something else prove to hold all that a source holds?

A child (what a conversion made of it) stands for its source when the fingerprints of both are equal: every
tensor is there, bit for bit, under its own name. A cast child is only taken by explicit policy: then the
conversion's fingerprint, taken before the cast, must be the source's. Fingerprints speak of tensors; objects
and files that are not part of what was read are compared by name, and may be given up by name only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ckptcore.catalog import tending
from ckptcore.catalog.values import CheckpointRow, ConversionRow
from ckptcore.convert import inspect
from ckptcore.fingerprinting import fingerprint
from ckptcore.fingerprinttable import held_by
from ckptcore.manifest import Manifest
from ckptcore.register import facts
from ckptcore.request import Settings
from ckptcore.shown import some
from ckptcore.store.survey import Seen, everything_at

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

# Files that say where tensors and objects lie, and hold nothing else.
_DESCRIBE = (
    ".metadata",
    "*/.metadata",
    "metadata.json",
    "*/metadata.json",
    "*.index.json",
    "common.pt",
    "*/common.pt",
)


@dataclass(frozen=True)
class Allowed:
    """What else is taken. cast: a child of other dtypes. loss: globs on objects and files that may go."""

    cast: bool = False
    loss: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stand:
    """Whether a child stands for its source; why not, otherwise. fresh: both were read for it just now.

    source_seen, child_seen: their files as they were before anything of them was read.
    """

    child: CheckpointRow | None
    conversion: ConversionRow | None
    why: str
    fresh: bool = False
    source_seen: Mapping[str, Seen] = field(default_factory=dict)
    child_seen: Mapping[str, Seen] = field(default_factory=dict)


def stand_in(
    catalog: Catalog, source: CheckpointRow, allowed: Allowed, *, take: Settings | None = None
) -> Stand:
    """The child that stands for a source. take: means to take fingerprints that are missing, or None.

    Raises what reading them raises.
    """
    with catalog.reading() as conn:
        made = tending.children(conn, source.id)
    if not made:
        return Stand(None, None, "nothing was made of it")
    seen = everything_at(source.uri)
    mine = source.fingerprint
    if take is not None:
        mine = _taken(catalog, source.uri, take)
    if mine is None:
        return Stand(None, None, "its fingerprint is not known; --fingerprint takes it")
    why = ""
    for conversion, child in made:
        child_seen = everything_at(child.uri) if take is not None else None
        theirs = child.fingerprint
        if take is not None:
            theirs = _taken(catalog, child.uri, take)
        cast = allowed.cast and conversion.fingerprint == mine and _casts(conversion)
        if theirs != mine and not cast:
            told = _casts(conversion) and conversion.fingerprint == mine
            why = why or (f"{child.uri} is cast; --accept-cast takes it" if told else _differs(child, theirs))
            continue
        missing = _lost(source.uri, seen, inspect(child.uri), allowed.loss)
        if missing:
            why = f"{child.uri} does not hold {missing}; --accept-loss GLOB gives it up"
            continue
        return Stand(child, conversion, "", take is not None, seen, child_seen or everything_at(child.uri))
    return Stand(None, None, why)


def _taken(catalog: Catalog, uri: str, settings: Settings) -> str:
    manifest = inspect(uri)
    found = fingerprint(manifest, settings)
    prints = held_by(manifest, found.tensors, dict(found.renamed))
    warnings = [f for f in manifest.findings if f.severity == "warning"]
    catalog.record_validation(facts(manifest, uri, verified="cover", prints=prints), warnings, level="cover")
    return found.fingerprint


def _casts(conversion: ConversionRow) -> bool:
    return bool(conversion.request.get("dtype") or conversion.request.get("dtype_for"))


def _differs(child: CheckpointRow, theirs: str | None) -> str:
    if theirs is None:
        return f"the fingerprint of {child.uri} is not known; --fingerprint takes it"
    return f"{child.uri} holds other tensors"


def inner_names(manifest: Manifest, uri: str) -> frozenset[str]:
    """The files that hold tensors, relative to the folder that was asked for; a format may read one below."""
    inner = manifest.root.rstrip("/").removeprefix(uri.rstrip("/")).strip("/")
    above = f"{inner}/" if inner else ""
    return frozenset(above + manifest.files[int(f)].path for f in set(manifest.items.file.tolist()))


def _lost(uri: str, seen: Mapping[str, Seen], child: Manifest, allowed: Sequence[str]) -> str:
    """The objects and files of a source that its child lacks, in words."""
    source = inspect(uri)
    there = {b.key for b in child.blobs}
    lost = [b.key for b in source.blobs if b.key not in there]
    if source.origin.get("file") is None:  # else its neighbours are not looked at, and stay
        # Not only what the format names: all that lies in the folder goes with it.
        used = inner_names(source, uri)
        lost += [p for p in seen if p not in used and not any(fnmatchcase(p, g) for g in _DESCRIBE)]
    return some([n for n in lost if not any(fnmatchcase(n, g) for g in allowed)])
