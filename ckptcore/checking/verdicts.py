"""Map the findings that stop a conversion to an error class and a status text.

Damage, an unfinished save, an unreadable part and unproven data are different news: each has its own error.
An unreadable part stops only the conversions that ask for it.
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

# Codes about the one tensor or object that a finding names. Excluding it avoids the error.
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
# Of these, the codes that do not mean damage: the checkpoint is complete, but a part of it is not supported.
UNREADABLE_CODES = frozenset({"unreadable-part", "refused-tensors", "unmerged-tensor"})
_UNPROVEN = frozenset({"unproven-shape", "unproven-parts"})
# Codes, error class, status text. The first row that has all codes of the errors applies.
_CLASSES: tuple[tuple[frozenset[str], type[CkptError], str], ...] = (
    (frozenset({"not-complete"}), NotComplete, "not complete"),
    (_UNPROVEN, UnprovenCheckpoint, "unproven"),
    (UNREADABLE_CODES, UnreadablePart, "in part unreadable"),
    (_UNPROVEN | UNREADABLE_CODES, UnprovenCheckpoint, "unproven"),
)


def error_class(findings: Iterable[Finding]) -> type[CkptError]:
    """Return the error class for findings that stop a conversion: `DamagedCheckpoint` if any is damage."""
    codes = {f.code for f in findings}
    return next((cls for class_codes, cls, _ in _CLASSES if codes <= class_codes), DamagedCheckpoint)


def verdict(findings: Iterable[Finding]) -> str:
    """Return the status text of a checkpoint with these findings.

    >>> verdict([Finding("unproven-shape", "coverage", "")]), verdict([])
    ('unproven', 'ok')
    """
    codes = {f.code for f in findings if f.severity == "error"}
    if not codes:
        return "ok"
    return next((text for class_codes, _, text in _CLASSES if codes <= class_codes), "damaged")
