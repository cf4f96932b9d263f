"""Options of the command line: those of a conversion as typer has them, and those of other commands.

A table of options is a name, a type and a default for each; `takes` gives a command the options of tables, so
that commands that share an option say the same of it. `declared` makes a table of what
`ckptcore.planning.options` says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import typer

from ckptcore.planning.options import MEANS, Destination, Option, Options, Source, options_of, split

Table = Mapping[str, tuple[Any, Any]]  # parameter -> (type, default), in the order of the help
_F = TypeVar("_F", bound=Callable[..., Any])


def spelled(name: str, kind: Any, option: Option, default: Any) -> Any:
    """The type of an option as typer reads it: its name, help and limits are those of its declaration."""
    flag = f"--{name.replace('_', '-')}"
    inner = [k for k in get_args(kind) if k is not type(None)] if _is_union(kind) else [kind]
    if inner == [bool] and (option.off or default is not False):
        flag += f"/--{option.off or f'no-{flag[2:]}'}"
    form = typer.Option(
        flag,
        metavar=option.metavar,
        help=option.help,
        min=option.least,
        envvar=option.env,
        hidden=option.hidden,
    )
    if get_origin(inner[0]) is tuple:  # typer has no tuples of any length
        return Annotated[list[get_args(inner[0])[0]] | None, form]  # type: ignore[misc]  # known at run time
    return Annotated[kind, form]


def declared(*names: str, of: type[Any] = Options, **defaults: Any) -> Table:
    """A table of declared options. of: the dataclass that declares them. defaults: in place of its own."""
    known = options_of(of)
    table = {}
    for name in names:
        kind, option, default = known[name]
        default = defaults.get(name, default)
        table[name] = spelled(name, kind, option, default), default
    return table


def help_of(annotation: Any) -> str:
    """The help of a declared type."""
    option = split(annotation)[1]
    assert option is not None  # it is declared with one
    return option.help


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


class Output(StrEnum):
    """How an answer is written."""

    TEXT = "text"
    JSON = "json"


class Level(StrEnum):
    """How deep to check."""

    FILES = "files"
    COVER = "cover"
    BYTES = "bytes"
    VALUES = "values"


Src = Annotated[str, typer.Argument(metavar="SRC", help=help_of(Source))]
Dst = Annotated[str, typer.Argument(metavar="DST", help=help_of(Destination))]
One = Annotated[str, typer.Argument(metavar="A", help="A checkpoint: a path or any fsspec URL.")]
Other = Annotated[str, typer.Argument(metavar="B", help="Another, of any format and topology.")]
As = Annotated[Output, typer.Option("--output", help="Text for people, JSON for programs.")]
Model = Annotated[
    bool, typer.Option("--model", help="The model parts alone, as export finds them, wrappers off.")
]
Prefixes = Annotated[
    list[str] | None,
    typer.Option("--model-prefix", metavar="PREFIX", help="Where the model is: in A, then in B."),
]
RenameA = Annotated[
    list[str] | None,
    typer.Option(
        "--rename", metavar="OLD=NEW", help="Rename a prefix of A's, or a pattern with one * (repeatable)."
    ),
]
Alias = Annotated[
    list[str] | None,
    typer.Option("--tie", metavar="GONE=KEPT", help="A side without GONE has KEPT there, too (repeatable)."),
]
RootNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ROOT]...", help="Names of watched roots; default: all that are not paused."),
]
Wait = Annotated[
    str | None,
    typer.Option(
        "--wait",
        metavar="TIME",
        help="Look again for so long at what is not whole yet, and make once what several ask for.",
    ),
]
Save = Annotated[
    str | None, typer.Option("--save", metavar="DIR", help="Keep the plan for `ckptcore apply`.")
]


# Which names of two checkpoints, brought together how.
NAMES: Table = {
    "model": (Model, False),
    "model_prefix": (Prefixes, None),
    **declared("include", "exclude"),
    "rename": (RenameA, None),
    "tie": (Alias, None),
    **declared("keep_quantized"),
}
# The names that a fingerprint is of.
PART: Table = {
    "model": (Model, False),
    **declared("model_prefix", "include", "exclude", "rename", "keep_quantized"),
}
RUN: Table = declared(*MEANS, "device")
WAIT: Table = {"wait": (Wait, None)}
SAVE: Table = {"save": (Save, None)}
ANSWER: Table = {"output": (As, Output.TEXT)}


def takes(*tables: Table) -> Callable[[_F], _F]:
    """Gives a command these options, in place of its ``**given``."""

    def wrap(command: _F) -> _F:
        seen = inspect.signature(command, eval_str=True)
        own = [p for p in seen.parameters.values() if p.kind is not p.VAR_KEYWORD]
        every = {name: option for table in tables for name, option in table.items()}
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in every.items()
        ]
        command.__signature__ = seen.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        return command

    return wrap
