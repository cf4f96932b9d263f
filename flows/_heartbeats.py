"""Send the heartbeats of a run that this process starts itself.

Prefect's own thread sleeps in steps of a second, and a run waits for it: every conversion would end up to a
second late. This one is not waited for. Runs that a worker starts have Prefect's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import prefect
from prefect import Flow, State
from prefect.client.schemas.objects import FlowRun
from prefect.events import RelatedResource, emit_event
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, get_current_settings, temporary_settings

from tasks.logs import log

NAME = "heartbeats"  # of the thread


@contextmanager
def own_heartbeats(flow: Flow[..., Any]) -> Iterator[Flow[..., Any]]:
    """Yield a flow whose runs send heartbeats from this module's thread, until the block ends."""
    seconds = get_current_settings().flows.heartbeat_frequency
    if seconds is None:
        yield flow
        return
    name, ended = flow.name, threading.Event()

    def begin(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
        beat = copy_context().run  # the settings, and so the server, of the run
        arguments = (_beat, name, flow_run, seconds, ended)
        thread = threading.Thread(target=beat, args=arguments, name=NAME, daemon=True)
        thread.start()

    try:
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            yield flow.with_options(on_running=[*flow.on_running_hooks, begin])
    finally:
        ended.set()


def _beat(name: str, run: FlowRun, seconds: int, ended: threading.Event) -> None:
    """Send a heartbeat now and every few seconds, as Prefect's engine does, until the run has ended."""
    resource = {
        "prefect.resource.id": f"prefect.flow-run.{run.id}",
        "prefect.resource.name": run.name or "",
        "prefect.version": prefect.__version__,
    }
    of = {
        "prefect.resource.id": f"prefect.flow.{run.flow_id}",
        "prefect.resource.role": "flow",
        "prefect.resource.name": name,
    }
    tags = [
        {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"}
        for tag in sorted(set(run.tags))
    ]
    related = [RelatedResource.model_validate(each) for each in (of, *tags)]
    while not ended.is_set():
        try:
            emit_event(event="prefect.flow-run.heartbeat", resource=resource, related=related)
        except Exception as error:  # as in Prefect: the run goes on
            log.debug("cannot send a heartbeat: %s", error)
        ended.wait(seconds)
