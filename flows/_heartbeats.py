"""Send the heartbeats of a run that this process starts itself.

Prefect's own thread sleeps in steps of a second, and a run waits for it: every conversion would end up to a
second late. This one is not waited for. Runs that a worker starts have Prefect's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import prefect
from prefect import Flow, State
from prefect.client.schemas.objects import FlowRun
from prefect.context import SettingsContext, get_settings_context
from prefect.events import RelatedResource, emit_event
from prefect.settings import get_current_settings

from tasks.logs import log

if TYPE_CHECKING:
    from prefect.flows import FlowStateHook

NAME = "heartbeats"  # of the thread
PLAIN = (str, int, float, bool, type(None))  # float: Prefect's encoder keeps those that are not finite, too


@contextmanager
def own_heartbeats(flow: Flow[..., Any]) -> Iterator[Flow[..., Any]]:
    """Yield a flow whose runs send heartbeats from this module's thread, until the block ends."""
    seconds = get_current_settings().flows.heartbeat_frequency
    if seconds is None:
        yield flow
        return
    ended = threading.Event()

    def begin(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
        beat = copy_context().run  # the settings, and so the server, of the run
        arguments = (_beat, flow.name, flow_run, seconds, ended)
        thread = threading.Thread(target=beat, args=arguments, name=NAME, daemon=True)
        thread.start()

    try:
        with _without_prefects():
            yield _OwnRun.of(flow, begin)
    finally:
        ended.set()


class _OwnRun(Flow[..., Any]):
    """A flow whose parameters are sent without FastAPI, where all are plain."""

    @classmethod
    def of(cls, flow: Flow[..., Any], on_running: FlowStateHook[..., Any]) -> _OwnRun:
        """Return a copy of a flow with one more hook."""
        # `with_options` makes a flow anew, with the models of its parameters: a twentieth of a second.
        copy = cls.__new__(cls)
        vars(copy).update(vars(flow))
        copy.on_running_hooks = [*flow.on_running_hooks, on_running]
        results = get_current_settings().results
        if results.default_storage_block is None and not results.persist_by_default:
            # Prefect would ask its server three times for a storage, and nobody reads results from there.
            copy.persist_result, copy.result_storage = False, results.local_storage_path
        return copy

    def __getstate__(self) -> dict[str, Any]:
        """Return what a task on a worker of a cluster brings of its flow: not the hook, which has a lock."""
        return {**vars(self), "on_running_hooks": self.on_running_hooks[:-1]}

    def serialize_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters as JSON has them."""
        # Prefect imports FastAPI for this, a sixth of a second.
        if all(_is_plain(value) for value in parameters.values()):
            return dict(parameters)
        return super().serialize_parameters(parameters)


def _is_plain(value: Any) -> bool:
    """Return whether a value is JSON already.

    >>> _is_plain(["a", 1]), _is_plain(None), _is_plain({1, 2}), _is_plain([{"a": 1}])
    (True, True, False, False)
    """
    return all(type(element) in PLAIN for element in (value if type(value) is list else [value]))


@contextmanager
def _without_prefects() -> Iterator[None]:
    """Turn Prefect's own heartbeats off."""
    # `temporary_settings` would read and validate all settings again, a tenth of a second.
    context = get_settings_context()
    flows = context.settings.flows.model_copy(update={"heartbeat_frequency": None})
    settings = context.settings.model_copy(update={"flows": flows})
    with SettingsContext(profile=context.profile, settings=settings):
        yield


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
    related = [RelatedResource.model_validate(form) for form in (of, *tags)]
    while not ended.is_set():
        try:
            emit_event(event="prefect.flow-run.heartbeat", resource=resource, related=related)
        except Exception as error:  # as in Prefect: the run goes on
            log.debug("cannot send a heartbeat: %s", error)
        ended.wait(seconds)
