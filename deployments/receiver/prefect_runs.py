"""Prefect's runs: the few calls that the receiver makes, over the server's API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from ckptcore.errors import UsageError
from deployments.receiver.start import Away, RunState


class PrefectRuns:
    """See `deployments.receiver.start.Runs`. One client for all: making one takes longer than a call."""

    def __init__(self) -> None:
        if get_current_settings().api.url is None:
            raise UsageError(
                "no Prefect server is configured",
                hint="set PREFECT_API_URL, as in http://127.0.0.1:4200/api",
            )
        self._client = get_client(sync_client=True)
        self._client.__enter__()

    def close(self) -> None:
        """Give the connections back."""
        self._client.__exit__(None, None, None)

    def start(
        self, deployment: str, parameters: Mapping[str, Any], *, key: str, name: str, tags: Sequence[str]
    ) -> str:
        """The id of the run that has this key, made if there was none."""
        with _answering():
            try:
                found = self._client.read_deployment_by_name(deployment)
            except ObjectNotFound as error:
                raise UsageError(f"the Prefect server has no deployment {deployment}") from error
            run = self._client.create_flow_run_from_deployment(
                found.id, parameters=dict(parameters), idempotency_key=key, name=name, tags=tags
            )
            return str(run.id)

    def states(self, ids: Sequence[str]) -> Mapping[str, RunState]:
        """By id; a run that is no longer known is not there."""
        wanted = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(id) for id in ids]))
        with _answering():
            found = self._client.read_flow_runs(flow_run_filter=wanted, limit=len(ids))
        return {str(run.id): _state(run.state) for run in found}

    def tell(self, event: str, uri: str, payload: Mapping[str, Any]) -> None:
        """Make an event of Prefect, about a checkpoint, that automations can be triggered by."""
        made = {
            "id": str(uuid4()),
            "occurred": datetime.now(UTC).isoformat(),
            "event": event,
            "resource": {"prefect.resource.id": f"ckptcore.announced.{uri}", "prefect.resource.name": uri},
            "payload": dict(payload),
        }
        # The client's own way of sending events is a queue in another thread; here it is one of four calls.
        self._client._client.post("/events", json=[made]).raise_for_status()


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        raise Away(f"Prefect does not answer: {error}") from error


def _state(state: Any) -> RunState:
    if state is None:
        return RunState("PENDING", datetime.now(UTC), "")
    return RunState(state.type.value, state.timestamp.astimezone(UTC), state.message or "")
