"""Leftovers: what did a run of `ckptcore retire` that was killed leave, and how does it end?

A source that is whole comes back to its place, whatever the catalog calls it. One of which a part is gone was
approved and proven before its first name went; the rest goes only when its child proves it still. What
nothing accounts for is kept, and told.
"""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

from ckptcore.catalog import CheckpointDetail
from ckptcore.catalog import maintenance as tending
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.types import CheckpointRow, State
from ckptcore.errors import Busy, CkptError, UsageError
from ckptcore.operations.child_proof import child_of, files_now, require_holding
from ckptcore.operations.distinct import require_apart
from ckptcore.operations.removal_record import (
    as_recorded,
    drop_record,
    left_of,
    read_record,
    records_at,
    remove_rest,
)
from ckptcore.operations.set_aside import Aside, RemovalRecord, bring_back, leftovers, partly_gone, place_of
from ckptcore.planning.request import Settings
from ckptcore.store import local_path, split_url

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog


def clear_away(catalog: Catalog, means: Settings) -> tuple[str, ...]:
    """Ends what runs that were killed left: a source that is whole comes back, and of one whose removal had
    begun the rest goes, name by name, when its child proves to hold it still. What nobody may remove is
    kept: the sentences tell where it is, and why. means: to read such a child.
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
                        _end(catalog, aside, means)
            except Busy:
                continue  # its process lives
            except CkptError as error:
                kept.append(f"{parent}/{name} is kept: {error.message}")
        kept += [why for name in older if (why := _end_older(catalog, root, parent, name))]
    return (*kept, *_clear_stores(catalog, means))


def _clear_stores(catalog: Catalog, means: Settings) -> tuple[str, ...]:
    """As `clear_away`, on object stores, where a deletion that has begun goes on."""
    kept: list[str] = []
    with catalog.reading() as conn:
        remote = [root.uri for root in roots.every(conn) if local_path(root.uri) is None]
        known = {uri for root in remote for uri in tending.known_below(conn, root)}
    for parent in sorted({split_url(uri)[0] for uri in known}):
        try:
            homes = records_at(parent)
        except CkptError as error:
            kept.append(f"cannot look for deletions that were killed: {error.message}")
            continue
        for home in homes:
            try:
                why = _end_recorded(catalog, home, means)
            except CkptError as error:
                why = f"{home} is kept: {error.message}"
            kept += [why] if why else []
    return tuple(kept)


def _end_recorded(catalog: Catalog, home: str, means: Settings) -> str:
    """Ends one deletion on an object store; what of it stays and why, or an empty text. Raises for what must
    be kept with its record."""
    record = read_record(home)
    if record is None:
        return ""
    source = _known_source(catalog, record)
    there = left_of(record)
    if source.state != State.DELETED.value:
        if partly_gone(record, there) and as_recorded(record, there):
            raise UsageError(f"a part of it is gone, and the catalog calls it {source.state}")
        drop_record(home)  # nothing was removed, or all of it and something else is there now
        return ""
    with catalog.reading() as conn:
        children = {child.id for _, child in tending.children(conn, source.id)}
    left: tuple[str, ...] = tuple(there)
    if as_recorded(record, there):
        if record.child not in children or record.fingerprint not in (None, source.fingerprint):
            raise UsageError(
                f"nothing that was made of it and is there proves it (recorded was {record.child})"
            )
        detail = child_of(catalog, record.child)
        require_holding(detail, record.fingerprint, means)
        require_apart(record.uri, there, detail.checkpoint.uri, files_now(detail))
        left = remove_rest(record)
    drop_record(home)
    if not left:
        return ""
    return f"{record.uri} has what nobody approved, or changed since, and keeps it: {', '.join(left[:5])}"


def _known_source(catalog: Catalog, record: RemovalRecord) -> CheckpointRow:
    """The row of a recorded source; raises `UsageError` unless it is the last that is known of its place."""
    known, there = (catalog.show(name, tensors=False) for name in (record.checkpoint, record.uri))
    if not isinstance(known, CheckpointDetail) or not isinstance(there, CheckpointDetail):
        raise UsageError(f"{record.checkpoint} is no checkpoint in this catalog")
    row = known.checkpoint
    if (row.id, row.uri) != (record.checkpoint, record.uri) or there.checkpoint.id != row.id:
        raise UsageError(f"{record.uri} is another checkpoint in this catalog than the record says")
    return row


def _end_older(catalog: Catalog, root: str, parent: str, name: str) -> str:
    """Ends what a version without records left; why it is kept, or an empty text."""
    uri = place_of(parent, name)
    with catalog.reading() as conn:
        there = any(row.uri == uri for row in tending.sources(conn, root))
    if not there:
        return (
            f"{parent}/{name} is kept: {uri} was deleted, but nothing says what of it was proven; "
            f"remove it yourself when nothing in it is needed"
        )
    try:
        bring_back(root, parent, name)
    except UsageError as error:
        return f"{parent}/{name} is kept: {error.message}"
    return ""


def _end(catalog: Catalog, aside: Aside, means: Settings) -> None:
    """Ends one leftover. Raises for what must be kept."""
    if not aside.holds:
        aside.put_back()
        return
    record = aside.record
    with catalog.reading() as conn:
        state = tending.state_of(conn, record.checkpoint)
    if state is None:
        raise UsageError("this catalog does not know the checkpoint that it is of")
    if not partly_gone(record, aside.look()):
        aside.put_back()
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
        aside.put_back()
        raise UsageError(f"{aside.path} has what nobody approved: {', '.join(left[:5])}")
