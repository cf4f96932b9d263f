"""Count what monitoring asks for: queues, conversions, failures, proofs and sizes.

Every number is an aggregate over columns; no row is returned. At 100,000 checkpoints all of them together
take less than a second, so a monitor may ask every 15 seconds.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from sqlalchemy import func, literal_column, select, text

from ckptcore.catalog.browse import NOT_CURRENT
from ckptcore.catalog.holds import in_force
from ckptcore.catalog.models import (
    Checkpoint,
    Conversion,
    FindingRecord,
    Hold,
    Inbox,
    Obligation,
    SetAsideRow,
)
from ckptcore.catalog.query import sum_of
from ckptcore.catalog.queues import Stage, inbox, outbox
from ckptcore.catalog.types import Outcome
from ckptcore.utils.text import short_repr

if TYPE_CHECKING:
    from sqlalchemy import Connection

_LABEL, _SHORTENED = 64, re.compile(r"\([0-9a-f]{8}\)\Z")  # characters of a text, and what is behind others
_DATABASE_SIZE = {
    "sqlite": "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()",
    "postgresql": "SELECT pg_database_size(current_database())",
}
_CODE = func.coalesce(Conversion.error_code, literal_column("'unknown'")).label("code")
# Each database computes durations in its own way; PostgreSQL has infinite times, which have no difference.
_SECONDS = {
    "sqlite": "(julianday(ended_at) - julianday(started_at)) * 86400.0",
    "postgresql": "CASE WHEN isfinite(ended_at) AND isfinite(started_at) "
    "THEN extract(epoch FROM ended_at - started_at)::double precision END",
}


@dataclass(frozen=True, slots=True)
class WorkDone:
    """What the successful conversions of a verb have done so far. seconds: the sum of their durations."""

    conversions: int
    bytes_in: int
    bytes_out: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Stock:
    """Checkpoints of one kind in one state, and their bytes."""

    checkpoints: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers of a catalog at one time.

    Attributes:
        at: The time.
        inbox: Events by stage.
        outbox: Messages by stage.
        oldest_event: When the oldest event arrived that is not done and has not failed; None without one.
        conversions: Conversions by verb and state.
        failures: Failed conversions by the code of their error.
        work: Verb -> what its successful conversions did.
        stock: (kind, state) -> checkpoints.
        unproven: Current checkpoints that were never verified.
        oldest_unproven: When the oldest of those was recorded; None without one.
        oldest_proof: The oldest time of the last verification among the verified current checkpoints.
        findings: Open findings of current checkpoints by severity.
        holds: Holds in force.
        set_aside_bytes: Bytes of files that purges free.
        obligations: Deletions whose copies must not go.
        lost_contents: Contents under an obligation that no recorded checkpoint holds.
        database_bytes: The size of the database.
    """

    at: datetime
    inbox: dict[str, int]
    outbox: dict[str, int]
    oldest_event: datetime | None
    conversions: dict[tuple[str, str], int]
    failures: dict[str, int]
    work: dict[str, WorkDone]
    stock: dict[tuple[str, str], Stock]
    unproven: int
    oldest_unproven: datetime | None
    oldest_proof: datetime | None
    findings: dict[str, int]
    holds: int
    set_aside_bytes: int
    obligations: int
    lost_contents: int
    database_bytes: int


