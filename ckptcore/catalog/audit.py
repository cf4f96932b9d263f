"""Record who changed aliases, holds and queues, in the transaction of the change."""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, select

from ckptcore.catalog.models import AuditRecord
from ckptcore.catalog.normalize import clean, clean_json
from ckptcore.catalog.row_values import parsed, read_row

if TYPE_CHECKING:
    from sqlalchemy import Connection


@dataclass(frozen=True, slots=True)
class Author:
    """Who makes a change, and where: ``page`` or ``cli``. user: None means the user of this process."""

    user: str | None = None
    via: str = "cli"


COMMAND = Author()


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One change.

    Attributes:
        id: its number; a later change has a higher one.
        at: when.
        actor: who.
        via: ``page`` or ``cli``.
        action: what, such as ``alias.set``.
        subject: the id or name of what was changed.
        detail: the values.
        trouble: what is odd in the row.
    """

    id: int
    at: datetime
    actor: str
    via: str
    action: str
    subject: str
    detail: dict[str, Any]
    trouble: str = ""


def note(
    conn: Connection,
    now: datetime,
    action: str,
    subject: str,
    detail: Mapping[str, Any],
    author: Author = COMMAND,
) -> None:
    """Record a change."""
    conn.execute(
        insert(AuditRecord).values(
            at=now,
            actor=clean(operating_user() if author.user is None else author.user),
            via=author.via,
            action=action,
            subject=clean(subject),
            detail=clean_json({k: clean(v) if isinstance(v, str) else v for k, v in detail.items()}),
        )
    )


def listed(
    conn: Connection, *, subject: str | None = None, before: int | None = None, limit: int = 50
) -> tuple[AuditRow, ...]:
    """Return changes, newest first.

    Args:
        conn: a transaction.
        subject: only of this id or name.
        before: only those with a lower number.
        limit: the most rows.
    """
    query = select(AuditRecord).order_by(AuditRecord.id.desc()).limit(limit)
    if subject is not None:
        query = query.where(AuditRecord.subject == subject)
    if before is not None:
        query = query.where(AuditRecord.id < before)
    return tuple(map(row_of, conn.execute(query)))


def row_of(row: Any) -> AuditRow:
    """Convert a row of ``select(AuditRecord)``."""
    return read_row(AuditRow, row, detail=parsed(row.detail))


def operating_user() -> str:
    """Return the name of the user of this process, or its number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        import os

        return f"uid {os.getuid()}"
