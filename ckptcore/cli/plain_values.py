"""Convert the arguments of a command line without pydantic, where no conversion is needed.

typer converts every argument and option of a command with an adapter of pydantic, also those that were not
given: importing pydantic and building the adapters takes longer than `ckptcore inspect` of a small checkpoint
(decision 108 in DESIGN.md). Texts, lists of texts, choices and plain numbers need none. Every other value,
and every value that is wrong, goes to typer, whose messages stay.

An empty text is refused: it is what a shell makes of a variable that is not set, and not a wish for the
default.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

_UNSURE = object()
_NUMBER = re.compile("[0-9]{1,18}")
# Names in the model's own tree, a name that must be new, and nobody.
_MAY_BE_EMPTY = frozenset({"model_prefix", "expect", "owner"})


class FilledCommand(TyperCommand):
    """A command that refuses empty texts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments of a command line; raise typer's error for an empty one."""
        rest = super().parse_args(ctx, args)
        _require_filled(self, ctx)
        return rest


class PlainCommand(FilledCommand):
    """A command whose plain values are converted without pydantic; its help is that of `help_text`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments of a command line, and whether its help is to have all options."""
        if "--all" in args and not {"-h", "--help"}.isdisjoint(args):
            from ckptcore.cli.help_text import without_all

            args = without_all(ctx, args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options."""
        from ckptcore.cli.help_text import write_options

        write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the example."""
        from ckptcore.cli.help_text import write_example

        write_example(ctx, formatter)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with the one of ``--help``."""
        return _without_adapters(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """A group of commands whose own plain values are converted without pydantic."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the group's own arguments; raise typer's error for an empty one."""
        rest = super().parse_args(ctx, args)
        _require_filled(self, ctx)
        return rest

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with the one of ``--help``."""
        return _without_adapters(super().get_params(ctx))


def _require_filled(command: Any, ctx: Any) -> None:
    """Raise typer's error for a parameter that was given as an empty text."""
    for param in command.get_params(ctx):
        argument, source = ctx.params.get(param.name), ctx.get_parameter_source(param.name)
        empty = argument == "" or (isinstance(argument, list | tuple) and "" in argument)
        if empty and source is not None and source.name != "DEFAULT" and param.name not in _MAY_BE_EMPTY:
            raise BadParameter("must not be empty", ctx=ctx, param=param)


def _without_adapters(params: list[Any]) -> list[Any]:
    """Put `_PLAIN` in the place of adapters; a typer without that place converts as it always does."""
    for param in params:
        if getattr(param, "_runtime_param", _PLAIN) is None:
            param._runtime_param = _PLAIN
    return params


class _PlainConversion:
    """Convert one value, in place of the adapter that typer builds on first use."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the converted value; raise what typer raises for a wrong one."""
        converted = _plain(value, param)
        if converted is not _UNSURE:
            return converted
        param._runtime_param = None  # typer builds its own
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


_PLAIN = _PlainConversion()


def _plain(value: Any, param: Any) -> Any:
    """Return the converted value of a parameter, or `_UNSURE`."""
    several = getattr(param, "multiple", False) or param.nargs == -1
    if value is None:
        return () if several else None
    kind, info = param.type_descriptor.annotation, param.type_descriptor.parameter_info
    if several:
        plain = kind == list[str] and info.parser is None and isinstance(value, list | tuple)
        return list(value) if plain and all(map(_is_text, value)) else _UNSURE
    if info.parser is not None:
        return _parsed(value, info.parser)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next((member for member in kind if value in (member, member.value)), _UNSURE)
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else _UNSURE
    if kind is str:
        return value if _is_text(value) else _UNSURE
    if kind is int:
        return _bounded_int(value, info.min, info.max)
    return _UNSURE


def _is_text(value: object) -> bool:
    """Report whether a value is a text that pydantic accepts: without lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parsed(value: Any, parser: Any) -> Any:
    try:
        return parser(value)
    except ValueError:  # typer adds the parameter's name
        return _UNSURE


def _bounded_int(value: Any, least: float | None, most: float | None) -> Any:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = int(value)
    if type(value) is not int or (least is not None and value < least) or (most is not None and value > most):
        return _UNSURE
    return value
