"""Record how `retire` proved a source that it deleted, and what was given up with it or by `thin`.

Every function runs inside the given transaction. Functions that change something need a writer's transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, insert, select

from ckptcore.catalog import audit
from ckptcore.catalog.models import Checkpoint, GivenUpRow, RetirementRow
from ckptcore.catalog.normalize import clean

if TYPE_CHECKING:
    from sqlalchemy import Connection

FULL, PART, THINNED = "full", "model part", "thinned"
_MOST = 1000  # names in an audit record; the table has all


@dataclass(frozen=True, slots=True)
class GivenUp:
    """One name that goes without proof. kind: what it is. nbytes: its size, or None if unknown."""

    name: str
    kind: str
    nbytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"name": self.name, "kind": self.kind, "bytes": self.nbytes}


@dataclass(frozen=True, slots=True)
class RetirementRecord:
    """How one source was proven.

    Attributes:
        child: Public id of the checkpoint that proved it.
        proof: `FULL`, `PART`, or `THINNED` for a step that was left at its place without what was given up.
        fingerprint: Of the child's tensors; None if its digests proved it.
        freed: Bytes of files.
        given_up: What went without proof.
        at: When; None before it is recorded.
    """

    child: str
    proof: str
    fingerprint: str | None
    freed: int
    given_up: tuple[GivenUp, ...] = ()
    at: datetime | None = None


def totals(given_up: Iterable[GivenUp]) -> dict[str, dict[str, int]]:
    """Return kind -> number of names and known bytes."""
    names: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for content in given_up:
        names[content.kind] += 1
        sizes[content.kind] += content.nbytes or 0
    return {kind: {"names": names[kind], "bytes": sizes[kind]} for kind in sorted(names)}


def note(
    conn: Connection, now: datetime, public: str, record: RetirementRecord, action: str = "checkpoint.retire"
) -> None:
    """Record a deletion, with an audit row, in the transaction that marks the source as deleted."""
    row = _row_id(conn, public)
    # A source that was brought back and retired once more has one record, the last one.
    withdraw(conn, public)
    values = {"child": record.child, "proof": record.proof, "fingerprint": record.fingerprint}
    conn.execute(insert(RetirementRow).values(checkpoint_id=row, freed=record.freed, at=now, **values))
    # By name and kind: one name may be a tensor and a file.
    named = {(clean(g.name), g.kind): g.nbytes for g in record.given_up}
    if named:
        rows = [
            {"checkpoint_id": row, "name": name, "kind": kind, "nbytes": size}
            for (name, kind), size in named.items()
        ]
        conn.execute(insert(GivenUpRow), rows)
    detail: dict[str, Any] = {**values, "freed": record.freed, "totals": totals(record.given_up)}
    # An audit row has a bound; the table has every name.
    detail["given_up"] = [g.as_dict() for g in record.given_up[:_MOST]]
    if len(record.given_up) > _MOST:
        detail["more"] = len(record.given_up) - _MOST
    audit.note(conn, now, action, public, detail)


def withdraw(conn: Connection, public: str) -> None:
    """Forget the record of a deletion that did not happen; its audit row stays."""
    row = _row_id(conn, public)
    for table in (GivenUpRow, RetirementRow):
        conn.execute(delete(table).where(table.checkpoint_id == row))


def of(conn: Connection, public: str) -> RetirementRecord | None:
    """Return how a deleted source was proven; None if that is not recorded."""
    row = _row_id(conn, public)
    record = conn.execute(select(RetirementRow.__table__).where(RetirementRow.checkpoint_id == row)).first()
    if record is None:
        return None
    query = select(GivenUpRow.__table__).where(GivenUpRow.checkpoint_id == row)
    ordered: Sequence[Any] = conn.execute(query.order_by(GivenUpRow.kind, GivenUpRow.name)).all()
    given_up = tuple(GivenUp(r.name, r.kind, r.nbytes) for r in ordered)
    return RetirementRecord(record.child, record.proof, record.fingerprint, record.freed, given_up, record.at)


def _row_id(conn: Connection, public: str) -> int | None:
    return conn.execute(select(Checkpoint.id).where(Checkpoint.uuid == public)).scalar()
