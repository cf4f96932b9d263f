"""Drain: a pool that takes no new runs, and runs that go on another time.

``pause=SECONDS``  no new runs; wait for those that run, and print the ids of those that still do
``requeue=IDS``    these and others that have not ended are due again, as soon as somebody works
``resume``         the deployments are made or brought up to date, and the pool takes runs again

The worker of `make up` ends with everything else, so all runs of the pool are its runs; `deployments.worker`
knows its own among those of others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.exceptions import ObjectNotFound

from ckptcore.utils import terminal
from deployments import POOL
from deployments.deploy import deploy
from deployments.release_runs import active, due_again


def pause(seconds: float) -> list[UUID]:
    """No new runs; the runs that still run when all have ended, or after a while."""
    with get_client(sync_client=True) as client:
        try:
            client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))
        except ObjectNotFound:
            return []
        until = time.monotonic() + seconds
        while (left := active(client, POOL)) and time.monotonic() < until:
            time.sleep(1.0)
    return [run.id for run in left]


def requeue(ids: Iterable[UUID]) -> None:
    """Runs whose worker is gone are due again. Call it when no worker of the pool is left.

    ids: of runs that were stopped: some say of themselves, with their last words, that they crashed.
    """
    with get_client(sync_client=True) as client:
        stopped = {id: client.read_flow_run(id) for id in ids} | {run.id: run for run in active(client, POOL)}
        states = {id: run.state for id, run in stopped.items()}
        left = [
            id for id, state in states.items() if state is None or state.is_crashed() or not state.is_final()
        ]
        due_again(client, (stopped[id] for id in left))


def resume() -> None:
    """Deployments up to date, and runs are taken again."""
    deploy()
    with get_client(sync_client=True) as client:
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=False))


if __name__ == "__main__":
    terminal.guard()
    for argument in sys.argv[1:]:
        verb, _, value = argument.partition("=")
        if verb == "pause":
            terminal.line(",".join(map(str, pause(float(value)))))
        elif verb == "requeue":
            requeue(UUID(id) for id in value.split(",") if id)
        else:
            resume()
