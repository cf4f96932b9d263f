"""Write the command-line reference from the commands themselves, each time the site is built.

A page below ``reference/cli/`` has one line, ``<!-- command: VERB -->``; sections with the usage, the
example, the arguments and the options of that command, and of those below it, replace it. In
`reference/cli.md`, ``<!-- commands -->`` becomes the list of these pages.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, get_args, get_origin

import click
import typer.main
from sphinx.application import Sphinx

from ckptcore.cli.commands import COMMANDS as GROUPS
from ckptcore.cli.commands import EXAMPLES
from ckptcore.cli.main import program

COMMANDS, COMMAND = re.compile(r"<!-- commands -->"), re.compile(r"<!-- command: ([\w-]+) -->")


def setup(sphinx: Sphinx) -> dict[str, Any]:
    """Register the filling of pages as they are read."""
    sphinx.connect("source-read", _fill)
    return {"parallel_read_safe": True}


def sections(verb: str) -> str:
    """Return a command of `ckptcore`, and those below it, in MyST markdown."""
    wanted = f"ckptcore {verb}"
    return "\n".join(
        line
        for name, command in _commands()
        if name == wanted or name.startswith(f"{wanted} ")
        for line in _section(name, command)
    )


def contents() -> str:
    """Return a table of all commands in their groups, and the toctree of their pages."""
    lines, verbs = list[str](), list[str]()
    for title, names in GROUPS[""].items():
        lines += [f"## {title}", "", "| command | what it does |", "|---|---|"]
        for verb in names.split():
            text = (_root().commands[verb].help or "").strip().partition("\n")[0]
            lines.append(f"| [`{verb}`](cli/{verb}.md) | {text} |")
            verbs.append(verb)
        lines.append("")
    return "\n".join([*lines, "```{toctree}", ":hidden:", "", *(f"cli/{verb}" for verb in verbs), "```"])


def _fill(_: Sphinx, docname: str, source: list[str]) -> None:
    if docname == "reference/cli":
        source[0] = COMMANDS.sub(lambda _: contents(), source[0])
    elif docname.startswith("reference/cli/"):
        source[0] = COMMAND.sub(lambda match: sections(match[1]), source[0])


@functools.cache
def _root() -> Any:
    return typer.main.get_command(program())


@functools.cache
def _commands() -> list[tuple[str, Any]]:
    return list(_walk("ckptcore", _root()))


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
    depth = name.count(" ") - 1
    anchor = name.replace(" ", "-")
    context = click.Context(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"({anchor})="
    yield f"{'#' * (depth + 1)} `{name}`"
    yield ""
    yield (command.help or "").strip()
    yield ""
    yield f"```text\n{name} {usage}\n```"
    yield ""
    if example := EXAMPLES.get(name.partition(" ")[2]):
        yield f"```sh\n{name} {example}\n```"
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
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    return getattr(annotation, "__name__", str(annotation)).upper()
