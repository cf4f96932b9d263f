"""Find why sources must stay, also where that is recorded under another name of their place.

A link, a second mount and another scheme of a URL give one checkpoint two rows. A hold, a tag, an alias or a
conversion that reads is of one of them; what is deleted is both. A module of its own, between the catalog,
which knows no file systems, and the deletion.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from itertools import chain
from typing import Any

from ckptcore.catalog import maintenance
from ckptcore.catalog.maintenance import Ties
from ckptcore.catalog.types import CheckpointRow
from ckptcore.store import local_path
from ckptcore.store.place import Relation, Spellings, perhaps_within
from ckptcore.utils.merged_url import is_merged, roots_of


def ties_of_places(conn: Any, now: datetime, rows: Sequence[CheckpointRow]) -> dict[str, Ties]:
    """Return why each of these checkpoints must stay at this moment, by public id.

    Args:
        conn: The transaction.
        now: The time.
        rows: The checkpoints.

    Raises:
        UsageError: One of them is not in the catalog.
    """
    ties_by_id = maintenance.ties(conn, now, [row.id for row in rows])
    tied = maintenance.tied(conn, now)
    if len(rows) < len(tied):  # an index of all would take longer than the rest of a deletion's gate
        tied = perhaps_within([row.uri for row in rows], tied)
    spellings = Spellings(tied)
    close = {  # without what contains it, which is no reason under its own name, either
        row.id: [
            spelling for spelling, nesting in spellings.of(row.uri).items() if nesting is not Relation.AROUND
        ]
        for row in rows
    }
    reasons = maintenance.ties_at(conn, now, list(dict.fromkeys(chain.from_iterable(close.values()))))
    for public, spellings_of_row in close.items():
        for spelling in spellings_of_row:
            ties_by_id[public] = ties_by_id[public].with_those(
                reasons.get(spelling, Ties()), f" (as {spelling})"
            )
    return ties_by_id


def inside_of_place(conn: Any, uri: str) -> tuple[str, ...]:
    """Return the URIs of other existing checkpoints with files inside a folder, whatever its name.

    A merged checkpoint has files in the folders around its parts, too: its part may be this folder. One that
    was incomplete, and of which a folder is not there, is none: a command with one place too many records it.
    """
    torn = {place for place in maintenance.merged_incomplete(conn) if _lacks_a_folder(place)}
    inside_by_name = tuple(place for place in maintenance.inside(conn, uri) if place not in torn)
    # The catalog's own spelling first: resolving every other name reads file systems.
    if inside_by_name:
        return inside_by_name
    existing = [place for place in maintenance.existing(conn) if place not in torn]
    merged = Spellings(filter(is_merged, existing)).of(uri)
    # One that is at the place itself, under another name, is no other one.
    return tuple(dict.fromkeys((*Spellings(existing).inside(uri), *merged)))


def _lacks_a_folder(place: str) -> bool:
    """Return whether a local folder of a merged checkpoint is not there now."""
    paths = filter(None, map(local_path, roots_of(place)))
    return not all(map(os.path.lexists, paths))


def writer_of_place(conn: Any, uri: str) -> str | None:
    """Return the id of a conversion that now writes to a place, in it or around it, whatever its name."""
    writing = maintenance.destinations(conn)
    if not writing:  # as a rule
        return None
    writers = maintenance.replacing(conn, uri)
    if writers:
        return writers[0]
    return next((writing[place] for place in Spellings(writing).of(uri)), None)
