"""Check configured parameters against the signatures of flows.

Prefect's server accepts any parameter name for a run; the run then fails before it begins, on every start. So
a configuration is checked when it is read: names, and types as Prefect would cast them.
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

import flows  # noqa: F401  # sets Prefect's environment first
from flows._options import misfit

if TYPE_CHECKING:
    from prefect import Flow

FILE = Path(__file__).with_name("prefect.yaml")


def misfits_of(deployment: str, parameters: Mapping[str, Any]) -> list[str]:
    """Return why a deployment's flow does not accept these parameters; [] for unknown deployments.

    Args:
        deployment: its name at Prefect, ``flow/name``. Its own parameters in prefect.yaml are added.
        parameters: the parameters to check.
    """
    for declaration in declared():
        flow = flow_of(declaration)
        if f"{flow.name}/{declaration['name']}" == deployment:
            return misfits(flow, {**(declaration.get("parameters") or {}), **parameters})
    return []


def misfits(
    flow: Flow[..., Any], parameters: Mapping[str, Any], supplied_names: Collection[str] = ()
) -> list[str]:
    """Return why a flow does not accept these parameters.

    Args:
        flow: the flow.
        parameters: the parameters to check.
        supplied_names: names of parameters whose values come from elsewhere.

    >>> from flows.sweep import sweep
    >>> misfits(sweep, {"dry": True})
    ["the flow sweep has no parameter 'dry' (did you mean 'dry_run'?)"]
    """
    flow_parameters = inspect.signature(flow.fn).parameters
    texts = [
        unknown(flow.name, name, flow_parameters)
        for name in (*parameters, *supplied_names)
        if name not in flow_parameters
    ]
    texts += [
        f"the flow {flow.name} needs the parameter {name!r}"
        for name, parameter in flow_parameters.items()
        if parameter.default is parameter.empty and name not in parameters and name not in supplied_names
    ]
    for name, value in parameters.items():
        why = _unfit(value, flow_parameters[name].annotation) if name in flow_parameters else None
        if why is not None:
            texts.append(f"the parameter {name!r} of the flow {flow.name} cannot be {value!r}: {why}")
    return texts


def unknown(flow: str, name: str, flow_parameters: Collection[str]) -> str:
    """Return the message for a parameter that a flow does not have."""
    near = difflib.get_close_matches(name, list(flow_parameters), 1)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    return f"the flow {flow} has no parameter {name!r}{meant}"


def flow_of(deployment: Mapping[str, Any]) -> Flow[..., Any]:
    """Return the flow of an entry of prefect.yaml."""
    module, _, name = str(deployment["entrypoint"]).rpartition(".")
    flow: Flow[..., Any] = getattr(import_module(module), name)
    return flow


@functools.cache
def declared() -> Sequence[Mapping[str, Any]]:
    """Return the deployments of prefect.yaml."""
    deployments: list[Mapping[str, Any]] = yaml.safe_load(FILE.read_text())["deployments"]
    return tuple(deployments)


def _unfit(value: Any, kind: Any) -> str | None:
    """Return why a value does not fit a type, or None."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:  # for example a date of TOML
        return f"it is not a JSON value: {error}"
    if isinstance(value, dict) and ("$ref" in value or "__prefect_kind" in value):
        return None  # Prefect replaces it by another value
    return misfit(kind, value)
