"""Say what an export is to be held against, and how it was made.

A file of its own: `comparison` uses it, `conversion` finds it in the catalog, and neither knows the other.
"""

from __future__ import annotations

from dataclasses import dataclass

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
class KnownExport:
    """What is known of an export.

    source: or None; reason: why there is none. conversion: id of the conversion that wrote it, in a catalog
    that was asked; None where none did, or another checkpoint lies there now.
    """

    source: ExportSource | None
    reason: str = "no source is known"
    conversion: str | None = None
