"""Reschedule a run that has to wait, so that it does not occupy its worker.

A run that waits in its process would occupy one of the worker's few slots: two folders that never become
checkpoints would block every other conversion for an hour. So a run that a worker started ends its process,
and Prefect starts it again after the pause, with the same id, name and parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.exceptions import Abort
from prefect.states import AwaitingRetry

from ckptcore.redaction import beginning
from tasks.attempts import LOOKS, looks_of
from tasks.logs import log

# Seconds. A worker polls for runs 10 s before they are due. It fails if it gets a run whose process still
# exists (Prefect 3.8, workers/base.py: a borrower holds one token of its limiter).
AT_LEAST = 30.0


def own_pauses(pauses: Sequence[float]) -> Sequence[float]:
    """Return the pauses to wait in this process: all if no worker would start the run again, else none."""
    return () if runtime.deployment.id else pauses


def put_off(pauses: Sequence[float], why: str) -> None:
    """End this process, and let Prefect start the run again after the next of its pauses.

    Returns normally if no pause is left or no worker would start the run again.

    Args:
        pauses: seconds between all starts of the run.
        why: the reason, for the message of the run's state.

    Raises:
        httpx.HTTPError: Prefect's server does not answer.
        Abort: otherwise; it ends the process of the run.
    """
    if not runtime.deployment.id:
        return
    id = UUID(str(runtime.flow_run.id))
    with get_client(sync_client=True) as client:
        looks = looks_of(client.read_flow_run(id).labels)
        if looks >= len(pauses):
            return
        client.update_flow_run_labels(id, {LOOKS: looks + 1})
        due = datetime.now(UTC) + timedelta(seconds=max(pauses[looks], AT_LEAST))
        message = f"next try at {due:%H:%M:%S} UTC: {why}"
        # Without force: a run that is being cancelled stays so.
        client.set_flow_run_state(id, AwaitingRetry(scheduled_time=due, message=beginning(message, 2000)))
    log.info("%s", message)
    raise Abort(message)  # the engine ends without another call to the server
