"""Say what was proven of an export: its checks, each with a verdict. Frozen values with a JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptcore.errors import UnprovenCheckpoint

OK, FAILED, NOT_DONE, UNPROVEN = "ok", "failed", "not-done", "unproven"
ELEMENTS, NAMES, VALUES, FINITE, NEAR, LOGITS = (
    "elements",
    "names",
    "fingerprints",
    "finite",
    "near",
    "logits",
)
# Check -> what it asks, in the order in which answers show them.
CHECKS = {
    ELEMENTS: "every element of the model part is in the export once, and nothing else is",
    NAMES: "names and shapes are those of the model class in config.json, or of an adapter's own config",
    VALUES: "every tensor holds what the source holds, through the map and the cast",
    FINITE: "no NaN and no Inf that the source does not have",
    NEAR: "every tensor points the way of its namesake in a related folder",
    LOGITS: "transformers opens the export and computes the logits of the reference",
}
ALWAYS = (ELEMENTS, NAMES, VALUES, FINITE)  # what a proof needs, whatever else is asked for
_NAMED = 5  # problems that a line of text names; JSON has all


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. name: of a tensor, a file, or a field of a config. what: what is wrong."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}" if self.name else self.what


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check.

    name: a key of `CHECKS`. verdict: ``ok``, ``failed`` or ``not-done``. summary: what was found, or why it
    was not done. problems: what failed, tensor by tensor. values: figures, in their JSON form.
    """

    name: str
    verdict: str
    summary: str
    problems: tuple[Problem, ...] = ()
    values: tuple[tuple[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The JSON face."""
        problems = [{"name": p.name, "what": p.what} for p in self.problems]
        rest = {"asks": CHECKS[self.name], "verdict": self.verdict, "summary": self.summary}
        return {"check": self.name, **rest, "problems": problems, **dict(self.values)}


@dataclass(frozen=True, slots=True)
class ExportProof:
    """What was proven of an export.

    export, format: where it lies, and as what. source: what it was held against, or None; found_by: what
    names that: ``--against``, the catalog, the model card. checks: in the order of `CHECKS`. fingerprint: of
    what the export holds, where every tensor was read. conversion: id of the conversion in the catalog that
    the verdict is stored with.
    """

    export: str
    format: str
    source: str | None
    found_by: str
    checks: tuple[Check, ...]
    fingerprint: str | None = None
    conversion: str | None = None

    @property
    def verdict(self) -> str:
        """``failed`` when a check failed, ``unproven`` when one was not done, else ``ok``."""
        return verdict_of([c.verdict for c in self.checks])

    @property
    def exit_code(self) -> int:
        """0 for ``ok``, 1 for ``failed``, that of `UnprovenCheckpoint` for ``unproven``."""
        return {OK: 0, FAILED: 1, UNPROVEN: UnprovenCheckpoint.exit_code}[self.verdict]

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(c for c in self.checks if c.verdict == FAILED)

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `ckptcore verify-export --output json`."""
        return {
            "verdict": self.verdict,
            "export": self.export,
            "format": self.format,
            "source": self.source,
            "found_by": self.found_by or None,
            "fingerprint": self.fingerprint,
            "conversion": self.conversion,
            "checks": [c.as_dict() for c in self.checks],
        }


def verdict_of(verdicts: Sequence[str]) -> str:
    """What the verdicts of checks amount to.

    >>> verdict_of(["ok", "not-done"]), verdict_of(["failed", "not-done"]), verdict_of(["ok"])
    ('unproven', 'failed', 'ok')
    """
    if FAILED in verdicts:
        return FAILED
    return UNPROVEN if NOT_DONE in verdicts else OK


def passed(name: str, summary: str, **values: Any) -> Check:
    """A check that found nothing wrong."""
    return Check(name, OK, summary, (), tuple(values.items()))


def failed(name: str, problems: Sequence[Problem], **values: Any) -> Check:
    """A check that found something wrong."""
    return Check(name, FAILED, named(problems), tuple(problems), tuple(values.items()))


def not_done(name: str, reason: str, problems: Sequence[Problem] = ()) -> Check:
    """A check that was not done."""
    return Check(name, NOT_DONE, reason, tuple(problems))


def named(problems: Sequence[Problem]) -> str:
    """Problems in one line: the first few, and how many more there are."""
    more = f" (and {len(problems) - _NAMED} more)" if len(problems) > _NAMED else ""
    return f"{'; '.join(map(str, problems[:_NAMED]))}{more}"
