"""Find a child that provably replaces a source, content by content.

Everything that a source holds (`ckptcore.custody.holdings`) its child holds, too, or it goes by a name that
the user said. Contents are compared by their ids: those of tensors are recorded sums, which count while the
source's files are, by size, times and inode or version, those that the conversion read; otherwise both sides
are read. Two clocks are never compared. What a conversion computed (an export's layout, a cast) has other
ids: `ckptcore.operations.retention.part_replacement` proves it, and the user must allow the loss ``cast``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ckptcore.catalog import CheckpointDetail, maintenance
from ckptcore.catalog import holdings as recorded
from ckptcore.catalog.normalize import storable
from ckptcore.catalog.retirements import FULL, PART, GivenUp
from ckptcore.catalog.row_values import require_sound
from ckptcore.catalog.types import CheckpointRow, ConversionRow, State
from ckptcore.checking.source_stamps import digest, stamp_files, take_ctimes
from ckptcore.comparison.fingerprint import fingerprint
from ckptcore.conversion.file_fingerprints import matching
from ckptcore.conversion.pipeline import inspect
from ckptcore.conversion.registration import record_prints
from ckptcore.conversion.source_digests import require_as_recorded
from ckptcore.core.manifest import Manifest
from ckptcore.core.used_files import placed
from ckptcore.custody.distinct import files_of, require_apart
from ckptcore.custody.holdings import (
    EMPTY_FOLDER,
    UNUSED,
    descriptions_last,
    file_holdings,
    objects_of,
    rest_of,
)
from ckptcore.custody.place_ties import writer_of_place
from ckptcore.custody.set_aside import require_files
from ckptcore.errors import UsageError
from ckptcore.fingerprints.holdings import (
    FILE,
    OBJECT,
    Holding,
    file_holding,
    ids_of,
    numbered,
    tensor_holdings,
)
from ckptcore.fingerprints.sums import Fingerprinted, checkpoint_fingerprint
from ckptcore.naming.training_state import TRAINING_STATE, StoredKinds
from ckptcore.operations.registered_files import digests_read, same_manifest
from ckptcore.operations.retention.part_replacement import CAST, MODEL, OPTIMIZER, prove_part
from ckptcore.planning.request import Settings
from ckptcore.store import open_store
from ckptcore.store.file_status import FileStatus, NameKind
from ckptcore.store.listing import contents
from ckptcore.utils.isolation import error_of
from ckptcore.utils.text import some

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_UNKNOWN = "its fingerprint is not known; --fingerprint computes it"
_PLAIN = (FILE, OBJECT)  # kinds that go without saying
# Kinds of files and folders: their names are no tensors or objects, whose kinds names and values tell.
_IN_FOLDERS = frozenset({FILE, EMPTY_FOLDER, UNUSED, *(kind.value for kind in NameKind)})


@dataclass(frozen=True, slots=True)
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
    def of(cls, names: Iterable[str] | None) -> Allowed:
        """Read names from the command line: ``cast`` and ``optimizer`` are no files; no glob matches them."""
        accepted = tuple(names or ())
        loss = tuple(name for name in accepted if name not in (CAST, OPTIMIZER))
        return cls(CAST in accepted, loss, OPTIMIZER in accepted)

    def accepts(self, loss: GivenUp) -> bool:
        """Return whether one loss is allowed."""
        if loss.kind == CAST:
            return self.cast
        # A part of the model is never accepted, whatever glob matches its name.
        if loss.kind == MODEL:
            return False
        return (self.optimizer and loss.kind in TRAINING_STATE) or accepted(loss.name, self.loss)


def accepted(name: str, globs: Iterable[str]) -> bool:
    """Return whether the user accepts the loss of a name; a glob may match a folder without its slash."""
    return any(fnmatchcase(name, glob) or fnmatchcase(name.rstrip("/"), glob) for glob in globs)


@dataclass(frozen=True, slots=True)
class Replacement:
    """The child that replaces a source, or the reason why there is none.

    Attributes:
        child: The child, or None.
        why: Why there is no child.
        things: All of the source before it was looked at, links not followed, in the order of removal.
        expects: What the child must hold when it is read; () where its digests must prove it.
        losses: What goes without proof: allowed if there is a child, else not.
        proof: FULL, or PART if the child holds the model part only.
    """

    child: CheckpointRow | None
    why: str
    things: Mapping[str, FileStatus] = field(default_factory=dict)
    expects: tuple[Holding, ...] = ()
    losses: tuple[GivenUp, ...] = ()
    proof: str = FULL


def find_replacement(
    catalog: Catalog,
    source: CheckpointRow,
    allowed: Allowed,
    *,
    fingerprint_settings: Settings | None = None,
    verify_settings: Settings | None = None,
) -> Replacement:
    """Find the child that replaces a source.

    Args:
        catalog: The catalog.
        source: The source.
        allowed: What may be lost.
        fingerprint_settings: Memory and threads for reading both sides; None to use the sums in the catalog.
        verify_settings: Memory and threads for computing casts again.

    Returns:
        The child, or the reason why there is none.

    Raises:
        CkptError: The source cannot be read.
    """
    # Only recorded children count: what is beside a source by chance replaces nothing.
    with catalog.reading() as conn:
        children = maintenance.children(conn, source.id)
    if not children:
        return Replacement(None, "it has no child")
    things, manifest = contents(source.uri), inspect(source.uri, observe=fingerprint_settings is not None)
    if manifest.digest.rpartition(":")[2].lower() != source.manifest_digest:
        return Replacement(None, "another checkpoint is there now")
    exports = [allowed.optimizer and conversion.verb == "export" for conversion, _ in children]
    # An export proves the model part alone, so the source's other tensors need not be read for it.
    side = _Side(catalog, source, manifest, things, None if all(exports) else fingerprint_settings)
    if not any(exports) and side.tensors is None:
        return Replacement(None, _UNKNOWN)
    # Bytes that were read must be those that the catalog recorded for this row.
    require_as_recorded(manifest, digests_read(manifest), catalog.at(source.uri))
    rejected: Replacement | None = None
    # A child with everything comes first.
    for export, (conversion, child) in sorted(zip(exports, children, strict=True), key=lambda row: row[0]):
        try:
            replacement = _judged(
                side,
                conversion,
                child,
                allowed,
                fingerprint_settings,
                verify_settings or Settings(),
                export=export,
            )
        except Exception as error:  # another child may replace it
            replacement = Replacement(None, error_of(error).message)
        if replacement.child is not None:
            return replacement
        # The first reason is of the most complete child, which is the one to mend.
        rejected = rejected or replacement
    assert rejected is not None
    return rejected


def child_of(catalog: Catalog, public: str) -> CheckpointDetail:
    """Return a child with its files, as the catalog has it now.

    Raises:
        UsageError: It is not present, an export that failed its verification, or about to be replaced.
        CatalogError: One of its rows is odd.
    """
    detail = catalog.show(public, tensors=False)
    if not isinstance(detail, CheckpointDetail):
        raise UsageError(f"{public} is not a checkpoint")
    if detail.checkpoint.state != State.PRESENT.value:
        raise UsageError(f"{detail.checkpoint.uri} is {detail.checkpoint.state}")
    require_sound([detail.checkpoint, detail.files, detail.written_by])
    verdicts = (c.export_verdict for c in detail.written_by)
    # An equal one that replaced it since has no verdict of its own yet, and does not cancel this one.
    if next((v for v in verdicts if v in ("ok", "failed")), None) == "failed":
        raise UsageError(
            f"{detail.checkpoint.uri} failed when it was verified as an export. Try verify-export again"
        )
    with catalog.reading() as conn:
        writer = writer_of_place(conn, detail.checkpoint.uri)
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
        times, stamps, local = (
            take_ctimes(paths, store),
            stamp_files(manifest, store),
            store.local is not None,
        )
    hint = "--fingerprint reads both"
    if conversion.source_stamp is None:
        raise UsageError(f"the state of its files at its conversion is not known; {hint}")
    if digest(stamps) != conversion.source_stamp:
        raise UsageError(f"it was written or moved since it was converted; {hint}")
    if local and (conversion.source_ctime is None or digest(times) != conversion.source_ctime):
        raise UsageError(
            f"the status of its files changed since it was converted, so a rewrite is possible; {hint}"
        )


class _Side:
    """A source or a child, with what it holds.

    Attributes:
        tensors: The holdings of its tensors, numbered; None if they are not known.
        fingerprint: Of all its tensors; None if it is not known.
    """

    def __init__(
        self,
        catalog: Catalog,
        row: CheckpointRow,
        manifest: Manifest,
        things: Mapping[str, FileStatus],
        fingerprint_settings: Settings | None,
    ) -> None:
        self.catalog, self.row, self.manifest, self.things = catalog, row, manifest, things
        self.objects = tuple(objects_of(manifest))
        self.fingerprint = row.fingerprint
        self.tensors = self._tensors(fingerprint_settings)

    def _tensors(self, fingerprint_settings: Settings | None) -> tuple[Holding, ...] | None:
        if fingerprint_settings is not None:
            # Read now, and recorded, so that the next run need not read it.
            sums = fingerprint(self.manifest, fingerprint_settings).tensors
            self.record(sums)
            self.fingerprint = checkpoint_fingerprint(sums)
            return self.holdings(sums)
        if self.row.fingerprint is None:
            return None
        with self.catalog.reading() as conn:
            prints = recorded.fingerprints_of(conn, self.row.id)
        tensors = self.manifest.tensors
        sums = tuple((t.fqn, t.dtype, t.shape, prints.get(storable(t.fqn), "")) for t in tensors)
        # A row that was edited proves nothing, and none may be missing.
        if checkpoint_fingerprint(sums) != self.row.fingerprint:
            raise UsageError(
                f"the fingerprint of {self.row.uri} in the catalog does not match those of its tensors; "
                "--fingerprint recomputes it"
            )
        return self.holdings(sums)

    def holdings(self, sums: Iterable[Fingerprinted]) -> tuple[Holding, ...]:
        """Return the holdings of its tensors by their sums."""
        return numbered(tensor_holdings(sums, {t.fqn: t.nbytes for t in self.manifest.tensors}))

    def record(self, sums: Iterable[Fingerprinted]) -> None:
        """Record sums that were just read."""
        record_prints(self.catalog, self.manifest, self.row.uri, matching(self.manifest, sums, {}))


def _judged(
    source: _Side,
    conversion: ConversionRow,
    child: CheckpointRow,
    allowed: Allowed,
    fingerprint_settings: Settings | None,
    verify_settings: Settings,
    *,
    export: bool,
) -> Replacement:
    """Return whether a child replaces a source. export: whether its model part is proven, not all of it."""
    require_sound(conversion)
    detail = child_of(source.catalog, child.id)
    manifest = same_manifest(child.uri, child.manifest_digest)
    if manifest is None:
        raise UsageError(f"another checkpoint is at {child.uri} now")
    files = files_of(child.uri, manifest, [row.path for row in detail.files])
    # By inode: a child that shares files with its source proves nothing of them.
    require_apart(source.row.uri, source.things, child.uri, files)
    if fingerprint_settings is None:
        require_as_converted(source.manifest, conversion)
    child_side = _Side(source.catalog, child, manifest, files, None if export else fingerprint_settings)
    tensor_losses: Iterable[GivenUp]
    if export:
        part = prove_part(
            source.row, source.manifest, conversion, child, fingerprint_settings, verify_settings
        )
        if part.recomputed:
            # The next gate then finds these sums in the catalog, and need not read the export.
            child_side.record(part.proof.tensors)
            child_side.tensors = child_side.holdings(part.proof.tensors)
        assert child_side.tensors is not None  # a proof by record requires its fingerprint
        tensor_losses, relied_tensors, proof = part.losses, child_side.tensors, PART
    else:
        tensor_losses, relied_tensors = _tensor_losses(source, child_side, conversion)
        proof = FULL
    beside_losses, relied_rest = _beside(source, child_side, detail, classify=allowed.optimizer)
    losses = (*tensor_losses, *beside_losses)
    missing = tuple(loss for loss in losses if not allowed.accepts(loss))
    if missing:
        # What was read of a source that is being written is of two states: it says nothing about the child.
        # Listed anew: a source that changed meanwhile is reported as that.
        require_files(source.row.uri, source.things, contents(source.row.uri))
        return Replacement(None, _why_not(child, missing), losses=missing)
    # What describes the checkpoint goes last, so that a removal that is killed can still be read.
    order = descriptions_last(source.manifest, source.row.uri, source.things)
    things = {name: source.things[name] for name in order}
    expects = (*relied_tensors, *relied_rest) if relied_tensors else ()
    if not all(row.digest for row in detail.files) and not relied_tensors:
        raise UsageError(f"{child.uri} has no digests: --fingerprint reads both")
    named = tuple({(loss.name, loss.kind): loss for loss in losses}.values())
    return Replacement(child, "", things, expects, named, proof if named else FULL)


def _tensor_losses(
    source: _Side, child: _Side, conversion: ConversionRow
) -> tuple[list[GivenUp], tuple[Holding, ...]]:
    """Return the tensors that a child has in another dtype, and those that it must hold; () if unknown.

    Raises:
        UsageError: Its tensors are not known, or other ones.
    """
    if source.tensors is None:
        raise UsageError(_UNKNOWN)
    casts = bool(conversion.request.get("dtype") or conversion.request.get("dtype_for"))
    # A cast child has other sums; the sums of what was read before the cast must be the source's.
    if casts and conversion.fingerprint == source.fingerprint != child.fingerprint:
        stored = {t.fqn: t for t in source.manifest.tensors}
        cast = [
            GivenUp(t.fqn, CAST, max(0, stored[t.fqn].nbytes - t.nbytes))
            for t in child.manifest.tensors
            if t.fqn in stored and stored[t.fqn].dtype != t.dtype
        ]
        return cast, child.tensors or ()
    if child.tensors is None:
        raise UsageError(f"the fingerprint of {child.row.uri} is not known; --fingerprint computes it")
    # Contents, not names: a renamed tensor is still there.
    if not ids_of(source.tensors) <= ids_of(child.tensors):
        why = f"{child.row.uri} has other tensors"
        if conversion.verb == "export":
            why += f"; --accept-loss {OPTIMIZER} compares the model part alone"
        raise UsageError(why)
    source_ids = ids_of(source.tensors)
    return [], tuple(holding for holding in child.tensors if holding.id in source_ids)


def _beside(
    source: _Side, child: _Side, detail: CheckpointDetail, *, classify: bool
) -> tuple[list[GivenUp], tuple[Holding, ...]]:
    """Return the objects and files that a child lacks, and those that it must hold when it is read.

    classify: find out which training state objects are.
    """
    # Only files whose sizes meet can be equal: others are not read.
    sizes = {row.nbytes for row in detail.files}
    mine = (*source.objects, *rest_of(source.manifest, source.row.uri, source.things, sizes))
    files = _recorded_files(detail, child, {holding.nbytes for holding in mine if holding.kind == FILE})
    theirs = (*child.objects, *files)
    child_ids, source_ids = ids_of(theirs), ids_of(mine)
    lacking = {(holding.name, holding.kind): holding for holding in mine if holding.id not in child_ids}
    stored = StoredKinds(source.manifest)
    losses = []
    for holding in lacking.values():
        of_object = stored.kind_of(holding.name) if classify and holding.kind not in _IN_FOLDERS else None
        losses.append(GivenUp(holding.name, of_object or holding.kind, holding.nbytes))
    return losses, tuple(holding for holding in theirs if holding.id in source_ids)


def _recorded_files(
    detail: CheckpointDetail, child: _Side, sizes: Collection[int | None]
) -> tuple[Holding, ...]:
    """Return the holdings of a child's files of these sizes by recorded digests; one of parts is none."""
    if not all(row.digest for row in detail.files):
        # One missing digest: nothing is known of its files then.
        return ()
    rows = [row for row in detail.files if row.nbytes in sizes]
    parts = {name: child.things[name] for row in rows if ":" in (row.digest or "") for name in (row.path,)}
    by_digest = [
        file_holding(row.path, row.nbytes, row.digest or "") for row in rows if row.path not in parts
    ]
    return (*by_digest, *file_holdings(child.row.uri, parts, sizes))


def _why_not(child: CheckpointRow, missing: Sequence[GivenUp]) -> str:
    """Return why a child with losses that are not allowed replaces nothing."""
    if any(loss.kind == CAST for loss in missing):
        return (
            f"{child.uri} is cast and does not prove its source; "
            f"--accept-loss {CAST} accepts the loss of precision"
        )
    names = some([e.name if e.kind in _PLAIN else f"{e.name} ({e.kind})" for e in missing])
    if any(loss.kind == MODEL for loss in missing):
        return f"{child.uri} does not contain {names}: a part of the model is never given up"
    return f"{child.uri} does not contain {names}; --accept-loss GLOB accepts the loss"
