"""Define the commands of a command line: they refuse empty texts, and their help is short and in groups.

An empty text is what a shell makes of a variable that is not set, and not a wish for the default. A
conversion has about thirty options, of which most commands need a few: ``--help`` has an example and the
options that people use first, ``--help --all`` has all.
"""

from __future__ import annotations

from typing import Any

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

# Names in the model's own tree, a name that must be new, and nobody.
_MAY_BE_EMPTY = frozenset({"model_prefix", "expect", "owner"})
MANY = 15  # with more options than these, the help is short
_FIRST = "config dtype to mesh include exclude max_file_size if_exists allow_incomplete output"
FIRST = frozenset(_FIRST.split(" "))
SECTIONS = {
    "Tensors and names": "model model_prefix include exclude rename tie weights keep_quantized keep_object "
    "allow_incomplete names arch allow_untried",
    "Files beside them": "config tokenizer",
    "Form of the output": "to dtype dtype_for max_file_size mesh sharding serialization",
    "Where the output exists": "if_exists overwrite overwrite_foreign overwrite_in_place resume wait",
    "Work and checks": "memory any_memory workers device verify digest fingerprint",
    "Catalog and answer": "catalog no_catalog meta output help",
}
EXAMPLES = {
    "inspect": "runs/llama/step-1000",
    "validate": "runs/llama/step-1000 --level bytes",
    "diff": "runs/llama/step-1000 runs/llama/step-2000",
    "fingerprint": "runs/llama/step-1000 --model",
    "consolidate": "runs/llama/step-1000 whole/step-1000 --to safetensors",
    "export": "runs/llama/step-1000 exports/step-1000 --config base-model --dtype bf16",
    "reshard": "runs/llama/step-1000 resharded --mesh fsdp=4,tp=2",
    "merge": "runs/llama/step-1000 runs/llama/step-2000 average --decay 0.9",
    "verify-export": "exports/step-1000 --against runs/llama/step-1000",
    "plan": "runs/llama/step-1000 exports/step-1000 --verb export --save plan",
    "apply": "plan",
    "serve": "runs/llama/step-1000 --dtype bf16",
    "formats": "--output json",
    "find": "exports/step-1000/model.safetensors",
    "sweep": "llama",
    "scrub": "--share 0.1",
    "retire": "llama --keep-last 3",
    "gc": "exports",
}
ALL = "--all"
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
        """Write the arguments and options."""
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the example of the command, if it has one."""
        example = EXAMPLES.get(ctx.command_path.partition(" ")[2])
        if example is not None:
            with formatter.section("Example"):
                formatter.write_text(f"{ctx.command_path} {example}")


class FilledGroup(TyperGroup):
    """A group of commands whose own options refuse empty texts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the group's own arguments; raise typer's error for an empty one."""
        rest = super().parse_args(ctx, args)
        _require_filled(self, ctx)
        return rest


def _require_filled(command: Any, ctx: Any) -> None:
    """Raise typer's error for a parameter that was given as an empty text."""
    for param in command.get_params(ctx):
        argument, source = ctx.params.get(param.name), ctx.get_parameter_source(param.name)
        empty = argument == "" or (isinstance(argument, list | tuple) and "" in argument)
        if empty and source is not None and source.name != "DEFAULT" and param.name not in _MAY_BE_EMPTY:
            raise BadParameter("must not be empty", ctx=ctx, param=param)


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """Write the arguments of a command, and its options in their groups."""
    records = [(param, param.get_help_record(ctx)) for param in command.get_params(ctx)]
    arguments = [record for param, record in records if record and param.param_type_name == "argument"]
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
        first = {n: option for n, option in options.items() if n in FIRST or n == "help" or n not in grouped}
        _write(formatter, "Options", list(first.values()))
        formatter.write_paragraph()
        formatter.write_text(f"{len(options) - len(first)} more options: {ctx.command_path} --help {ALL}")


def _write(formatter: Any, title: str, records: list[Any]) -> None:
    if records:
        with formatter.section(title):
            formatter.write_dl(records)
