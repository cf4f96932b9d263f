"""The command line: thin verbs over the library. Parse, call, show.

Answers go to standard output (text, or JSON with ``--output json``); words and progress go to
standard error. Every error ends with its documented exit code, and never with a traceback.
"""

from __future__ import annotations

import copy
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptcore.cli import operations as clitend
from ckptcore.cli import render as show
from ckptcore.cli import render_operations as tendoutput
from ckptcore.cli.catalog import app as catalog_app
from ckptcore.cli.catalog import which as catalog_which
from ckptcore.cli.options import (
    ANSWER,
    CONTENT,
    DEVICE,
    MEANS,
    MODEL,
    NAMES,
    PART,
    PLACE,
    PREFIX,
    PROOF,
    RECORD,
    SAVE,
    SHARDS,
    WAIT,
    As,
    Catalog,
    Dst,
    Exclude,
    Include,
    Keep,
    Level,
    NoCatalog,
    One,
    Other,
    Output,
    Recover,
    Src,
    To,
    Workers,
    takes,
)
from ckptcore.cli.rebuild import rebuild as catalog_rebuild
from ckptcore.errors import CkptError, InternalError, Interrupted, UsageError
from ckptcore.utils import terminal
from ckptcore.utils.units import parse_size

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Sharded training checkpoints made whole: validated, consolidated and exported in bounded memory.",
)
catalog_app.command("rebuild")(catalog_rebuild)
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
) -> None:
    """Sharded training checkpoints made whole: validated, consolidated and exported in bounded memory."""


@app.command()
def inspect(
    src: Src,
    recover: Recover = False,
    keep_quantized: Keep = False,
    include: Include = None,
    exclude: Exclude = None,
    output: As = Output.TEXT,
) -> None:
    """What is there: format with evidence, tensors, shapes, dtypes, bytes. Reads headers only."""
    # Not through `convert`: what only writes need not be imported to look.
    from ckptcore.formats import open_source, read_manifest

    manifest = read_manifest(open_source(src, recover=recover, keep_quantized=keep_quantized))
    show.manifest(manifest, include or [], exclude or [], as_json=output is Output.JSON)


@app.command()
def validate(
    src: Src,
    level: Annotated[Level, typer.Option("--level", help="How deep to look.")] = Level.COVER,
    recover: Recover = False,
    keep_quantized: Keep = False,
    workers: Workers = None,
    no_catalog: NoCatalog = False,
    catalog: Catalog = None,
    output: As = Output.TEXT,
) -> None:
    """Is it there, whole, right? Exit code 1 when something is damaged."""
    from ckptcore.checking.examine import inspect as read
    from ckptcore.checking.examine import validate as check
    from ckptcore.planning.request import Settings

    try:
        with show.progress() as progress:
            manifest = read(src, recover, keep_quantized)
            report = check(
                manifest, level.value, workers=Settings(workers=workers).threads, progress=progress
            )
            if not no_catalog and level in (Level.BYTES, Level.VALUES):
                from ckptcore.operations.registered_files import (
                    against_catalog,  # SQLAlchemy: only who needs it waits for it
                )

                report = against_catalog(manifest, report, src, catalog)
    except CkptError as error:
        if error.exit_code != 1:
            raise
        show.report(show.report_of(error, src, level.value), as_json=output is Output.JSON)
        raise typer.Exit(1) from error
    # The answer first: an unusable catalog must not hide what took hours to find.
    show.report(report, as_json=output is Output.JSON)
    if not no_catalog:
        from ckptcore.operations.registered_files import record_report

        if not record_report(manifest, src, report, catalog):
            terminal.line(
                "not recorded: the catalog has digests of these files, and they read as another checkpoint; "
                "try --level bytes to compare, or `ckptcore catalog rebuild --digests` to record them",
                err=True,
            )
    raise typer.Exit(0 if report.ok else 1)


@app.command()
@takes(NAMES, MEANS, ANSWER)
def diff(a: One, b: Other, **given: Any) -> None:
    """Is it the same? Names, dtypes, shapes, every bit, plain values. Exit code 1 when it is not."""
    from ckptcore.api import diff as compare

    settings = _settings(given)
    with show.progress() as progress:
        found = compare(
            a,
            b,
            model=given["model"],
            model_prefix=given["model_prefix"] or (),
            include=given["include"] or (),
            exclude=given["exclude"] or (),
            rename=_pairs(given["rename"], "--rename"),
            tie=_pairs(given["tie"], "--tie"),
            keep_quantized=given["keep_quantized"],
            settings=settings,
            progress=progress,
        )
    show.difference(found, as_json=given["output"] is Output.JSON)
    raise typer.Exit(0 if found.equal else 1)


