"""Replaceable: does something else prove to hold all that a source holds?

A child (what a conversion made of it) stands for its source when the fingerprints of both are equal: every
tensor is there, bit for bit, under its own name. The source's counts for what lies there now when its files
are, by size, times and inode or version, those that the conversion read; otherwise both are read. Two clocks
are never compared. Of a cast child nothing proves its source: it is taken only where somebody says so by the
name ``cast``; then the conversion's fingerprint, taken before the cast, must be the source's.

Fingerprints speak of tensors. What else lies in the source is looked at name by name
(`ckptcore.operations.proven_files`), and what the child does not hold may be given up by name only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptcore.catalog import CheckpointDetail
from ckptcore.catalog import maintenance as tending
from ckptcore.catalog.types import CheckpointRow, ConversionRow
from ckptcore.comparison.fingerprint import fingerprint
from ckptcore.conversion.file_fingerprints import held_by
from ckptcore.conversion.pipeline import inspect
from ckptcore.conversion.registration import facts
from ckptcore.core.manifest import Manifest
from ckptcore.core.used_files import placed
from ckptcore.errors import CkptError, UsageError
from ckptcore.execution.source_stamps import digest, take, take_ctimes
from ckptcore.fingerprints.sums import checkpoint_fingerprint
from ckptcore.operations.distinct import files_of, require_apart
from ckptcore.operations.proven_files import accepted, descriptions_last, unheld
from ckptcore.operations.registered_files import same_manifest
from ckptcore.planning.request import Settings
from ckptcore.store import open_store
from ckptcore.store.contents import Thing, contents
from ckptcore.utils.text import some

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

CAST = "cast"  # the name by which what a cast takes from the numbers is given up


@dataclass(frozen=True)
class Allowed:
    """What may be lost. cast: what a child of other dtypes lacks. loss: globs on objects and files."""

    cast: bool = False
    loss: tuple[str, ...] = ()

    @classmethod
    def of(cls, names: Iterable[str] | None, *, cast: bool = False) -> Allowed:
        """From names as people give them: ``cast`` is no file; no glob means it."""
        given = tuple(names or ())
        return cls(cast or CAST in given, tuple(name for name in given if name != CAST))


@dataclass(frozen=True)
class Stand:
    """Whether a child stands for its source; why not, otherwise.

    fresh: both were read for it just now. cast: the child is a cast one, taken by name. things: all of the
    source, no link followed, as it was before anything of it was read; the order is that of removing
    objects. files: the same of the child's files, links followed. lost: (name, what it is) of what goes with
    the source and is held by nobody: given up where there is a child, missing where there is none.
    fingerprint: of the child, as it must be when it is read again; of a cast one None.
    """

    child: CheckpointRow | None
    conversion: ConversionRow | None
    why: str
    fresh: bool = False
    cast: bool = False
    things: Mapping[str, Thing] = field(default_factory=dict)
    files: Mapping[str, Thing] = field(default_factory=dict)
    lost: tuple[tuple[str, str], ...] = ()
    fingerprint: str | None = None


def stand_in(
    catalog: Catalog, source: CheckpointRow, allowed: Allowed, *, take: Settings | None = None
) -> Stand:
    """The child that stands for a source. take: means to take fingerprints anew, or None.

    Raises what reading them raises.
    """
    with catalog.reading() as conn:
        made = tending.children(conn, source.id)
    if not made:
        return Stand(None, None, "nothing was made of it")
    things = contents(source.uri)
    manifest = inspect(source.uri)
    if manifest.digest.rpartition(":")[2].lower() != source.manifest_digest:
        return Stand(None, None, "another checkpoint stands there now")
    if take is None:
        if source.fingerprint is None:
            return Stand(None, None, "its fingerprint is not known; --fingerprint takes it")
        _require_own_fingerprint(catalog, source)
        mine = source.fingerprint
    else:
        mine = _taken_fingerprint(catalog, source.uri, manifest, take)
    rejected: Stand | None = None
    asked = _Source(source, things, manifest, mine)
    for conversion, child in made:
        try:
            found = _stand_of(catalog, asked, conversion, child, allowed, take)
        except CkptError as error:  # another child may do
            found = Stand(None, None, error.message)
        if found.child is not None:
            return found
        rejected = rejected or found
    assert rejected is not None
    return rejected


def require_as_converted(manifest: Manifest, conversion: ConversionRow) -> None:
    """Raises `UsageError` unless a source's files are those that a conversion read.

    Their status times (ctime) are no part of what a source is, but whoever rewrites a file can put its other
    time back, and not this one: where it alone differs, or was not noted, nothing is proven without reading.
    """
    with closing(open_store(manifest.root)) as store:
        paths = placed(manifest)
        times, stamps, local = take_ctimes(paths, store), take(manifest, store), store.local is not None
    hint = "--fingerprint reads both"
    if conversion.source_stamp is None:
        raise UsageError(f"what its files were when it was converted is not known; {hint}")
    if digest(stamps) != conversion.source_stamp:
        raise UsageError(f"it was written or moved since it was converted; {hint}")
    if local and (conversion.source_ctime is None or digest(times) != conversion.source_ctime):
        raise UsageError(
            f"the status of its files changed since it was converted, and a rewrite could hide "
            f"behind that; {hint}"
        )


@dataclass(frozen=True)
class _Source:
    row: CheckpointRow
    things: Mapping[str, Thing]
    manifest: Manifest
    fingerprint: str


def _stand_of(
    catalog: Catalog,
    source: _Source,
    conversion: ConversionRow,
    child: CheckpointRow,
    allowed: Allowed,
    means: Settings | None,
) -> Stand:
    """Whether one child stands for a source."""
    detail = catalog.show(child.id, tensors=False)
    assert isinstance(detail, CheckpointDetail)
    manifest = same_manifest(child.uri, child.manifest_digest)
    if manifest is None:
        return Stand(None, None, f"another checkpoint stands at {child.uri} now")
    files = files_of(child.uri, manifest, [row.path for row in detail.files])
    require_apart(source.row.uri, source.things, child.uri, files)
    theirs = child.fingerprint if means is None else _taken_fingerprint(catalog, child.uri, manifest, means)
    cast = theirs != source.fingerprint
    if cast:
        if not (_casts(conversion) and conversion.fingerprint == source.fingerprint):
            return Stand(None, None, _differs(child, theirs))
        if not allowed.cast:
            return Stand(
                None,
                None,
                f"{child.uri} is cast and proves nothing of its source; "
                f"--accept-loss {CAST} gives up what the cast took",
            )
    if means is None:
        require_as_converted(source.manifest, conversion)
    rows = detail.files if all(row.digest for row in detail.files) else ()
    lost = unheld(source.manifest, source.row.uri, source.things, manifest, rows)
    missing = tuple(each for each in lost if not accepted(each[0], allowed.loss))
    if missing:
        names = some([name if what in ("file", "object") else f"{name} ({what})" for name, what in missing])
        why = f"{child.uri} does not hold {names}; --accept-loss GLOB gives it up"
        return Stand(None, None, why, lost=missing)
    order = descriptions_last(source.manifest, source.row.uri, source.things)
    things = {name: source.things[name] for name in order}
    return Stand(
        child,
        conversion,
        "",
        means is not None,
        cast,
        things,
        files,
        lost,
        None if cast else source.fingerprint,
    )


def _taken_fingerprint(catalog: Catalog, uri: str, manifest: Manifest, settings: Settings) -> str:
    found = fingerprint(manifest, settings)
    prints = held_by(manifest, found.tensors, dict(found.renamed))
    warnings = [f for f in manifest.findings if f.severity == "warning"]
    catalog.record_validation(
        facts(manifest, uri, verified="coverage", prints=prints), warnings, level="coverage"
    )
    return found.fingerprint


def _require_own_fingerprint(catalog: Catalog, source: CheckpointRow) -> None:
    """Raises `UsageError` unless a fingerprint in the catalog is that of the tensors there: a row that
    somebody edited proves nothing."""
    detail = catalog.show(source.id)
    assert isinstance(detail, CheckpointDetail)
    known = [(t.fqn, t.dtype, t.shape, t.fingerprint or "") for t in detail.tensors]
    if checkpoint_fingerprint(known) != source.fingerprint:
        raise UsageError(
            "its fingerprint in the catalog is not that of its tensors there; --fingerprint takes it anew"
        )


def _casts(conversion: ConversionRow) -> bool:
    return bool(conversion.request.get("dtype") or conversion.request.get("dtype_for"))


def _differs(child: CheckpointRow, theirs: str | None) -> str:
    if theirs is None:
        return f"the fingerprint of {child.uri} is not known; --fingerprint takes it"
    return f"{child.uri} holds other tensors"
