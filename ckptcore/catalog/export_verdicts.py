"""Record the verdicts on exports, check by check.

A verdict belongs to the conversion that wrote the export. The newest result of each check counts. A check
that cannot be done later, for example because the source was deleted, does not revoke an earlier result. A
failed check counts until it is repeated.
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
    """Record the results of checks and return the verdict over all checks recorded so far.

    Args:
        conn: a writer's transaction.
        now: the time to record.
        conversion: the public id of the conversion that wrote the export.
        checks: (check, verdict, summary) each; the verdict is ``ok``, ``failed`` or ``not-done``.

    Raises:
        UsageError: the catalog has no such conversion.
    """
    row = conn.execute(
        select(Conversion.id, Conversion.export_checks).where(Conversion.uuid == conversion).with_for_update()
    ).first()
    if row is None:
        raise UsageError(f"the catalog has no conversion {conversion}", hint="record its start first")
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
