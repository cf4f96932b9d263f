"""Define the commands of a command line: they refuse empty texts, and their help is short and in groups.

An empty text is what a shell makes of a variable that is not set, and not a wish for the default. A
conversion has about thirty options, of which most commands need a few: ``--help`` has an example and the
options that people use first, ``--help --all`` has all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

# Names in the model's own tree, a name that must be new, and nobody.
_MAY_BE_EMPTY = frozenset({"model_prefix", "expect", "owner"})
MANY = 15  # with more options than these, the help is short
_FIRST = "config dtype to mesh include exclude max_file_size if_exists allow_incomplete output"
FIRST = frozenset(_FIRST.split(" "))
# Commands whose options have the names of others, and another meaning.
FIRST_OF = {"verify-export": frozenset({"output", "dtype"})}
SECTIONS = {
    "Tensors and names": "model model_prefix include exclude rename tie weights keep_quantized keep_object "
    "allow_incomplete names arch allow_untried",
    "Files beside them": "config tokenizer",
    "Form of the output": "to dtype dtype_for max_file_size mesh sharding serialization",
    "Where the output exists": "if_exists overwrite overwrite_foreign overwrite_in_place resume wait",
    "Work and checks": "memory any_memory workers device verify digest fingerprint stats",
    "Catalog and answer": "catalog no_catalog meta all output help",
}
# Group of commands -> its sections, in the order of the table.
COMMANDS = {
    "": {
        "Look": "inspect validate diff fingerprint stats formats",
        "Convert": "export consolidate reshard merge verify-export serve mount plan apply",
        "Publish": "push sign verify-signature",
        "Operate": "sweep scrub retire thin gc",
        "Remember": "catalog find",
    },
    "catalog": {
        "Look": "list show resolve lineage find best history sql page",
        "Record": "meta tag rebuild upgrade restore",
        "Manage": "alias hold obligation root inbox outbox",
    },
}
_RUN, _EXPORT = "runs/llama/step-1000", "exports/step-1000"
EXAMPLES = {
    "": f"export {_RUN} {_EXPORT} --config base-model",
    "inspect": _RUN,
    "validate": f"{_RUN} --level bytes",
    "diff": f"{_RUN} runs/llama/step-2000",
    "fingerprint": f"{_RUN} --model",
    "stats": f"{_RUN} runs/llama/step-2000",
    "consolidate": f"{_RUN} whole/step-1000 --to safetensors",
    "export": f"{_RUN} {_EXPORT} --config base-model --dtype bf16",
    "reshard": f"{_RUN} resharded --mesh fsdp=4,tp=2",
    "merge": f"{_RUN} runs/llama/step-2000 average --decay 0.9",
    "verify-export": f"{_EXPORT} --against {_RUN}",
    "plan": f"{_RUN} {_EXPORT} --verb export --save plan",
    "apply": "plan",
    "serve": f"{_RUN} --dtype bf16",
    "mount": f"{_RUN} look --dtype bf16",
    "formats": "--output json",
    "push": f"{_EXPORT} hf://org/name@step-1000",
    "sign": f"{_EXPORT} --key private.pem",
    "verify-signature": f"{_EXPORT} --key public.pem",
    "find": f"{_EXPORT}/model.safetensors",
    "sweep": "llama",
    "scrub": "--share 0.1",
    "retire": "llama --keep-last 3",
    "thin": "llama --keep-optimizer-last 2",
    "gc": "s3://models/exports",
    "catalog": f"lineage {_EXPORT}",
    "catalog upgrade": "",
    "catalog restore": _RUN,
    "catalog list": "--run llama --kind source",
    "catalog show": _EXPORT,
    "catalog resolve": "llama/prod",
    "catalog lineage": _EXPORT,
    "catalog find": f"{_EXPORT}/model.safetensors",
    "catalog tag": f"{_EXPORT} eval.mmlu=0.71",
    "catalog meta": f"{_RUN} metrics.loss=2.31 git_commit=3f9a",
    "catalog best": "loss --run llama",
    "catalog history": "llama",
    "catalog page": "--port 8080",
    "catalog sql": '"SELECT run, step, uri FROM latest_exports"',
    "catalog rebuild": "runs exports",
    "catalog alias": f"set llama/prod {_EXPORT}",
    "catalog alias set": f"llama/prod {_EXPORT}",
    "catalog alias history": "llama/prod",
    "catalog alias rollback": "llama/prod",
    "catalog alias list": "--output json",
    "catalog alias remove": "llama/prod",
    "catalog hold": f"place {_RUN} --reason 'the paper cites it'",
    "catalog hold place": f"{_RUN} --reason 'the paper cites it'",
    "catalog hold list": _RUN,
    "catalog hold release": "3f9a",
    "catalog obligation": "list",
    "catalog obligation list": "--output json",
    "catalog obligation release": "3f9a --accept-loss 'optimizer.*'",
    "catalog root": "show llama",
    "catalog root add": "llama /runs/llama --verb export --config base-model",
    "catalog root set": "llama --config base-model",
    "catalog root show": "llama",
    "catalog root check": "llama",
    "catalog root retain": "llama '{\"keep_last\": 3}'",
    "catalog root list": "--output json",
    "catalog root pause": "llama",
    "catalog root resume": "llama",
    "catalog root remove": "llama",
    "catalog inbox": "list",
    "catalog inbox list": "--output json",
    "catalog inbox retry": "--failed",
    "catalog outbox": "list",
    "catalog outbox list": "--output json",
    "catalog outbox retry": "--failed",
}
ALL = "--all"
_BRACES = re.compile(r"\{([^{}]*)\}(\.\.\.|)")
_TYPE = re.compile(r" <[^<>]*>$")  # of an argument: its help says what it is
_WORD = re.compile(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+")
_WANTS_ALL = "ckptcore.cli.commands.all"  # in the context of a command


class FilledCommand(TyperCommand):
    """A command that refuses empty texts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments of a command line; raise typer's error for an empty one."""
        rest = super().parse_args(ctx, args)
        _require_filled(self, ctx)
        return rest


