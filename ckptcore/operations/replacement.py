"""Find a child that provably replaces a source.

A child (an output of its conversion) replaces its source if the fingerprints of both are equal: every tensor
is there, bit for bit, under its own name. The source's fingerprint is valid if its files are, by size, times
and inode or version, those that the conversion read; otherwise both are read. Two clocks are never compared.
A cast child does not prove its source: it is accepted only if the user allows the loss ``cast``; then the
conversion's fingerprint, computed before the cast, must be the source's.

Fingerprints cover tensors. Other files and objects of the source are checked name by name
(`ckptcore.operations.proven_files`), and the user must allow the loss of each that the child lacks, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckptcore.catalog import CheckpointDetail
from ckptcore.catalog import maintenance as tending
from ckptcore.catalog.retirements import GivenUp
from ckptcore.catalog.types import CheckpointRow, ConversionRow, State
from ckptcore.comparison.fingerprint import fingerprint
from ckptcore.conversion.file_fingerprints import matching
from ckptcore.conversion.pipeline import inspect
from ckptcore.conversion.registration import facts
from ckptcore.conversion.sole_copies import export_failed
from ckptcore.core.manifest import Manifest
from ckptcore.core.used_files import placed
from ckptcore.errors import CkptError, UsageError
from ckptcore.execution.source_stamps import digest, take, take_ctimes
from ckptcore.fingerprints.sums import Fingerprinted, checkpoint_fingerprint
from ckptcore.operations.distinct import files_of, require_apart
from ckptcore.operations.part_replacement import CAST, MODEL, OPTIMIZER, is_training_state, prove_part, sized
from ckptcore.operations.place_ties import writer_of_place
from ckptcore.operations.proven_files import accepted, descriptions_last, not_proven
from ckptcore.operations.registered_files import same_manifest
from ckptcore.planning.request import Settings
from ckptcore.store import open_store
from ckptcore.store.contents import Thing, contents
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.text import some

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_UNKNOWN = "its fingerprint is not known; --fingerprint computes it"
_PLAIN = ("file", "object")  # kinds that go without saying


@dataclass(frozen=True)
class Allowed:
    """What may be lost.

    Attributes:
        cast: What a child of other dtypes lacks.
        loss: Globs on objects, files and tensors.
        optimizer: What only a resumed training needs, if an export holds the model part.
    """

    cast: bool = False
    loss: tuple[str, ...] = ()
    optimizer: bool = False

    @classmethod
    def of(cls, names: Iterable[str] | None, *, cast: bool = False) -> Allowed:
        """Read names from the command line: ``cast`` and ``optimizer`` are no files; no glob matches them."""
        given = tuple(names or ())
        loss = tuple(name for name in given if name not in (CAST, OPTIMIZER))
        return cls(cast or CAST in given, loss, OPTIMIZER in given)

    def accepts(self, loss: GivenUp) -> bool:
        """Return whether one loss is allowed."""
        if loss.kind == CAST:
            return self.cast
        if loss.kind == MODEL:
            return False
        return (self.optimizer and is_training_state(loss)) or accepted(loss.name, self.loss)


@dataclass(frozen=True)
class Replacement:
    """The child that replaces a source, or the reason why there is none.

    Attributes:
        child: The child, or None.
        conversion: The conversion that made it, or None.
        why: Why there is no child.
        fresh: Source and child were read for this just now.
        cast: The child is a cast one, allowed by name.
        things: All of the source before it was read, links not followed, in the order of removal.
        files: The child's files before they were read, links followed.
        lost: (name, kind) of what the child lacks: allowed if there is a child, else not.
        fingerprint: That the child must have when it is read again; None where its digests prove it.
        given_up: What is allowed to be lost, with kinds and sizes.
        part: Whether the child holds the model part only.
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
    given_up: tuple[GivenUp, ...] = ()
    part: bool = False

    def of(
        self,
        files: Mapping[str, Thing],
        *,
        fresh: bool,
        cast: bool,
        fingerprint: str | None,
        part: bool = False,
    ) -> Replacement:
        """Return this one with how its child was proven; one without a child stays as it is."""
        if self.child is None:
            return self
        return replace(self, files=files, fresh=fresh, cast=cast, fingerprint=fingerprint, part=part)


