"""Options of flows: the declared options of a conversion, as parameters that Prefect shows and checks.

A flow names the options that it takes; `takes` makes its signature of them. So names, types, defaults and
help are those of the command line, Prefect's form shows the help, choices and limits, and a configuration is
held against the same types.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from ckptcore.conversion.registration import UNANNOUNCED, Announcement
from ckptcore.planning.options import (
    Option,
    Options,
    former_option,
    options_of,
    pydantic_type,
    read_options,
    split,
)
from ckptcore.planning.request import Settings
from ckptcore.utils.units import parse_size
from flows._engine import HERE, Engine
from flows._engine import engine as parse_engine

RUN = ("batch", "engine")
EXPORT = ("verify_export",)
Table = tuple[inspect.Parameter, ...]
_F = TypeVar("_F", bound=Callable[..., Any])
_Declared = TypeVar("_Declared")
_log = logging.getLogger("ckptcore")


@dataclass(frozen=True, slots=True)
class FlowJob:
    """With what means, and where, a flow converts.

    catalog: its URL; None is the default one, False is none. batch_bytes: of output in one task.
    announcement: of the source. verify_export: whether exports are verified once they are published.
    """

    settings: Settings
    catalog: str | Literal[False] | None
    batch_bytes: int = 1 << 30
    engine: Engine = HERE
    announcement: Announcement = UNANNOUNCED
    verify_export: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowOptions(Options):
    """How a flow converts, as its options are spelled."""

    batch: Annotated[str, Option("Bytes of output in one task.", "SIZE")] = "1GiB"
    engine: Annotated[
        str | None,
        Option(
            "Where tasks run: threads, dask, dask=tcp://HOST:8786, ray, ray=HOST:6379; "
            "default: CKPTCORE_ENGINE, else threads."
        ),
    ] = None

    verify_export: Annotated[
        bool, Option("Hold an export against its source once it is published; the catalog keeps the verdict.")
    ] = True

    def job(self) -> FlowJob:
        """With what means, and where, to convert; raises `UsageError`."""
        return FlowJob(
            self.settings(),
            self.register_in,
            parse_size(self.batch),
            parse_engine(self.engine),
            verify_export=self.verify_export,
        )


def declared(*names: str, of: type[Any] = FlowOptions, **defaults: Any) -> Table:
    """Parameters of declared options. of: the dataclass that declares them. defaults: in place of its own."""
    known = options_of(of)
    found = {name: (*known[name][:2], defaults.get(name, known[name][2])) for name in names}
    # Deployments of release 0.1 keep working: former names are parameters, too, without a field in the form.
    found |= dict(former for name in names if (former := former_option(name, known[name])) is not None)
    return tuple(
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=pydantic_type(kind, option)
        )
        for name, (kind, option, default) in found.items()
    )


def flow_options(declaration: type[_Declared], given: Mapping[str, Any]) -> _Declared:
    """Return the options of a dataclass among a flow's parameters, and log those with a former name."""
    for name, (_, option, _) in options_of(declaration).items():
        if option.former is not None and given.get(option.former):
            _log.warning("the parameter %r is now %r; the next release drops it", option.former, name)
    return read_options(declaration, given)


def takes(*tables: Table) -> Callable[[_F], _F]:
    """Gives a function these parameters, in place of its ``**given``.

    Its own parameters are options too: their types are declared with an `Option`. Prefect reads what
    parameters mean from the docstring, which gets a line for each.
    """

    def wrap(function: _F) -> _F:
        seen = inspect.signature(function, eval_str=True)
        own = [_own(p) for p in seen.parameters.values() if p.kind is not p.VAR_KEYWORD]
        known = {p.name for p in own}
        every = [*own, *(p for table in tables for p in table if p.name not in known)]
        function.__signature__ = seen.replace(parameters=every)  # type: ignore[attr-defined]
        lines = [f"    {p.name}: {option_of(p).help}" for p in every if option_of(p).renamed_to is None]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Args:", *lines])
        return function

    return wrap


def option_of(parameter: inspect.Parameter) -> Option:
    """What a flow's parameter is declared as."""
    option = split(parameter.annotation)[1]
    if option is None:
        raise TypeError(f"the parameter {parameter.name!r} of a flow is declared without an Option")
    return option


def misfit(kind: Any, value: Any) -> str | None:
    """Why a value cannot be a parameter of a type, in pydantic's words; None when it can."""
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # a model brings a configuration of its own
        adapter = TypeAdapter(kind)
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        return error.errors()[0]["msg"]
    return None


def _own(parameter: inspect.Parameter) -> inspect.Parameter:
    kind = split(parameter.annotation)[0]
    return parameter.replace(annotation=pydantic_type(kind, option_of(parameter)))