def figures(conn: Connection, now: datetime) -> Figures:
    """Return the numbers of a catalog. All tables of this version must exist."""
    waiting = Inbox.state.in_((Stage.WAITING.value, Stage.TAKEN.value))
    current = Checkpoint.state.not_in(NOT_CURRENT)
    unproven = conn.execute(
        select(func.count(), func.min(Checkpoint.created_at)).where(current, Checkpoint.verified_at.is_(None))
    ).one()
    return Figures(
        at=now,
        inbox=inbox.depth(conn),
        outbox=outbox.depth(conn),
        oldest_event=_time(conn.execute(select(func.min(Inbox.received_at)).where(waiting)).scalar()),
        conversions=_conversions(conn),
        failures={
            _label(row.code): row.n
            for row in conn.execute(
                select(_CODE, func.count().label("n"))
                .where(Conversion.state == Outcome.FAILED.value)
                .group_by(_CODE)
            )
        },
        work=_work(conn),
        stock=_stock(conn),
        unproven=unproven[0],
        oldest_unproven=_time(unproven[1]),
        oldest_proof=_time(conn.execute(select(func.min(Checkpoint.verified_at)).where(current)).scalar()),
        findings={
            _label(row.severity): row.n
            for row in conn.execute(
                select(FindingRecord.severity, func.count().label("n"))
                .join(Checkpoint, Checkpoint.id == FindingRecord.checkpoint_id)
                .where(FindingRecord.resolved_at.is_(None), current)
                .group_by(FindingRecord.severity)
            )
        },
        holds=conn.execute(select(func.count()).select_from(Hold).where(*in_force(now))).scalar_one(),
        set_aside_bytes=_total(conn, SetAsideRow.nbytes),
        obligations=conn.execute(select(func.count()).select_from(Obligation)).scalar_one(),
        lost_contents=_total(conn, Obligation.lost),
        database_bytes=int(conn.execute(text(_DATABASE_SIZE[conn.dialect.name])).scalar_one()),
    )


def _total(conn: Connection, column: Any) -> int:
    return _as_integer(conn.execute(select(func.coalesce(sum_of(conn, column), 0))).scalar_one())


def _as_integer(value: Any) -> int:
    """Return a sum as an integer; 0 for an infinite one, of which a row is odd."""
    return int(value) if math.isfinite(value) else 0


def _label(value: Any) -> str:
    """Return a short text of a row; of another value its beginning, and a digest: no two have one label.

    >>> _label("failed"), _label(b"failed")
    ('failed', "b'failed' (edf948fe)")
    """
    if isinstance(value, str) and len(value) <= _LABEL and not _SHORTENED.search(value):
        return value
    text = f"{type(value).__name__} {value!r}".encode(errors="surrogatepass")
    return f"{short_repr(value, 40)} ({blake3(text).hexdigest(length=4)})"


def _time(value: Any) -> datetime | None:
    """Return the oldest of some times; None for what is no time: a row is odd."""
    return value if isinstance(value, datetime) else None


def _conversions(conn: Connection) -> dict[tuple[str, str], int]:
    counted = select(Conversion.verb, Conversion.state, func.count().label("n"))
    rows = conn.execute(counted.group_by(Conversion.verb, Conversion.state))
    return {(_label(row.verb), _label(row.state)): row.n for row in rows}


def _work(conn: Connection) -> dict[str, WorkDone]:
    seconds: Any = literal_column(_SECONDS[conn.dialect.name])
    summed = select(
        Conversion.verb,
        func.count().label("n"),
        func.coalesce(sum_of(conn, Conversion.bytes_in), 0).label("bytes_in"),
        func.coalesce(sum_of(conn, Conversion.bytes_out), 0).label("bytes_out"),
        func.coalesce(func.sum(seconds), 0).label("seconds"),
    ).where(Conversion.state == Outcome.SUCCEEDED.value)
    rows = conn.execute(summed.group_by(Conversion.verb))
    return {
        _label(r.verb): WorkDone(r.n, _as_integer(r.bytes_in), _as_integer(r.bytes_out), float(r.seconds))
        for r in rows
    }


def _stock(conn: Connection) -> dict[tuple[str, str], Stock]:
    counted = select(
        Checkpoint.kind,
        Checkpoint.state,
        func.count().label("n"),
        func.coalesce(sum_of(conn, Checkpoint.total_bytes), 0).label("nbytes"),
    )
    rows = conn.execute(counted.group_by(Checkpoint.kind, Checkpoint.state))
    return {(_label(row.kind), _label(row.state)): Stock(row.n, _as_integer(row.nbytes)) for row in rows}