def find_replacement(
    catalog: Catalog,
    source: CheckpointRow,
    allowed: Allowed,
    *,
    take: Settings | None = None,
    means: Settings | None = None,
) -> Replacement:
    """Find the child that replaces a source.

    Args:
        catalog: The catalog.
        source: The source.
        allowed: What may be lost.
        take: Memory and threads for computing both fingerprints anew; None to use those in the catalog.
        means: Memory and threads for computing casts again.

    Returns:
        The child, or the reason why there is none.

    Raises:
        CkptError: The source cannot be read.
    """
    with catalog.reading() as conn:
        made = tending.children(conn, source.id)
    if not made:
        return Replacement(None, None, "it has no child")
    things = contents(source.uri)
    manifest = inspect(source.uri)
    if manifest.digest.rpartition(":")[2].lower() != source.manifest_digest:
        return Replacement(None, None, "another checkpoint is there now")
    exports = [(allowed.optimizer and conversion.verb == "export") for conversion, _ in made]
    mine = source.fingerprint
    if all(exports):
        mine = None  # nothing needs the fingerprint of all its tensors
    elif take is not None:
        mine = _taken_fingerprint(catalog, source.uri, manifest, take)
    elif mine is not None:
        _require_own_fingerprint(catalog, source)
    elif not any(exports):
        return Replacement(None, None, _UNKNOWN)
    rejected: Replacement | None = None
    asked = _Source(source, things, manifest, mine)
    # A child with everything comes first.
    for export, (conversion, child) in sorted(zip(exports, made, strict=True), key=lambda row: row[0]):
        try:
            if export:
                found = _check_part(catalog, asked, conversion, child, allowed, take, means)
            else:
                found = _check_child(catalog, asked, conversion, child, allowed, take)
        except CkptError as error:  # another child may replace it
            found = Replacement(None, None, error.message)
        if found.child is not None:
            return found
        rejected = rejected or found
    assert rejected is not None
    return rejected


def child_of(catalog: Catalog, public: str) -> CheckpointDetail:
    """Return a child with its files, as the catalog has it now.

    Raises:
        UsageError: It is not present, an export that failed its verification, or about to be replaced.
    """
    detail = catalog.show(public, tensors=False)
    if not isinstance(detail, CheckpointDetail):
        raise UsageError(f"{public} is not a checkpoint")
    if detail.checkpoint.state != State.PRESENT.value:
        raise UsageError(f"{detail.checkpoint.uri} is {detail.checkpoint.state}")
    if export_failed(detail):
        raise UsageError(
            f"{detail.checkpoint.uri} failed when it was verified as an export. Try verify-export again"
        )
    with catalog.reading() as conn:
        writer = writer_of_place(conn, datetime.now(UTC), detail.checkpoint.uri)
    if writer is not None:
        raise UsageError(f"conversion {writer} writes to {detail.checkpoint.uri}")
    return detail


def require_as_converted(manifest: Manifest, conversion: ConversionRow) -> None:
    """Raise `UsageError` unless a source's files are those that a conversion read.

    A ctime is not part of a file's content. But a program that rewrites a file can reset its mtime, and not
    its ctime. So if only the ctime differs, or was not recorded, only reading is a proof.
    """
    with closing(open_store(manifest.root)) as store:
        paths = placed(manifest)
        times, stamps, local = take_ctimes(paths, store), take(manifest, store), store.local is not None
    hint = "--fingerprint reads both"
    if conversion.source_stamp is None:
        raise UsageError(f"the state of its files at its conversion is not known; {hint}")
    if digest(stamps) != conversion.source_stamp:
        raise UsageError(f"it was written or moved since it was converted; {hint}")
    if local and (conversion.source_ctime is None or digest(times) != conversion.source_ctime):
        raise UsageError(
            f"the status of its files changed since it was converted, so a rewrite is possible; {hint}"
        )


@dataclass(frozen=True)
class _Source:
    row: CheckpointRow
    things: Mapping[str, Thing]
    manifest: Manifest
    fingerprint: str | None


def _check_part(
    catalog: Catalog,
    source: _Source,
    conversion: ConversionRow,
    child: CheckpointRow,
    allowed: Allowed,
    take: Settings | None,
    means: Settings | None,
) -> Replacement:
    """Return whether an export holds the model part of a source, and all the rest is given up by name."""
    detail, manifest, files = _opened_child(catalog, source, child)
    if take is None:
        require_as_converted(source.manifest, conversion)
    part = prove_part(source.row, source.manifest, conversion, child, take, means or Settings())
    if part.fresh:
        _record(catalog, child.uri, manifest, part.proof.tensors, {})
    if part.cast and not allowed.cast:
        return Replacement(None, None, _cast_message(child))
    rows = detail.files if all(row.digest for row in detail.files) else ()
    lost = not_proven(source.manifest, source.row.uri, source.things, manifest, rows)
    beside = sized(lost, source.manifest, source.things, classify=True)
    losses = {(each.name, each.kind): each for each in (*part.losses, *beside)}
    return _decided(source, conversion, child, allowed, tuple(losses.values())).of(
        files, fresh=part.fresh, cast=part.cast, fingerprint=part.fingerprint, part=True
    )


