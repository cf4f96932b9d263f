"""Record obligations: contents that must not go, because what held them was deleted in favour of a copy.

An obligation is on content ids. It outlives the rows, states, moves and names of the copy; `place` only says
where the copy was when it was last counted on. Whoever would replace a place asks for its obligations when
its conversion has a row, and an obligation is recorded only while no conversion writes to its copy: so one of
the two sees the other. See `ckptcore.custody`.

Every function runs inside the given transaction. Functions that change something need a writer's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from sqlalchemy import delete, insert, select, update

from ckptcore.catalog import audit
from ckptcore.catalog.models import Checkpoint, FindingRecord, Obligation
from ckptcore.catalog.normalize import normal_uri, storable_finding
from ckptcore.catalog.row_values import read_row
from ckptcore.errors import UsageError, finding
from ckptcore.utils.text import some

if TYPE_CHECKING:
    from sqlalchemy import Connection


LOST = "lost-content"
_MOST = 1000  # names in an audit record


@dataclass(frozen=True, slots=True)
class ObligationRow:
    """One obligation.

    Attributes:
        id: Its public id.
        checkpoint: Public id of what was deleted; None if this catalog does not know it.
        source: URI of what was deleted.
        place: URI of the copy that it counts on.
        specs: `ckptcore.fingerprints.holdings.pack_specs` of its contents.
        created_at: When it began.
        lost: How many of its contents no recorded checkpoint held when that was last looked at.
        trouble: What is odd in the row.
    """

    id: str
    checkpoint: str | None
    source: str
    place: str
    specs: bytes
    created_at: datetime
    lost: int = 0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class ListedObligation:
    """One obligation, for people.

    id: its id. source: what was deleted. place: the copy that it counts on. created_at: since when. lost: how
    many of its contents no recorded checkpoint holds. contents: their names. trouble: what is odd in the row.
    """

    id: str
    source: str
    place: str
    created_at: datetime
    lost: int
    contents: tuple[str, ...]
    trouble: str = ""


_COLUMNS = (
    Obligation.uuid,
    Checkpoint.uuid.label("checkpoint"),
    Obligation.source,
    Obligation.place,
    Obligation.specs,
    Obligation.created_at,
    Obligation.lost,
)


def every(conn: Connection) -> tuple[ObligationRow, ...]:
    """Return all obligations, oldest first."""
    rows = select(*_COLUMNS).outerjoin(Checkpoint, Checkpoint.id == Obligation.checkpoint_id)
    ordered = conn.execute(rows.order_by(Obligation.id))
    return tuple(read_row(ObligationRow, row, id=row.uuid) for row in ordered)


def contents_of(conn: Connection, public: str) -> bytes:
    """Return the packed contents of an obligation. Raises `UsageError` for an unknown id."""
    contents = conn.execute(select(Obligation.contents).where(Obligation.uuid == public)).scalar()
    if contents is None:
        raise UsageError(
            f"there is no obligation {public}", hint="`ckptcore catalog obligation list` lists all"
        )
    return contents


def put(conn: Connection, row: ObligationRow, contents: bytes) -> None:
    """Record an obligation, or replace the one of its id."""
    # None in another catalog: the obligation is kept nevertheless, since it is about contents.
    source = conn.execute(select(Checkpoint.id).where(Checkpoint.uuid == row.checkpoint)).scalar()
    values = {
        "checkpoint_id": source,
        "source": normal_uri(row.source),
        "place": normal_uri(row.place),
        "specs": row.specs,
        "contents": contents,
        "created_at": row.created_at,
        "lost": row.lost,
    }
    if not conn.execute(update(Obligation).where(Obligation.uuid == row.id).values(values)).rowcount:
        conn.execute(insert(Obligation).values(uuid=row.id, **values))


def move(conn: Connection, public: str, place: str) -> None:
    """Record that an obligation counts on another copy now."""
    conn.execute(update(Obligation).where(Obligation.uuid == public).values(place=normal_uri(place)))


def note_lost(conn: Connection, now: datetime, row: ObligationRow, names: Sequence[str]) -> None:
    """Record as a finding on what was deleted which contents no recorded checkpoint holds."""
    # The count is for lists; the finding names what is lost.
    conn.execute(update(Obligation).where(Obligation.uuid == row.id).values(lost=len(names)))
    source = conn.execute(select(Checkpoint.id).where(Checkpoint.uuid == row.checkpoint)).scalar()
    mine = (FindingRecord.code == LOST, FindingRecord.checkpoint_id == source)
    still = FindingRecord.resolved_at.is_(None)
    # One finding at a time: an earlier one is closed, whether or not a new one follows.
    conn.execute(update(FindingRecord).where(*mine, still).values(resolved_at=now))
    if not names or source is None:
        return
    gone = some(list(names))
    message = f"{len(names)} contents of {row.source} are in no recorded checkpoint any more: {gone}"
    lost = finding(LOST, "bytes", message)
    values = {"checkpoint_id": source, "found_at": now}
    conn.execute(insert(FindingRecord).values(storable_finding(lost) | values))


def reduce(
    conn: Connection, now: datetime, public: str, specs: bytes, contents: bytes, names: Sequence[str]
) -> None:
    """Record what is left of an obligation, with an audit row. names: contents that a user gave up."""
    this_obligation = Obligation.uuid == public
    source = conn.execute(select(Obligation.source).where(this_obligation)).scalar()
    audit.note(conn, now, "obligation.reduce", public, {"source": source, "names": list(names[:_MOST])})
    conn.execute(update(Obligation).where(this_obligation).values(specs=specs, contents=contents))


def end(conn: Connection, now: datetime, public: str, why: str, names: Sequence[str] = ()) -> None:
    """End an obligation, with an audit row. why: for people. names: contents that a user gave up."""
    source = conn.execute(select(Obligation.source).where(Obligation.uuid == public)).scalar()
    # Ended already, perhaps by another process: nothing more is recorded.
    if source is not None:
        audit.note(
            conn, now, "obligation.end", public, {"source": source, "why": why, "names": list(names[:_MOST])}
        )
        conn.execute(delete(Obligation).where(Obligation.uuid == public))
