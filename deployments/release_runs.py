"""Letting go: runs whose worker is gone are due again at once.

A worker that is told to end does so at once, and leaves its runs "Running" for ever
(PrefectHQ/prefect#16746): whoever ends it, or outlives it, says so here. Without that the automation
`ckptcore-crash-zombies` finds them, after 90 s without a heartbeat.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prefect import State
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import AwaitingRetry, Cancelled

ACTIVE = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
NAME = "prefect.worker.name"  # the label that a worker gives a run before it starts it
PAGE = 100


def active(client: SyncPrefectClient, pool: str) -> list[FlowRun]:
    """The runs of a pool that a worker has taken and that have not ended."""
    found: list[FlowRun] = []
    while True:
        page = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=ACTIVE))),
            work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
            limit=PAGE,
            offset=len(found),
        )
        found += page
        if len(page) < PAGE:
            return found


def due_again(client: SyncPrefectClient, runs: Iterable[FlowRun]) -> None:
    """Runs that nobody works on any more go on, wherever a worker takes them; what was to be cancelled is."""
    for run in runs:
        if run.state is not None and run.state.is_cancelling():
            state: State[Any] = Cancelled(message="its worker was stopped")
        else:
            state = AwaitingRetry(message="its worker was stopped; it goes on where it was")
        client.set_flow_run_state(run.id, state, force=True)


def let_go(pool: str, worker: str) -> list[FlowRun]:
    """The runs that a worker had, by its name, which are due again now. Call it when the worker is gone."""
    with get_client(sync_client=True) as client:
        mine = [run for run in active(client, pool) if run.labels.get(NAME) == worker]
        due_again(client, mine)
    return mine
