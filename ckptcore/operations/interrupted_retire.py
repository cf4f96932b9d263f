"""Leftovers: what did a run of `ckptcore retire` that was killed leave, and how does it end?

A source that is whole comes back to its place, whatever the catalog calls it. One of which a part is gone was
approved and proven before its first name went; the rest goes only when its child proves it still. What
nothing accounts for is kept, and told.
"""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

from ckptcore.catalog import maintenance as tending
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.types import State
from ckptcore.errors import Busy, CkptError, UsageError
from ckptcore.operations.child_proof import child_of, files_now, require_holding
from ckptcore.operations.distinct import require_apart
from ckptcore.operations.set_aside import Aside, bring_back, leftovers, partly_gone, place_of
from ckptcore.planning.request import Settings
from ckptcore.store import local_path

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
    return tuple(kept)


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
