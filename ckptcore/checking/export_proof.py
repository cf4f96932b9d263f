"""Hold the result of `verify-export`: its checks, each with a verdict. Frozen values with a JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptcore.errors import OutputMismatch, UnprovenCheckpoint

OK, FAILED, NOT_DONE, UNPROVEN = "ok", "failed", "not-done", "unproven"
ELEMENTS, NAMES, CONFIG, VALUES, FINITE, NEAR, REFERENCE, LOGITS = (
    "elements",
    "names",
    "config",
    "fingerprints",
    "finite",
    "near",
    "reference",
    "logits",
)
# Check -> what it requires, in the order of the answers.
CHECKS = {
    ELEMENTS: "every element of the model part is in the export once, and nothing else is",
    NAMES: "names and shapes are those of the model class in config.json, or of an adapter's own config",
    CONFIG: "nothing contradicts config.json: neither it itself nor the source's or the reference's configs",
    VALUES: "every tensor equals the source's, through the map and the cast",
    FINITE: "no NaN and no Inf that the source does not have",
    NEAR: "the cosine of every tensor with its namesake in a related folder is near 1",
    REFERENCE: "every tensor equals the reference's, after a cast to the export's dtype",
    LOGITS: "transformers opens the export and computes the logits of the reference",
}
ALWAYS = (ELEMENTS, NAMES, CONFIG, VALUES, FINITE)  # checks that every proof includes
_NAMED = 5  # problems listed in a line of text; JSON has all


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: the name of a tensor, a file or a field of a config, and what is wrong with it."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}" if self.name else self.what


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        name: A key of `CHECKS`.
        verdict: ``ok``, ``failed`` or ``not-done``.
        summary: The result in a line, or why the check was not done.
        problems: What failed, tensor by tensor.
        values: Figures, in their JSON form.
    """

    name: str
    verdict: str
    summary: str
    problems: tuple[Problem, ...] = ()
    values: tuple[tuple[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        problems = [{"name": p.name, "what": p.what} for p in self.problems]
        rest = {"asks": CHECKS[self.name], "verdict": self.verdict, "summary": self.summary}
        return {"check": self.name, **rest, "problems": problems, **dict(self.values)}


@dataclass(frozen=True, slots=True)
class ExportProof:
    """The result of `verify-export`.

    Attributes:
        export: Path or URL of the export.
        format: Its format.
        source: What it was compared with, or None.
        found_by: What named the source: ``--against``, the catalog, or the model card.
        checks: In the order of `CHECKS`.
        fingerprint: Of the export's tensors, if every tensor was read.
        conversion: Id of the conversion in the catalog that the verdict is stored with.
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
        """Return the JSON of `ckptcore verify-export --output json`."""
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


def require_match(proof: ExportProof) -> None:
    """Raise `OutputMismatch` for the first check of an export that failed."""
    if not proof.failures:
        return
    first = proof.failures[0]
    raise OutputMismatch(
        f"{proof.export} is published but does not match its source: {first.name}: {first.summary}",
        hint="do not use it: `ckptcore verify-export` shows every difference; export again with --overwrite",
        checks=[check.name for check in proof.failures],
    )


def verdict_of(verdicts: Sequence[str]) -> str:
    """Return the verdict on an export, from the verdicts of its checks.

    >>> verdict_of(["ok", "not-done"]), verdict_of(["failed", "not-done"]), verdict_of(["ok"])
    ('unproven', 'failed', 'ok')
    """
    if FAILED in verdicts:
        return FAILED
    return UNPROVEN if NOT_DONE in verdicts else OK


def passed(name: str, summary: str, **values: Any) -> Check:
    """Return a check that found no problem; values: figures for the JSON."""
    return Check(name, OK, summary, (), tuple(values.items()))


def failed(name: str, problems: Sequence[Problem], **values: Any) -> Check:
    """Return a check that found problems; values: figures for the JSON."""
    return Check(name, FAILED, named(problems), tuple(problems), tuple(values.items()))


def not_done(name: str, reason: str, problems: Sequence[Problem] = ()) -> Check:
    """Return a check that was not done."""
    return Check(name, NOT_DONE, reason, tuple(problems))


def named(problems: Sequence[Problem]) -> str:
    """Return problems in one line: the first few, and how many more there are."""
    rest = f" (and {len(problems) - _NAMED} more)" if len(problems) > _NAMED else ""
    return f"{'; '.join(map(str, problems[:_NAMED]))}{rest}"
