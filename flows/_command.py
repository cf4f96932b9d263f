"""Run a flow from the command line.

The options are the flow's parameters, which are declared in `flows._options`; typer reads them as it does
those of `ckptcore`. ``source`` and ``destination`` are positional arguments.

Prefect's handler prints each log line with Rich, in colours; a file or a pipe gets the same text without.
Rich takes a third of a millisecond for a line.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast, get_args

import typer
from prefect.context import SyncClientContext
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import get_current_settings

from ckptcore.cli.commands import FilledCommand
from ckptcore.cli.options import typer_type
from ckptcore.conversion.destination import require_no_credentials
from ckptcore.conversion.publish import Result
from ckptcore.errors import CkptError, Interrupted, UsageError
from ckptcore.planning.options import read_rules, split
from ckptcore.utils import standard_streams, terminal
from ckptcore.utils.command_process import leave
from ckptcore.utils.text import count
from ckptcore.utils.units import show_size
from flows._options import misfit, option_of
from flows._prefect import end_with, serve_while_alive, unanswered
from tasks.artifacts import sending_artifacts
from tasks.logs import send_logs

if TYPE_CHECKING:
    from prefect import Flow, State

ENDS = ("source", "destination")  # positional, even if a flow has a default for them


def entry(flow: Flow[..., Any]) -> NoReturn:
    """Run `flow` as a process of its own, which ends quickly."""
    code: Any = 0
    standard_streams.secure()
    write_plainly()
    try:
        main(flow)
    except SystemExit as end:
        code = end.code or 0
    leave(code)


def main(flow: Flow[..., Any], arguments: Sequence[str] | None = None) -> None:
    """Run `flow` with the arguments of the command line. Exit with a non-zero code if it fails."""
    terminal.guard()
    parameters = parse(flow, sys.argv[1:] if arguments is None else arguments)
    logging.getLogger("prefect.task_runs").addFilter(_is_news)
    # A tenth of a small run's imports, while it waits for the server's first answers.
    threading.Thread(target=import_module, args=("ckptcore.catalog.catalog",), daemon=True).start()
    try:
        serve_while_alive()
        # Prefect sets the state of the run and sends logs while the last artifacts are sent, by one client.
        with SyncClientContext.get_or_create(), sending_artifacts():
            state = cast("State[Any]", _without_results(flow)(**parameters, return_state=True))
            send_logs()
    except KeyboardInterrupt:
        terminal.line(f"stopped; {Interrupted.default_hint}", err=True)
        sys.exit(Interrupted.exit_code)
    except Exception as error:  # of Prefect's engine: a flow's own errors are in its state
        server_error = unanswered(error)
        if server_error is None:
            raise
        end_with(server_error)
    result: Any = state.result(raise_on_failure=False)
    if not state.is_completed():
        terminal.block(f"{(state.name or 'failed').lower()}: {state.message}", err=True)
        sys.exit(getattr(result, "exit_code", 1))
    if not isinstance(result, list | Result):  # of a flow without one output
        terminal.block(state.message or "completed", err=True, indent="")
        return
    for output in result if isinstance(result, list) else [result]:
        terminal.line(
            f"{output.destination}: {count(len(output.files), 'file')}, {show_size(output.nbytes)}", err=True
        )


def parse(flow: Flow[..., Any], arguments: Sequence[str]) -> dict[str, Any]:
    """Return the flow's parameters from command-line arguments.

    The help text and invalid arguments end the process. Values are checked against the flow's types before
    anything is started; a wrong one exits with code 2.
    """
    prog = f"python -m flows.{flow.name}"
    parameter_values: dict[str, Any] = {}

    def command(**options: Any) -> None:
        parameter_values.update(options)

    parameters = inspect.signature(flow.fn).parameters
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [_typed(p).replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters.values()]
    )
    command.__doc__ = (flow.fn.__doc__ or "").partition("\n\nArgs:")[0]
    app = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=FilledCommand)(command)
    try:
        code = app(args=list(arguments), prog_name=prog, standalone_mode=False)
        if not parameter_values:  # the help text was printed
            sys.exit(code or 0)
        if "sharding" in parameter_values:
            parameter_values["sharding"] = read_rules(parameter_values["sharding"])
        _require_types(flow, parameter_values)
        # Prefect stores parameters as given.
        require_no_credentials(*(parameter_values.get(end) for end in ENDS))
    except typer.TyperException as error:
        message, code = error.format_message(), UsageError.exit_code
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except CkptError as error:
        message, code = error.message, error.exit_code
    else:
        return parameter_values
    terminal.block(f"{prog}: {message}\nsee `{prog} --help`", err=True, indent="")
    sys.exit(code)


def _require_types(flow: Flow[..., Any], parameters: dict[str, Any]) -> None:
    """Raise `UsageError` unless every value fits the type of its parameter."""
    for name, parameter in inspect.signature(flow.fn).parameters.items():
        why = misfit(parameter.annotation, parameters[name])
        if why is not None:
            raise UsageError(f"cannot use {parameters[name]!r} for {name.replace('_', '-')}: {why}")


def _typed(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a flow's parameter as typer reads it."""
    option, (kind, _) = option_of(parameter), split(parameter.annotation)
    default = parameter.default
    if parameter.name in ENDS:
        kind = str  # a source in several folders is one text here: merged://[FOLDER,FOLDER]
        metavar = option.metavar if default is parameter.empty else f"[{option.metavar}]"
        return parameter.replace(
            annotation=Annotated[kind, typer.Argument(metavar=metavar, help=option.help)]
        )
    of = next((k for k in get_args(kind) if k is not type(None)), kind)
    model = next((k for k in get_args(of) if hasattr(k, "model_validate_json")), None)
    if model is not None:  # a list of models, each as JSON
        form = typer.Option(metavar=option.metavar, help=option.help, parser=model.model_validate_json)
        return parameter.replace(annotation=Annotated[list[Any] | None, form])
    # The catalog's variable is read when the catalog is opened: users can see a run's parameters, with
    # passwords.
    option = replace(option, env=None)
    return parameter.replace(annotation=typer_type(parameter.name, kind, option, default))


def _without_results(flow: Flow[..., Any]) -> Flow[..., Any]:
    """Return a flow that keeps no results, unless the user's settings say where: nobody reads them from here.

    Prefect asks its server three times for a storage otherwise.
    """
    results = get_current_settings().results
    if results.default_storage_block is not None or results.persist_by_default:
        return flow
    place = cast("Any", results.local_storage_path)  # a path is taken, though the annotation says blocks
    return flow.with_options(persist_result=False, result_storage=place)


def _is_news(record: logging.LogRecord) -> bool:
    # Tasks log their results themselves. Prefect's lines about retries and failures stay.
    return not record.getMessage().startswith("Finished in state Completed")


def write_plainly() -> None:
    """Replace Prefect's handler of the root logger, unless it writes colours or markup."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if type(handler) is not PrefectConsoleHandler or handler.console.is_terminal:
            continue
        if get_current_settings().logging.markup:
            continue
        root.removeHandler(handler)
        root.addHandler(terminal.plain_handler(handler))
