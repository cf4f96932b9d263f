"""Orders: what does an event ask for, under today's configuration?

Asked twice: when the event comes in, to refuse it while its sender listens, and when it is started. A root
that was taken from the configuration in between counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.receiver.http_errors import RequestRefused
from deployments.receiver.roots import filled, place_of
from deployments.receiver.settings import Sender


@dataclass(frozen=True, slots=True)
class Order:
    """A run to start.

    uri: of the checkpoint. deployment: ``flow/name`` of Prefect. parameters: of the flow.
    """

    uri: str
    deployment: str
    parameters: Mapping[str, Any]


def order_of(sender: Sender, uri: str, run: str, step: int | None) -> Order:
    """The run that an event asks for; raises `RequestRefused`.

    uri: "" where the event names none, and the configuration makes one.
    """
    uri = uri or filled(sender.source.uri or "", run=run, step=step)
    if not uri:
        raise RequestRefused("not-understood", f"it names no place ({', '.join(sender.dialect.uri)})")
    place = place_of(uri, sender.roots)
    parameters = sender.parameters | {
        "source": place.uri,
        "destination": filled(sender.destination, run=run, step=step, path=place.path),
        "root": place.root,
        "run": run,
        "step": step,
    }
    return Order(place.uri, sender.deployment, parameters)
