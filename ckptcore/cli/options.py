"""Turn declared options into those of typer, and define the options that only the command line has.

A table of options is a name, a type and a default for each. `takes` gives a command the options of tables, so
that commands that share an option describe it alike. `declared` makes a table from
`ckptcore.planning.options`. `named_places` finds what a SRC names in the catalog.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import typer

from ckptcore.cli.commands import FilledGroup, GroupedHelpCommand
from ckptcore.errors import LEVELS, CatalogError
from ckptcore.planning.options import (
    HELP_OF_VERB,
    MEANS,
    Destination,
    Option,
    Options,
    Source,
    options_of,
    split,
)
from ckptcore.utils import terminal

Table = Mapping[str, tuple[Any, Any]]  # parameter -> (type, default), in the order of the help
_F = TypeVar("_F", bound=Callable[..., Any])


class _Program(typer.Typer):
    """A program whose commands refuse empty texts, and have their help in groups."""

    def command(self, name: str | None = None, **keywords: Any) -> Callable[[_F], _F]:
        """Register a command."""
        return super().command(name, **{"cls": GroupedHelpCommand, **keywords})


def group(help: str) -> typer.Typer:
    """Return a program or a group of commands."""
    return _Program(
        cls=FilledGroup,
        rich_markup_mode=None,  # the tables of rich cut names of options at 80 columns
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},  # commands inherit them
        add_completion=False,
        pretty_exceptions_enable=False,
        help=help,
    )


def typer_type(name: str, kind: Any, option: Option, default: Any) -> Any:
    """Return an option's type for typer, with the declared name, help and limits."""
    flag = f"--{name.replace('_', '-')}"
    is_union = get_origin(kind) in (Union, UnionType)
    inner = [k for k in get_args(kind) if k is not type(None)] if is_union else [kind]
    if inner == [bool] and (option.off or default is not False):
        flag += f"/--{option.off or f'no-{flag[2:]}'}"
    form = typer.Option(flag, metavar=option.metavar, help=option.help, min=option.least, envvar=option.env)
    if get_origin(inner[0]) is tuple:  # typer has no tuples of any length
        return Annotated[list[get_args(inner[0])[0]] | None, form]  # type: ignore[misc]  # known at run time
    return Annotated[kind, form]


def declared(*names: str, of: type[Any] = Options, verb: str = "", **defaults: Any) -> Table:
    """Return a table of declared options.

    Args:
        names: Names of the options.
        of: The dataclass that declares them.
        verb: The command whose help they are in, if an option has a text of its own there.
        defaults: Defaults that replace the declared ones.
    """
    declarations, helps = options_of(of), HELP_OF_VERB.get(verb, {})
    table = {}
    for name in names:
        kind, option, default = declarations[name]
        option = replace(option, help=helps[name]) if name in helps else option
        default = defaults.get(name, default)
        table[name] = typer_type(name, kind, option, default), default
    return table


def help_of(annotation: Any) -> str:
    """Return the help of a declared type."""
    option = split(annotation)[1]
    assert option is not None  # it is declared with one
    return option.help


class Output(StrEnum):
    """The form of an answer."""

    TEXT = "text"
    JSON = "json"


def level(text: str) -> str:
    """Return the check level of a text."""
    if text not in LEVELS:
        raise typer.BadParameter(f"must be {', '.join(LEVELS[:-1])} or {LEVELS[-1]} (got {text!r})")
    return text


Srcs = Annotated[
    list[str],
    typer.Argument(metavar="SRC...", help=f"{help_of(Source)} Several: the folders that hold its files."),
]
Dst = Annotated[str, typer.Argument(metavar="DST", help=help_of(Destination))]
One = Annotated[str, typer.Argument(metavar="A", help="Path or fsspec URL of a checkpoint.")]
Other = Annotated[str, typer.Argument(metavar="B", help="Another checkpoint, of any format and topology.")]


class IfExists(StrEnum):
    """What to do where the destination exists."""

    FAIL = "fail"
    SKIP = "skip"
    REPLACE = "replace"


