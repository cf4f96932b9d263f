"""Settling: is a place a whole checkpoint, one that is still being written, or a broken one?

Nothing that changed a moment ago is opened: some savers write their last file first, and nothing in a save of
rank files tells that it is finished. What lies still is checked, and what is not complete then is broken. It
is looked at again when its files change, when its target says `recover` or no longer does, and by every new
version, which may read what an older one could not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from ckptcore.catalog.sightings import Condition, SightingRow
from ckptcore.checking.examine import inspect, validate
from ckptcore.checking.verdicts import UNREADABLE_CODES
from ckptcore.core.manifest import Manifest
from ckptcore.errors import (
    CkptError,
    DamagedCheckpoint,
    Finding,
    NotComplete,
    SourceUnreadable,
    UnknownFormat,
    UnsafeContent,
    UnsupportedDtype,
    UnsupportedFormat,
)
from ckptcore.operations.claims import source_digest
from ckptcore.store.listing import ListedFile, newest, stamp_of

SETTLE_S = 120.0
# What is wrong with the checkpoint itself; anything else is wrong with the way to it.
_ITS_OWN = (DamagedCheckpoint, NotComplete, UnknownFormat, UnsupportedFormat, UnsafeContent, UnsupportedDtype)


@dataclass(frozen=True)
class Look:
    """What a look at a place gave. stamp, changed_at: of its files. message: why it is not whole.

    manifest: what was read just now, if anything. source_digest, manifest_digest: of what is whole.
    """

    state: Condition
    stamp: str
    changed_at: datetime
    message: str = ""
    findings: tuple[Finding, ...] = ()
    source_digest: str | None = None
    manifest_digest: str | None = None
    manifest: Manifest | None = None


def look(
    uri: str,
    files: Mapping[str, ListedFile],
    before: SightingRow | None,
    now: datetime,
    *,
    settle_s: float = SETTLE_S,
    recover: bool = False,
    again: bool = False,
) -> Look:
    """What is at a place now.

    files: what a survey found there. before: what was seen there last. settle_s: seconds in which nothing
    must have changed. again: look also at what was broken, whatever is remembered of it. Never raises for
    what is wrong with the checkpoint.
    """
    own = stamp_of(files)
    stamp = _judged_stamp(own, recover)
    changed = _changed_at(files, own, before, now)
    if before is not None and _remembered(before, stamp) and not (again and before.state == Condition.BROKEN):
        told = before.findings[0].message if before.findings else ""
        return Look(
            Condition(before.state),
            stamp,
            changed,
            told,
            before.findings,
            before.source_digest,
            before.manifest_digest,
        )
    quiet = now - changed
    if quiet < timedelta(seconds=settle_s):
        told = (
            f"changed {quiet.total_seconds():.0f} s ago; looked at when nothing changed for {settle_s:.0f} s"
        )
        return Look(Condition.WRITING, stamp, changed, told)
    return _look_at(uri, stamp, changed, recover)


def _look_at(uri: str, stamp: str, changed: datetime, recover: bool) -> Look:
    manifest: Manifest | None = None
    try:
        manifest = inspect(uri, recover)
        report = validate(manifest, "coverage")
        # What a part is made of says nothing against the checkpoint: whether it is asked for, a target
        # decides.
        errors = tuple(f for f in report.findings if f.severity == "error" and f.code not in UNREADABLE_CODES)
        if not errors:
            return Look(
                Condition.WHOLE, stamp, changed, "", (), source_digest(manifest), manifest.digest, manifest
            )
        return Look(
            Condition.BROKEN, stamp, changed, errors[0].message, errors, None, manifest.digest, manifest
        )
    except CkptError as error:
        # A file that ends early is the checkpoint's fault; a door that is shut is not.
        own_fault = isinstance(error, _ITS_OWN) or (
            isinstance(error, SourceUnreadable) and "file" in error.values
        )
        state = Condition.BROKEN if own_fault and not error.transient else Condition.UNREAD
        findings = tuple(error.values.get("findings", ())) or (
            Finding(error.code, "files", error.message, hint=error.hint),
        )
        return Look(state, stamp, changed, error.message, findings, None, None, manifest)


def _judged_stamp(stamp: str, recover: bool) -> str:
    """The stamp of files, and by which rules and which version they were judged."""
    from ckptcore import __version__

    return f"{stamp}{' recover' if recover else ''} by {__version__}"


def _remembered(before: SightingRow, stamp: str) -> bool:
    """Whether what was seen last still holds."""
    if before.state == Condition.BROKEN:
        return before.stamp == stamp
    # What an older version found whole is proven anyway before it is converted, and there may be very many.
    return before.state == Condition.WHOLE and before.stamp.split(" by ")[0] == stamp.split(" by ")[0]


def _changed_at(
    files: Mapping[str, ListedFile], stamp: str, before: SightingRow | None, now: datetime
) -> datetime:
    if before is not None and before.stamp.split(" ")[0] == stamp:
        return before.changed_at  # also where a file server's clock runs ahead
    last = newest(files)
    return now if last is None else min(now, datetime.fromtimestamp(last, UTC))