@app.command()
@takes(PART, MEANS, DEVICE, RECORD, ANSWER)
def fingerprint(src: Src, **given: Any) -> None:
    """One digest of the numbers: equal for every copy, whatever its format, topology and files."""
    from ckptcore.api import fingerprint as take
    from ckptcore.checking.examine import inspect as read

    manifest = read(src, keep_quantized=given["keep_quantized"])
    with show.progress() as progress:
        found = take(
            manifest,
            model=given["model"],
            model_prefix=given["model_prefix"],
            include=given["include"] or (),
            exclude=given["exclude"] or (),
            rename=_pairs(given["rename"], "--rename"),
            settings=_settings(given),
            progress=progress,
        )
    show.fingerprint(found, src, as_json=given["output"] is Output.JSON)
    if not given["no_catalog"]:
        from ckptcore.conversion.registration import record_fingerprint

        record_fingerprint(manifest, src, found.tensors, dict(found.renamed), given["catalog"])


@app.command()
@takes(CONTENT, MEANS, DEVICE, PLACE, PROOF, WAIT, ANSWER)
def consolidate(
    src: Src,
    dst: Annotated[str | None, typer.Argument(metavar="[DST]", help="Default: SRC.consolidated")] = None,
    to: To = "",
    **given: Any,
) -> None:
    """Every tensor, model and optimizer, under its stored name, in one file or folder."""
    _convert(_request("consolidate", src, dst, to, given), given)


@app.command()
@takes(MODEL, CONTENT, MEANS, DEVICE, PLACE, PROOF, WAIT, ANSWER)
def export(src: Src, dst: Dst, to: To = "", **given: Any) -> None:
    """The model part as a Hugging Face folder: shards, index, config and tokenizer."""
    _convert(_request("export", src, dst, to, given), given)


@app.command()
@takes(SHARDS, PREFIX, CONTENT, MEANS, DEVICE, PLACE, PROOF, WAIT, ANSWER)
def reshard(src: Src, dst: Dst, to: To = "", **given: Any) -> None:
    """Model, optimizer and trainer state, cut for the ranks of a mesh: fsdp, tp, pp, ep."""
    _convert(_request("reshard", src, dst, to, given), given)


@app.command()
@takes(MODEL, SHARDS, CONTENT, PLACE, MEANS, SAVE, ANSWER)
def plan(
    src: Src,
    dst: Dst,
    to: To = "",
    verb: Annotated[str, typer.Option("--verb", help="consolidate, export or reshard.")] = "",
    **given: Any,
) -> None:
    """What a conversion would do: bytes, files, renames, casts, drops, peak memory. Writes nothing."""
    from ckptcore.checking.examine import inspect as read
    from ckptcore.conversion.destination import refuse_existing
    from ckptcore.conversion.pipeline import peak_memory
    from ckptcore.conversion.saved_plan import plan_into
    from ckptcore.planning.compose import compose

    verb = verb or ("reshard" if given["mesh"] else "consolidate")
    request = _request(verb, src, dst, to, given)
    settings = _settings(given)
    folder = None if given["save"] is None else _here(given["save"], "--save")
    refuse_existing(request)
    manifest = read(src, request.recover, request.keep_quantized)
    composed = compose(request, manifest) if folder is None else plan_into(folder, request, manifest)
    show.plan(composed, peak_memory(composed.plan, settings), as_json=given["output"] is Output.JSON)


@app.command()
@takes(MEANS, DEVICE, PROOF, ANSWER)
def apply(
    plan_dir: Annotated[str, typer.Argument(metavar="PLAN", help="What `ckptcore plan --save` wrote.")],
    **given: Any,
) -> None:
    """Carries out a saved plan; refuses when the source has changed since."""
    from ckptcore.conversion.saved_plan import load_request

    _convert(load_request(_here(plan_dir, "PLAN")), given)


@app.command()
def formats(output: As = Output.TEXT) -> None:
    """What can be read and written, and what is recognised and refused by name."""
    show.formats(as_json=output is Output.JSON)


# Behind the verbs above, as the help shows them.
app.command("which")(catalog_which)
app.command()(clitend.sweep)
app.command()(clitend.scrub)
app.command()(clitend.retire)


