"""Declare the parameters of flows, from the same options as the command line.

A flow names the options that it takes, and `takes` builds its signature from them. So names, types, defaults
and help are those of the command line. Prefect's form shows help, choices and limits, and configurations are
checked against the same types.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from ckptcore.catalog.training import facts_of_pairs
from ckptcore.conversion.registration import UNANNOUNCED, Announcement
from ckptcore.operations.options import VerifyExport
from ckptcore.planning.options import HELP_OF_VERB, Option, Options, options_of, pydantic_type, split
from ckptcore.planning.request import Settings
from ckptcore.utils.units import parse_size
from flows._engine import HERE, Engine
from flows._engine import engine as parse_engine

RUN = ("batch", "engine")
EXPORT = ("verify_export",)
Table = tuple[inspect.Parameter, ...]
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class FlowJob:
    """The settings of a flow's conversion.

    Attributes:
        settings: memory, threads and device.
        catalog: its URL; None for the default one, False for none.
        batch_bytes: bytes of output in one task.
        engine: where tasks run.
        announcement: the announcement of the source.
        verify_export: whether exports are verified after they are published.
    """

    settings: Settings
    catalog: str | Literal[False] | None
    batch_bytes: int = 1 << 30
    engine: Engine = HERE
    announcement: Announcement = UNANNOUNCED
    verify_export: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowOptions(Options):
    """The options of a flow's conversion, as text and plain values."""

    batch: Annotated[str, Option("Bytes of output in one task.", "SIZE")] = "1GiB"
    engine: Annotated[
        str | None,
        Option(
            "Where tasks run: threads, dask, dask=tcp://HOST:8786, ray, ray=HOST:6379; "
            "default: CKPTCORE_ENGINE, else threads."
        ),
    ] = None
    verify_export: VerifyExport = True
    push: Annotated[
        str | None,
        Option(
            "Send the export to a branch of the Hugging Face hub when it is proven; {step} is its step.",
            "hf://ORG/NAME@BRANCH",
        ),
    ] = None

    def job(self) -> FlowJob:
        """Return the settings of the conversion. Raises `UsageError`."""
        return FlowJob(
            self.settings(),
            self.register_in,
            parse_size(self.batch),
            parse_engine(self.engine),
            announcement=Announcement(meta=facts_of_pairs(self.meta or (), "meta").as_form()),
            verify_export=self.verify_export,
        )


def declared(*names: str, of: type[Any] = FlowOptions, verb: str = "", **defaults: Any) -> Table:
    """Return parameters for declared options.

    Args:
        names: the options.
        of: the dataclass that declares them.
        verb: the command whose help they have, if an option has a text of its own there.
        defaults: values that replace the declared defaults.
    """
    declarations, helps = options_of(of), HELP_OF_VERB.get(verb, {})
    parameters = []
    for name in dict.fromkeys(names):
        kind, option, default = declarations[name]
        option = replace(option, help=helps[name]) if name in helps else option
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(name, default),
                annotation=pydantic_type(kind, option),
            )
        )
    return tuple(parameters)


def takes(*tables: Table) -> Callable[[_F], _F]:
    """Replace the ``**parameters`` of a function by declared parameters.

    The function's own parameters are options too: their annotations contain an `Option`. Prefect takes the
    help of parameters from the docstring, so each gets a line there.
    """

    def wrap(function: _F) -> _F:
        signature = inspect.signature(function, eval_str=True)
        own_parameters = [_own(p) for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        own_names = {p.name for p in own_parameters}
        parameters = [*own_parameters, *(p for table in tables for p in table if p.name not in own_names)]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        lines = [f"    {p.name}: {option_of(p).help}" for p in parameters]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Args:", *lines])
        return function

    return wrap


def option_of(parameter: inspect.Parameter) -> Option:
    """Return the declared option of a flow's parameter."""
    option = split(parameter.annotation)[1]
    if option is None:
        raise TypeError(f"the parameter {parameter.name!r} of a flow must be annotated with an Option")
    return option


def misfit(kind: Any, value: Any) -> str | None:
    """Return pydantic's message why a value does not fit a type, or None."""
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # a model has a configuration of its own
        adapter = TypeAdapter(kind)
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        return error.errors()[0]["msg"]
    return None


def _own(parameter: inspect.Parameter) -> inspect.Parameter:
    kind = split(parameter.annotation)[0]
    return parameter.replace(annotation=pydantic_type(kind, option_of(parameter)))
