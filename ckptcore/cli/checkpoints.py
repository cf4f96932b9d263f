"""Run `ckptcore inspect`, `validate`, `diff`, `fingerprint`, `stats`, `verify-export` and `formats`.

They write nothing. Commands parse, call and print; `ckptcore.cli.main` handles errors.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptcore.cli import render as show
from ckptcore.cli.options import (
    ANSWER,
    LEFT_OUT,
    NAMES,
    PART,
    ROWS,
    RUN,
    As,
    Level,
    One,
    Other,
    Output,
    Srcs,
    declared,
    named_places,
    takes,
)
from ckptcore.errors import CkptError
from ckptcore.planning.options import (
    MEANS,
    RECORD,
    Options,
    VerifyOptions,
    options_of,
    pairs,
    read_options,
    request_field,
)
from ckptcore.utils import terminal
from ckptcore.utils.average_url import is_average


@takes(declared("allow_incomplete", "keep_quantized", "weights", "include", "exclude"), ROWS, ANSWER)
def inspect(src: Srcs, **arguments: Any) -> None:
    """Show format, tensors, shapes and sizes of a checkpoint. Reads headers only."""
    # Not through `convert`: what only writes is not imported.
    from ckptcore.formats import open_source, read_manifest
    from ckptcore.store.merged import source_url

    options = Options.of(arguments)
    manifest = read_manifest(
        open_source(
            source_url(named_places(src, arguments), recover=options.allow_incomplete),
            recover=options.allow_incomplete,
            keep_quantized=options.keep_quantized,
            weights=options.weights,
        )
    )
    show.manifest(
        manifest,
        options.include or (),
        options.exclude or (),
        show_all=arguments["all"],
        as_json=arguments["output"] is Output.JSON,
    )


@takes(declared("allow_incomplete", "keep_quantized", "weights", "workers", *RECORD), ROWS, ANSWER)
def validate(src: Srcs, level: Level = "coverage", **arguments: Any) -> None:
    """Check that a checkpoint is complete and correct. Exit code 1 if it is damaged."""
    from ckptcore.checking.examine import examine
    from ckptcore.store.merged import source_url

    options, as_json = Options.of(arguments), arguments["output"] is Output.JSON
    url = source_url(named_places(src, arguments), recover=options.allow_incomplete)
    live = None
    try:
        with show.progress() as progress:
            manifest, report = examine(
                url,
                level,
                recover=options.allow_incomplete,
                keep_quantized=options.keep_quantized,
                weights=options.weights,
                workers=options.settings().threads,
                progress=progress,
                observe=not options.no_catalog,
            )
            if not options.no_catalog and level in ("bytes", "values"):
                from ckptcore.operations.registered_files import (
                    against_catalog,  # SQLAlchemy: only who needs it waits for it
                )

                report = against_catalog(manifest, report, url, options.catalog)
            if not options.no_catalog and level == "values" and not is_average(url):
                from ckptcore.operations.live_check import against_live

                settings = options.settings()
                report, live = against_live(manifest, report, url, options.catalog, settings, progress)
    except CkptError as error:
        if error.exit_code != 1:
            raise
        show.report(show.report_of(error, url, level), show_all=arguments["all"], as_json=as_json)
        raise typer.Exit(1) from error
    # The answer comes first: an unusable catalog must not hide a result that took hours.
    show.report(report, manifest, show_all=arguments["all"], as_json=as_json)
    if not options.no_catalog and not is_average(url):  # an average is at no place
        from ckptcore.operations.registered_files import record_report

        if not record_report(manifest, url, report, options.catalog, live):
            terminal.line(
                "not recorded: the files differ from the checkpoint that the catalog has here, with digests. "
                "try --level bytes to compare them, or `ckptcore catalog rebuild --digests` to record them",
                err=True,
            )
    raise typer.Exit(0 if report.ok else 1)


@takes(NAMES, LEFT_OUT, declared(*MEANS), ANSWER)
def diff(a: One, b: Other, **arguments: Any) -> None:
    """Compare two checkpoints bit by bit.

    Names, dtypes, shapes, tensors and plain values are compared. Exit code 1 if they differ. State that a
    reshard leaves out is listed apart.
    """
    from ckptcore.api import diff as compare

    a, b = named_places((a, b), arguments)
    with show.progress() as progress:
        difference = compare(
            a,
            b,
            model=arguments["model"],
            model_prefix=arguments["model_prefix"] or (),
            include=arguments["include"] or (),
            exclude=arguments["exclude"] or (),
            rename=pairs("rename", arguments["rename"]),
            tie=pairs("tie", arguments["tie"]),
            keep_quantized=arguments["keep_quantized"],
            weights=arguments["weights"],
            record=arguments["record"],
            ignore_dropped=arguments["ignore_dropped"],
            settings=Options.of(arguments).settings(),
            progress=progress,
        )
    show.difference(difference, as_json=arguments["output"] is Output.JSON)
    raise typer.Exit(0 if difference.equal else 1)


@takes(PART, RUN, declared(*RECORD), ANSWER)
def fingerprint(src: Srcs, **arguments: Any) -> None:
    """Compute one digest of all tensor values.

    It is equal for every copy, whatever its format, topology and files. Exit code 1 if it is not what the
    job had in memory, where the job announced that.
    """
    from ckptcore.api import fingerprint as take
    from ckptcore.checking.examine import inspect as read
    from ckptcore.store.merged import source_url

    options, url = Options.of(arguments), source_url(named_places(src, arguments))
    manifest = read(url, keep_quantized=options.keep_quantized, weights=options.weights)
    with show.progress() as progress:
        taken = take(
            manifest,
            model=arguments["model"],
            model_prefix=options.model_prefix,
            include=options.include or (),
            exclude=options.exclude or (),
            rename=pairs("rename", options.rename),
            settings=options.settings(),
            progress=progress,
        )
    recorded, live = not options.no_catalog and not is_average(url), None
    if recorded:
        from ckptcore.operations.live_check import compare_fingerprints, recorded_job

        job, names = recorded_job(url, options.catalog), dict(taken.renamed)
        live = compare_fingerprints(manifest, job, taken.tensors, names, prefix=options.model_prefix)
    show.fingerprint(taken, url, live, as_json=arguments["output"] is Output.JSON)
    if recorded:
        from ckptcore.conversion.registration import record_fingerprint

        record_fingerprint(manifest, url, taken.tensors, names, options.catalog, live)
    if live is not None and live.different:
        raise typer.Exit(1)


@takes(declared("keep_quantized", "weights", *MEANS, *RECORD), ROWS, ANSWER)
def stats(
    a: One,
    b: Annotated[
        str | None, typer.Argument(metavar="B", help="A later step: also what changed since A.")
    ] = None,
    **arguments: Any,
) -> None:
    """Compute norms, means and odd values of tensors.

    Of each: norm, mean, largest value, and counts of NaN, Inf and zeros. The catalog keeps those of A or B.
    Exit code 1 if its run's history has an alarm about it.
    """
    from ckptcore.api import changes, statistics
    from ckptcore.checking.examine import inspect as read

    options = Options.of(arguments)
    urls = named_places((a,) if b is None else (a, b), arguments)
    manifests = [read(url, keep_quantized=options.keep_quantized, weights=options.weights) for url in urls]
    settings, between = options.settings(), None
    with show.progress() as progress:
        if b is None:
            measured = statistics(manifests[0], settings=settings, progress=progress)
        else:
            between = changes(*manifests, settings=settings, progress=progress)
            measured = between.measured
    show_all, as_json = arguments["all"], arguments["output"] is Output.JSON
    alarms = []
    if not options.no_catalog and not is_average(urls[-1]):
        from ckptcore.conversion.registration import record_statistics

        before = None if between is None else (urls[0], between)
        alarms = record_statistics(manifests[-1], urls[-1], measured, options.catalog, before)
    if between is None:
        show.statistics(measured, urls[0], alarms, show_all=show_all, as_json=as_json)
    else:
        show.changes(between, urls, alarms, show_all=show_all, as_json=as_json)
    raise typer.Exit(1 if alarms else 0)


# Options of the export, for exports that the catalog does not know.
_EXPORTED_WITH = (
    "include",
    "exclude",
    "rename",
    "dtype",
    "dtype_for",
    "tie",
    "model_prefix",
    "allow_incomplete",
    "keep_quantized",
    "weights",
)


@takes(
    declared(*options_of(VerifyOptions), of=VerifyOptions),
    declared(*_EXPORTED_WITH, verb="verify-export"),
    RUN,
    declared(*RECORD),
    ANSWER,
)
def verify_export(
    export: Annotated[
        str, typer.Argument(metavar="DST", help="Folder or file that `ckptcore export` wrote.")
    ],
    **arguments: Any,
) -> None:
    """Compare an export with its source. Exit code 1 if it differs, 26 if a check could not be done."""
    from ckptcore.api import prove_export
    from ckptcore.conversion.export_verdict import record_verdict

    options = Options.of(arguments)
    (export,) = named_places((export,), arguments)
    with show.progress() as progress:
        export_lookup, proof = prove_export(
            export,
            read_options(VerifyOptions, arguments),
            options.settings(),
            progress,
            options.register_in,
            **_exported_with(options),
        )
    # The answer comes first: an unusable catalog must not hide a result that took hours.
    show.export_proof(proof, as_json=arguments["output"] is Output.JSON)
    record_verdict(export_lookup, proof, options.register_in)
    raise typer.Exit(proof.exit_code)


def _exported_with(options: Options) -> dict[str, Any]:
    """Return the fields of a request that the command line gives."""
    request = options.request("export", "-", "-")
    usual = Options()  # what nobody named changes nothing: the catalog has the exact request
    names = [
        name for name in _EXPORTED_WITH if getattr(options, name) not in (None, (), [], getattr(usual, name))
    ]
    return {name: getattr(request, name) for name in map(request_field, names)}


def formats(output: As = Output.TEXT) -> None:
    """List the formats that can be read and written.

    The second list has formats that are recognised and refused.
    """
    show.formats(as_json=output is Output.JSON)