def run(argv: list[str]) -> int:
    """Runs the command line; gives the exit code. Errors become words (or JSON) and a code."""
    as_json = any(a == "--output=json" for a in argv) or ("--output", "json") in pairwise(argv)
    try:
        done: Any = _asked(argv)(args=argv, prog_name="ckptcore", standalone_mode=False)
        return done if isinstance(done, int) else 0
    except CkptError as error:
        show.error(error, as_json=as_json)
        return error.exit_code
    except typer.Exit as error:
        return error.exit_code
    except typer.TyperException as error:
        words = error.format_message()
        if words:  # without any argument the help has been shown, and says enough
            show.error(UsageError(words, hint=_usage_hint(error)), as_json=as_json)
        return UsageError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        show.error(Interrupted("stopped by the user"), as_json=as_json)
        return Interrupted.exit_code
    except BrokenPipeError:  # the reader of our output has gone: nothing is left to say
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  the interpreter flushes it when it ends
        return 0
    except Exception as error:
        # The last net: what nobody foresaw ends in words and a code of its own, too.
        if os.environ.get("CKPTCORE_TRACEBACK"):
            terminal.report(error)
        show.error(InternalError(f"{type(error).__name__}: {error}"), as_json=as_json)
        return InternalError.exit_code


def _asked(argv: list[str]) -> typer.Typer:
    """The command line with nothing but the verb that is asked for; whole where none is, as for help.

    typer makes every verb that it is given before it looks at one: all of them take 20 ms of each start.
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


def _request(verb: str, src: str, dst: str | None, to: str, given: dict[str, Any]) -> Any:
    from ckptcore.planning.request import Request

    return Request(
        src,
        src.rstrip("/") + ".consolidated" if dst is None else dst,
        verb,
        to,
        tuple(given["include"] or ()),
        tuple(given["exclude"] or ()),
        _pairs(given["rename"], "--rename"),
        given["dtype"],
        _pairs(given["dtype_for"], "--dtype-for"),
        given.get("model_prefix"),
        given.get("config"),
        parse_size(given["max_file_size"]),
        _pairs(given["tie"], "--tie"),
        given["recover"],
        given["overwrite"],
        given["resume"],
        given["keep_quantized"],
        given.get("mesh") or "",
        _text_of(given.get("sharding")),
        given.get("serialization", "torch_save"),
        given["overwrite_foreign"],
    )


def _here(text: str, option: str) -> Path:
    """A path of this machine. A URL made into one would be a folder called ``s3:``, credentials and all."""
    from ckptcore.store import local_path

    path = local_path(text)
    if path is None:
        raise UsageError(f"{option} {text} is on another machine", hint="name a path of this one")
    return path


def _text_of(named: str | None) -> str | None:
    if named is None:
        return None
    from ckptcore.topology.rules_file import MAX_BYTES

    path = _here(named, "--sharding")
    try:
        with path.open("rb") as file:  # what is named by mistake is not read to its end
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UsageError(
                f"--sharding {path} has more than {MAX_BYTES} bytes", hint="name a file of rules"
            )
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--sharding {path} cannot be read: {error}") from error


def _settings(given: dict[str, Any]) -> Any:
    from ckptcore.planning.request import Settings

    return Settings(
        parse_size(given["memory"]),
        given["workers"],
        given.get("device", "cpu"),
        given.get("verify", True),
        given.get("digest", True),
        given.get("fingerprint"),
    )


def _convert(request: Any, given: dict[str, Any]) -> None:
    from ckptcore.conversion.pipeline import convert
    from ckptcore.conversion.publish import Result

    catalog: str | bool | None = False if given["no_catalog"] else given["catalog"]
    as_json = given["output"] is Output.JSON
    result: Result | None
    with show.progress() as progress:
        if given.get("wait") is None:
            result = convert(request, _settings(given), progress, catalog)
        else:
            result = _once(request, given, progress, catalog)
    if result is not None:
        show.result(result, as_json=as_json)
    else:
        tendoutput.already(request.destination, as_json=as_json)


def _once(request: Any, given: dict[str, Any], progress: Any, catalog: str | bool | None) -> Any:
    from ckptcore.operations.convert_once import convert_once
    from ckptcore.utils.units import parse_duration

    return convert_once(
        request,
        _settings(given),
        progress,
        catalog,
        wait_s=parse_duration(given["wait"]),
        told=tendoutput.waits,
    )


def _pairs(given: list[str] | None, option: str) -> tuple[tuple[str, str], ...]:
    out = []
    for text in given or ():
        left, sign, right = text.partition("=")
        if not sign or not left:
            raise UsageError(f"{option} {text!r} is not LEFT=RIGHT")
        out.append((left, right))
    return tuple(out)
