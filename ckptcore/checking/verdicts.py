"""Verdicts: what are findings called that stop a conversion, and which of them are about one part alone?

Damage, a save that did not finish, a part that is not understood, and what nothing proves are different news:
each has an error of its own. A part that cannot be read stops what asks for it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptcore.errors import (
    CkptError,
    DamagedCheckpoint,
    Finding,
    NotComplete,
    UnprovenCheckpoint,
    UnreadablePart,
)

# Codes about the one tensor or object that a finding names, which stop nothing that leaves it out.
PART_CODES = frozenset(
    {
        "unreadable-part",
        "refused-tensors",
        "unmerged-tensor",
        "hole",
        "no-place",
        "malformed-item",
        "unsafe-item",
        "replica-mismatch",
        "lost-at-save",
        "unproven-shape",
        "unfit-quantization",
    }
)
# Of these, what says nothing against the checkpoint: it is whole, and a part of it is not understood.
UNREADABLE_CODES = frozenset({"unreadable-part", "refused-tensors", "unmerged-tensor"})
# The first row that has all codes of the errors: their class, and the same in a word.
_CALLED: tuple[tuple[frozenset[str], type[CkptError], str], ...] = (
    (frozenset({"not-complete"}), NotComplete, "not complete"),
    (frozenset({"unproven-shape"}), UnprovenCheckpoint, "unproven"),
    (UNREADABLE_CODES, UnreadablePart, "in part unreadable"),
)


def called(findings: Iterable[Finding]) -> type[CkptError]:
    """The error class of what stops a conversion: `DamagedCheckpoint` unless none of it is damage."""
    codes = {f.code for f in findings}
    return next((cls for known, cls, _ in _CALLED if codes <= known), DamagedCheckpoint)


def verdict(findings: Iterable[Finding]) -> str:
    """What a checkpoint with these findings is called.

    >>> verdict([Finding("unproven-shape", "coverage", "")]), verdict([])
    ('unproven', 'ok')
    """
    codes = {f.code for f in findings if f.severity == "error"}
    if not codes:
        return "ok"
    return next((word for known, _, word in _CALLED if codes <= known), "damaged")
