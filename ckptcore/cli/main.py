"""Define the program with its groups of commands, and end each command with its exit code.

Answers go to standard output (text, or JSON with ``--output json``); notes and progress go to
standard error. Every error ends with its documented exit code, and never with a traceback.
"""

from __future__ import annotations

import copy
import os
import sys
from itertools import pairwise
from typing import Annotated, Any

import typer

from ckptcore.cli import checkpoints, conversions, operations
from ckptcore.cli import render as show
from ckptcore.cli.catalog import app as catalog_app
from ckptcore.cli.catalog import find, which
from ckptcore.cli.options import group
from ckptcore.errors import CkptError, InternalError, Interrupted, UsageError
from ckptcore.utils import terminal

_ABOUT = (
    "Convert sharded training checkpoints into one verified model: validate, consolidate, export and reshard "
    "in bounded memory."
)
app = group(_ABOUT)
catalog_app.command()(operations.rebuild)
app.add_typer(catalog_app, name="catalog")


def _version(wanted: bool) -> None:
    if wanted:
        from ckptcore import __version__

        terminal.line(f"ckptcore {__version__}")
        raise typer.Exit(0)


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version.")
    ] = False,
    storage_option: Annotated[
        list[str] | None,
        typer.Option(
            "--storage-option",
            metavar="NAME=VALUE",
            help="Option of s3fs, such as profile=NAME; SCHEME.NAME=VALUE for others. Repeatable.",
        ),
    ] = None,
) -> None:
    """Convert sharded training checkpoints into one verified model in bounded memory."""
    if storage_option:
        from ckptcore.store.options import use_storage_options

        use_storage_options(storage_option)


# In the order in which the help shows them.
for command in (
    checkpoints.inspect,
    checkpoints.validate,
    checkpoints.diff,
    checkpoints.fingerprint,
    conversions.consolidate,
    conversions.export,
    conversions.reshard,
    checkpoints.verify_export,
    conversions.plan,
    conversions.apply,
    checkpoints.formats,
    find,
    operations.sweep,
    operations.scrub,
    operations.retire,
    operations.gc,
):
    app.command()(command)
app.command("prune", hidden=True)(operations.retire)
app.command("which", hidden=True)(which)


def run(argv: list[str]) -> int:
    """Run a command line, print its error as text or JSON, and return the exit code."""
    as_json = any(a == "--output=json" for a in argv) or ("--output", "json") in pairwise(argv)
    try:
        done: Any = _program(argv)(args=argv, prog_name="ckptcore", standalone_mode=False)
        return done if isinstance(done, int) else 0
    except CkptError as error:
        show.error(error, as_json=as_json)
        return error.exit_code
    except typer.Exit as error:
        return error.exit_code
    except typer.TyperException as error:
        message = error.format_message()
        if message:  # without any argument the help has been printed, which is enough
            show.error(UsageError(message, hint=_usage_hint(error)), as_json=as_json)
        return UsageError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        show.error(Interrupted("stopped by the user"), as_json=as_json)
        return Interrupted.exit_code
    except BrokenPipeError:  # the reader of the output has gone: nothing is left to print
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  the interpreter flushes it when it ends
        return 0
    except Exception as error:
        # Unforeseen errors, too, end with a message and an exit code of their own.
        if os.environ.get("CKPTCORE_TRACEBACK"):
            terminal.report(error)
        show.error(InternalError(f"{type(error).__name__}: {error}"), as_json=as_json)
        return InternalError.exit_code


def _program(argv: list[str]) -> typer.Typer:
    """Return the program with only the command that is called, or all of it, as for help.

    typer builds every command that it has before it runs one: all of them take 20 ms of each start.
    """
    if not argv:
        return app
    commands = [c for c in app.registered_commands if _name_of(c) == argv[0]]
    groups = [g for g in app.registered_groups if g.name == argv[0]]
    if not commands and not groups:
        return app
    alone = copy.copy(app)
    alone.registered_commands, alone.registered_groups = commands, groups
    return alone


def _name_of(command: typer.models.CommandInfo) -> str:
    assert command.callback is not None
    return command.name or typer.main.get_command_name(command.callback.__name__)


def _usage_hint(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return f"see `{context.command_path} --help`" if context is not None else "see `ckptcore --help`"
