"""Set retired sources aside, purge them when their grace period is over, and restore them.

A source is set aside in one transaction: ties are asked about, its row is marked, and last it is moved out
of sight. Nothing is read for that. The purge reads the child that replaces it once, from its own place: a
link from the child to the source is broken now. Then the gate is asked again, an obligation is put on what
the child holds alone from now on, and exactly the files of the record are removed. If anything is in doubt,
the source stays aside, complete.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ckptcore.catalog import CheckpointDetail, maintenance, obligations, retirements, set_aside
from ckptcore.catalog import holdings as recorded
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.database import clock
from ckptcore.catalog.normalize import normal_uri
from ckptcore.catalog.obligations import ObligationRow
from ckptcore.catalog.retirements import RetirementRecord
from ckptcore.catalog.row_values import require_sound
from ckptcore.catalog.types import CheckpointRow, State
from ckptcore.checking.examine import inspect
from ckptcore.checking.source_stamps import published_stamp
from ckptcore.conversion.registration import facts
from ckptcore.conversion.staging.open_staging import at_rest, open_staging
from ckptcore.conversion.staging.staging import noted
from ckptcore.core.used_files import used
from ckptcore.custody.distinct import files_of, require_apart
from ckptcore.custody.gate import judge
from ckptcore.custody.holdings import file_holdings, objects_of, tensors_read
from ckptcore.custody.obligation_records import Obligation, drop_obligations
from ckptcore.custody.replacing import counting_on, moving_obligations
from ckptcore.custody.set_aside import (
    REPLACED,
    RETIRED,
    SetAside,
    SetAsideRecord,
    folder_of,
    homes_in,
    open_set_aside,
    partly_gone,
    place_of,
    require_files,
)
from ckptcore.errors import Busy, CkptError, Conflict, SourceUnreadable, UsageError
from ckptcore.fingerprints.holdings import FILE, Holding, ids_of, numbered, numbered_ids, pack_ids, pack_specs
from ckptcore.operations.registered_files import compare, same_manifest
from ckptcore.operations.retention.replacement import child_of
from ckptcore.operations.retention.setting_aside import freed_bytes, require_untied, row_of
from ckptcore.operations.verify import Proof, Proven, prove
from ckptcore.planning.request import Settings
from ckptcore.store import forget_small_reads, join_url, local_path, split_url
from ckptcore.store.below import open_below
from ckptcore.store.file_status import FileStatus
from ckptcore.store.listing import contents
from ckptcore.utils.isolation import attempt
from ckptcore.utils.text import some

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_log = logging.getLogger("ckptcore")


@dataclass(frozen=True, slots=True)
class Purged:
    """One thing that was set aside, and what a purge did with it.

    Attributes:
        uri: Its place.
        record: Path or URL of the folder with its record.
        fate: purged, waiting (its grace period is not over) or kept.
        why: Why it waits or is kept.
        nbytes: Bytes of its files.
        due_at: When it may be purged.
    """

    uri: str
    record: str
    fate: str
    why: str
    nbytes: int
    due_at: datetime

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        form = {name: getattr(self, name) for name in ("uri", "record", "fate", "why")}
        return form | {"bytes": self.nbytes, "due_at": self.due_at.isoformat()}


PURGED, WAITING, KEPT = "purged", "waiting", "kept"


def purge(
    catalog: Catalog,
    verify_settings: Settings,
    places: Sequence[str] | None,
    *,
    due: datetime,
    run: str | None = None,
) -> Iterator[Purged]:
    """Purge what was set aside and is due; finish what killed runs left.

    Args:
        catalog: The catalog.
        verify_settings: Memory and threads for reading.
        places: Only what was in one of these folders; None for everything.
        due: Purge what is due at this time.
        run: Only sources of this training run.

    Yields:
        What became of each thing that is set aside.
    """
    with catalog.kept_open():
        yield from _purged_each(catalog, verify_settings, places, due, run)


def _purged_each(
    catalog: Catalog, verify_settings: Settings, places: Sequence[str] | None, due: datetime, run: str | None
) -> Iterator[Purged]:
    with catalog.reading() as conn:
        rows = set_aside.every(conn)
        above = roots.every(conn)
        # Known places as well: a record beside one of them may be of a catalog that was lost.
        source_uris = {uri for root in above for uri in maintenance.known_below(conn, root.uri)}
    listed = {row.record: row for row in rows if row.record}
    # A row without a record cannot be purged, only reported.
    for odd in (row for row in rows if not row.record):
        if places is None or _is_below(odd.uri, places):
            yield Purged(odd.uri, "", KEPT, odd.trouble, odd.nbytes, odd.due_at)
    homes = dict.fromkeys(listed)
    for folder in sorted({split_url(uri)[0] for uri in source_uris}):
        homes_there = attempt(homes_in, folder)
        if isinstance(homes_there, CkptError):
            _log.warning("cannot search %s for what was set aside: %s", folder, homes_there.message)
        else:
            homes |= dict.fromkeys(homes_there)
    for home in homes:
        uri = place_of(home) or home
        if places is not None and not _is_below(uri, places):
            continue
        row = listed.get(home)
        nbytes, due_at = (row.nbytes, row.due_at) if row else (0, due)
        item = Purged(uri, home, KEPT, "", nbytes, due_at)
        purged = attempt(_purged, catalog, item, row, above, verify_settings, due, run)
        if isinstance(purged, CkptError):
            yield replace(item, why=purged.message)
        elif purged is not None:
            yield purged


def waiting(catalog: Catalog, places: Sequence[str] | None, run: str | None = None) -> Iterator[Purged]:
    """Yield what is set aside, by the catalog alone; the arguments are those of `purge`."""
    now = catalog.now()
    with catalog.reading() as conn:
        rows = set_aside.every(conn)
    for row in rows:
        if places is not None and not _is_below(row.uri, places):
            continue
        if run is not None and row.run != run:
            continue
        item = Purged(row.uri, row.record, WAITING, _until(row.due_at, now), row.nbytes, row.due_at)
        yield replace(item, fate=KEPT, why=row.trouble) if row.trouble else item


def purge_one(catalog: Catalog, aside: SetAside, verify_settings: Settings) -> tuple[str, ...]:
    """Purge one thing that is set aside.

    Args:
        catalog: The catalog.
        aside: It; it is open.
        verify_settings: Memory and threads for reading.

    Returns:
        Messages about files that are kept.

    Raises:
        CkptError: It is not proven elsewhere any more, or a user wants to keep it. It stays aside.
    """
    record = aside.record
    # A removal that had begun goes on: what is left of it can no longer be compared with the record.
    is_resumed = partly_gone(aside)
    if not is_resumed:
        aside.require_approved()
    if record.why == RETIRED:
        _give_to_child(catalog, aside, verify_settings)
    else:
        expected = _expected(aside)
        # What was replaced has no child: the gate asks where each of its contents is now.
        judged = judge(catalog, aside.place, verify_settings, at_rest, record.uri, counted=expected)
        # Obligations and the decision are in one transaction: no other process can count on what goes.
        with moving_obligations(catalog, aside.place, judged, at_rest, expected) as conn:
            _decide(conn, aside)
    # Once more: reading took long, and a file may have been written to since.
    if not is_resumed:
        aside.require_approved()
    # Files are removed as recorded, so what was written meanwhile is left.
    left, trouble = aside.remove()
    if trouble:
        return (
            f"cannot remove all of it: {trouble}; the rest is in {aside.place}, and the next run resumes",
        )
    # The row goes last: while it is there, the next run goes on.
    with catalog.writing() as conn:
        set_aside.drop(conn, aside.home)
    return _restore_rest(aside, left) if left else ()


def restore(catalog: Catalog, ref: str, to: str = "") -> str:
    """Restore what is set aside.

    Args:
        catalog: The catalog.
        ref: Its place, its id in the catalog, or the folder with its record.
        to: The name to give it instead, in the same folder.

    Returns:
        Where it is now.

    Raises:
        UsageError: Nothing of this name is set aside, or something else is at its place now.
        SourceChanged: Objects of it changed since.
    """
    home = _home_of(catalog, ref)
    uri = place_of(home) or ref
    above = -1
    if local_path(home) is not None:
        above = os.open(os.path.dirname(home), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    aside = open_set_aside(home, above)
    if aside is None or not aside.holds:
        with catalog.reading() as conn:
            row = set_aside.get(conn, home)
        # A run that was killed after it had restored: nothing is left
        # aside, and the checkpoint is at its place.
        if row is not None and row.checkpoint and _settle(catalog, home, row) == State.PRESENT:
            return row.uri  # a run that restored it could not say so
        raise UsageError(f"nothing is set aside in {home}", hint="see ckptcore retire --purge --dry-run")
    with closing(aside):
        if partly_gone(aside):
            raise UsageError(f"cannot restore {uri}: its removal had begun, and a part of it is gone")
        target = join_url(split_url(uri)[0], os.path.basename(to.rstrip("/"))) if to else ""
        # Objects stay where they are: another program may have written to them.
        if local_path(home) is None:
            aside.require_approved()
        with catalog.writing() as conn:
            row = set_aside.get(conn, home)
            # The decision to remove is on record, and its obligations count on it.
            if row is not None and row.purging:
                raise UsageError(f"cannot restore {uri}: its removal is decided, and the next purge ends it")
            set_aside.drop(conn, home)
            state = maintenance.state_of(conn, aside.record.checkpoint)
            back = aside.record.why == RETIRED and state in (State.RETIRED, State.DELETED)
            if back:
                set_aside.restored(conn, aside.record.checkpoint, target or None)
            aside.restore(target)  # last in the transaction: a purge sees nothing of it, or all
        # A replaced checkpoint has no row that says it is back: it is recorded like a new one.
        if not back and target:
            catalog.record_validation(facts(inspect(target), target), level="files")
    return target or uri


def _purged(
    catalog: Catalog,
    item: Purged,
    row: set_aside.SetAsideEntry | None,
    above: Sequence[roots.RootRow],
    verify_settings: Settings,
    due: datetime,
    run: str | None,
) -> Purged | None:
    """Purge one folder if it is due.

    Returns:
        What became of it; None if nothing of it is left, or it is of another run.

    Raises:
        CkptError: It stays aside.
    """
    require_sound(row)
    home = item.record
    # The folder is opened below its root, so that a link on the way leads nowhere else.
    try:
        aside = _opened(home, above)
    except Busy:
        return None  # another process works on it
    if aside is None:
        _settle(catalog, home, row)
        return None
    with closing(aside):
        record = aside.record
        item = replace(item, due_at=record.due_at)
        source = _source_of(catalog, record)
        if run is not None and (source is None or source.run != run):
            return None
        # The conversion that prepared this folder has not moved anything yet; a power cut may undo its row.
        if not aside.holds and record.why == REPLACED and _is_awaited(home, record.uri):
            return None
        if row is None:
            return _unlisted(item, aside, source)
        if not aside.holds:  # all of it was removed
            aside.restore()
            _settle(catalog, home, row)
            return None
        # A record that was edited could name other files.
        if record.digest != row.digest:
            raise UsageError("its record is not the one that the catalog knows")
        if row.purging or record.due_at <= due:
            left = purge_one(catalog, aside, verify_settings)
            return replace(item, fate=KEPT if left else PURGED, why="; ".join(left))
        return replace(item, fate=WAITING, why=_until(record.due_at, catalog.now()))


def _unlisted(item: Purged, aside: SetAside, source: CheckpointRow | None) -> Purged | None:
    """Restore what a run set aside that was killed before its transaction ended; report anything else."""
    # Only a source that this catalog has as present can be restored to its place.
    if aside.holds and (source is None or source.state != State.PRESENT.value or partly_gone(aside)):
        return replace(item, why="this catalog does not know that it was set aside")
    aside.restore()
    return None


def _until(due_at: datetime, now: datetime) -> str:
    if due_at <= now:
        return "its grace period is over: --purge deletes it if it is proven once more"
    return f"it can be restored until {due_at:%Y-%m-%d %H:%M} UTC"


def _is_below(uri: str, places: Sequence[str]) -> bool:
    return any(f"{uri}/".startswith(f"{place.rstrip('/')}/") for place in places)


def _opened(home: str, above: Sequence[roots.RootRow]) -> SetAside | None:
    if local_path(home) is None:
        return open_set_aside(home)
    parent = os.path.dirname(home)
    around = next((r.uri for r in above if f"{parent}/".startswith(f"{r.uri.rstrip('/')}/")), None)
    try:
        if around is not None:
            folder = open_below(around, parent, parent)
        else:
            folder = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"cannot open {parent}: {error.strerror}") from error
    return open_set_aside(home, folder)


def _is_awaited(home: str, place: str) -> bool:
    """Return whether a conversion is about to move what it replaces here, or was killed before that."""
    staging = open_staging(place)
    try:
        with staging.lock(shared=True):
            publication = noted(staging)
    except Busy:
        return True
    return publication is not None and publication.replaces.home == os.path.basename(home)


def _settle(catalog: Catalog, home: str, row: set_aside.SetAsideEntry | None) -> str | None:
    """Record what became of what is not set aside any more: an earlier run could not say it.

    It was removed as decided, or restored, or another user removed the folder.

    Returns:
        The state of its checkpoint now.

    Raises:
        UsageError: The folder around it is another one than it was: its disk may be away.
    """
    if row is not None and row.folder and row.folder != folder_of(home):
        raise UsageError(f"{home} is not there, and the folder around it is another one: is its disk away?")
    back, public = False, "" if row is None or row.purging else row.checkpoint or ""
    if public and row is not None:
        detail = catalog.show(public, tensors=False)
        assert isinstance(detail, CheckpointDetail)
        try:
            # The same manifest at the place means that an earlier run restored it.
            back = same_manifest(row.uri, detail.checkpoint.manifest_digest) is not None
        except SourceUnreadable:
            _log.warning("nothing of %s is left, and no run of retire removed it", row.uri)
    with catalog.writing() as conn:
        set_aside.drop(conn, home)
        if public and maintenance.state_of(conn, public) == State.RETIRED:
            set_aside.restored(conn, public)
            if not back:
                maintenance.gone(conn, clock(conn), public)
        return maintenance.state_of(conn, row.checkpoint) if row is not None and row.checkpoint else None


def _source_of(catalog: Catalog, record: SetAsideRecord) -> CheckpointRow | None:
    """Return the row of what is set aside; None if this catalog does not know it."""
    with catalog.reading() as conn:
        row = maintenance.row_of(conn, record.checkpoint)
    return None if row is None or row.uri != normal_uri(record.uri) else row


def _give_to_child(catalog: Catalog, aside: SetAside, verify_settings: Settings) -> None:
    """Prove that the child holds everything, put an obligation on that, and mark the source as deleted."""
    record, source = aside.record, _source_of(catalog, aside.record)
    detail = child_of(catalog, record.child)
    child, before = detail.checkpoint, files_now(detail)
    require_apart(aside.place, aside.look(), child.uri, before)
    child_holdings = _read_child(catalog, detail, record.expects, verify_settings)
    now = catalog.now()
    row = ObligationRow(
        _id_of(aside), record.checkpoint, record.uri, child.uri, pack_specs(child_holdings), now
    )
    obligation = Obligation.of(row, child_holdings)

    def require_same(uri: str) -> None:
        require_files(uri, before, files_now(detail))

    try:
        with counting_on(catalog, {child.uri: [obligation]}, at_rest, require_same) as conn:
            if source is not None:
                require_untied(conn, now, source)
            _require_present(conn, child)
            obligations.put(conn, row, obligation.packed)
            set_aside.deleted(conn, now, record.checkpoint)
            freed = freed_bytes(record.things)
            proven = RetirementRecord(child.id, record.proof, child.fingerprint, freed, record.given_up)
            retirements.note(conn, now, record.checkpoint, proven)
            _decide(conn, aside)
    except BaseException:
        current_row = row_of(catalog, aside.home)
        # An earlier run may have decided on the removal: then its record beside the child must stay.
        decided = isinstance(current_row, set_aside.SetAsideEntry) and current_row.purging
        if not decided and not isinstance(current_row, CkptError):
            drop_obligations(child.uri, [row.id])
        raise


def _expected(aside: SetAside) -> tuple[Obligation, ...]:
    """Return what the record of a replaced one asks for, as an obligation to be proven elsewhere now."""
    record = aside.record
    if not record.expects:
        return ()
    specs = pack_specs(record.expects)
    row = ObligationRow(_id_of(aside), record.checkpoint, record.uri, record.uri, specs, record.at)
    return (Obligation.of(row, tuple(record.expects)),)


def _decide(conn: Any, aside: SetAside) -> None:
    """Record that the removal is decided; raise `Conflict` if another process restored it meanwhile."""
    if not set_aside.purging(conn, aside.home):
        raise Conflict(f"{aside.record.uri} is not set aside any more")


def _require_present(conn: Any, child: CheckpointRow) -> None:
    """Raise `UsageError` unless a child is present."""
    state = maintenance.state_of(conn, child.id)
    if state != State.PRESENT.value:
        raise UsageError(f"{child.uri} is {state}")


def files_now(detail: CheckpointDetail) -> dict[str, FileStatus]:
    """Return the child's current files, each with its identity."""
    child = detail.checkpoint
    manifest = same_manifest(child.uri, child.manifest_digest)
    if manifest is None:
        raise UsageError(f"another checkpoint is at {child.uri} now")
    registered_paths = {file.path for file in detail.files if file.digest}
    name = manifest.origin.get("file")
    missing = sorted(used(manifest).data - registered_paths - {name}) if registered_paths else []
    # Files with tensors whose digests nobody recorded are no proof.
    if missing:
        raise UsageError(f"{child.uri}: the catalog has no digest of {missing[0]}")
    return files_of(child.uri, manifest, [file.path for file in detail.files])


