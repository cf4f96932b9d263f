"""Wait until an announced checkpoint exists and is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from ckptcore.checking.check import Report
from ckptcore.checking.examine import inspect, validate
from ckptcore.checking.verdicts import UNREADABLE_CODES, error_class
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError, DamagedCheckpoint, NotComplete, SourceUnreadable, UnknownFormat
from ckptcore.store import open_store
from ckptcore.utils import host

# Seconds between looks. Savers that copy in the background, and object stores, lag by minutes.
STEPS: Sequence[float] = (10, 20, 30, 60, 120, 300)
QUIET = 5.0  # seconds without a change before damage counts as damage
MAX_LOOKS = 50  # Prefect accepts no longer list of delays
# A missing or incomplete checkpoint gives one of these; other errors are permanent.
PENDING: tuple[type[CkptError], ...] = (NotComplete, SourceUnreadable, UnknownFormat)
PENDING_FINDINGS = frozenset({"not-complete", "missing-file", "truncated-file", "missing-rank", "no-tensors"})

OnWait = Callable[[float, CkptError], None]


def delays(minutes: float) -> list[float]:
    """Return the seconds to wait before each further look, ``minutes`` in all.

    >>> delays(1), sum(delays(60)) / 60, delays(0.05), delays(0)
    ([10, 20, 30], 60.0, [3.0], [])
    """
    pauses: list[float] = []
    while (left := 60 * minutes - sum(pauses)) > 0 and len(pauses) < MAX_LOOKS:
        pauses.append(min(STEPS[min(len(pauses), len(STEPS) - 1)], left))
    return pauses


def may_become_complete(error: object) -> bool:
    """Return whether a checkpoint with this error may still become complete."""
    if isinstance(error, DamagedCheckpoint):
        return any(pending.code in PENDING_FINDINGS for pending in error.findings)
    return isinstance(error, PENDING) or (isinstance(error, CkptError) and error.transient)


def read_complete(source: str, recover: bool = False) -> Manifest:
    """Read the manifest of a checkpoint, and check that it is complete.

    Raises:
        NotComplete: It is still being written.
        DamagedCheckpoint: It is not complete; with the findings.
        CkptError: It cannot be read.
    """
    try:
        manifest = inspect(source, recover)
        _require_complete(source, validate(manifest, "coverage"))
    except DamagedCheckpoint as error:
        # A file that is being written looks like a damaged one. Only time shows whether it still changes.
        if _changes(source):
            raise NotComplete(f"{source} is still being written: {error.message}") from error
        raise
    return manifest


def wait_until_complete(source: str, recover: bool, looks: Sequence[float], on_wait: OnWait) -> Manifest:
    """Wait until a checkpoint is complete, and read its manifest.

    Args:
        source: Path or URL.
        recover: Accept a save that did not finish.
        looks: Seconds before each further look.
        on_wait: Called before each pause with its seconds and the error.

    Raises:
        CkptError: A permanent error, or the error of the last look.
    """
    for pause in looks:
        try:
            return read_complete(source, recover)
        except CkptError as error:
            if not may_become_complete(error):
                raise
            on_wait(pause, error)
            host.sleep(pause)
    return read_complete(source, recover)


def _require_complete(source: str, report: Report) -> None:
    """Raise an error for an incomplete checkpoint; the conversion decides about unreadable parts."""
    errors = [f for f in report.findings if f.severity == "error" and f.code not in UNREADABLE_CODES]
    if errors:
        raise error_class(errors)(f"{source}: {errors[0].message}", findings=report.findings)


def _changes(source: str) -> bool:
    with closing(open_store(source)) as store:
        before = store.list()
        host.sleep(QUIET)
        return store.list() != before
