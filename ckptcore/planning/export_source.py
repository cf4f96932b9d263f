"""Describe the source of an export, and what a catalog recorded of it.

A module of its own: `comparison` uses it, `conversion` finds it in the catalog, and neither knows the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from ckptcore.planning.request import Request


@dataclass(frozen=True, slots=True)
class ExportSource:
    """The source that an export is compared with.

    Attributes:
        request: Request of the export; its ``source`` is read.
        by: Origin of the source's name: ``--against``, ``the catalog``, ``the model card``.
        exact: Whether the request has every dtype; otherwise the export shows its cast.
        digest: Digest of the source's manifest at the time of the export, or None.
        asked: Whether the caller named it. If it cannot be read, that is then an error. Otherwise checks are
            not done.
    """

    request: Request
    by: str
    exact: bool = False
    digest: str | None = None
    asked: bool = False


@dataclass(frozen=True, slots=True)
class ExportRecord:
    """The record of an export in a catalog.

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
            another checkpoint is there now.
        record: What that catalog recorded of it, or None.
    """

    source: ExportSource | None
    reason: str = "no source is known"
    conversion: str | None = None
    record: ExportRecord | None = None
