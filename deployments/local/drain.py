"""Drain: a pool that takes no new runs, and runs that go on another time.

``pause=SECONDS``  no new runs; wait for those that run, and print the ids of those that still do
``requeue=IDS``    these and others that have not ended are due again, as soon as somebody works
``resume``         the deployments are made or brought up to date, and the pool takes runs again

A worker that is told to end does so at once, and leaves its runs "Running" for ever
(PrefectHQ/prefect#16746): so they are ended here, before or after.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any
from uuid import UUID

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


def pause(seconds: float) -> list[UUID]:
    """No new runs; the runs that still run when all have ended, or after a while."""
    with get_client(sync_client=True) as client:
        try:
            client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))
        except ObjectNotFound:
            return []
        until = time.monotonic() + seconds
        while (left := _active(client)) and time.monotonic() < until:
            time.sleep(1.0)
    return [run.id for run in left]


def requeue(ids: Iterable[UUID]) -> None:
    """Runs whose worker is gone are due again. Call it when no worker of the pool is left.

    ids: of runs that were stopped: some say of themselves, with their last words, that they crashed.
    """
    with get_client(sync_client=True) as client:
        stopped = {id: client.read_flow_run(id) for id in ids} | {run.id: run for run in _active(client)}
        for run in stopped.values():
            if run.state is None or run.state.is_crashed() or not run.state.is_final():
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
        verb, _, value = argument.partition("=")
        if verb == "pause":
            print(",".join(map(str, pause(float(value)))))
        elif verb == "requeue":
            requeue(UUID(id) for id in value.split(",") if id)
        else:
            resume()
