"""`ckptcore consolidate`, `export`, `reshard`, `plan`, `apply`: make something of a checkpoint.

Parse, call, show; errors are those of `ckptcore.cli.main`. Flows have the same options
(`ckptcore.planning.options`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptcore.cli import render as show
from ckptcore.cli.options import ANSWER, RUN, SAVE, WAIT, Dst, Output, Src, declared, takes
from ckptcore.cli.render_operations import already, waits
from ckptcore.planning.options import (
    CONTENT,
    MEANS,
    MODEL,
    OF_VERB,
    PLACE,
    PROOF,
    RECORD,
    SHARDS,
    Options,
    here,
    read_rules,
)

if TYPE_CHECKING:
    from ckptcore.conversion.pipeline import Progress, Result
    from ckptcore.planning.request import Request


@takes(declared(*OF_VERB["consolidate"]), WAIT, ANSWER)
def consolidate(
    src: Src,
    dst: Annotated[str | None, typer.Argument(metavar="[DST]", help="Default: SRC.consolidated")] = None,
    **given: Any,
) -> None:
    """Every tensor, model and optimizer, under its stored name, in one file or folder."""
    _convert(_options(given).request("consolidate", src, dst), given)


@takes(declared(*OF_VERB["export"]), WAIT, ANSWER)
def export(src: Src, dst: Dst, **given: Any) -> None:
    """The model part as a Hugging Face folder: shards, index, config and tokenizer."""
    _convert(_options(given).request("export", src, dst), given)


@takes(declared(*OF_VERB["reshard"]), WAIT, ANSWER)
def reshard(src: Src, dst: Dst, **given: Any) -> None:
    """Model, optimizer and trainer state, cut for the ranks of a mesh: fsdp, tp, pp, ep."""
    _convert(_options(given).request("reshard", src, dst), given)


@takes(declared(*MODEL, *SHARDS, *CONTENT, *PLACE, *MEANS, "no_catalog"), SAVE, ANSWER)
def plan(
    src: Src,
    dst: Dst,
    verb: Annotated[str, typer.Option("--verb", help="consolidate, export or reshard.")] = "",
    **given: Any,
) -> None:
    """What a conversion would do: bytes, files, renames, casts, drops, peak memory. Writes nothing."""
    from ckptcore.checking.examine import inspect as read
    from ckptcore.conversion.destination import refuse_existing
    from ckptcore.conversion.pipeline import peak_memory
    from ckptcore.conversion.saved_plan import plan_into
    from ckptcore.planning.compose import compose

    options = _options(given)
    request = options.request(verb or ("reshard" if options.mesh else "consolidate"), src, dst)
    settings = options.settings()
    folder = None if given["save"] is None else here("--save", given["save"])
    refuse_existing(request)
    manifest = read(src, request.recover, request.keep_quantized)
    composed = compose(request, manifest) if folder is None else plan_into(folder, request, manifest)
    show.plan(composed, peak_memory(composed.plan, settings), as_json=given["output"] is Output.JSON)


@takes(RUN, declared(*PROOF, *RECORD), ANSWER)
def apply(
    plan_dir: Annotated[str, typer.Argument(metavar="PLAN", help="What `ckptcore plan --save` wrote.")],
    **given: Any,
) -> None:
    """Carries out a saved plan; refuses when the source has changed since."""
    from ckptcore.conversion.saved_plan import load_request

    _convert(load_request(here("PLAN", plan_dir)), given)


def _options(given: dict[str, Any]) -> Options:
    """The options of a command; rules for sharding are read from the file that is named."""
    return Options.of({**given, "sharding": read_rules(given.get("sharding"))})


def _convert(request: Request, given: dict[str, Any]) -> None:
    """Converts, and answers. given: the arguments of the command, of which the request is made already."""
    from ckptcore.conversion.pipeline import convert

    options, wait = Options.of(given), given.get("wait")
    with show.progress() as progress:
        if wait is None:
            result: Result | None = convert(request, options.settings(), progress, options.register_in)
        else:
            result = _once(request, options, progress, wait)
    as_json = given["output"] is Output.JSON
    if result is None:
        already(request.destination, as_json=as_json)
    else:
        show.result(result, as_json=as_json)


def _once(request: Request, options: Options, progress: Progress, wait: str) -> Result | None:
    from ckptcore.operations.convert_once import convert_once
    from ckptcore.utils.units import parse_duration

    return convert_once(
        request, options.settings(), progress, options.register_in, wait_s=parse_duration(wait), on_wait=waits
    )
