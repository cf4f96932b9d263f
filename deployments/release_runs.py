"""Release the runs of a worker that has ended, so that another worker takes them at once.

A worker that is asked to end does so at once and leaves its runs "Running" forever (PrefectHQ/prefect#16746).
The process that ends it, or outlives it, reschedules its runs here. Otherwise the automation
`ckptcore-crash-zombies` finds them after 90 s without a heartbeat.
"""

from __future__ import annotations

import sys
import time
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

from ckptcore.utils import terminal
from ckptcore.utils.isolation import for_each

ACTIVE = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
NAME = "prefect.worker.name"  # the label that a worker sets on a run before it starts it
PAGE = 100


def active(client: SyncPrefectClient, pool: str) -> list[FlowRun]:
    """Return the runs of a pool that a worker has taken and that have not ended."""
    runs: list[FlowRun] = []
    while True:
        page = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=ACTIVE))),
            work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
            limit=PAGE,
            offset=len(runs),
        )
        runs += page
        if len(page) < PAGE:
            return runs


def reschedule(client: SyncPrefectClient, runs: Iterable[FlowRun]) -> None:
    """Reschedule runs that no process works on. Runs in state Cancelling become Cancelled."""

    def release_one(run: FlowRun) -> None:
        if run.state is not None and run.state.is_cancelling():
            state: State[Any] = Cancelled(message="its worker was stopped")
        else:
            state = AwaitingRetry(message="its worker was stopped; the next one resumes it")
        client.set_flow_run_state(run.id, state, force=True)

    for_each(release_one, runs)


def release(pool: str, worker: str) -> list[FlowRun]:
    """Reschedule and return the runs of a worker, by its name. Call it after the worker has ended."""
    with get_client(sync_client=True) as client:
        mine = [run for run in active(client, pool) if run.labels.get(NAME) == worker]
        reschedule(client, mine)
    return mine


def wait(pool: str) -> None:
    """Wait until no worker has a run of the pool."""
    with get_client(sync_client=True) as client:
        while active(client, pool):
            time.sleep(1.0)


if __name__ == "__main__":  # POOL waits, POOL WORKER releases
    terminal.guard()
    (wait if len(sys.argv) == 2 else release)(*sys.argv[1:])
