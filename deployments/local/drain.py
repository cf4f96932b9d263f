"""Drain the work pool and resume it.

``pause=SECONDS``  stop taking runs, wait for active runs, and print the ids of those still active
``requeue=IDS``    reschedule these runs, and others that have not ended
``resume``         create or update the deployments, and take runs again

The worker of `make up` ends with everything else, so all runs of the pool are its own. `deployments.worker`
distinguishes its runs from those of other workers.
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
from ckptcore.utils.isolation import for_each
from deployments import POOL
from deployments.deploy import deploy
from deployments.release_runs import active, reschedule


def pause(seconds: float) -> list[UUID]:
    """Pause the pool and wait for its runs; return the ids of those still active after `seconds`."""
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
    """Reschedule runs whose worker has ended. Call it when no worker of the pool is left.

    Args:
        ids: ids of the stopped runs, some of which reported a crash as they ended.
    """
    with get_client(sync_client=True) as client:
        stopped = {run.id: run for run in active(client, POOL)}

        def requeue_one(id: UUID) -> None:
            run = stopped.get(id) or client.read_flow_run(id)
            if run.state is None or run.state.is_crashed() or not run.state.is_final():
                reschedule(client, [run])

        for_each(requeue_one, dict.fromkeys([*ids, *stopped]))


def resume() -> None:
    """Create or update the deployments, and let the pool take runs."""
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
