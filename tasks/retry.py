"""Options of tasks: their names and retries after transient errors; and how often a run was started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import httpx
from prefect import Task, runtime
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun

from ckptcore.errors import WorkerLost
from ckptcore.redaction import redacted

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

LOOKS = "ckptcore.looks"  # a label of a run: how often it rescheduled itself to wait for its checkpoint

TAKEN = (StateType.PENDING, StateType.RUNNING)  # states of a run that a worker has taken


def looks_of(labels: Mapping[str, Any]) -> int:
    """Return how often a run rescheduled itself, from its labels."""
    looks = labels.get(LOOKS, 0)
    return looks if isinstance(looks, int) else 0


def start_count(run: FlowRun, states: Iterable[State[Any]] = ()) -> int:
    """Return how often a run was started, without the starts after it rescheduled itself.

    Prefect's own count grows when a run begins to run. If a run dies before that, only its states show the
    start.

    Args:
        run: the run.
        states: all states that it ever had.
    """
    kinds = [state.type for state in sorted(states, key=lambda state: state.timestamp)]
    before = [StateType.SCHEDULED, *kinds]
    starts = sum(old is StateType.SCHEDULED and new in TAKEN for old, new in zip(before, kinds, strict=False))
    return max(run.run_count, starts) - looks_of(run.labels)


def given_up(times: int, last: str) -> str:
    """Return the message of a run that is not started again: its worker was lost each time."""
    end = last or "none"
    lost = f"gave up after {times} starts: the run lost its process each time. Last message: {end}"
    return f"{WorkerLost.code}: {lost}"


def named(verb: str) -> Callable[[], str]:
    """Return a function that names a task's runs: the verb and its source, without credentials."""

    def name() -> str:
        return f"{verb} {redacted(str(runtime.task_run.parameters.get('source', '')))}"

    return name