class GroupedHelpCommand(FilledCommand):
    """A command whose help has an example and groups of options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments of a command line, and whether its help is to have all options."""
        if ALL in args and not {"-h", "--help"}.isdisjoint(args):
            ctx.meta[_WANTS_ALL] = True
            args = [argument for argument in args if argument != ALL]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options in their groups."""
        records = [(param, param.get_help_record(ctx)) for param in self.get_params(ctx)]
        arguments = [
            (_TYPE.sub("", record[0]), record[1])
            for param, record in records
            if record and param.param_type_name == "argument"
        ]
        options = {
            param.name: record for param, record in records if record and param.param_type_name == "option"
        }
        _write(formatter, "Arguments", arguments)
        grouped = {name: title for title, names in SECTIONS.items() for name in names.split()}
        if len(options) <= MANY:
            _write(formatter, "Options", list(options.values()))
        elif ctx.meta.get(_WANTS_ALL):
            _write(formatter, "Options", [option for name, option in options.items() if name not in grouped])
            for title, names in SECTIONS.items():
                _write(formatter, title, [options[name] for name in names.split() if name in options])
        else:
            names_first = FIRST_OF.get(_command(ctx), FIRST)
            first = {n: o for n, o in options.items() if n in names_first or n == "help" or n not in grouped}
            _write(formatter, "Options", list(first.values()))
            formatter.write_paragraph()
            formatter.write_text(f"{len(options) - len(first)} more options: {ctx.command_path} --help {ALL}")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line."""
        return usage_pieces(super().collect_usage_pieces(ctx))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the example of the command, if it has one."""
        write_example(ctx, formatter)


class FilledGroup(TyperGroup):
    """A group of commands whose own options refuse empty texts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the group's own arguments; raise typer's error for an empty one."""
        rest = super().parse_args(ctx, args)
        _require_filled(self, ctx)
        return rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in their sections; one that is in no section is in the last."""
        commands = {
            name: command
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) is not None and not command.hidden
        }
        sections = {
            title: names.split() for title, names in COMMANDS.get(_command(ctx), {"Commands": ""}).items()
        }
        listed = {name for names in sections.values() for name in names}
        sections[list(sections)[-1]] += [name for name in commands if name not in listed]
        width = max(map(len, commands), default=0)
        limit = formatter.width - 6 - width
        for title, names in sections.items():
            rows = [
                (f"{name:<{width}}", commands[name].get_short_help_str(limit))
                for name in names
                if name in commands
            ]
            _write(formatter, title, rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the example of the group, if it has one."""
        write_example(ctx, formatter)


def _require_filled(command: Any, ctx: Any) -> None:
    """Raise typer's error for a parameter that was given as an empty text."""
    for param in command.get_params(ctx):
        argument, source = ctx.params.get(param.name), ctx.get_parameter_source(param.name)
        empty = argument == "" or (isinstance(argument, list | tuple) and "" in argument)
        if empty and source is not None and source.name != "DEFAULT" and param.name not in _MAY_BE_EMPTY:
            raise BadParameter("must not be empty", ctx=ctx, param=param)


def usage_pieces(pieces: Iterable[str]) -> list[str]:
    """Return the pieces of a usage line as people read them: without braces, and with dots once.

    >>> usage_pieces(["[OPTIONS]", "{SRC...}...", "{DST}", "{KEY=VALUE}...", "[ROOT]..."])
    ['[OPTIONS]', 'SRC...', 'DST', 'KEY=VALUE...', '[ROOT]...']
    """
    return [_BRACES.sub(lambda m: m[1] if "..." in m[1] else m[1] + m[2], piece) for piece in pieces]


def write_example(ctx: Any, formatter: Any) -> None:
    """Write the example of a command on lines that a shell takes as they are."""
    example = EXAMPLES.get(_command(ctx))
    if example is None:
        return
    with formatter.section("Example"):
        indent = " " * formatter.current_indent
        lines = [""]
        for word in shell_terms(f"{ctx.command_path} {example}".strip()):
            if lines[-1] and len(indent) + len(lines[-1]) + len(word) + 3 > formatter.width:
                lines.append("   ")
            lines[-1] += f" {word}" if lines[-1] else word
        formatter.write(" \\\n".join(indent + line for line in lines) + "\n")


def shell_terms(text: str) -> list[str]:
    """Return the terms of a command line with their quotes; an option keeps its value beside it.

    >>> shell_terms("a --reason 'b c' d")
    ['a', "--reason 'b c'", 'd']
    """
    terms: list[str] = []
    for word in _WORD.findall(text):
        if terms and terms[-1].startswith("--") and " " not in terms[-1] and not word.startswith("--"):
            terms[-1] += f" {word}"
        else:
            terms.append(word)
    return terms


def _command(ctx: Any) -> str:
    """Return the names of a command behind that of the program."""
    return str(ctx.command_path.partition(" ")[2])


def _write(formatter: Any, title: str, records: list[Any]) -> None:
    if records:
        with formatter.section(title):
            formatter.write_dl(records)