def _read_child(
    catalog: Catalog, detail: CheckpointDetail, expects: Collection[Holding], verify_settings: Settings
) -> tuple[Holding, ...]:
    """Read a child in its own place; return what of it replaces the source.

    Raises:
        UsageError: It does not hold what it must.
    """
    uri = detail.checkpoint.uri
    # What was read of the child a moment ago may be remembered: the proof reads it now.
    forget_small_reads()
    manifest = same_manifest(uri, detail.checkpoint.manifest_digest)
    if manifest is None:
        raise UsageError(f"another checkpoint is at {uri} now")
    # Without expected contents only digests of all files can prove it.
    if not expects:
        _require_proven(uri, prove(detail))
    sizes = {holding.nbytes for holding in expects if holding.kind == FILE}
    things = contents(uri, follow=True) if sizes else {}
    stamp, tensors = published_stamp(manifest), numbered(tensors_read(manifest, verify_settings))
    child_holdings = (*tensors, *objects_of(manifest), *file_holdings(uri, things, sizes))
    child_ids = ids_of(child_holdings)
    missing = [holding.name for holding in expects if holding.id not in child_ids]
    if missing:
        raise UsageError(f"{uri} has other tensors or objects now: {some(missing)}")
    data = used(manifest).data
    other_files = tuple(file for file in detail.files if file.digest and file.path not in data)
    for wrong in compare(uri, other_files).findings if other_files else ():
        raise UsageError(f"{uri}: {wrong.message}")
    with catalog.writing() as conn:
        # Then a gate need not read it again: a publication is too young to have a stamp of its own.
        tensor_ids = recorded.tensor_ids_of(conn, detail.checkpoint.id)
        is_recorded = numbered_ids(tensor_ids or b"") == ids_of(tensors)
        unchanged = stamp if is_recorded and stamp == published_stamp(manifest) else None
        recorded.keep(conn, detail.checkpoint.id, pack_ids(child_ids), unchanged)
    # Only what replaces the source is put under the obligation; other contents are the child's own.
    replacing_ids = ids_of(expects) if expects else child_ids
    return tuple(holding for holding in child_holdings if holding.id in replacing_ids)


