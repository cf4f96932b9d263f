"""Hold the results of a sweep: each checkpoint with its standing, and what they say together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ckptcore.errors import Finding
from ckptcore.planning.request import Request


class SweepState(StrEnum):
    """The state of a checkpoint, or of its conversion."""

    READY = "ready"  # complete and not yet converted
    MADE = "made"  # converted by this sweep
    CONVERTED = "converted"  # had been converted before
    THINNED = "thinned"  # this sweep removed its optimizer
    THINNABLE = "thinnable"  # its optimizer would go, were this no dry run
    CLAIMED = "claimed"  # another process is converting it
    OUTDATED = "outdated"  # converted, and rewritten since
    FAILED = "failed"  # the conversion failed; retried later
    WRITING = "writing"  # not yet complete
    BROKEN = "broken"  # no longer changes, and is not complete
    UNREAD = "unread"  # could not be read
    REFUSED = "refused"  # the target cannot be used for it


_OF_SOURCE = {SweepState.WRITING, SweepState.BROKEN, SweepState.UNREAD}
_WRONG = {SweepState.FAILED, SweepState.UNREAD, SweepState.REFUSED, SweepState.OUTDATED}


@dataclass(frozen=True)
class SweepItem:
    """One checkpoint.

    why: the reason of its standing. request, digests: only of a complete one. nbytes: of its files.
    """

    root: str
    source: str
    step: int | None
    standing: SweepState
    why: str = ""
    destination: str = ""
    findings: tuple[Finding, ...] = ()
    request: Request | None = field(default=None, repr=False)
    source_digest: str = ""
    manifest_digest: str = ""
    nbytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "root": self.root,
            "source": self.source,
            "step": self.step,
            "standing": self.standing.value,
            "why": self.why,
            "destination": self.destination,
            "findings": [f.as_dict() for f in self.findings],
        }


@dataclass(frozen=True)
class Swept:
    """The result of a sweep.

    Attributes:
        items: Every checkpoint, by root, the lowest step first.
        dry_run: Whether nothing was converted.
        strict: Whether checkpoints that are broken for good count as an error.
    """

    items: tuple[SweepItem, ...]
    dry_run: bool = False
    strict: bool = False

    @property
    def counts(self) -> dict[str, int]:
        """SweepState -> number of outputs; of checkpoints, where it is that of the checkpoint itself."""
        of_sources = {(i.standing, i.root, i.source) for i in self.items if i.standing in _OF_SOURCE}
        of_outputs = [i.standing for i in self.items if i.standing not in _OF_SOURCE]
        return dict(Counter(standing.value for standing in (*(s for s, _, _ in of_sources), *of_outputs)))

    @property
    def exit_code(self) -> int:
        """1 if a conversion failed or cannot be made; with `strict`, also if a checkpoint is broken; else 0.

        A sweep runs by a schedule: what is still being written is converted by a later one, and a step that a
        killed job left broken stays broken.
        """
        wrong = _WRONG | ({SweepState.BROKEN} if self.strict else set())
        return int(any(i.standing in wrong for i in self.items))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"dry_run": self.dry_run, "counts": self.counts, "items": [i.as_dict() for i in self.items]}
