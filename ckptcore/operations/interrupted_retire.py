"""Finish the deletions that a killed run of `ckptcore retire` left unfinished.

A complete source is restored to its place, whatever its state in the catalog. A source of which a part is
gone was approved and proven before its first file was removed; the rest is removed only if its child still
proves it. Everything else is kept and reported.
"""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

from ckptcore.catalog import CheckpointDetail, retirements
from ckptcore.catalog import maintenance as tending
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.types import CheckpointRow, State
from ckptcore.errors import Busy, CkptError, UsageError
from ckptcore.operations.child_proof import files_now, require_holding
from ckptcore.operations.distinct import require_apart
from ckptcore.operations.removal_record import (
    as_recorded,
    drop_record,
    left_of,
    read_record,
    records_at,
    remove_rest,
)
from ckptcore.operations.replacement import child_of
from ckptcore.operations.set_aside import (
    Aside,
    RemovalRecord,
    leftovers,
    partly_gone,
    place_of,
    restore_older,
)
from ckptcore.planning.request import Settings
from ckptcore.store import local_path, split_url

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog


def finish_interrupted(catalog: Catalog, means: Settings) -> tuple[str, ...]:
    """Finish the deletions that killed runs left unfinished.

    A complete source is restored. If the removal had begun, the rest is removed, name by name, if its child
    still proves it. Everything else is kept.

    Args:
        catalog: The catalog.
        means: Memory and threads for reading children.

    Returns:
        Messages: what is kept, where, and why.
    """
    kept: list[str] = []
    with catalog.reading() as conn:
        local = [root.uri for root in roots.every(conn) if local_path(root.uri) is not None]
        places = {(root, os.path.dirname(uri)) for root in local for uri in tending.known_below(conn, root)}
    for root, parent in sorted(places):
        try:
            names, older = leftovers(root, parent)
        except UsageError:
            continue  # there is no such folder below the root
        for name in names:
            try:
                aside = Aside.leftover(root, parent, name)
                if aside is not None:
                    with closing(aside):
                        _finish(catalog, aside, means)
            except Busy:
                continue  # its process is alive
            except CkptError as error:
                kept.append(f"{parent}/{name} is kept: {error.message}")
        kept += [why for name in older if (why := _finish_older(catalog, root, parent, name))]
    return (*kept, *_finish_on_stores(catalog, means))


def _finish_on_stores(catalog: Catalog, means: Settings) -> tuple[str, ...]:
    """Finish interrupted deletions on object stores, where a begun deletion is resumed."""
    kept: list[str] = []
    with catalog.reading() as conn:
        remote = [root.uri for root in roots.every(conn) if local_path(root.uri) is None]
        known = {uri for root in remote for uri in tending.known_below(conn, root)}
    for parent in sorted({split_url(uri)[0] for uri in known}):
        try:
            homes = records_at(parent)
        except CkptError as error:
            kept.append(f"cannot search for interrupted deletions: {error.message}")
            continue
        for home in homes:
            try:
                why = _finish_recorded(catalog, home, means)
            except CkptError as error:
                why = f"{home} is kept: {error.message}"
            kept += [why] if why else []
    return tuple(kept)


def _finish_recorded(catalog: Catalog, home: str, means: Settings) -> str:
    """Finish one deletion on an object store.

    Returns:
        Which objects stay, and why; empty if none do.

    Raises:
        CkptError: The rest must be kept, with its record.
    """
    record = read_record(home)
    if record is None:
        return ""
    source = _known_source(catalog, record)
    there = left_of(record)
    if source.state != State.DELETED.value:
        if partly_gone(record, there) and as_recorded(record, there):
            raise UsageError(f"a part of it is gone, and the catalog calls it {source.state}")
        drop_record(home)  # nothing was removed, or everything was and something else is there now
        return ""
    with catalog.reading() as conn:
        children = {child.id for _, child in tending.children(conn, source.id)}
        proven = retirements.of(conn, source.id)
    known = {None, source.fingerprint, proven.fingerprint if proven is not None else None}
    left: tuple[str, ...] = tuple(there)
    if as_recorded(record, there):
        if record.child not in children or record.fingerprint not in known:
            raise UsageError(f"no existing child proves it (the record names {record.child})")
        detail = child_of(catalog, record.child)
        require_holding(detail, record.fingerprint, means)
        require_apart(record.uri, there, detail.checkpoint.uri, files_now(detail))
        left = remove_rest(record)
    drop_record(home)
    if not left:
        return ""
    return f"{record.uri} keeps files that are not in the record, or changed since: {', '.join(left[:5])}"


def _known_source(catalog: Catalog, record: RemovalRecord) -> CheckpointRow:
    """Return the row of a recorded source; raise `UsageError` unless it is the latest of its place."""
    known, there = (catalog.show(name, tensors=False) for name in (record.checkpoint, record.uri))
    if not isinstance(known, CheckpointDetail) or not isinstance(there, CheckpointDetail):
        raise UsageError(f"{record.checkpoint} is not a checkpoint in this catalog")
    row, latest = known.checkpoint, there.checkpoint
    # Under another scheme, one content has a row of its own.
    twin = latest.uri != row.uri and latest.manifest_digest == row.manifest_digest
    twin = twin and latest.content_digest == row.content_digest
    if (row.id, row.uri) != (record.checkpoint, record.uri) or not (latest.id == row.id or twin):
        raise UsageError(f"{record.uri} is another checkpoint in this catalog than in the record")
    return row


def _finish_older(catalog: Catalog, root: str, parent: str, name: str) -> str:
    """Restore what a version without records left; return why it is kept, or an empty text."""
    uri = place_of(parent, name)
    with catalog.reading() as conn:
        there = any(row.uri == uri for row in tending.sources(conn, [root]))
    if not there:
        return (
            f"{parent}/{name} is kept: {uri} was deleted, but there is no record of what was proven; "
            f"remove it yourself if nothing in it is needed"
        )
    try:
        restore_older(root, parent, name)
    except UsageError as error:
        return f"{parent}/{name} is kept: {error.message}"
    return ""


def _finish(catalog: Catalog, aside: Aside, means: Settings) -> None:
    """Finish one local deletion. Raise an error for what must be kept."""
    if not aside.holds:
        aside.restore()
        return
    record = aside.record
    with catalog.reading() as conn:
        state = tending.state_of(conn, record.checkpoint)
    if state is None:
        raise UsageError("its checkpoint is not in this catalog")
    if not partly_gone(record, aside.look()):
        aside.restore()
        with catalog.writing() as conn:
            tending.restored(conn, record.checkpoint)
        return
    if state != State.DELETED.value:
        raise UsageError(f"a part of it is gone, and the catalog calls it {state}")
    detail = child_of(catalog, record.child)
    require_holding(detail, record.fingerprint, means)
    require_apart(aside.path, aside.look(), detail.checkpoint.uri, files_now(detail))
    left, trouble = aside.remove()
    if trouble:
        raise UsageError(f"cannot remove what is in it: {trouble}")
    if left:
        aside.restore()
        raise UsageError(f"{aside.path} has files that are not in the record: {', '.join(left[:5])}")
