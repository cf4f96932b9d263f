"""Change aliases, holds and queues. Each change is recorded with its user, in one transaction."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ckptcore.catalog import aliases, audit, holds, queues
from ckptcore.catalog.aliases import AliasRow
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.database import clock
from ckptcore.catalog.holds import HoldRow
from ckptcore.catalog.queues import Queue
from ckptcore.errors import UsageError
from ckptcore.utils.foreign_text import InvalidText, parse_date


def set_alias(
    catalog: Catalog, user: str, ref: str, name: str, expect: str | None, force: bool = False
) -> AliasRow:
    """Set an alias, if it still refers to the checkpoint that the user expects; None expects nothing."""
    with catalog.writing() as conn:
        return aliases.promote(conn, name, ref, expect, force=force, author=_author(user))


def roll_back(catalog: Catalog, user: str, name: str, expect: str | None, force: bool = False) -> AliasRow:
    """Let an alias refer to what it referred to before its last change, if it still is what the user saw."""
    with catalog.writing() as conn:
        before = aliases.previous(conn, name)
        expected = expect or aliases.get(conn, name).checkpoint
        return aliases.promote(conn, name, before, expected, force=force, author=_author(user))


def place_hold(catalog: Catalog, user: str, ref: str, reason: str, until: datetime | None) -> HoldRow:
    """Place a hold in the user's name."""
    with catalog.writing() as conn:
        now = clock(conn)
        hold = holds.place(conn, now, ref, reason, owner=user, until=until)
        row = _active(holds.active(conn, now, ref), hold)
        detail = {"hold": hold, "reason": reason, "until": None if until is None else f"{until:%Y-%m-%d}"}
        audit.note(conn, now, "hold.place", row.checkpoint, detail, _author(user))
    return row


def release_hold(catalog: Catalog, user: str, hold: str) -> HoldRow:
    """Release a hold, and return it as it was."""
    with catalog.writing() as conn:
        now = clock(conn)
        row = _active(holds.active(conn, now), hold)
        holds.release(conn, now, hold)
        detail = {"hold": hold, "reason": row.reason, "owner": row.owner}
        audit.note(conn, now, "hold.release", row.checkpoint, detail, _author(user))
    return row


def retry(catalog: Catalog, user: str, name: str, ref: str) -> tuple[str, ...]:
    """Make a failed row of a queue due again, and return its id. name: ``inbox`` or ``outbox``."""
    queue: Queue[Any] = queues.inbox if name == "inbox" else queues.outbox
    with catalog.writing() as conn:
        now = clock(conn)
        reopened = queue.retry(conn, now, ref)
        for row_id in reopened:
            audit.note(conn, now, f"{name}.retry", row_id, {}, _author(user))
    return reopened


def day(text: str) -> datetime | None:
    """Return the beginning of a day, ``YYYY-MM-DD`` in UTC; None for an empty text. Raises `UsageError`."""
    if not text:
        return None
    try:
        return datetime.combine(parse_date(text), datetime.min.time(), UTC)
    except InvalidText as error:
        raise UsageError(f"{text[:20]!r} is not a date", hint="as in 2027-01-31") from error


def _author(user: str) -> audit.Author:
    return audit.Author(user, "page")


def _active(active: tuple[HoldRow, ...], hold: str) -> HoldRow:
    for row in active:
        if row.id == hold:
            return row
    raise UsageError(
        f"there is no hold {hold} in force", hint="it may have been released; open the page again"
    )
