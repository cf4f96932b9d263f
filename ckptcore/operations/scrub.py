"""Verify that the checkpoints in the catalog are intact: a share at a time, those not verified longest first.

The first is always read to its end: otherwise a checkpoint that takes more than the time budget would never
be verified. A later check that runs out of time records nothing, and comes first next time.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptcore.catalog import CheckpointDetail, maintenance
from ckptcore.catalog.database import clock as catalog_clock
from ckptcore.catalog.types import CheckpointRow
from ckptcore.custody.upkeep import look_after
from ckptcore.errors import CatalogUnavailable, UsageError
from ckptcore.operations.verify import FINE, Proof, Proven, prove
from ckptcore.utils.isolation import error_of

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

SHARE, BUDGET_S = 0.05, 600.0


@dataclass(frozen=True)
class Looked:
    """One checkpoint that was checked."""

    checkpoint: CheckpointRow
    proven: Proven

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "checkpoint": self.checkpoint.id,
            "uri": self.checkpoint.uri,
            "proof": self.proven.proof.value,
            "why": self.proven.message,
            "bytes": self.proven.nbytes,
            "unproven": list(self.proven.unproven),
            "findings": [f.as_dict() for f in self.proven.findings],
        }


@dataclass(frozen=True)
class Scrubbed:
    """The result of a scrub. due: number of checkpoints to check. known: number that exist by the catalog."""

    looked: tuple[Looked, ...]
    due: int
    known: int

    @property
    def counts(self) -> dict[str, int]:
        """Proof -> number of checkpoints."""
        return dict(Counter(check.proven.proof.value for check in self.looked))

    @property
    def exit_code(self) -> int:
        """1 if a checkpoint is damaged, changed, gone or unreadable, else 0: unproven is not damaged."""
        return int(any(check.proven.proof not in FINE for check in self.looked))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "known": self.known,
            "due": self.due,
            "counts": self.counts,
            "checkpoints": [check.as_dict() for check in self.looked],
        }


def scrub(
    catalog: Catalog,
    share: float = SHARE,
    budget_s: float = BUDGET_S,
    *,
    on_look: Callable[[Looked], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scrubbed:
    """Check a share of the checkpoints that exist by the catalog, and record the results.

    Args:
        catalog: The catalog.
        share: Of the checkpoints, above 0 and up to 1.
        budget_s: Seconds; a check that is running then is abandoned, except the first one.
        on_look: Called for each checkpoint.
        clock: Returns the time in seconds.

    Raises:
        UsageError: The share is not above 0 and up to 1.
    """
    if not 0 < share <= 1:
        raise UsageError(f"--share must be above 0 and up to 1 (got {share})")
    end = clock() + budget_s
    with catalog.reading() as conn:
        rows = maintenance.due(conn)
    due_rows = rows[: math.ceil(share * len(rows))]
    looked: list[Looked] = []
    for row in due_rows:
        if looked and clock() >= end:
            break
        in_time = (lambda: clock() < end) if looked else (lambda: True)
        checked = _check(catalog, row, in_time)
        looked.append(checked)
        if on_look is not None:
            on_look(checked)
        if checked.proven.proof is Proof.STOPPED:
            break
    look_after(catalog)
    return Scrubbed(tuple(looked), len(due_rows), len(rows))


def _check(catalog: Catalog, row: CheckpointRow, in_time: Callable[[], bool]) -> Looked:
    """Check one checkpoint and record the result; what nobody foresaw is a result, too."""
    try:
        detail = catalog.show(row.id, tensors=False)
        assert isinstance(detail, CheckpointDetail)
        odd = detail.checkpoint.trouble or next((f.trouble for f in detail.files if f.trouble), "")
        if odd:
            return _unread(catalog, row, f"its rows in the catalog cannot be used: {odd}")
        checked = Looked(row, prove(detail, in_time))
        _record_look(catalog, checked)
    except CatalogUnavailable:
        raise  # as it would be for all of them
    except Exception as error:
        ended = error_of(error)
        return _unread(catalog, row, f"{ended.code}: {ended.message}")
    return checked


def _unread(catalog: Catalog, row: CheckpointRow, message: str) -> Looked:
    """Record the time of a check that came to no result, so that the next run begins with another one."""
    try:
        with catalog.writing() as conn:
            maintenance.looked(conn, catalog_clock(conn), row.id)
    except Exception as error:
        message += f"; and the time of the check could not be recorded: {error_of(error).message}"
    return Looked(row, Proven(Proof.UNREAD, message=message))


def _record_look(catalog: Catalog, check: Looked) -> None:
    proven, id, now = check.proven, check.checkpoint.id, catalog.now()
    if proven.now is not None:  # it is another one, or its digests were not known
        catalog.record_validation(proven.now, proven.findings, level=proven.now.verified or "files")
    if proven.proof is Proof.CHANGED:
        return
    with catalog.writing() as conn:
        if proven.proof in (Proof.PROVEN, Proof.TENSORS, Proof.UNPROVEN, Proof.DAMAGED):
            maintenance.checked(conn, now, id, "bytes", proven.findings)
        elif proven.proof is Proof.GONE:
            maintenance.gone(conn, now, id)
        elif proven.proof is Proof.UNREAD:
            maintenance.looked(conn, now, id)
