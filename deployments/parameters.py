"""Parameters: does a flow take what a configuration gives it?

Prefect's server takes any name for a run's parameter; the run then dies before it begins, as often as it is
started. So a configuration is held against the flow's signature where it is read: names, and types as Prefect
would cast them.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import flows  # noqa: F401  # settles Prefect's environment
from flows._options import misfit

if TYPE_CHECKING:
    from prefect import Flow

FILE = Path(__file__).with_name("prefect.yaml")


def misfits_of(deployment: str, parameters: Mapping[str, Any]) -> list[str]:
    """Why a deployment's flow cannot be called with these parameters; nothing for one that is not of ours.

    deployment: as Prefect names it, ``flow/name``. Its own parameters, of prefect.yaml, are given too.
    """
    for one in declared():
        flow = flow_of(one)
        if f"{flow.name}/{one['name']}" == deployment:
            return misfits(flow, {**(one.get("parameters") or {}), **parameters})
    return []


def misfits(flow: Flow[..., Any], parameters: Mapping[str, Any], given: Collection[str] = ()) -> list[str]:
    """Why a flow cannot be called with these parameters.

    given: names of parameters that get their values elsewhere.

    >>> from flows.sweep import sweep
    >>> misfits(sweep, {"dry": True})
    ["the flow sweep takes no parameter 'dry' (did you mean 'dry_run'?)"]
    """
    known = inspect.signature(flow.fn).parameters
    found = [unknown(flow.name, name, known) for name in (*parameters, *given) if name not in known]
    found += [
        f"the flow {flow.name} needs the parameter {name!r}"
        for name, parameter in known.items()
        if parameter.default is parameter.empty and name not in parameters and name not in given
    ]
    for name, value in parameters.items():
        why = _unfit(value, known[name].annotation) if name in known else None
        if why is not None:
            found.append(f"the parameter {name!r} of the flow {flow.name} cannot be {value!r}: {why}")
    return found


def unknown(flow: str, name: str, known: Collection[str]) -> str:
    """What is said of a parameter that a flow does not take."""
    near = difflib.get_close_matches(name, list(known), 1)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    return f"the flow {flow} takes no parameter {name!r}{meant}"


def flow_of(deployment: Mapping[str, Any]) -> Flow[..., Any]:
    """The flow of an entry of prefect.yaml."""
    module, _, name = str(deployment["entrypoint"]).rpartition(".")
    found: Flow[..., Any] = getattr(import_module(module), name)
    return found


@functools.cache
def declared() -> Sequence[Mapping[str, Any]]:
    """The deployments of prefect.yaml."""
    found: list[Mapping[str, Any]] = yaml.safe_load(FILE.read_text())["deployments"]
    return tuple(found)


def _unfit(value: Any, kind: Any) -> str | None:
    """Why a value cannot be a parameter of a type; None when it can."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:  # a date of TOML, say
        return f"it cannot be sent to Prefect: {error}"
    if isinstance(value, dict) and ("$ref" in value or "__prefect_kind" in value):
        return None  # Prefect puts something else in its place
    return misfit(kind, value)
