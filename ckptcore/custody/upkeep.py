"""List obligations and what of them is lost, end them by a user's word, and read records beside copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ckptcore.catalog import holdings, obligations
from ckptcore.catalog.types import CheckpointRow, State
from ckptcore.custody.obligation_records import Duty, add_duties, drop_duties, read_duties
from ckptcore.errors import CkptError, UsageError
from ckptcore.fingerprints.holdings import Ids, ids_of, nth, pack, pack_specs, tensor_id, unpack, unpack_ids
from ckptcore.utils.dataclass import dataclass

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_NOT_THERE = (State.GONE.value,)  # beside those that `holdings.may_hold` leaves out


@dataclass(frozen=True, slots=True)
class ListedObligation:
    """One obligation, for people.

    id: its id. source: what was deleted. place: the copy that it counts on. created_at: since when. lost: how
    many of its contents no recorded checkpoint holds. contents: their names.
    """

    id: str
    source: str
    place: str
    created_at: datetime
    lost: int
    contents: tuple[str, ...]


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
                tuple(each.name for each in unpack(obligations.contents_of(conn, row.id))),
            )
            for row in obligations.every(conn)
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
    now = datetime.now(UTC)
    with catalog.writing() as conn:
        rows = [row for row in obligations.every(conn) if row.id.startswith(public)]
        if len(rows) != 1:
            raise UsageError(
                f"there {'is no' if not rows else 'are several'} obligations {public}",
                hint="see ckptcore catalog obligation list",
            )
        (row,) = rows
        contents = unpack(obligations.contents_of(conn, row.id))
        named = [each for each in contents if any(fnmatchcase(each.name, glob) for glob in globs)]
        if not named:
            raise UsageError(
                f"obligation {row.id} has no contents of these names (got {', '.join(globs)})",
                hint="see ckptcore catalog obligation list --output json",
            )
        left = tuple(each for each in contents if each not in named)
        names = [each.name for each in named]
        if left:
            obligations.reduce(conn, now, row.id, pack_specs(left), pack(left), names)
        else:
            obligations.end(conn, now, row.id, "given up by name", names)
    if left:
        add_duties(row.place, [Duty(row, left)])
    else:
        drop_duties(row.place, [row.id])
    return tuple(names)


def note_lost(catalog: Catalog) -> int:
    """Record which contents under an obligation no recorded checkpoint holds; return how many.

    It is what records say. Nothing is blocked by it: a disk may be away, or a copy not be recorded.
    """
    lost: dict[str, list[str]] = {}
    with catalog.reading() as conn:
        rows = obligations.every(conn)
        cache: dict[str, Ids] = {}
        for row in rows:
            contents = unpack(obligations.contents_of(conn, row.id))
            wanted = ids_of(contents)
            there = frozenset[bytes]()
            for holder in holdings.may_hold(conn, wanted):
                if holder.state not in _NOT_THERE and not wanted <= there:
                    there |= cache.setdefault(holder.id, recorded_ids(conn, holder))
            lost[row.id] = [each.name for each in contents if each.id not in there]
    if any(len(lost[row.id]) != row.lost for row in rows):
        with catalog.writing() as conn:
            for row in rows:
                if len(lost[row.id]) != row.lost:
                    obligations.note_lost(conn, datetime.now(UTC), row, lost[row.id])
    return sum(map(len, lost.values()))


def recorded_ids(conn: Any, row: CheckpointRow) -> Ids:
    """Return the content ids that a checkpoint holds by its records."""
    kept = holdings.ids_of_row(conn, row.id)
    counts = Counter((holdings.fingerprints_of(conn, row.id) or {}).values())
    tensors = {nth(tensor_id(sums), n) for sums, count in counts.items() for n in range(1, count + 1)}
    return frozenset(tensors) | (unpack_ids(kept) if kept else frozenset())


def read_records(catalog: Catalog, places: Iterable[str]) -> tuple[int, tuple[str, ...]]:
    """Record the obligations that records beside these places have, and the catalog does not.

    Returns:
        How many were recorded, and messages about records that cannot be read.
    """
    count, unread = 0, []
    for place in places:
        try:
            duties = read_duties(place)
        except CkptError as error:
            unread.append(error.message)
            continue
        if not duties:
            continue
        with catalog.writing() as conn:
            known = {row.id for row in obligations.every(conn)}
            for duty in duties:
                if duty.row.id not in known:
                    obligations.put(conn, duty.row, pack(duty.contents))
                    count += 1
    return count, tuple(unread)
