"""Define the program with its groups of commands, and end each command with its exit code.

Answers go to standard output (text, or JSON with ``--output json``); notes and progress go to
standard error. Every error ends with its documented exit code, and never with a traceback.
"""

from __future__ import annotations

import copy
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any

import typer

from ckptcore.cli.options import group
from ckptcore.errors import CkptError, Interrupted, UsageError
from ckptcore.utils import terminal
from ckptcore.utils.isolation import error_of

_ABOUT = (
    "Convert sharded training checkpoints into one verified model: validate, consolidate, export and reshard "
    "in bounded memory."
)
# Command -> its module in this package, and the function or group there; in the order of the help.
COMMANDS = {
    "inspect": ("checkpoints", "inspect"),
    "validate": ("checkpoints", "validate"),
    "diff": ("checkpoints", "diff"),
    "fingerprint": ("checkpoints", "fingerprint"),
    "stats": ("checkpoints", "stats"),
    "consolidate": ("conversions", "consolidate"),
    "export": ("conversions", "export"),
    "reshard": ("conversions", "reshard"),
    "merge": ("conversions", "merge"),
    "verify-export": ("checkpoints", "verify_export"),
    "plan": ("conversions", "plan"),
    "apply": ("conversions", "apply"),
    "serve": ("conversions", "serve"),
    "mount": ("conversions", "mount"),
    "formats": ("checkpoints", "formats"),
    "push": ("publishing", "push"),
    "sign": ("publishing", "sign"),
    "verify-signature": ("publishing", "verify_signature"),
    "find": ("catalog", "find"),
    "sweep": ("operations", "sweep"),
    "scrub": ("operations", "scrub"),
    "retire": ("operations", "retire"),
    "thin": ("operations", "thin"),
    "gc": ("operations", "gc"),
    "catalog": ("catalog", "app"),
}


def _version(show_version: bool) -> None:
    if show_version:
        from ckptcore.utils.version import __version__

        terminal.line(f"ckptcore {__version__}")
        raise typer.Exit(0)


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


def program(*names: str) -> typer.Typer:
    """Return the program with only the command that is called, or all of it, as for help.

    Only the called command's module is imported, and only that command is built: all of them take 80 ms.

    Args:
        names: The first arguments of the command line.
    """
    only = names[0] if names and names[0] in COMMANDS else None
    complete = group(_ABOUT)
    complete.callback()(main)
    for name, (module, member) in COMMANDS.items():
        if only in (None, name):
            command_or_group = getattr(import_module(f"ckptcore.cli.{module}"), member)
            if isinstance(command_or_group, typer.Typer):
                complete.add_typer(
                    command_or_group if only is None else _alone(command_or_group, names[1:]), name=name
                )
            else:
                complete.command(name)(command_or_group)
    return complete


def run(argv: list[str]) -> int:
    """Run a command line, print its error as text or JSON, and return the exit code."""
    # Read from argv: the error may be one of parsing these arguments.
    as_json = any(a == "--output=json" for a in argv) or ("--output", "json") in pairwise(argv)
    try:
        exit_code: Any = program(*argv[:2])(args=argv, prog_name="ckptcore", standalone_mode=False)
        return exit_code if isinstance(exit_code, int) else 0
    except typer.Exit as error:
        return error.exit_code
    except CkptError as error:
        ended = error
        ended.hint = error.hint.replace("`ckptcore COMMAND ", f"`{_command_of(argv)} ")
    except typer.TyperException as error:
        # A group without a command: the message is its help. By name, as typer does it: the class is private.
        if type(error).__name__ == "NoArgsIsHelpError":
            # The text of our own help: no line of it is another's.
            terminal.block(error.format_message(), err=True, indent="")
            return UsageError.exit_code
        # Without the terms of the library that checks values.
        text = error.format_message().replace("Value error, ", "").replace("Input should be", "must be")
        context = getattr(error, "ctx", None)
        called = _command_of(argv) if context is None else context.command_path
        ended = UsageError(_of_missing_destination(error, argv) or text, hint=f"see `{called} --help`")
    except (KeyboardInterrupt, typer.Abort):
        ended = Interrupted("stopped by the user")
    except Exception as error:
        # Unforeseen errors, too, end with a message and an exit code of their own.
        ended = error_of(error)
    from ckptcore.cli import render as show

    show.error(ended, as_json=as_json)
    return ended.exit_code


def _alone(complete: typer.Typer, names: tuple[str, ...]) -> typer.Typer:
    """Return a group with only the command that is called, or all of it."""
    commands = [c for c in complete.registered_commands if _name_of(c) in names[:1]]
    groups = [g for g in complete.registered_groups if g.name in names[:1]]
    if not commands and not groups:
        return complete
    alone = copy.copy(complete)
    alone.registered_commands, alone.registered_groups = commands, groups
    return alone


def _name_of(command: typer.models.CommandInfo) -> str:
    assert command.callback is not None
    return command.name or typer.main.get_command_name(command.callback.__name__)


def _of_missing_destination(error: Exception, argv: list[str]) -> str:
    """Return the message where one place was given: it is read as the destination, and is the source."""
    missing = getattr(getattr(error, "param", None), "name", None)
    positional = [argument for argument in argv[1:] if argument and not argument.startswith("-")]
    context = getattr(error, "ctx", None)
    arguments = [p for p in context.command.params if p.param_type_name == "argument"] if context else []
    if missing != "src" or not positional or len(arguments) < 2:
        return ""
    return f"Missing argument '{arguments[-1].metavar or 'DST'}': where to write."


def _command_of(argv: list[str]) -> str:
    """Return the command that is called, such as ``ckptcore catalog list``.

    >>> _command_of(["catalog", "root", "add", "llama"]), _command_of(["--help"])
    ('ckptcore catalog root add', 'ckptcore')
    """
    if not argv or argv[0] not in COMMANDS:
        return "ckptcore"
    module, member = COMMANDS[argv[0]]
    node, names = getattr(import_module(f"ckptcore.cli.{module}"), member), ["ckptcore", argv[0]]
    for name in argv[1:]:
        if not isinstance(node, typer.Typer):
            break
        below = {g.name: g.typer_instance for g in node.registered_groups}
        below |= {_name_of(command): None for command in node.registered_commands}
        if name not in below:
            break
        node = below[name]
        names.append(name)
    return " ".join(names)
