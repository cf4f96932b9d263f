"""Drain: a pool that takes no new runs, and runs that go on another time.

``pause=SECONDS``  no new runs; wait for those that run
``requeue``        those that did not end are due again, as soon as somebody works
``resume``         the deployments are made or brought up to date, and the pool takes runs again

A worker that is told to end does so at once, and leaves its runs "Running" for ever
(PrefectHQ/prefect#16746): so they are ended here, before or after.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from prefect import State
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry

from deployments.deploy import POOL, deploy

ACTIVE = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]


def pause(seconds: float) -> None:
    """No new runs; returns when none runs any more, or after a while."""
    with get_client(sync_client=True) as client:
        try:
            client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))
        except ObjectNotFound:
            return
        until = time.monotonic() + seconds
        while _active(client) and time.monotonic() < until:
            time.sleep(1.0)


def requeue() -> None:
    """Runs whose worker is gone are due again. Call it when no worker of the pool is left."""
    with get_client(sync_client=True) as client:
        for run in _active(client):
            again: State[Any] = AwaitingRetry(message="its worker was stopped; it goes on where it was")
            client.set_flow_run_state(run.id, again, force=True)


def resume() -> None:
    """Deployments up to date, and runs are taken again."""
    deploy()
    with get_client(sync_client=True) as client:
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=False))


def _active(client: SyncPrefectClient) -> list[FlowRun]:
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=ACTIVE))),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL])),
    )


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        verb, _, seconds = argument.partition("=")
        if verb == "pause":
            pause(float(seconds))
        else:
            {"requeue": requeue, "resume": resume}[verb]()
