"""Waiting: is a checkpoint that somebody announced there, and whole? If not, when is it looked at again?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing

from ckptcore.checking.check import Report
from ckptcore.checking.examine import inspect, validate
from ckptcore.checking.verdicts import UNREADABLE_CODES, called
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError, DamagedCheckpoint, NotComplete, SourceUnreadable, UnknownFormat
from ckptcore.store import open_store

# Seconds between looks. Savers that copy in the background, and object stores, lag by minutes.
STEPS: Sequence[float] = (10, 20, 30, 60, 120, 300)
QUIET = 5.0  # seconds in which nothing must change under what looks torn
MAX_LOOKS = 50  # Prefect takes no longer list of delays
# What is not there yet, or not all of it, looks like one of these; anything else will not get better.
PENDING: tuple[type[CkptError], ...] = (NotComplete, SourceUnreadable, UnknownFormat)
PENDING_FINDINGS = frozenset({"not-complete", "missing-file", "truncated-file", "missing-rank", "no-tensors"})

OnWait = Callable[[float, CkptError], None]


def delays(minutes: float) -> list[float]:
    """Seconds to wait before each further look, ``minutes`` in all and no longer.

    >>> delays(1), sum(delays(60)) / 60, delays(0.05), delays(0)
    ([10, 20, 30], 60.0, [3.0], [])
    """
    found: list[float] = []
    while (left := 60 * minutes - sum(found)) > 0 and len(found) < MAX_LOOKS:
        found.append(min(STEPS[min(len(found), len(STEPS) - 1)], left))
    return found


def may_become_whole(error: object) -> bool:
    """Whether what could not be read may still become a whole checkpoint."""
    if isinstance(error, DamagedCheckpoint):
        return any(found.code in PENDING_FINDINGS for found in error.findings)
    return isinstance(error, PENDING) or (isinstance(error, CkptError) and error.transient)


def whole(source: str, recover: bool = False) -> Manifest:
    """The manifest of a checkpoint, if it is whole. Raises what reading raises, and `DamagedCheckpoint` or
    `UnprovenCheckpoint` with the findings."""
    try:
        manifest = inspect(source, recover)
        _require_whole(source, validate(manifest, "coverage"))
    except DamagedCheckpoint as error:
        # Half a file looks like a torn one. Whether somebody is still at it, only time tells.
        if _changes(source):
            raise NotComplete(f"{source} is still being written: {error.message}") from error
        raise
    return manifest


def wait_until_whole(source: str, recover: bool, looks: Sequence[float], on_wait: OnWait) -> Manifest:
    """The manifest once it is whole; raises what the last look raises, or one that will not get better.

    looks: seconds before each further look. on_wait: is called before each pause, with its reason.
    """
    for pause in looks:
        try:
            return whole(source, recover)
        except CkptError as error:
            if not may_become_whole(error):
                raise
            on_wait(pause, error)
            time.sleep(pause)
    return whole(source, recover)


def _require_whole(source: str, report: Report) -> None:
    """What cannot be read is whole: whether it is asked for, the conversion decides."""
    errors = [f for f in report.findings if f.severity == "error" and f.code not in UNREADABLE_CODES]
    if errors:
        raise called(errors)(f"{source}: {errors[0].message}", findings=report.findings)


def _changes(source: str) -> bool:
    with closing(open_store(source)) as store:
        before = store.list()
        time.sleep(QUIET)
        return store.list() != before
