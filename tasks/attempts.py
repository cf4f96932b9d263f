"""Begun: how often did a run begin anew because something had gone wrong?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prefect.client.schemas.objects import FlowRun, State, StateType

from ckptcore.errors import WorkerLost

LOOKS = "ckptcore.looks"  # a label of a run: how often it was put off, to look at its checkpoint later

TAKEN = (StateType.PENDING, StateType.RUNNING)  # of a run that somebody has taken, to start it


def looks_of(labels: Mapping[str, Any]) -> int:
    """How often a run was put off, by its labels."""
    found = labels.get(LOOKS, 0)
    return found if isinstance(found, int) else 0


def begun(run: FlowRun, states: Iterable[State[Any]] = ()) -> int:
    """How often a run was started, less the times at which it had put itself off.

    states: all that it ever had. Prefect's own count grows when a run begins to run; of one that dies before
    that, only its states say that it was started once more.
    """
    kinds = [state.type for state in sorted(states, key=lambda state: state.timestamp)]
    before = [StateType.SCHEDULED, *kinds]
    starts = sum(old is StateType.SCHEDULED and new in TAKEN for old, new in zip(before, kinds, strict=False))
    return max(run.run_count, starts) - looks_of(run.labels)


def given_up(times: int, last: str) -> str:
    """What is said of a run that is not started any more: it has lost its worker, and no error of ours."""
    end = last or "it said nothing"
    lost = f"given up: it was started {times} times, and its process went away each time; at last: {end}"
    return f"{WorkerLost.code}: {lost}"