def _check_child(
    catalog: Catalog,
    source: _Source,
    conversion: ConversionRow,
    child: CheckpointRow,
    allowed: Allowed,
    means: Settings | None,
) -> Replacement:
    """Return whether one child replaces a source."""
    if source.fingerprint is None:
        return Replacement(None, None, _UNKNOWN)
    detail, manifest, files = _opened_child(catalog, source, child)
    theirs = child.fingerprint if means is None else _taken_fingerprint(catalog, child.uri, manifest, means)
    cast = theirs != source.fingerprint
    if cast:
        if not (_casts(conversion) and conversion.fingerprint == source.fingerprint):
            return Replacement(None, None, _differs(conversion, child, theirs))
        if not allowed.cast:
            return Replacement(None, None, _cast_message(child))
    if means is None:
        require_as_converted(source.manifest, conversion)
    rows = detail.files if all(row.digest for row in detail.files) else ()
    lost = not_proven(source.manifest, source.row.uri, source.things, manifest, rows)
    losses = tuple(sized(lost, source.manifest, source.things, classify=allowed.optimizer))
    if cast:
        stored = {spec.fqn: spec for spec in source.manifest.tensors}
        losses += tuple(
            GivenUp(spec.fqn, CAST, max(0, stored[spec.fqn].nbytes - spec.nbytes))
            for spec in manifest.tensors
            if spec.fqn in stored and stored[spec.fqn].dtype != spec.dtype
        )
    fingerprint = None if cast else source.fingerprint
    return _decided(source, conversion, child, allowed, losses).of(
        files, fresh=means is not None, cast=cast, fingerprint=fingerprint
    )


def _opened_child(
    catalog: Catalog, source: _Source, child: CheckpointRow
) -> tuple[CheckpointDetail, Manifest, Mapping[str, Thing]]:
    """Return a child's row, manifest and files; raise `UsageError` if it proves nothing."""
    detail = child_of(catalog, child.id)
    manifest = same_manifest(child.uri, child.manifest_digest)
    if manifest is None:
        raise UsageError(f"another checkpoint is at {child.uri} now")
    files = files_of(child.uri, manifest, [row.path for row in detail.files])
    require_apart(source.row.uri, source.things, child.uri, files)
    return detail, manifest, files


def _decided(
    source: _Source,
    conversion: ConversionRow,
    child: CheckpointRow,
    allowed: Allowed,
    losses: tuple[GivenUp, ...],
) -> Replacement:
    """Return the child, if every loss is allowed."""
    lost = tuple((each.name, each.kind) for each in losses if each.kind != CAST)
    missing = tuple(each for each in losses if not allowed.accepts(each))
    if missing:
        names = some([e.name if e.kind in _PLAIN else f"{e.name} ({e.kind})" for e in missing])
        why = f"{child.uri} does not contain {names}; --accept-loss GLOB accepts the loss"
        if any(each.kind == MODEL for each in missing):
            why = f"{child.uri} does not contain {names}: a part of the model is never given up"
        return Replacement(None, None, why, lost=tuple((e.name, e.kind) for e in missing))
    order = descriptions_last(source.manifest, source.row.uri, source.things)
    things = {name: source.things[name] for name in order}
    return Replacement(child, conversion, "", things=things, lost=lost, given_up=losses)


def _taken_fingerprint(catalog: Catalog, uri: str, manifest: Manifest, settings: Settings) -> str:
    found = fingerprint(manifest, settings)
    _record(catalog, uri, manifest, found.tensors, dict(found.renamed))
    return found.fingerprint


def _record(
    catalog: Catalog, uri: str, manifest: Manifest, found: Iterable[Fingerprinted], names: Mapping[str, str]
) -> None:
    """Record the fingerprints of tensors that were just read."""
    prints = matching(manifest, found, names)
    warnings = [f for f in manifest.findings if f.severity == "warning"]
    catalog.record_validation(
        facts(manifest, uri, verified="coverage", prints=prints), warnings, level="coverage"
    )


def _cast_message(child: CheckpointRow) -> str:
    return (
        f"{child.uri} is cast and does not prove its source; "
        f"--accept-loss {CAST} accepts the loss of precision"
    )


def _require_own_fingerprint(catalog: Catalog, source: CheckpointRow) -> None:
    """Raise `UsageError` unless a source's fingerprint in the catalog matches those of its tensors.

    A row that was edited proves nothing.
    """
    detail = catalog.show(source.id)
    assert isinstance(detail, CheckpointDetail)
    known = [(t.fqn, t.dtype, t.shape, t.fingerprint or "") for t in detail.tensors]
    if checkpoint_fingerprint(known) != source.fingerprint:
        raise UsageError(
            "its fingerprint in the catalog does not match those of its tensors; --fingerprint recomputes it"
        )


def _casts(conversion: ConversionRow) -> bool:
    return bool(conversion.request.get("dtype") or conversion.request.get("dtype_for"))


def _differs(conversion: ConversionRow, child: CheckpointRow, theirs: str | None) -> str:
    why = f"{child.uri} has other tensors"
    if theirs is None:
        why = f"the fingerprint of {child.uri} is not known; --fingerprint computes it"
    if conversion.verb == "export":
        why += f"; --accept-loss {OPTIMIZER} compares the model part alone"
    return why
