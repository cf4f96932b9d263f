"""Count how often a run was started, and format the message of a run that was started too often."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prefect.client.schemas.objects import FlowRun, State, StateType

from ckptcore.errors import WorkerLost

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
