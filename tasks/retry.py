"""Retries: which failures are worth another try, and after how long?"""

from __future__ import annotations

from typing import Any

import httpx
from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

RETRIES = 3
DELAYS: list[float] = [1, 5, 20]  # seconds; a throttled object store has calmed down by then


def passes(error: object) -> bool:
    """Whether it is an error that often passes: one that says so (`CkptError.transient`), or that of a
    server which does not answer, as Prefect's when it is started anew.
    """
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, httpx.TransportError) or bool(getattr(error, "transient", False))


def is_transient(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Whether the task's error `passes`."""
    return passes(state.result(raise_on_failure=False))


# What every task is: tried again where that helps, and never remembered by Prefect: receipts are.
# It has no tags: Prefect asks its server for a slot for each tag, and fails the task when the server is away.
STEP: dict[str, Any] = {
    "retries": RETRIES,
    "retry_delay_seconds": DELAYS,
    "retry_condition_fn": is_transient,
    "cache_policy": NO_CACHE,
    "persist_result": False,
}
