"""Resume: a run whose process or machine went away, taken up again.

The deployment `resume` starts it when a run crashes. The run itself goes on: its id, name and parameters
stay, and files that it had finished are recognised by their receipts.
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
from flows._options import takes
from tasks.attempts import begun, given_up
from tasks.logs import log


def run_name() -> str:
    """``resume 2f6c1b1e``: the first part of the run's id."""
    return f"resume {str(runtime.flow_run.parameters.get('flow_run_id', ''))[:8]}"


@flow(name="resume", flow_run_name=run_name)
@takes()
def resume(
    flow_run_id: Annotated[str, Option("The run, as Prefect names it.")],
    most: Annotated[
        int,
        Option(
            "How often a run may be started in all; one that kills its process again and again has failed "
            "then."
        ),
    ] = 5,
) -> State[Any]:
    """Let a crashed run go on where it stopped."""
    told = _resumed(UUID(flow_run_id), most)
    log.info("%s", told)
    return Completed(message=told)


def _resumed(run_id: UUID, most: int) -> str:
    with get_client(sync_client=True) as client:
        try:
            run = client.read_flow_run(run_id)
        except ObjectNotFound:
            return f"run {run_id} is gone"
        # A run that somebody has taken up, cancelled or deleted meanwhile is left alone.
        if run.state is None or not run.state.is_crashed():
            return f"{run.name} is not crashed"
        times, last = begun(run, client.read_flow_run_states(run_id)), run.state.message or ""
        if times >= most:
            ended: State[Any] = Failed(message=beginning(given_up(times, last), 2000))
            client.set_flow_run_state(run_id, ended, force=True)
            return f"{run.name} is {given_up(times, last)}"
        again: State[Any] = AwaitingRetry(message=beginning(f"resumed after: {last or 'a crash'}", 500))
        client.set_flow_run_state(run_id, again, force=True)
        return f"{run.name} goes on, for the {times + 1}. time"
