"""The receiver's calls to the API of Prefect's server.

Prefect's client would repeat a call that was refused for minutes, or for as long as the answer says. The
receiver schedules repeats itself, so each answer is looked at before the client, which repeats nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from pydantic import ValidationError

from ckptcore.errors import CkptError, UsageError
from ckptcore.redaction import beginning
from ckptcore.utils.foreign_text import parse_time
from ckptcore.utils.isolation import attempt, parsed_or_none
from deployments.parameters import unknown
from tasks.retry import start_count

# Automations react to events. A killed server loses the events that it has not processed. A restarted one
# ignores for a quarter of an hour events that follow on one that it has not seen (Prefect,
# server/events/ordering). Runs that automations should have noticed by then are resumed here.
OVERLOOKED = {"CRASHED": timedelta(seconds=45), "PENDING": timedelta(seconds=120)}
DEFAULT_BEAT = timedelta(seconds=180)  # Prefect's default; prefect.yaml sets 30 s
BEATS = 4  # missed heartbeats until a running run counts as overlooked
PASSING = (408, 429)  # and every 5xx: a later call may be answered


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a flow run.

    kind: Prefect's state type. since: the time of that state, or of the last heartbeat of a running run.
    message: for users. starts: how often the run was started. beat: the interval of its heartbeats.
    """

    kind: str
    since: datetime
    message: str
    starts: int = 0
    beat: timedelta = DEFAULT_BEAT


class PrefectError(Exception):
    """Prefect's answer cannot be used. The message says why, to users."""


class PrefectUnavailable(PrefectError):
    """Prefect does not answer. Nothing else should be tried in this round."""


def is_overlooked(state: RunState, now: datetime) -> bool:
    """Return whether no worker processes a run, and no automation has noticed that."""
    patience = BEATS * state.beat if state.kind == "RUNNING" else OVERLOOKED.get(state.kind)
    return patience is not None and now - state.since > patience


@contextmanager
def _answering() -> Iterator[None]:
    """Raise `PrefectUnavailable`, `PrefectError` or a `CkptError`, whatever the client makes of an answer."""
    try:
        yield
    except (PrefectError, CkptError):
        raise
    except httpx.TransportError as error:
        raise PrefectUnavailable(f"Prefect does not answer: {error}") from error
    except httpx.HTTPStatusError as error:
        raise PrefectError(f"Prefect replied {error.response.status_code}: {error}") from error
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise PrefectError(f"Prefect's answer cannot be used: {text}") from error


