"""Resume a run whose process or machine was lost.

The deployment `resume` starts this flow when a run crashes. The crashed run keeps its id, name and
parameters, and files that it had finished are recognised by their receipts.
"""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from prefect import State, flow, runtime
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry, Completed, Failed

from ckptcore.planning.options import Option
from ckptcore.redaction import beginning
from flows._command import entry
from flows._options import takes
from tasks.logs import log
from tasks.retry import given_up, start_count


def run_name() -> str:
    """Return the name of the run, with the first part of the other run's id: ``resume 2f6c1b1e``."""
    return f"resume {str(runtime.flow_run.parameters.get('flow_run_id', ''))[:8]}"


@flow(name="resume", flow_run_name=run_name)
@takes()
def resume(
    flow_run_id: Annotated[str, Option("The id of the crashed flow run.")],
    most: Annotated[
        int,
        Option(
            "How often the run may be started in total; after that, a run that keeps losing its process "
            "has failed."
        ),
    ] = 5,
) -> State[Any]:
    """Resume a crashed run where it stopped."""
    outcome = _resumed(UUID(flow_run_id), most)
    log.info("%s", outcome)
    return Completed(message=outcome)


def _resumed(run_id: UUID, most: int) -> str:
    with get_client(sync_client=True) as client:
        try:
            run = client.read_flow_run(run_id)
        except ObjectNotFound:
            return f"run {run_id} no longer exists"
        # A run that was resumed, cancelled or deleted meanwhile is left alone.
        if run.state is None or not run.state.is_crashed():
            return f"{run.name} has not crashed"
        times, last = start_count(run, client.read_flow_run_states(run_id)), run.state.message or ""
        if times >= most:
            ended: State[Any] = Failed(message=beginning(given_up(times, last), 2000))
            client.set_flow_run_state(run_id, ended, force=True)
            return f"{run.name}: {given_up(times, last)}"
        retry: State[Any] = AwaitingRetry(message=beginning(f"resumed after: {last or 'a crash'}", 500))
        client.set_flow_run_state(run_id, retry, force=True)
        return f"{run.name} is resumed: start {times + 1}"


if __name__ == "__main__":
    entry(resume)
