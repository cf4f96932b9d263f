"""`ckptcore inspect`, `validate`, `diff`, `fingerprint`, `verify-export`, `formats`: look, change nothing.

Parse, call, show; errors are those of `ckptcore.cli.main`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptcore.cli import render as show
from ckptcore.cli.options import ANSWER, NAMES, PART, RUN, As, Level, One, Other, Output, Src, declared, takes
from ckptcore.errors import CkptError
from ckptcore.operations.options import VerifyOptions
from ckptcore.planning.options import MEANS, RECORD, Options, options_of, pairs
from ckptcore.utils import terminal


@takes(declared("recover", "keep_quantized", "include", "exclude"), ANSWER)
def inspect(src: Src, **given: Any) -> None:
    """What is there: format with evidence, tensors, shapes, dtypes, bytes. Reads headers only."""
    # Not through `convert`: what only writes need not be imported to look.
    from ckptcore.formats import open_source, read_manifest

    manifest = read_manifest(
        open_source(src, recover=given["recover"], keep_quantized=given["keep_quantized"])
    )
    show.manifest(
        manifest, given["include"] or [], given["exclude"] or [], as_json=given["output"] is Output.JSON
    )


@takes(declared("recover", "keep_quantized", "workers", *RECORD), ANSWER)
def validate(
    src: Src,
    level: Annotated[Level, typer.Option("--level", help="How deep to look.")] = Level.COVER,
    **given: Any,
) -> None:
    """Is it there, whole, right? Exit code 1 when something is damaged."""
    from ckptcore.checking.examine import inspect as read
    from ckptcore.checking.examine import validate as check

    options, as_json = Options.of(given), given["output"] is Output.JSON
    try:
        with show.progress() as progress:
            manifest = read(src, options.recover, options.keep_quantized)
            report = check(manifest, level.value, workers=options.settings().threads, progress=progress)
            if not options.no_catalog and level in (Level.BYTES, Level.VALUES):
                from ckptcore.operations.registered_files import (
                    against_catalog,  # SQLAlchemy: only who needs it waits for it
                )

                report = against_catalog(manifest, report, src, options.catalog)
    except CkptError as error:
        if error.exit_code != 1:
            raise
        show.report(show.report_of(error, src, level.value), as_json=as_json)
        raise typer.Exit(1) from error
    # The answer first: an unusable catalog must not hide what took hours to find.
    show.report(report, as_json=as_json)
    if not options.no_catalog:
        from ckptcore.operations.registered_files import record_report

        if not record_report(manifest, src, report, options.catalog):
            terminal.line(
                "not recorded: the catalog has digests of these files, and they read as another checkpoint; "
                "try --level bytes to compare, or `ckptcore catalog rebuild --digests` to record them",
                err=True,
            )
    raise typer.Exit(0 if report.ok else 1)


@takes(NAMES, declared(*MEANS), ANSWER)
def diff(a: One, b: Other, **given: Any) -> None:
    """Is it the same? Names, dtypes, shapes, every bit, plain values. Exit code 1 when it is not."""
    from ckptcore.api import diff as compare

    with show.progress() as progress:
        found = compare(
            a,
            b,
            model=given["model"],
            model_prefix=given["model_prefix"] or (),
            include=given["include"] or (),
            exclude=given["exclude"] or (),
            rename=pairs("rename", given["rename"]),
            tie=pairs("tie", given["tie"]),
            keep_quantized=given["keep_quantized"],
            settings=Options.of(given).settings(),
            progress=progress,
        )
    show.difference(found, as_json=given["output"] is Output.JSON)
    raise typer.Exit(0 if found.equal else 1)


@takes(PART, RUN, declared(*RECORD), ANSWER)
def fingerprint(src: Src, **given: Any) -> None:
    """One digest of the numbers: equal for every copy, whatever its format, topology and files."""
    from ckptcore.api import fingerprint as take
    from ckptcore.checking.examine import inspect as read

    options = Options.of(given)
    manifest = read(src, keep_quantized=options.keep_quantized)
    with show.progress() as progress:
        found = take(
            manifest,
            model=given["model"],
            model_prefix=options.model_prefix,
            include=options.include or (),
            exclude=options.exclude or (),
            rename=pairs("rename", options.rename),
            settings=options.settings(),
            progress=progress,
        )
    show.fingerprint(found, src, as_json=given["output"] is Output.JSON)
    if not options.no_catalog:
        from ckptcore.conversion.registration import record_fingerprint

        record_fingerprint(manifest, src, found.tensors, dict(found.renamed), options.catalog)


# How an export was made, where the catalog does not know. These are fields of a request, too.
_MADE = (
    "include",
    "exclude",
    "rename",
    "dtype",
    "dtype_for",
    "tie",
    "model_prefix",
    "recover",
    "keep_quantized",
)


@takes(
    declared(*options_of(VerifyOptions), of=VerifyOptions), declared(*_MADE), RUN, declared(*RECORD), ANSWER
)
def verify_export(
    export: Annotated[str, typer.Argument(metavar="DST", help="What `ckptcore export` wrote.")], **given: Any
) -> None:
    """Is an export what its source holds? Exit code 1 when it is not, 26 when a check could not be done."""
    from ckptcore.api import prove_export
    from ckptcore.conversion.export_verdict import record_verdict

    asked, options = {name: given[name] for name in options_of(VerifyOptions)}, Options.of(given)
    with show.progress() as progress:
        known, found = prove_export(
            export,
            **asked,
            settings=options.settings(),
            progress=progress,
            catalog=options.register_in,
            **_made(options, given),
        )
    # The answer first: an unusable catalog must not hide what took hours to find.
    show.export_proof(found, as_json=given["output"] is Output.JSON)
    record_verdict(known, found, options.register_in)
    raise typer.Exit(found.exit_code)


def _made(options: Options, given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that the command line names."""
    request = options.request("export", "-", "-")
    return {name: getattr(request, name) for name in _MADE if given[name]}


def formats(output: As = Output.TEXT) -> None:
    """What can be read and written, and what is recognised and refused by name."""
    show.formats(as_json=output is Output.JSON)
