"""Decide whether a checkpoint is complete, still being written, or broken.

A place that changed a moment ago is not opened: some savers write their last file first, and a save of rank
files has no mark that it is finished. A place that no longer changes is checked; if it is incomplete then, it
is broken. A broken place is checked again when its files change, when its target's `recover` changes, and by
a build with other readers or checks, which may read more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.resources.abc import Traversable

from blake3 import blake3

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
    findings_of,
)
from ckptcore.formats import registry
from ckptcore.operations.claims import source_digest
from ckptcore.store.file_status import FileStatus
from ckptcore.store.listing import newest, stamp_of

# Rooms whose code decides what a checkpoint is, and whether it is complete.
_ROOMS = ("checking", "core", "encodings", "formats")
SETTLE_S = 120.0
# Errors of the checkpoint itself; all others are errors of the access to it.
_ITS_OWN = (DamagedCheckpoint, NotComplete, UnknownFormat, UnsupportedFormat, UnsafeContent, UnsupportedDtype)


@dataclass(frozen=True)
class Readiness:
    """The state of a place.

    Attributes:
        state: Complete, being written, broken or unreadable.
        stamp: Of its files.
        changed_at: When its files changed last.
        message: Why it is not complete.
        findings: Of the check: the errors; of a complete checkpoint the warnings.
        source_digest: Of a complete checkpoint (`ckptcore.operations.claims.source_digest`).
        manifest_digest: Of the manifest, if it was read.
        manifest: The manifest, if it was read just now.
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
    files: Mapping[str, FileStatus],
    before: SightingRow | None,
    now: datetime,
    *,
    settle_s: float = SETTLE_S,
    recover: bool = False,
    retry_failed: bool = False,
) -> Readiness:
    """Determine the current state of a place. Errors of the checkpoint are not raised, but returned.

    Args:
        uri: Path or URL.
        files: Its files, from a survey.
        before: The last recorded state, or None.
        now: The current time.
        settle_s: Seconds without a change before it is opened.
        recover: Accept a save that did not finish.
        retry_failed: Check a broken place again, even if it did not change.
    """
    files_stamp = stamp_of(files)
    stamp = _judged_stamp(files_stamp, recover)
    changed = _changed_at(files, files_stamp, before, now)
    retried = retry_failed and before is not None and before.state == Condition.BROKEN
    if before is not None and _is_current(before, stamp) and not retried:
        return _recorded(before, stamp, changed)
    quiet = now - changed
    if quiet < timedelta(seconds=settle_s):
        message = (
            f"changed {quiet.total_seconds():.0f} s ago; checked after {settle_s:.0f} s without a change"
        )
        return Readiness(Condition.WRITING, stamp, changed, message)
    return _look_at(uri, stamp, changed, recover)


def recalled(before: SightingRow | None, recover: bool) -> Readiness | None:
    """Return the recorded state of a complete place whose files are not listed now; None if it cannot serve.

    Args:
        before: The last recorded state, or None.
        recover: Accept a save that did not finish; a state that was recorded otherwise does not serve.
    """
    if before is None or before.state != Condition.COMPLETE:
        return None
    if before.stamp.split(" by ")[0].endswith(" recover") != recover:
        return None
    return _recorded(before, before.stamp, before.changed_at)


def _recorded(before: SightingRow, stamp: str, changed: datetime) -> Readiness:
    is_complete = before.state == Condition.COMPLETE
    message = before.findings[0].message if before.findings and not is_complete else ""
    return Readiness(
        Condition(before.state),
        stamp,
        changed,
        message,
        before.findings,
        before.source_digest,
        before.manifest_digest,
    )


def _look_at(uri: str, stamp: str, changed: datetime, recover: bool) -> Readiness:
    manifest: Manifest | None = None
    try:
        manifest = inspect(uri, recover)
        report = validate(manifest, "coverage")
        # An unreadable part does not make a checkpoint broken: the target decides whether it is needed.
        errors = tuple(f for f in report.findings if f.severity == "error" and f.code not in UNREADABLE_CODES)
        if not errors:
            warnings = tuple(f for f in report.findings if f.severity == "warning")
            digests = source_digest(manifest), manifest.digest
            return Readiness(Condition.COMPLETE, stamp, changed, "", warnings, *digests, manifest)
        return Readiness(
            Condition.BROKEN, stamp, changed, errors[0].message, errors, None, manifest.digest, manifest
        )
    except CkptError as error:
        # A truncated file is an error of the checkpoint; a missing permission is not.
        own_fault = isinstance(error, _ITS_OWN) or (
            isinstance(error, SourceUnreadable) and "file" in error.values
        )
        state = Condition.BROKEN if own_fault and not error.transient else Condition.UNREAD
        return Readiness(state, stamp, changed, error.message, findings_of(error), None, None, manifest)


def _judged_stamp(stamp: str, recover: bool) -> str:
    """Return the stamp of files with the rules, the readers and the checks that judge them."""
    return f"{stamp}{' recover' if recover else ''} by {readers_digest()}"


def _is_current(before: SightingRow, stamp: str) -> bool:
    """Return whether the last recorded state is still valid."""
    if before.state == Condition.BROKEN:
        return before.stamp == stamp
    # A conversion checks again what an older build found complete, and there may be very many.
    return before.state == Condition.COMPLETE and before.stamp.split(" by ")[0] == stamp.split(" by ")[0]


def _changed_at(
    files: Mapping[str, FileStatus], stamp: str, before: SightingRow | None, now: datetime
) -> datetime:
    if before is not None and before.stamp.split(" ")[0] == stamp:
        return before.changed_at  # also if a file server's clock is ahead
    last = newest(files)
    return now if last is None else min(now, datetime.fromtimestamp(last, UTC))


@cache
def readers_digest() -> str:
    """Return a digest of the readers and checks: their source, and the versions of packages with formats.

    A version number does not serve: builds between two releases have the same one.
    """
    digest = blake3()
    for room in _ROOMS:
        for path, content in _modules(files("ckptcore") / room, room):
            digest.update(f"{path} {len(content)}\n".encode() + content)
    formats = registry()
    for name in sorted(f.name for f in formats.formats):
        digest.update(f"{name} {_version(formats.package(name))}\n".encode())
    return digest.hexdigest()[:16]


def _modules(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    """Yield the modules of a package, in the order of their paths, with their source."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _modules(entry, f"{path}/{entry.name}")
        elif entry.name.endswith(".py"):
            yield f"{path}/{entry.name}", entry.read_bytes()


def _version(package: str) -> str:
    """Return the version of a package with formats; its name where it is not installed as one."""
    try:
        return version(package)
    except PackageNotFoundError:
        return package
