"""Prefect's decorator of flows, without the form of their parameters where a flow runs as a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import prefect

from flows._start import started_as_command


def flow(**settings: Any) -> Callable[[Callable[..., Any]], prefect.Flow[..., Any]]:
    """Return `prefect.flow`; in a command, its flows have no schema of their parameters."""
    prefects = prefect.flow(**settings)
    return _without_schema(prefects) if started_as_command() else prefects


def _without_schema(prefects: Callable[..., Any]) -> Callable[[Callable[..., Any]], prefect.Flow[..., Any]]:
    def wrap(function: Callable[..., Any]) -> prefect.Flow[..., Any]:
        # The schema is for the forms of deployments, and nobody deploys from here. Prefect makes a model of
        # each parameter for it, which takes 0.035 s.
        full = inspect.signature(function)
        function.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
        prefect_flow: prefect.Flow[..., Any] = prefects(function)
        callables: tuple[Any, ...] = (function, prefect_flow)  # Prefect copies the function's attributes
        for target in callables:
            target.__signature__ = full
        return prefect_flow

    return wrap
