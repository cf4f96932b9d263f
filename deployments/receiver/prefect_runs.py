"""Prefect's runs: the few calls that the receiver makes, over the server's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from ckptcore.errors import UsageError
from deployments.receiver.start import RunState


class PrefectRuns:
    """See `deployments.receiver.start.Runs`. For one thread."""

    def __init__(self) -> None:
        if get_current_settings().api.url is None:
            raise UsageError(
                "no Prefect server is configured",
                hint="set PREFECT_API_URL, as in http://127.0.0.1:4200/api",
            )

    def start(
        self, deployment: str, parameters: Mapping[str, Any], *, key: str, name: str, tags: Sequence[str]
    ) -> str:
        """The id of the run that has this key, made if there was none."""
        with get_client(sync_client=True) as client:
            try:
                found = client.read_deployment_by_name(deployment)
            except ObjectNotFound as error:
                raise UsageError(f"the Prefect server has no deployment {deployment}") from error
            run = client.create_flow_run_from_deployment(
                found.id, parameters=dict(parameters), idempotency_key=key, name=name, tags=tags
            )
            return str(run.id)

    def states(self, ids: Sequence[str]) -> Mapping[str, RunState]:
        """By id; a run that is no longer known is not there."""
        wanted = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(id) for id in ids]))
        with get_client(sync_client=True) as client:
            found = client.read_flow_runs(flow_run_filter=wanted, limit=len(ids))
        return {
            str(run.id): RunState(
                run.state.type.value, run.state.timestamp.astimezone(UTC), run.state.message or ""
            )
            if run.state is not None
            else RunState("PENDING", datetime.now(UTC), "")
            for run in found
        }
