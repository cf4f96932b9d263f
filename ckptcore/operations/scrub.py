"""Scrubbing: is everything that the catalog knows still there and whole? A share at a time, the oldest first.

The first is read to its end, however long that takes: otherwise what needs more time than there is would
never be proven. A later look that ends because the time is over has found nothing and records nothing: next
time it comes before those that were proven.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ckptcore.catalog import CheckpointDetail
from ckptcore.catalog import maintenance as tending
from ckptcore.catalog.types import CheckpointRow
from ckptcore.errors import UsageError
from ckptcore.operations.verify import Proof, Proven, prove

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

SHARE, BUDGET_S = 0.05, 600.0


@dataclass(frozen=True)
class Looked:
    """One checkpoint that was looked at."""

    checkpoint: CheckpointRow
    proven: Proven

    def as_dict(self) -> dict[str, Any]:
        """The JSON face."""
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
    """What a scrub did. due: how many were to be looked at. known: how many the catalog says exist."""

    looked: tuple[Looked, ...]
    due: int
    known: int

    @property
    def counts(self) -> dict[str, int]:
        """proof -> how many."""
        return dict(Counter(each.proven.proof.value for each in self.looked))

    @property
    def exit_code(self) -> int:
        """1 where something is damaged, changed, gone or could not be read: unproven is not damaged."""
        fine = (Proof.PROVEN, Proof.UNPROVEN, Proof.STOPPED)
        return int(any(each.proven.proof not in fine for each in self.looked))

    def as_dict(self) -> dict[str, Any]:
        """The JSON face."""
        return {
            "known": self.known,
            "due": self.due,
            "counts": self.counts,
            "checkpoints": [each.as_dict() for each in self.looked],
        }


def scrub(
    catalog: Catalog,
    share: float = SHARE,
    budget_s: float = BUDGET_S,
    *,
    on_look: Callable[[Looked], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scrubbed:
    """Looks at a share of what the catalog says exists, and records what it finds.

    share: of the checkpoints, above 0 and up to 1. budget_s: seconds; a look under way then is given up, but
    for the first one.
    """
    if not 0 < share <= 1:
        raise UsageError(f"--share {share} is no share", hint="above 0 and up to 1")
    end = clock() + budget_s
    with catalog.reading() as conn:
        rows = tending.due(conn)
    wanted = rows[: math.ceil(share * len(rows))]
    looked: list[Looked] = []
    for row in wanted:
        if looked and clock() >= end:
            break
        in_time = (lambda: clock() < end) if looked else (lambda: True)
        detail = catalog.show(row.id, tensors=False)
        assert isinstance(detail, CheckpointDetail)
        found = Looked(row, prove(detail, in_time))
        _record_look(catalog, found)
        looked.append(found)
        if on_look is not None:
            on_look(found)
        if found.proven.proof is Proof.STOPPED:
            break
    return Scrubbed(tuple(looked), len(wanted), len(rows))


def _record_look(catalog: Catalog, found: Looked) -> None:
    proven, id, now = found.proven, found.checkpoint.id, datetime.now(UTC)
    if proven.now is not None:
        catalog.record_validation(proven.now, (), level="files")
        return
    with catalog.writing() as conn:
        if proven.proof in (Proof.PROVEN, Proof.UNPROVEN, Proof.DAMAGED):
            tending.checked(conn, now, id, "bytes", proven.findings)
        elif proven.proof is Proof.GONE:
            tending.gone(conn, now, id)
        elif proven.proof is Proof.UNREAD:
            tending.looked(conn, now, id)
