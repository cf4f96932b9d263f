"""Set a source aside, and put it back where that fails.

A source is set aside in one transaction: ties are asked about, its row is marked, and last it is moved out
of sight. Nothing is read for that. What a commit did is read back: its reply may be lost.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from ckptcore.catalog import maintenance, set_aside
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.database import clock
from ckptcore.catalog.types import CheckpointRow
from ckptcore.custody.place_ties import inside_of_place, ties_of_places
from ckptcore.custody.set_aside import RETIRED, SetAside, SetAsideRecord, begin, folder_of, require_files
from ckptcore.errors import CkptError, Conflict, UsageError
from ckptcore.operations.retention.policy import RetentionEntry, user_reasons
from ckptcore.operations.retention.replacement import Replacement
from ckptcore.store import local_path
from ckptcore.store.below import open_above
from ckptcore.store.file_status import FileStatus, NameKind
from ckptcore.store.listing import contents, require_no_mount
from ckptcore.utils.merged_url import is_merged

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_log = logging.getLogger("ckptcore")


def put_aside(
    catalog: Catalog, source: CheckpointRow, replacement: Replacement, nbytes: int, grace: timedelta
) -> SetAside:
    """Set a source aside, and mark it as retired.

    Args:
        catalog: The catalog.
        source: The source.
        replacement: The child that replaces it.
        nbytes: Bytes of files that its purge frees.
        grace: How long it can be restored.

    Returns:
        What is set aside; the caller closes it.

    Raises:
        Conflict: A user wants to keep it, or its row changed.
        SourceChanged: Its files changed since they were looked at.
        UsageError: It cannot be moved.
    """
    assert replacement.child is not None
    local = local_path(source.uri) is not None
    if local:
        require_no_mount(source.uri)
    with catalog.reading() as conn:
        root, now = root_above(roots.every(conn), source.uri), clock(conn)
    record = SetAsideRecord(
        RETIRED,
        source.id,
        source.uri,
        replacement.child.id,
        replacement.proof,
        replacement.expects,
        replacement.losses,
        now,
        now + grace,
        replacement.things,
    )
    _require_same(source.uri, replacement.things)
    aside = begin(record, open_above(root, source.uri) if local else -1)
    # Which folder it is in: later it shows whether its disk is the same one.
    folder = folder_of(aside.home)
    try:
        with catalog.writing() as conn:
            _mark_retired(conn, now, source)
            aside.move_in()  # late in the transaction: no reader sees half of it
            aside.require_approved()  # a trainer that saves from here on creates a new folder
            due, digest = now + grace, aside.record.digest
            set_aside.put(
                conn,
                set_aside.SetAsideEntry(
                    aside.home, source.id, source.uri, nbytes, now, due, digest, folder=folder
                ),
            )
    except BaseException:
        # The reply to a commit may be lost: what the catalog says now is what happened.
        listed = row_of(catalog, aside.home)
        # The transaction was committed: only its reply was lost.
        if isinstance(listed, set_aside.SetAsideEntry) and aside.holds:
            return aside
        # Neither recorded nor known to be: it returns to its place.
        if listed is None:
            _restore(aside)
        # Why the catalog does not answer is unknown: it stays aside, and the next run looks.
        aside.close()
        raise
    try:
        aside.hide()
    except CkptError as error:  # what is left in sight is purged as well
        _log.warning("cannot hide all of %s: %s", source.uri, error.message)
    return aside


def _mark_retired(conn: Any, now: datetime, source: CheckpointRow) -> None:
    require_free(conn, now, source)
    if not set_aside.retired(conn, now, source):
        raise Conflict("its row in the catalog changed meanwhile")


def _restore(aside: SetAside) -> None:
    """Restore a source after an error, which matters more than one of this."""
    try:
        aside.restore()
    except CkptError as error:
        _log.warning("cannot restore %s: %s", aside.record.uri, error.message)


def put_back(catalog: Catalog, aside: SetAside) -> None:
    """Restore a source whose purge failed right after it was set aside; a purge that has begun goes on later.

    An error of this is logged: the first one matters more.
    """
    try:
        row = row_of(catalog, aside.home)
        # A removal that was decided goes on, since contents may count on it.
        if isinstance(row, set_aside.SetAsideEntry) and not row.purging:
            aside.restore()
            with catalog.writing() as conn:
                set_aside.drop(conn, aside.home)
                set_aside.restored(conn, aside.record.checkpoint)
    except CkptError as error:
        _log.warning("cannot restore %s: %s", aside.record.uri, error.message)


def row_of(catalog: Catalog, home: str) -> set_aside.SetAsideEntry | CkptError | None:
    """Return the row of what is set aside, None if there is none, or why the catalog does not answer."""
    try:
        with catalog.reading() as conn:
            return next((row for row in set_aside.every(conn) if row.record == home), None)
    except CkptError as error:
        _log.warning("the catalog does not answer: the next run looks at %s: %s", home, error.message)
        return error


def root_above(above: Iterable[roots.RootRow], uri: str) -> str:
    """Return the watched root of a source, by its real place, not by its name or through a link.

    On an object store the name is the place. Raise `UsageError` if there is none.
    """
    if is_merged(uri):
        # Its folders may be of other machines and stores, and other saves may use them: what one deletion
        # cannot prove and undo as one is not begun.
        raise UsageError(
            f"cannot delete {uri}: it is several folders", hint="remove them by hand when they are replaced"
        )
    error: UsageError | None = None
    for root in above:
        if not uri.startswith(root.uri.rstrip("/") + "/"):
            continue
        if local_path(uri) is None:
            # A key may hold "..", which no store resolves, but a client might.
            if ".." not in uri.split("/"):
                return root.uri
            continue
        try:
            os.close(open_above(root.uri, uri))
        except UsageError as refused:
            error = error or refused
        else:
            return root.uri
    raise error or UsageError(f"cannot delete {uri}: it is not below a watched root")


def retention_entry(row: CheckpointRow, ties: maintenance.Ties) -> RetentionEntry:
    """Return a source as a retention policy sees it."""
    readers = tuple(f"{reader} reads it" for reader in ties.readers)
    # Sources without a run belong to the run of their folder.
    run = row.run or os.path.dirname(row.uri)
    return RetentionEntry(row.id, run, row.step, ties.tags, ties.aliases, (*ties.holds, *readers))


def inside_of(conn: Any, source: CheckpointRow) -> str:
    """Return why a source must stay because of another checkpoint in its folder; empty if none is there."""
    inner_uris = inside_of_place(conn, source.uri)
    return f"{inner_uris[0]} is inside it" if inner_uris else ""


def require_free(conn: Any, now: datetime, source: CheckpointRow) -> None:
    """Raise `Conflict` if a user wants to keep it now, or it is not below a watched root."""
    # Asked inside of the transaction: ties that are set from here on see the row as retired.
    require_untied(conn, now, source)
    if inside := inside_of(conn, source):
        raise Conflict(inside)
    try:
        root_above(roots.every(conn), source.uri)
    except UsageError as error:
        raise Conflict(error.message) from error


def require_untied(conn: Any, now: datetime, source: CheckpointRow) -> None:
    """Raise `Conflict` if a user wants to keep a source now."""
    ties = ties_of_places(conn, now, [source])[source.id]
    why = user_reasons(retention_entry(source, ties))
    if why:
        raise Conflict(f"{why[0]}, meanwhile")


def _require_same(uri: str, things: Mapping[str, FileStatus]) -> None:
    """Raise `SourceChanged` unless a source is, name by name, unchanged since before it was looked at."""
    require_files(uri, things, contents(uri))


def freed_bytes(things: Mapping[str, FileStatus]) -> int:
    """Return the bytes of files that are freed if all these names are removed.

    A file with several names counts once, and not at all if a name of it stays.
    """
    removed: Counter[tuple[int, int]] = Counter()
    total, linked = 0, dict[tuple[int, int], FileStatus]()
    for thing in things.values():
        if thing.kind is not NameKind.FILE:
            continue
        # Objects, and files with one name: nothing else can keep their bytes.
        if thing.links in (None, 1) or thing.device is None or thing.inode is None:
            total += thing.nbytes
            continue
        removed[thing.device, thing.inode] += 1
        linked[thing.device, thing.inode] = thing
    return total + sum(t.nbytes for inode, t in linked.items() if t.links == removed[inode])