def _require_proven(uri: str, proven: Proven) -> None:
    """Raise `UsageError` unless every file of a child is, byte for byte, the one that was written."""
    if any(f.code == "no-checksum" for f in proven.findings):
        raise UsageError(f"{uri} has no digests: --fingerprint reads both")
    # With digests, only files without tensors that are not recorded are unproven: they are no evidence.
    if proven.proof not in (Proof.PROVEN, Proof.TENSORS, Proof.UNPROVEN):
        raise UsageError(f"{uri}: {proven.message}")


def _id_of(aside: SetAside) -> str:
    """Return the id of the obligation of one purge: a resumed one puts the same."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, aside.home))


def _restore_rest(aside: SetAside, left: Sequence[str]) -> tuple[str, ...]:
    """Restore files that appeared while the source was removed to the place where they were written."""
    names = ", ".join(left[:5])
    try:
        aside.restore()
    except CkptError as error:
        return (f"{names} could not be removed: {error.message}",)
    return (f"{names} appeared or changed meanwhile, and is kept in {aside.record.uri}",)


def _home_of(catalog: Catalog, ref: str) -> str:
    """Return the folder with the record of what a user names. Raises `UsageError`."""
    uri = normal_uri(ref)
    with catalog.reading() as conn:
        rows = set_aside.every(conn)
    homes = [row.record for row in rows if ref == row.record or uri == row.uri]
    # By place first, then by id: an id's beginning is the less exact name.
    homes = homes or [row.record for row in rows if row.checkpoint and row.checkpoint.startswith(ref)]
    if not homes:  # the catalog may be lost
        homes = [ref] if place_of(ref) else [h for h in homes_in(split_url(uri)[0]) if place_of(h) == uri]
    if len(homes) != 1:
        number_text = "nothing" if not homes else f"{len(homes)} checkpoints"
        names = f" ({some(homes)})" if homes else ""
        raise UsageError(
            f"{number_text} of the name {ref} {'is' if len(homes) < 2 else 'are'} set aside{names}",
            hint="name the folder with its record: ckptcore retire lists them",
        )
    return homes[0]
