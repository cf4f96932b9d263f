"""Say what an export is to be held against, and how it was made.

A file of its own: `comparison` uses it, `conversion` finds it in the catalog, and neither knows the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from ckptcore.planning.request import Request


@dataclass(frozen=True, slots=True)
class ExportSource:
    """What an export is held against.

    request: how it was exported; its ``source`` is what is read. exact: whether the request says every dtype,
    too; otherwise a cast shows by the export itself. by: what names the source: ``--against``, ``the
    catalog``, ``the model card``. digest: of the source's manifest when it was exported, or None. asked:
    whether the caller named it: one that cannot be read is then an error, and no check that was not done.
    """

    request: Request
    by: str
    exact: bool = False
    digest: str | None = None
    asked: bool = False


@dataclass(frozen=True, slots=True)
class ExportRecord:
    """What a catalog recorded when an export was written, and when it was verified.

    Attributes:
        written: When its conversion ended, or None.
        files: Path -> (bytes, BLAKE3 in hex) of the files that have a digest.
        fingerprint: Of its tensors, or None.
        verdict: ``ok``, ``failed`` or ``unproven``; None where nobody verified it.
        verified: When that was, or None.
    """

    written: datetime | None
    files: Mapping[str, tuple[int, str]]
    fingerprint: str | None = None
    verdict: str | None = None
    verified: datetime | None = None


@dataclass(frozen=True, slots=True)
class KnownExport:
    """What is known of an export.

    Attributes:
        source: What it is compared with, or None.
        reason: Why there is no source.
        conversion: Id of the conversion that wrote it, in a catalog that was asked; None where none did, or
            another checkpoint lies there now.
        record: What that catalog recorded of it, or None.
    """

    source: ExportSource | None
    reason: str = "no source is known"
    conversion: str | None = None
    record: ExportRecord | None = None
