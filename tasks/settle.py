"""Settle: is a checkpoint that somebody announced there, and whole?"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from ckptcore.convert import inspect, validate
from ckptcore.errors import CkptError, DamagedCheckpoint, NotComplete, SourceUnreadable, UnknownFormat
from tasks.words import count

# Seconds between looks. Savers that copy in the background, and object stores, lag by minutes.
STEPS: Sequence[float] = (10, 20, 30, 60, 120, 300)
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
    """Whether what was found may still become a whole checkpoint."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, DamagedCheckpoint):
        return any(found.code in PENDING_FINDINGS for found in error.findings)
    return isinstance(error, PENDING) or bool(getattr(error, "transient", False))


@task(
    task_run_name="wait for {source}",
    tags=["ckptcore"],
    retry_condition_fn=is_pending,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def settle(source: str, recover: bool = False) -> str:
    """The digest of a checkpoint's manifest once it is whole; looked at again while it is not.

    Raises what reading raises, and `DamagedCheckpoint` with the findings. `delays` says when to look again.
    """
    manifest = inspect(source, recover)
    report = validate(manifest, "cover")
    if not report.ok:
        first = next(found for found in report.findings if found.severity == "error")
        raise DamagedCheckpoint(f"{source}: {first.message}", findings=report.findings)
    log.info("%s is whole: %s, %s", source, manifest.format, count(manifest.num_tensors, "tensor"))
    return manifest.digest
