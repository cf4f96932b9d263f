"""Command: how does a flow run from a terminal?

The flow's signature is the command line, its docstring the help: the parameter ``max_file_size`` is
``--max-file-size``, a list is an option that may be repeated, a bool that is true has a ``--no-`` form.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import re
import sys
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from ckptcore.errors import Interrupted
from ckptcore.utils import terminal
from ckptcore.utils.units import show_size
from flows._prefect import serve_while_alive
from tasks.markdown_text import count

if TYPE_CHECKING:
    from prefect import Flow, State

ENDS = ("source", "destination")  # given by position, also where a flow has a default


def main(flow: Flow[..., Any], arguments: Sequence[str] | None = None) -> None:
    """Run ``flow`` with the command line's arguments; exit non-zero when it fails."""
    given = vars(parser(flow.fn, f"python -m flows.{flow.name}").parse_args(arguments))
    terminal.guard()
    logging.getLogger("prefect.task_runs").addFilter(_is_news)
    serve_while_alive()
    try:
        state = cast("State[Any]", flow(**given, return_state=True))
    except KeyboardInterrupt:
        terminal.line(f"stopped; {Interrupted.default_hint}", err=True)
        sys.exit(Interrupted.exit_code)
    result: Any = state.result(raise_on_failure=False)
    if not state.is_completed():
        terminal.block(f"{(state.name or 'failed').lower()}: {state.message}", err=True)
        sys.exit(getattr(result, "exit_code", 1))
    for one in result if isinstance(result, list) else [result]:
        terminal.line(
            f"{one.destination}: {count(len(one.files), 'file')}, {show_size(one.nbytes)}", err=True
        )


def parser(function: Callable[..., Any], prog: str) -> argparse.ArgumentParser:
    """The command line of a function whose docstring has one ``name: meaning`` per parameter.

    >>> def paint(wall: str, colours: list[str] | None = None, coats: int = 2) -> None:
    ...     '''Paint a wall.
    ...
    ...     wall: which one.
    ...     colours: from bottom
    ...         to top.
    ...     coats: of each colour.
    ...     '''
    >>> parser(paint, "paint").parse_args(["north", "--colours", "red", "--colours", "blue"])
    Namespace(wall='north', colours=['red', 'blue'], coats=2)
    """
    text, told = inspect.getdoc(function) or "", meanings(function)
    types = typing.get_type_hints(function)
    found = terminal.parser(prog=prog, description=text.split("\n\n")[0])
    for name, parameter in inspect.signature(function).parameters.items():
        help, default = told[name], parameter.default
        if default is parameter.empty:
            found.add_argument(name, help=help)
        elif name in ENDS:
            found.add_argument(name, nargs="?", default=default, help=help)
        else:
            how = _options(types[name], default)
            found.add_argument(f"--{name.replace('_', '-')}", default=default, help=help, **how)
    return found


def meanings(function: Callable[..., Any]) -> dict[str, str]:
    """What a flow's docstring says about each of its parameters, one line each."""
    found = re.findall(r"^(\w+): (.*(?:\n    .*)*)", inspect.getdoc(function) or "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _is_news(record: logging.LogRecord) -> bool:
    # What a task did stands in its own line; retries and failures are told by Prefect.
    return not record.getMessage().startswith("Finished in state Completed")


def _options(kind: Any, default: Any) -> dict[str, Any]:  # kind: a type or `list[str] | None`
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if default else "store_true"}
    if origin is typing.Literal:
        return {"choices": inner}
    if origin is list:
        return {"action": "append", "type": getattr(inner[0], "model_validate_json", inner[0])}
    return _options(inner[0], default) if inner else {"type": kind}
