"""Retries: which failures are worth another try, and after how long?"""

from __future__ import annotations

from typing import Any

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

RETRIES = 3
DELAYS: list[float] = [1, 5, 20]  # seconds; a throttled object store has calmed down by then


def is_transient(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Whether the error says of itself that it often passes (`CkptError.transient`)."""
    error = state.result(raise_on_failure=False)
    return bool(getattr(error, "transient", False))


# What every task is: tried again where that helps, and never remembered by Prefect: receipts are.
STEP: dict[str, Any] = {
    "tags": ["ckptcore"],
    "retries": RETRIES,
    "retry_delay_seconds": DELAYS,
    "retry_condition_fn": is_transient,
    "cache_policy": NO_CACHE,
    "persist_result": False,
}
