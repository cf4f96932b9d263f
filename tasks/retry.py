"""Retry tasks after transient errors."""

from __future__ import annotations

from typing import Any

import httpx
from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

RETRIES = 3
DELAYS: list[float] = [1, 5, 20]  # seconds; a throttled object store has recovered by then


def is_transient(error: object) -> bool:
    """Return whether an error is often transient.

    That is one that says so (`CkptError.transient`), or that of an unreachable server, such as Prefect's
    during a restart.
    """
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, httpx.TransportError) or bool(getattr(error, "transient", False))


def should_retry(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Return whether the task's error is transient; see `is_transient`."""
    return is_transient(state.result(raise_on_failure=False))


# Of every task: never cached by Prefect (receipts do that), and without tags. For each tag Prefect asks its
# server for a slot, and fails the task if the server is down.
ONCE: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}
# Of a task that is retried after transient errors.
STEP: dict[str, Any] = {
    **ONCE,
    "retries": RETRIES,
    "retry_delay_seconds": DELAYS,
    "retry_condition_fn": should_retry,
}
