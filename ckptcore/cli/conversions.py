"""Run `ckptcore consolidate`, `export`, `reshard`, `merge`, `plan`, `apply`, `serve` and `mount`.

Commands parse, call and print; `ckptcore.cli.main` handles errors. Flows have the same options
(`ckptcore.planning.options`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from ckptcore.cli import render as show
from ckptcore.cli.options import (
    ANSWER,
    ROWS,
    RUN,
    SAVE,
    WAIT,
    Dst,
    IfExists,
    Output,
    Srcs,
    declared,
    help_of,
    named_places,
    takes,
)
from ckptcore.cli.render_operations import already, waits
from ckptcore.errors import DestinationExists, UsageError
from ckptcore.planning.options import (
    CONTENT,
    MEANS,
    MODEL,
    OF_MERGE,
    OF_VERB,
    PLACE,
    PROOF,
    RECORD,
    SHARDS,
    Options,
    Source,
    here,
    read_rules,
)
from ckptcore.store import is_s3, reads_s3, split_url

if TYPE_CHECKING:
    from ckptcore.conversion.pipeline import Progress, Result
    from ckptcore.conversion.registration import Announcement
    from ckptcore.planning.request import Request, Settings

_VIRTUAL = tuple(name for name in CONTENT if name != "to")  # options of an export that is not written


@takes(declared(*OF_VERB["consolidate"], verb="consolidate"), WAIT, ANSWER)
def consolidate(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC... [DST]",
            help=f"{help_of(Source)} Several: the folders that hold its files. Then the new folder or file; "
            "default: SRC.consolidated.",
        ),
    ],
    **arguments: Any,
) -> None:
    """Write all tensors, named as stored, to a file or folder."""
    *src, last = places
    dst = last if src else None
    _convert(
        _means(arguments),
        _options(arguments).request("consolidate", named_places(src or [last], arguments), dst),
    )


@takes(declared(*OF_VERB["export"], verb="export"), WAIT, ANSWER)
def export(src: Srcs, dst: Dst, **arguments: Any) -> None:
    """Write the model part as a Hugging Face folder.

    The folder contains the shards, their index, the config and the tokenizer.
    """
    _convert(_means(arguments), _options(arguments).request("export", named_places(src, arguments), dst))


@takes(declared(*OF_VERB["reshard"], verb="reshard"), WAIT, ANSWER)
def reshard(
    src: Srcs, dst: Annotated[str, typer.Argument(metavar="DST", help="New folder.")], **arguments: Any
) -> None:
    """Write all state for the ranks of another mesh.

    Model, optimizer and trainer state are sharded over the axes fsdp, tp, pp and ep.
    """
    _convert(_means(arguments), _options(arguments).request("reshard", named_places(src, arguments), dst))


@takes(declared(*OF_MERGE), WAIT, ANSWER)
def merge(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC... DST",
            help="Two or more checkpoints of one model, of any formats, topologies and dtypes, in the order "
            "of the sum; then the new folder or file. With --run only DST, with --adapter one SRC.",
        ),
    ],
    shares: Annotated[
        str | None,
        typer.Option(
            "--weights", metavar="W,W,...", help="Weight of each SRC; they are divided by their sum."
        ),
    ] = None,
    decay: Annotated[
        float | None,
        typer.Option(
            "--decay",
            metavar="D",
            help="Exponential moving average in the order of SRC: D * average + (1 - D) * SRC.",
        ),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Take steps of this run, from the catalog.")
    ] = None,
    last: Annotated[
        int | None, typer.Option("--last", metavar="N", min=2, help="With --run: its last N steps.")
    ] = None,
    every: Annotated[
        int, typer.Option("--every", metavar="STEPS", min=1, help="With --run: multiples of STEPS only.")
    ] = 1,
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            metavar="DIR",
            help="LoRA adapter, with its adapter_config.json, to merge into the one SRC.",
        ),
    ] = None,
    verb: Annotated[
        str,
        typer.Option(
            "--verb",
            metavar="VERB",
            help="consolidate, export or reshard. Default: reshard with --mesh, export with --config or "
            "--tokenizer, otherwise consolidate.",
        ),
    ] = "",
    **arguments: Any,
) -> None:
    """Average checkpoints, or merge an adapter into a model.

    Each tensor with fractions is the weighted sum of those of all SRC, in float32; all else is the last
    SRC's. The optimizer is left out. The output is that of consolidate, export or reshard.
    """
    from ckptcore.operations.averages import merge_request, numbers, window

    *src, dst = places
    options = _options(arguments)
    if (run is None) != (last is None) or (run is not None and src):
        raise UsageError(
            "--run needs --last, and takes no SRC",
            hint="ckptcore merge --run RUN --last 8 DST; or name every SRC",
        )
    if run is not None and last is not None:
        src = window(options.register_in, run, last=last, every=every)
    weights = None if shares is None else numbers(shares)
    places = named_places(src, arguments)
    _convert(_means(arguments), merge_request(options, places, dst, weights, decay, verb, adapter))


@takes(declared(*MODEL, *_VIRTUAL, *MEANS))
def serve(
    context: typer.Context,
    src: Srcs,
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, help="Port; 0 picks a free one.")] = 8791,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Address to listen on. Elsewhere than on this machine, clients need a token.",
        ),
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="Name under which clients reach it (repeatable)."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Name of the folder, which is the title of the model card. Default: SRC's.",
        ),
    ] = None,
    **arguments: Any,
) -> None:
    """Serve the files of an export over HTTP.

    They are the files that `export` would write, byte for byte, computed from SRC when they are read.
    Nothing is written.
    """
    places = named_places(src, arguments)
    request = _options(arguments).request("export", places, name or split_url(places[0])[1])
    listening = {"host": host, "port": port, "hosts": list(allow_host or ())}
    _become_server("file_server", "CKPTCORE_SERVED", context, request, arguments, listening)


@takes(declared(*MODEL, *_VIRTUAL, *MEANS))
def mount(
    context: typer.Context,
    src: Srcs,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Empty folder to mount at.")],
    **arguments: Any,
) -> None:
    """Mount the files of an export as a folder.

    They are the files that `export` would write to DIR, byte for byte, computed from SRC when they are read.
    Nothing is written. It ends when DIR is unmounted, or with Ctrl-C.
    """
    request = _options(arguments).request("export", named_places(src, arguments), directory)
    _become_server("mounted_folder", "CKPTCORE_MOUNTED", context, request, arguments, {})


def _become_server(
    module: str,
    variable: str,
    context: typer.Context,
    request: Request,
    arguments: dict[str, Any],
    more: dict[str, Any],
) -> NoReturn:
    """Replace this process by a module of `ckptcore.page`, which finds its request in a variable.

    A server lives long: it goes without what a command does to start and end fast. URLs and options, which
    may contain a password, are no arguments: those are visible to all users.
    """
    import os
    import sys
    from dataclasses import asdict

    from ckptcore.core.columnar_file import canonical_json

    form = {
        "request": request.as_dict(),
        "settings": asdict(_options(arguments).settings()),
        "storage_options": context.find_root().params.get("storage_option") or [],
        **more,
    }
    command = [sys.executable, "-m", f"ckptcore.page.{module}"]
    os.execve(sys.executable, command, {**os.environ, variable: canonical_json(form).decode()})


@takes(declared(*MODEL, *SHARDS, *CONTENT, *PLACE, *MEANS, "no_catalog"), SAVE, ROWS, ANSWER)
def plan(
    src: Srcs,
    dst: Dst,
    verb: Annotated[
        str,
        typer.Option(
            "--verb",
            metavar="VERB",
            help="consolidate, export or reshard. Default: reshard with --mesh, otherwise consolidate.",
        ),
    ] = "",
    **arguments: Any,
) -> None:
    """Show what a conversion would do, and write nothing.

    Reports bytes, files, renames, casts, drops and the most memory that a run should take.
    """
    from ckptcore.checking.examine import inspect as read
    from ckptcore.conversion.destination import refuse_existing
    from ckptcore.conversion.staging.staged_plan import plan_into
    from ckptcore.planning.compose import compose
    from ckptcore.planning.plan import peak_memory
    from ckptcore.utils.memory import reusing_memory

    options = _options(arguments)
    request = options.request(
        verb or ("reshard" if options.mesh else "consolidate"), named_places(src, arguments), dst
    )
    settings = options.settings()
    folder = None if arguments["save"] is None else here("--save", arguments["save"])
    refuse_existing(request)
    with reusing_memory():
        manifest = read(request.source, request.recover, request.keep_quantized, request.weights)
        composed = compose(request, manifest) if folder is None else plan_into(folder, request, manifest)
    costs = None
    if is_s3(dst):
        from ckptcore.conversion.staging.s3_staging import upload_budget

        upload_budget(composed.plan.files, settings)  # as a run refuses it
    if reads_s3(request.source) or is_s3(dst):
        from ckptcore.conversion.request_costs import request_costs

        costs = request_costs(composed.plan, composed.files, request.source, dst, settings)
    peak, frees = peak_memory(composed.plan.source, composed.plan.files, settings), 0
    if options.register_in is not False:
        from ckptcore.custody.replacing import purge_frees

        frees = purge_frees(options.register_in, dst)
    as_json = arguments["output"] is Output.JSON
    show.plan(composed, manifest, peak, costs, frees, show_all=arguments["all"], as_json=as_json)


@takes(RUN, declared(*PROOF, *RECORD), ANSWER)
def apply(
    plan_dir: Annotated[
        str, typer.Argument(metavar="PLAN", help="Folder that `ckptcore plan --save` wrote.")
    ],
    **arguments: Any,
) -> None:
    """Execute a saved plan. Refuses if the source has changed since."""
    from ckptcore.conversion.staging.staged_plan import load_request

    _convert(_means(arguments), load_request(here("PLAN", plan_dir)))


def announced(meta: Sequence[str] | None) -> Announcement:
    """Return what ``--meta`` reports about a source. Raises `UsageError`."""
    from ckptcore.catalog.training import facts_of_pairs
    from ckptcore.conversion.registration import Announcement

    return Announcement(meta=facts_of_pairs(meta or ()).as_form())


def _options(arguments: dict[str, Any]) -> Options:
    """Return the options of a command, with the text of the sharding rules in place of their file."""
    return Options.of({**arguments, "sharding": read_rules(arguments.get("sharding"))})


@dataclass(frozen=True, slots=True)
class _Means:
    """What a command is given beside its request.

    Attributes:
        settings: Memory, threads and device.
        catalog: The catalog's URL; None is the default one, False is none.
        announcement: What ``--meta`` reports about the source.
        wait: Of ``--wait``.
        if_exists: What to do where the destination exists.
        as_json: The answer is for a program.
    """

    settings: Settings
    catalog: str | Literal[False] | None
    announcement: Announcement
    wait: str | None
    if_exists: IfExists
    as_json: bool


def _means(arguments: dict[str, Any]) -> _Means:
    options = Options.of(arguments)
    return _Means(
        options.settings(),
        options.register_in,
        announced(options.meta),
        arguments.get("wait"),
        arguments.get("if_exists", IfExists.FAIL),
        arguments["output"] is Output.JSON,
    )


def _convert(means: _Means, request: Request) -> None:
    """Convert and print the result."""
    from ckptcore.conversion.pipeline import convert

    if request.destination.lower().startswith("memory://"):
        raise UsageError(
            f"{request.destination} would end with this command: it is in the command's memory",
            hint="give a folder or an object store; memory:// is for programs that call ckptcore.convert",
        )
    wait = means.wait
    if means.if_exists is IfExists.REPLACE:
        request = replace(request, overwrite=True)
    elif means.if_exists is IfExists.SKIP:
        if means.catalog is False or request.replaces:
            raise UsageError("--if-exists skip asks the catalog, and excludes --no-catalog and --overwrite")
        # Only `convert_once` asks the catalog; without --wait it asks, and waits for nothing.
        wait = wait or "0s"
    with show.progress() as progress:
        if wait is None:
            result: Result | None = convert(
                request, means.settings, progress, means.catalog, announcement=means.announcement
            )
        else:
            try:
                result = _once(means, request, progress, wait)
            except DestinationExists as error:
                if means.if_exists is IfExists.SKIP:
                    error.hint = f"this request did not make it of this source; {error.hint}"
                raise
    if result is None:
        already(request.destination, as_json=means.as_json)
    else:
        show.result(result, as_json=means.as_json)


def _once(means: _Means, request: Request, progress: Progress, wait: str) -> Result | None:
    from ckptcore.operations.automation.convert_once import convert_once
    from ckptcore.utils.units import parse_duration

    return convert_once(
        request,
        means.settings,
        progress,
        means.catalog,
        wait_s=parse_duration(wait),
        on_wait=waits,
        announcement=means.announcement,
    )
