"""List obligations and what of them is lost, end them by a user's word, and read records beside copies."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ckptcore.catalog import holdings, obligations
from ckptcore.catalog.database import clock
from ckptcore.catalog.normalize import normal_uri
from ckptcore.catalog.obligations import ListedObligation
from ckptcore.catalog.types import CheckpointRow, State
from ckptcore.custody.distinct import require_own_files
from ckptcore.custody.obligation_records import (
    Obligation,
    add_obligations,
    drop_obligations,
    home_of,
    places_with_records,
    read_obligations,
    recorded_obligation,
)
from ckptcore.errors import CkptError, UsageError
from ckptcore.fingerprints.holdings import TENSOR, Holding, Ids, ids_of, numbered_ids, pack_specs, unpack_ids
from ckptcore.store import join_url, listing, local_path, split_url
from ckptcore.utils.isolation import attempt

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_log = logging.getLogger("ckptcore")


def listed(catalog: Catalog) -> tuple[ListedObligation, ...]:
    """Return all obligations, oldest first."""
    with catalog.reading() as conn:
        return tuple(
            ListedObligation(
                row.id,
                row.source,
                row.place,
                row.created_at,
                row.lost,
                _names(attempt(recorded_obligation, conn, row)),
                row.trouble,
            )
            for row in obligations.every(conn)
        )


def _names(obligation: Obligation | CkptError) -> tuple[str, ...]:
    return (
        (f"({obligation.message})",)
        if isinstance(obligation, CkptError)
        else tuple(h.name for h in obligation.contents)
    )


def release(catalog: Catalog, public: str, globs: Sequence[str]) -> tuple[str, ...]:
    """Give contents of an obligation up, by names that a user said; it ends with its last content.

    Args:
        catalog: The catalog.
        public: Id of the obligation, or a unique beginning of it.
        globs: Names of contents, as `ckptcore.fingerprints.holdings.Holding` has them.

    Returns:
        The names.

    Raises:
        UsageError: There is no such obligation, or it has no such contents.
    """
    with catalog.writing() as conn:
        now = clock(conn)
        rows = [row for row in obligations.every(conn) if row.id.startswith(public)]
        if len(rows) != 1:
            raise UsageError(
                f"there {'is no' if not rows else 'are several'} obligations {public}",
                hint="see ckptcore catalog obligation list",
            )
        (row,) = rows
        obligation = attempt(recorded_obligation, conn, row)
        if isinstance(obligation, CkptError) and "*" not in globs:
            raise obligation
        contents = () if isinstance(obligation, CkptError) else obligation.contents

        def is_named(content: Holding) -> bool:
            return any(fnmatchcase(content.name, glob) for glob in globs)

        named = list(filter(is_named, contents))
        if contents and not named:
            raise UsageError(
                f"obligation {row.id} has no contents of these names (got {', '.join(globs)})",
                hint="see ckptcore catalog obligation list --output json",
            )
        left = tuple(holding for holding in contents if not is_named(holding))
        names = [holding.name for holding in named]
        if left:
            rest = Obligation.of(row, left)
            obligations.reduce(conn, now, row.id, pack_specs(left), rest.packed, names)
        else:
            obligations.end(conn, now, row.id, "given up by name", names)
    if left:
        add_obligations(row.place, [rest])
    else:
        drop_obligations(row.place, [row.id])
    return tuple(names)


def look_after(catalog: Catalog) -> int:
    """Record what of the contents under obligations no recorded checkpoint holds; return how many.

    An obligation whose copy was moved counts on the copy's new place from then on, and its record is beside
    that, also where a link is at the old place. This is what records say: nothing is blocked by it. A disk
    may be away, or a copy not be recorded.
    """
    cache: dict[str, Ids] = {}
    total = 0
    with catalog.reading() as conn:
        checked_obligations = [attempt(recorded_obligation, conn, row) for row in obligations.every(conn)]
    for obligation in checked_obligations:
        lost = (
            obligation
            if isinstance(obligation, CkptError)
            else attempt(_look_after, catalog, obligation, cache)
        )
        if isinstance(lost, CkptError):
            _log.warning("%s", lost.message)
        else:
            total += lost
    return total


def _look_after(catalog: Catalog, obligation: Obligation, cache: dict[str, Ids]) -> int:
    """Record what of the contents of one obligation is lost; return how many. cache: ids by checkpoint."""
    row, contents = obligation.row, obligation.contents
    protected_ids, by_place, in_part = ids_of(contents), dict[str, Ids](), False
    with catalog.reading() as conn:
        for holder in holdings.may_hold(conn, protected_ids):
            if holder.state != State.GONE.value:
                ids = cache.setdefault(holder.id, recorded_ids(conn, holder))
                by_place[holder.uri] = ids & protected_ids
                # Only tensors have recorded sums before something reads all of a checkpoint.
                in_part |= holdings.ids_of_row(conn, holder.id) is None
    lost = [
        content.name
        for content in contents
        if not (in_part and content.kind != TENSOR)
        and not any(content.id in ids for ids in by_place.values())
    ]
    if len(lost) != row.lost:
        with catalog.writing() as conn:
            obligations.note_lost(conn, clock(conn), row, lost)
    gone = row.place not in by_place
    holders = sorted(filter(by_place.get, by_place), key=lambda uri: (uri != row.place, -len(by_place[uri])))
    for uri in holders if gone or by_place[row.place] else ():
        if _count_on(catalog, obligation, uri, gone=gone):
            break
    return len(lost)


def _count_on(catalog: Catalog, obligation: Obligation, place: str, *, gone: bool) -> bool:
    """Let an obligation count on a copy whose files are its own, with a record beside that.

    gone: whether the copy that it counts on is not at its place any more. Return whether it counts on this
    one now.
    """
    row = obligation.row
    if place == row.place and (
        local_path(place) is None or isinstance(attempt(listing.contents, place, follow=True), CkptError)
    ):
        return True  # objects are no links, and a disk may be away
    added = attempt(_add_beside, catalog, obligation, place)
    if isinstance(added, CkptError):
        _log.warning("no record of an obligation beside %s: %s", place, added.message)
        return False
    if gone and home_of(place) != home_of(row.place):  # else it is another name of the same copy
        drop_obligations(row.place, [row.id])
    return True


def _add_beside(catalog: Catalog, obligation: Obligation, place: str) -> None:
    """Record that an obligation counts on a copy; first it gets its record beside that."""
    if local_path(place) is not None:
        require_own_files(place, listing.contents(place, follow=True))
    if place == obligation.row.place and os.path.lexists(
        join_url(home_of(place), f"{obligation.row.id}.json")
    ):
        return
    with catalog.writing() as conn:  # records beside copies are changed by one process at a time
        # Unless it ended meanwhile.
        add_obligations(place, [recorded_obligation(conn, obligation.row, obligation)])
        obligations.move(conn, obligation.row.id, place)


def recorded_ids(conn: Any, row: CheckpointRow) -> Ids:
    """Return the content ids that a checkpoint holds by its records."""
    packed_ids = holdings.ids_of_row(conn, row.id)
    tensor_ids = holdings.tensor_ids_of(conn, row.id)
    return numbered_ids(tensor_ids or b"") | unpack_ids(packed_ids or b"")


def read_records(catalog: Catalog, places: Iterable[str]) -> tuple[int, tuple[str, ...]]:
    """Record the obligations that records beside and in these places have, and the catalog does not.

    A copy may have been moved away from its record: the others beside these places are read as well.

    Returns:
        How many were recorded, and messages about records that cannot be read.
    """
    count, unread = 0, []
    all_places = dict.fromkeys(normal_uri(place) for place in places)
    for folder in dict.fromkeys([*all_places, *(split_url(place)[0] for place in all_places)]):
        with suppress(CkptError):  # a file, or a folder that is not ours to list
            all_places |= dict.fromkeys(places_with_records(folder))
    for place in all_places:
        recorded = attempt(read_obligations, place)
        if isinstance(recorded, CkptError):
            unread.append(recorded.message)
            continue
        if not recorded:
            continue
        with catalog.writing() as conn:
            rows = obligations.every(conn)
            stored_ids = {
                row.id for row in rows if isinstance(attempt(recorded_obligation, conn, row), Obligation)
            }
            for obligation in recorded:
                if obligation.row.id not in stored_ids:
                    obligations.put(conn, obligation.row, obligation.packed)
                    count += 1
    return count, tuple(unread)
