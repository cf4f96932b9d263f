"""The receiver's calls to the API of Prefect's server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.states import AwaitingRetry, Failed

from ckptcore.errors import UsageError
from ckptcore.redaction import beginning
from ckptcore.utils.foreign_text import parse_time
from deployments.parameters import unknown
from deployments.receiver.dispatch import DEFAULT_BEAT, Away, RunState, is_overlooked
from tasks.attempts import begun


class PrefectRuns:
    """See `deployments.receiver.dispatch.FlowRuns`. One client for all calls: creating one is slow."""

    def __init__(self) -> None:
        if get_current_settings().api.url is None:
            raise UsageError(
                "no Prefect server is configured", hint="set PREFECT_API_URL, as in http://127.0.0.1:4200/api"
            )
        self._client, self._beats = get_client(sync_client=True), dict[UUID, timedelta]()
        self._client.__enter__()

    def close(self) -> None:
        """Close the connections."""
        self._client.__exit__(None, None, None)

    def start(
        self, deployment: str, parameters: Mapping[str, Any], *, key: str, name: str, tags: Sequence[str]
    ) -> str:
        """Return the id of the run with this idempotency key; start it if there is none."""
        with _answering():
            try:
                found = self._client.read_deployment_by_name(deployment)
            except ObjectNotFound as error:
                raise UsageError(f"the Prefect server has no deployment {deployment}") from error
            wrong = _misfits(deployment, parameters, found.parameter_openapi_schema or {})
            if wrong:  # the run would fail before it begins, on every start
                raise UsageError(
                    "; ".join(wrong), hint="correct [parameters] in the receiver's configuration"
                )
            run = self._client.create_flow_run_from_deployment(
                found.id, parameters=dict(parameters), idempotency_key=key, name=name, tags=tags
            )
            return str(run.id)

    def states(self, ids: Sequence[str]) -> Mapping[str, RunState]:
        """Return the states of runs by id. A run that Prefect no longer knows is missing."""
        wanted = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(id) for id in ids]))
        with _answering():
            found = self._client.read_flow_runs(flow_run_filter=wanted, limit=len(ids))
            return {str(run.id): self._state(run) for run in found}

    def resume(self, id: str, why: str) -> None:
        """Resume a run that no worker processes, under its id. Complete files have their receipts."""
        with _answering():
            self._client.set_flow_run_state(UUID(id), AwaitingRetry(message=why), force=True)

    def give_up(self, id: str, why: str) -> None:
        """Fail a run that was started too often."""
        with _answering():
            self._client.set_flow_run_state(UUID(id), Failed(message=beginning(why, 2000)), force=True)

    def _state(self, run: FlowRun) -> RunState:
        state = run.state
        if state is None:
            return RunState("PENDING", datetime.now(UTC), "")
        since = state.timestamp.astimezone(UTC)
        found = RunState(state.type.value, since, state.message or "", begun(run), self._beat(run))
        if state.is_running() and is_overlooked(found, datetime.now(UTC)):
            found = replace(found, since=max(since, self._last_event_at(run)))
        if is_overlooked(found, datetime.now(UTC)):  # it is about to be resumed or failed
            return replace(found, begun=begun(run, self._client.read_flow_run_states(run.id)))
        return found

    def _beat(self, run: FlowRun) -> timedelta:
        """Return the interval of a run's heartbeats, from its deployment's environment."""
        id = run.deployment_id
        if id is None:
            return DEFAULT_BEAT
        if id not in self._beats:
            try:
                env = self._client.read_deployment(id).job_variables.get("env") or {}
            except ObjectNotFound:  # deleted since, but its runs were not
                env = {}
            seconds = str(env.get("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", ""))
            self._beats[id] = timedelta(seconds=int(seconds)) if seconds.isdecimal() else DEFAULT_BEAT
        return self._beats[id]

    def _last_event_at(self, run: FlowRun) -> datetime:
        """Return the time of a run's last event."""
        wanted = {"filter": {"resource": {"id": [f"prefect.flow-run.{run.id}"]}}, "limit": 1}
        found = self._client._client.post("/events/filter", json=wanted).json()["events"]  # newest first
        return parse_time(found[0]["occurred"]) if found else datetime.min.replace(tzinfo=UTC)

    def tell(self, event: str, uri: str, payload: Mapping[str, Any]) -> None:
        """Send Prefect an event about a checkpoint, which can trigger automations."""
        made = {
            "id": str(uuid4()),
            "occurred": datetime.now(UTC).isoformat(),
            "event": event,
            "resource": {"prefect.resource.id": f"ckptcore.announced.{uri}", "prefect.resource.name": uri},
            "payload": dict(payload),
        }
        # Prefect's client queues events in another thread; here it is one API call.
        self._client._client.post("/events", json=[made]).raise_for_status()


def _misfits(deployment: str, parameters: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """Return why the deployed flow cannot be called so. The server checks types, but not names."""
    known = schema.get("properties") or {}
    flow = deployment.partition("/")[0]
    return [unknown(flow, name, known) for name in parameters if name not in known]


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        raise Away(f"Prefect does not answer: {error}") from error
    except httpx.HTTPStatusError as error:
        if error.response.status_code < 500:
            raise
        raise Away(f"Prefect replied {error.response.status_code}: its database may be down") from error
