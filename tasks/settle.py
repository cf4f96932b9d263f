"""Settle: is a checkpoint that somebody announced there, and whole?"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from ckptcore.check import Report
from ckptcore.convert import inspect, validate
from ckptcore.errors import CkptError, DamagedCheckpoint, NotComplete, SourceUnreadable, UnknownFormat
from ckptcore.store import open_store
from tasks.retry import passes
from tasks.words import count

# Seconds between looks. Savers that copy in the background, and object stores, lag by minutes.
STEPS: Sequence[float] = (10, 20, 30, 60, 120, 300)
QUIET = 5.0  # seconds in which nothing must change under what looks torn
MAX_LOOKS = 50  # Prefect takes no longer list of delays
# What is not there yet, or not all of it, looks like one of these; anything else will not get better.
PENDING: tuple[type[CkptError], ...] = (NotComplete, SourceUnreadable, UnknownFormat)
PENDING_FINDINGS = frozenset({"not-complete", "missing-file", "truncated-file", "missing-rank", "no-tensors"})

log = logging.getLogger("ckptcore.tasks")


def delays(minutes: float) -> list[float]:
    """Seconds to wait before each further look, about ``minutes`` in all.

    >>> delays(1), sum(delays(60)) / 60, delays(0)
    ([10, 20, 30], 64.0, [])
    """
    found: list[float] = []
    while sum(found) < 60 * minutes and len(found) < MAX_LOOKS:
        found.append(STEPS[min(len(found), len(STEPS) - 1)])
    return found


def is_pending(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Whether what the task found may still become a whole checkpoint."""
    return may_become_whole(state.result(raise_on_failure=False))


def may_become_whole(error: object) -> bool:
    """Whether what could not be read may still become a whole checkpoint."""
    if isinstance(error, DamagedCheckpoint):
        return any(found.code in PENDING_FINDINGS for found in error.findings)
    return isinstance(error, PENDING) or passes(error)


def _require_whole(source: str, report: Report) -> None:
    if not report.ok:
        first = next(found for found in report.findings if found.severity == "error")
        raise DamagedCheckpoint(f"{source}: {first.message}", findings=report.findings)


def _changes(source: str) -> bool:
    with closing(open_store(source)) as store:
        before = store.list()
        time.sleep(QUIET)
        return store.list() != before


@task(
    task_run_name="wait for {source}",
    retry_condition_fn=is_pending,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def settle(source: str, recover: bool = False) -> str:
    """The digest of a checkpoint's manifest once it is whole; looked at again while it is not.

    Raises what reading raises, and `DamagedCheckpoint` with the findings. `delays` says when to look again.
    """
    try:
        manifest = inspect(source, recover)
        _require_whole(source, validate(manifest, "cover"))
    except DamagedCheckpoint as error:
        # Half a file looks like a torn one. Whether somebody is still at it, only time tells.
        if _changes(source):
            raise NotComplete(f"{source} is still being written: {error.message}") from error
        raise
    log.info("%s is whole: %s, %s", source, manifest.format, count(manifest.num_tensors, "tensor"))
    return manifest.digest
