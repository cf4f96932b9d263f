"""Later: a run that has to wait gives its place at the worker back meanwhile.

Waiting inside the run would hold one of the worker's few places: two places that never become checkpoints
would stop every other conversion for an hour. So a run that a worker started ends its process, and Prefect
starts it again when the pause is over: its id, name and parameters stay.
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

# Seconds. A worker asks for runs 10 s before they are due, and ends with an error when it is given one whose
# process it still has (Prefect 3.8, workers/base.py: a borrower holds one token of its limiter).
AT_LEAST = 30.0


def inside(pauses: Sequence[float]) -> Sequence[float]:
    """The pauses that a run makes in its own process: all of them when no worker would start it again."""
    return () if runtime.deployment.id else pauses


def put_off(pauses: Sequence[float], why: str) -> None:
    """End this process, and let the run begin anew after the next of its pauses (seconds).

    Returns when there is none left, or nobody would start the run again. Raises `httpx.HTTPError` when
    Prefect's server is away, and what ends the process of a run otherwise.
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
        told = f"looked at again at {due:%H:%M:%S} UTC: {why}"
        # Not by force: a run that is being cancelled stays so.
        client.set_flow_run_state(id, AwaitingRetry(scheduled_time=due, message=beginning(told, 2000)))
    log.info("%s", told)
    raise Abort(told)  # the engine ends without another word to the server
