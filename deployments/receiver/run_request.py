"""Derive the flow run for an event from the configuration.

This is done twice: when the event arrives, so that its sender gets the error, and when the run is started. A
root that was removed from the configuration in between is then no longer allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptcore.operations.export_target import stem
from ckptcore.page.http_errors import RequestRefused
from deployments.receiver.roots import filled, place_of
from deployments.receiver.settings import Sender


@dataclass(frozen=True, slots=True)
class FlowRunRequest:
    """A run to start.

    uri: of the checkpoint. deployment: ``flow/name`` of Prefect. parameters: of the flow.
    """

    uri: str
    deployment: str
    parameters: Mapping[str, Any]


def flow_run_for(
    sender: Sender, uri: str, run: str, step: int | None, meta: Mapping[str, Any] | None = None
) -> FlowRunRequest:
    """Return the run to start for an event. Raises `RequestRefused`.

    Args:
        sender: the configured source.
        uri: the URI in the event. If it is "", the source's template gives one.
        run: the name of the training run, or "".
        step: the training step, or None.
        meta: facts about the training; they are no parameter if there are none.
    """
    uri = uri or filled(sender.source.uri or "", run=run, step=step)
    if not uri:
        raise RequestRefused("not-understood", f"the event names no URI ({', '.join(sender.dialect.uri)})")
    place = place_of(uri, sender.roots)
    parameters = sender.parameters | {
        "source": place.uri,
        "destination": filled(sender.destination, run=run, step=step, path=stem(place.path)),
        "root": place.root,
        "run": run,
        "step": step,
        **({"meta": dict(meta)} if meta else {}),
    }
    return FlowRunRequest(place.uri, sender.deployment, parameters)
