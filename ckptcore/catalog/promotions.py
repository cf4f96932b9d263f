"""Announce alias changes: from rows of the audit, which each change leaves, to messages of the outbox.

A command line that sets an alias knows no endpoints, so a receiver finds the changes here. The key of a
message is the number of its row in the audit, so each endpoint gets a change once, whichever receiver
announces it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import Text, cast, exists, literal, select

from ckptcore.catalog.audit import AuditRow, row_of
from ckptcore.catalog.models import AuditRecord, Checkpoint, Outbox
from ckptcore.catalog.query import checkpoint_row, checkpoint_rows
from ckptcore.catalog.queues import outbox
from ckptcore.catalog.row_values import row_findings
from ckptcore.catalog.run_outputs import export_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

MOVED, REMOVED = "alias.moved", "alias.removed"
TYPES: Mapping[str, str] = {"alias.set": MOVED, "alias.remove": REMOVED}
# A receiver that was stopped for less announces what it missed; an endpoint that is new gets as much.
WINDOW = timedelta(days=1)


def unannounced(
    conn: Connection, now: datetime, endpoint: str, types: Collection[str] = (MOVED, REMOVED)
) -> tuple[AuditRow, ...]:
    """Return the alias changes of the last `WINDOW` without a message to an endpoint, oldest first."""
    actions = [action for action, type in TYPES.items() if type in types]
    if not actions:
        return ()
    key = literal("audit:", Text) + cast(AuditRecord.id, Text)
    announced = exists().where(Outbox.endpoint == endpoint, Outbox.key == key)
    query = select(AuditRecord).where(
        AuditRecord.at >= now - WINDOW, AuditRecord.action.in_(actions), ~announced
    )
    return tuple(map(row_of, conn.execute(query.order_by(AuditRecord.id))))


def announce(conn: Connection, now: datetime, endpoint: str, change: AuditRow) -> bool:
    """Put a message about a change into the outbox; return whether it is new."""
    type = TYPES[change.action]
    body = {"type": type, "timestamp": change.at.isoformat(), "data": _data(conn, change)}
    return outbox.put(conn, now, endpoint, f"audit:{change.id}", type=type, body=body)[1]


def _data(conn: Connection, change: AuditRow) -> dict[str, Any]:
    data: dict[str, Any] = {
        "alias": change.detail.get("alias"),
        "checkpoint": change.subject,
        "before": change.detail.get("before"),
        "actor": change.actor,
        "via": change.via,
    }
    odd = list(row_findings(change))
    subject = conn.execute(checkpoint_rows().where(Checkpoint.uuid == change.subject)).first()
    if subject is not None:
        row = checkpoint_row(subject)
        odd += row_findings(row)
        data |= {
            "uri": row.uri,
            "run": row.run,
            "step": row.step,
            "state": row.state,
            "fingerprint": row.fingerprint,
            "verified_level": row.verified_level,
            **export_of(conn, subject.id),
        }
    if odd:  # the change is announced, without what cannot be read of it
        data["error"] = "; ".join(f"{row_finding.code}: {row_finding.message}" for row_finding in odd)
    return data
