"""Describe the source of an export, and what a catalog recorded of it.

A module of its own: `comparison` uses it, `conversion` finds it in the catalog, and neither knows the other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from ckptcore.planning.hub_files import NONE
from ckptcore.planning.request import Request
from ckptcore.store import local_path


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


def with_own_config(request: Request, export: str) -> Request:
    """Take an export's copy of its config where the recorded path says nothing any more.

    A relative path, of an older catalog, was typed in another working folder: here it may be another model's.
    """
    path = None if request.config in (None, NONE) else local_path(str(request.config))
    if path is None or (os.path.isabs(path) and os.path.exists(path)):
        return request
    return replace(request, config=export)