class PrefectRuns:
    """The calls to Prefect, by one client: creating one is slow.

    All raise `PrefectUnavailable` if it does not answer, and `PrefectError` for an odd answer.
    """

    def __init__(self) -> None:
        if get_current_settings().api.url is None:
            raise UsageError(
                "no Prefect server is configured", hint="set PREFECT_API_URL, as in http://127.0.0.1:4200/api"
            )
        hooks: dict[str, Any] = {"event_hooks": {"response": [_require_usable]}}
        self._client, self._beats = get_client(hooks, sync_client=True), dict[UUID, timedelta]()
        self._client.__enter__()

    def close(self) -> None:
        """Close the connections."""
        self._client.__exit__(None, None, None)

    @_answering()
    def start(
        self, deployment: str, parameters: Mapping[str, Any], *, key: str, name: str, tags: Sequence[str]
    ) -> str:
        """Return the id of the run with this idempotency key; start it if there is none."""
        try:
            server_deployment = self._client.read_deployment_by_name(deployment)
        except ObjectNotFound as error:
            raise UsageError(
                f"the Prefect server has no deployment {deployment}",
                hint="run `python -m deployments.deploy` for this server",
            ) from error
        parameter_errors = _misfits(deployment, parameters, server_deployment.parameter_openapi_schema or {})
        if parameter_errors:  # the run would fail before it begins, on every start
            raise UsageError(
                "; ".join(parameter_errors), hint="correct [parameters] in the receiver's configuration"
            )
        run = self._client.create_flow_run_from_deployment(
            server_deployment.id, parameters=dict(parameters), idempotency_key=key, name=name, tags=tags
        )
        # A run counts as started once the server has it under its id.
        try:
            started = self._client.read_flow_run(run.id)
        except ObjectNotFound as error:
            raise PrefectError(f"Prefect started run {run.id}, and does not know it") from error
        if (started.id, started.idempotency_key) != (run.id, key):
            raise PrefectError(f"Prefect started run {run.id}, which is another event's")
        return str(run.id)

    @_answering()
    def states(self, ids: Sequence[str]) -> Mapping[str, RunState | CkptError]:
        """Return the states of runs by id, or why one is unknown.

        A run that Prefect no longer knows is missing.
        """
        keys = {id: key for id in ids if (key := parsed_or_none(UUID, id)) is not None}
        states: dict[str, RunState | CkptError] = {
            id: UsageError(f"{id!r} is not the id of a run", hint="retry the event")
            for id in ids
            if id not in keys
        }
        run_filter = FlowRunFilter(id=FlowRunFilterId(any_=list(keys.values())))
        try:
            runs = self._client.read_flow_runs(flow_run_filter=run_filter, limit=len(keys)) if keys else []
        except ValidationError:  # of one run perhaps, which a newer server describes in another way
            return states | {id: attempt(self._state, key) for id, key in keys.items()}
        if other_ids := {run.id for run in runs}.difference(keys.values()):
            raise PrefectError(f"Prefect was asked for other runs than {min(map(str, other_ids))}")
        by_key = {run.id: attempt(self._state, run) for run in runs}
        return states | {id: by_key[key] for id, key in keys.items() if key in by_key}

    @_answering()
    def resume(self, id: str, why: str) -> None:
        """Resume a run that no worker processes, under its id. Complete files have their receipts."""
        self._client.set_flow_run_state(UUID(id), AwaitingRetry(message=why), force=True)

    @_answering()
    def give_up(self, id: str, why: str) -> None:
        """Fail a run that was started too often."""
        self._client.set_flow_run_state(UUID(id), Failed(message=beginning(why, 2000)), force=True)

    @_answering()
    def _state(self, run: FlowRun | UUID) -> RunState:
        run = self._client.read_flow_run(run) if isinstance(run, UUID) else run
        state = run.state
        if state is None:
            return RunState("PENDING", datetime.now(UTC), "")
        since = state.timestamp.astimezone(UTC)
        run_state = RunState(state.type.value, since, state.message or "", start_count(run), self._beat(run))
        if state.is_running() and is_overlooked(run_state, datetime.now(UTC)):
            run_state = replace(run_state, since=max(since, self._last_event_at(run)))
        if is_overlooked(run_state, datetime.now(UTC)):  # it is about to be resumed or failed
            return replace(run_state, starts=start_count(run, self._client.read_flow_run_states(run.id)))
        return run_state

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
        event_filter = {"filter": {"resource": {"id": [f"prefect.flow-run.{run.id}"]}}, "limit": 1}
        answer = self._client._client.post("/events/filter", json=event_filter).json()
        events = answer["events"]  # newest first
        return parse_time(events[0]["occurred"]) if events else datetime.min.replace(tzinfo=UTC)

    @_answering()
    def tell(self, event: str, uri: str, payload: Mapping[str, Any]) -> None:
        """Send Prefect an event about a checkpoint, which can trigger automations."""
        event_form = {
            "id": str(uuid4()),
            "occurred": datetime.now(UTC).isoformat(),
            "event": event,
            "resource": {"prefect.resource.id": f"ckptcore.announced.{uri}", "prefect.resource.name": uri},
            "payload": dict(payload),
        }
        # Prefect's client queues events in another thread; here it is one API call.
        self._client._client.post("/events", json=[event_form]).raise_for_status()


def _misfits(deployment: str, parameters: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """Return why the deployed flow cannot be called so. The server checks types, but not names."""
    schema_properties = schema.get("properties") or {}
    flow = deployment.partition("/")[0]
    return [unknown(flow, name, schema_properties) for name in parameters if name not in schema_properties]


def _require_usable(response: httpx.Response) -> None:
    """Raise `PrefectUnavailable` or `PrefectError` for an answer that the client would repeat or misread."""
    if response.status_code in PASSING or response.status_code >= 500:
        raise PrefectUnavailable(
            f"Prefect replied {response.status_code}: it is overloaded, or its database is down"
        )
    kind = response.headers.get("content-type", "")
    if response.is_success and response.status_code != 204 and "json" not in kind:
        raise PrefectError(f"Prefect replied {response.status_code} with {kind or 'nothing'} instead of JSON")
