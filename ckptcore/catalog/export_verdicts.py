"""Keep verdicts on exports: what is known of each check, and what it amounts to?

A verdict belongs to the conversion that wrote the export. Of each check the newest word counts; a check that
could not be done later, because the source is gone, say, does not take back what was proven before. One that
failed counts until it is made again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING

from sqlalchemy import select, update

from ckptcore.catalog.models import Conversion
from ckptcore.catalog.normalize import clean, clean_json
from ckptcore.errors import UsageError

if TYPE_CHECKING:
    from sqlalchemy import Connection

FAILED, NOT_DONE, UNPROVEN, OK = "failed", "not-done", "unproven", "ok"


def record(conn: Connection, now: datetime, conversion: str, checks: Iterable[tuple[str, str, str]]) -> str:
    """Stores the outcome of checks; the verdict on all that are known.

    checks: (check, ok or failed or not-done, summary). Raises `UsageError` for an unknown conversion.
    """
    row = conn.execute(
        select(Conversion.id, Conversion.export_checks).where(Conversion.uuid == conversion).with_for_update()
    ).first()
    if row is None:
        raise UsageError(f"the catalog has no conversion {conversion}", hint="begin it first")
    known: dict[str, dict[str, str]] = json.loads(row.export_checks or "{}")
    for name, verdict, summary in checks:
        if verdict != NOT_DONE or known.get(name, {}).get("verdict", NOT_DONE) == NOT_DONE:
            known[name] = {"verdict": verdict, "summary": clean(summary), "at": now.isoformat()}
    verdicts = {check["verdict"] for check in known.values()}
    verdict = FAILED if FAILED in verdicts else UNPROVEN if NOT_DONE in verdicts else OK
    conn.execute(
        update(Conversion)
        .where(Conversion.id == row.id)
        .values(export_verdict=verdict, export_checks=clean_json(known), export_verified_at=now)
    )
    return verdict
