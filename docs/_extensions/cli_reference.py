"""Write the command-line reference from the commands themselves, each time the site is built.

The page `reference/cli.md` has one line, ``<!-- commands -->``; sections with the usage, the arguments and
the options of every command replace it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import click
import typer.main
from sphinx.application import Sphinx

from ckptcore.cli.main import program

MARK = re.compile(r"<!-- commands -->")


def setup(sphinx: Sphinx) -> dict[str, Any]:
    """Register the filling of pages as they are read."""
    sphinx.connect("source-read", _fill)
    return {"parallel_read_safe": True}


def sections() -> str:
    """Return every command of `ckptcore` in MyST markdown, groups before their commands."""
    root = typer.main.get_command(program())
    return "\n".join(line for name, command in _walk("ckptcore", root) for line in _section(name, command))


def _fill(_: Sphinx, docname: str, source: list[str]) -> None:
    if docname == "reference/cli":
        source[0] = MARK.sub(lambda _: sections(), source[0])


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield commands in the order of `--help`, depth first; hidden ones are left out."""
    context = click.Context(command, info_name=name)
    for child in command.list_commands(context):
        found = command.get_command(context, child)
        if found is None or found.hidden:
            continue
        yield f"{name} {child}", found
        if hasattr(found, "list_commands"):
            yield from _walk(f"{name} {child}", found)


def _section(name: str, command: Any) -> Iterator[str]:
    depth = name.count(" ")
    anchor = name.replace(" ", "-")
    context = click.Context(command, info_name=name)
    usage = re.sub(r"\{(\w+)\}", r"\1", " ".join(command.collect_usage_pieces(context)))
    yield f"({anchor})="
    yield f"{'#' * (depth + 1)} `{name}`"
    yield ""
    yield (command.help or "").strip()
    yield ""
    yield f"```text\n{name} {usage}\n```"
    yield ""
    params = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    for param in params:
        yield from _entry(param)


def _entry(param: Any) -> Iterator[str]:
    """Yield a definition list's entry: the spelling, then help and default."""
    spelled = ", ".join(f"`{o}`" for o in [*param.opts, *param.secondary_opts])
    if param.param_type_name == "argument":
        spelled = f"`{param.metavar or param.name.upper()}`"
    elif not param.is_flag:
        spelled += f" `{param.metavar or _values(param.type_descriptor.annotation)}`"
    text = (getattr(param, "help", None) or "").strip() or "(no description)"
    default = getattr(param, "show_default", False) and param.default not in (None, (), [], False, "")
    notes = (
        [f"Default: `{getattr(param.default, 'value', param.default)}`."]
        if default and not callable(param.default)
        else []
    )
    if getattr(param, "multiple", False):
        notes.append("May be given several times." if "repeatable" not in text else "")
    if getattr(param, "envvar", None):
        notes.append(f"Environment: `{param.envvar}`.")
    yield spelled
    yield f": {' '.join([text, *filter(None, notes)])}".replace("\n", " ")
    yield ""


def _values(annotation: Any) -> str:
    """Return what an option without a metavar takes: the members of an enum, or the type's name."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "|".join(str(member.value) for member in annotation)
    return getattr(annotation, "__name__", str(annotation)).upper()