As = Annotated[Output, typer.Option("--output", help="Text for people, JSON for programs.")]
Every = Annotated[
    bool, typer.Option("--all", help="Print every row of long tables, as into a pipe. JSON always has them.")
]
Level = Annotated[
    str,
    typer.Option(
        "--level",
        metavar="|".join(LEVELS),
        parser=level,
        help="How deep to check. Each level includes those before it.",
    ),
]
Model = Annotated[
    bool,
    typer.Option("--model", help="Use the model part only, as export finds it, without wrapper prefixes."),
]
Prefixes = Annotated[
    list[str] | None,
    typer.Option(
        "--model-prefix", metavar="PREFIX", help="Prefix of the model's names: first in A, then in B."
    ),
]
RenameA = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        metavar="OLD=NEW",
        help="Rename a prefix of A's names, or a pattern with one * (repeatable).",
    ),
]
Alias = Annotated[
    list[str] | None,
    typer.Option("--tie", metavar="GONE=KEPT", help="Compare KEPT where a side has no GONE (repeatable)."),
]
Record = Annotated[
    str | None,
    typer.Option(
        "--record",
        metavar="PATH",
        help="Saved plan or JSON answer of the conversion between A and B. What it left out counts as equal.",
    ),
]
IgnoreDropped = Annotated[
    bool,
    typer.Option(
        "--ignore-dropped",
        help="Exit with 0 if only state that a reshard leaves out differs: random states, positions of "
        "data loaders.",
    ),
]
RootNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="ROOT", help="Names of watched roots. Default: all that are not paused."),
]
Wait = Annotated[
    str | None,
    typer.Option(
        "--wait",
        metavar="TIME",
        help="Wait up to TIME for an unfinished checkpoint. If another process is converting it, reuse its "
        "result.",
    ),
]
Existing = Annotated[
    IfExists,
    typer.Option(
        "--if-exists",
        help="What to do where DST exists: fail; skip, if it was made of this source by this request, by the "
        "catalog; replace, as --overwrite.",
    ),
]
Save = Annotated[
    str | None, typer.Option("--save", metavar="DIR", help="Save the plan for `ckptcore apply`.")
]


# Options that match the names of two checkpoints.
NAMES: Table = {
    "model": (Model, False),
    "model_prefix": (Prefixes, None),
    **declared("include", "exclude"),
    "rename": (RenameA, None),
    "tie": (Alias, None),
    **declared("keep_quantized", "weights"),
}
# Options that choose the names of a fingerprint.
PART: Table = {
    "model": (Model, False),
    **declared("model_prefix", "include", "exclude", "rename", "keep_quantized", "weights"),
}
LEFT_OUT: Table = {"record": (Record, None), "ignore_dropped": (IgnoreDropped, False)}
RUN: Table = declared(*MEANS, "device")
WAIT: Table = {"wait": (Wait, None), "if_exists": (Existing, IfExists.FAIL)}
SAVE: Table = {"save": (Save, None)}
ROWS: Table = {"all": (Every, False)}
ANSWER: Table = {"output": (As, Output.TEXT)}


def takes(*tables: Table) -> Callable[[_F], _F]:
    """Give a command the options of tables, in place of its ``**arguments``."""

    def wrap(command: _F) -> _F:
        signature = inspect.signature(command, eval_str=True)
        command_parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = {name: option for table in tables for name, option in table.items()}
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in options.items()
        ]
        command.__signature__ = signature.replace(parameters=[*command_parameters, *shared])  # type: ignore[attr-defined]
        return command

    return wrap


def named_places(names: Sequence[str], arguments: Mapping[str, Any]) -> list[str]:
    """Return paths and URLs as they are, and for an alias or the beginning of an id the checkpoint's place.

    A path that exists is never taken for another name, and a name that the catalog does not know stays.

    Args:
        names: What the command line has as SRC.
        arguments: The command's options; without ``catalog`` the default catalog is asked.
    """
    return [_named_place(name, arguments) for name in names]


def _named_place(name: str, arguments: Mapping[str, Any]) -> str:
    if arguments.get("no_catalog") or "://" in name or os.path.lexists(name):
        return name
    place = _resolved(name, arguments.get("catalog"))
    if place is None or place == os.path.abspath(name):
        return name
    terminal.line(f"{name} is {place} in the catalog", err=True)
    return place


def _resolved(name: str, catalog: str | None) -> str | None:
    """Return the place of the checkpoint that a catalog has under a name; None if it has none.

    Raises `UsageError` for the beginning of several ids.
    """
    from ckptcore.custody.gate import existing_catalog

    try:
        with existing_catalog(catalog) as opened:
            return None if opened is None else opened.place_of(name)
    except CatalogError:  # the error of whoever reads the path is then the one that helps
        return None
