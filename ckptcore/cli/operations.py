"""`ckptcore sweep`, `scrub`, `retire`: what keeps folders of checkpoints in order, from the command line.

They do what the scheduled flows do. Parse, call, show; errors are those of `ckptcore.cli.main`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptcore.cli.options import ANSWER, DEVICE, KNOWN, MEANS, Again, DryRun, Output, RootNames, Settle, takes


@takes(MEANS, DEVICE, KNOWN, ANSWER)
def sweep(
    names: RootNames = None,
    dry_run: DryRun = False,
    settle: Settle = "2m",
    again: Again = False,
    fingerprint: Annotated[
        bool, typer.Option("--fingerprint", help="One digest of the numbers of every conversion.")
    ] = False,
    **given: Any,
) -> None:
    """Converts what is complete and not yet converted below the watched roots."""
    from ckptcore.catalog import default_url, open_catalog
    from ckptcore.cli import render_operations as show
    from ckptcore.conversion.pipeline import convert
    from ckptcore.operations.sweep import sweep as run
    from ckptcore.planning.request import Settings
    from ckptcore.utils.units import parse_duration, parse_size

    url = given["catalog"] or default_url()
    settings = Settings(
        parse_size(given["memory"]), given["workers"], given["device"], fingerprint=fingerprint or None
    )
    as_json = given["output"] is Output.JSON
    with open_catalog(url) as catalog:
        found = run(
            catalog,
            lambda request: convert(request, settings, None, url),
            names or (),
            dry_run=dry_run,
            settle_s=parse_duration(settle),
            again=again,
            told=show.told(as_json),
        )
    show.swept(found, as_json=as_json)
    raise typer.Exit(found.exit_code)


@takes(KNOWN, ANSWER)
def scrub(
    share: Annotated[float, typer.Option("--share", help="Of what the catalog knows, above 0 to 1.")] = 0.05,
    budget: Annotated[
        str, typer.Option("--budget", metavar="TIME", help="Stop after this time, the first aside.")
    ] = "10m",
    **given: Any,
) -> None:
    """Is what the catalog knows still there, byte for byte? The longest unproven first."""
    from ckptcore.catalog import default_url, open_catalog
    from ckptcore.cli import render_operations as show
    from ckptcore.operations.scrub import scrub as run
    from ckptcore.utils.units import parse_duration

    as_json = given["output"] is Output.JSON
    with open_catalog(given["catalog"] or default_url(), create=False) as catalog:
        found = run(catalog, share, parse_duration(budget), told=show.looked(as_json))
    show.scrubbed(found, as_json=as_json)
    raise typer.Exit(found.exit_code)


@takes(MEANS, DEVICE, KNOWN, ANSWER)
def retire(
    scope: Annotated[
        str | None, typer.Argument(metavar="[ROOT|RUN]", help="A watched root or a run; default: all roots.")
    ] = None,
    keep_last: Annotated[
        int, typer.Option("--keep-last", metavar="N", help="The newest N steps of every run.")
    ] = 3,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", metavar="K", help="And every step that K divides.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes/--dry-run", help="Delete; without it nothing is changed.")
    ] = False,
    fingerprint: Annotated[
        bool, typer.Option("--fingerprint", help="Read sources and children to take their fingerprints.")
    ] = False,
    accept_cast: Annotated[
        bool, typer.Option("--accept-cast", hidden=True, help="The same as --accept-loss cast.")
    ] = False,
    accept_loss: Annotated[
        list[str] | None,
        typer.Option(
            "--accept-loss",
            metavar="GLOB",
            help="Objects and files that may go unproven; the word cast: what a cast took (repeatable).",
        ),
    ] = None,
    **given: Any,
) -> None:
    """Deletes sources that a verified child proves to hold, but for the last ones and those people hold."""
    from ckptcore.catalog import default_url, open_catalog
    from ckptcore.cli import render_operations as show
    from ckptcore.operations.replacement import Allowed
    from ckptcore.operations.retention import Policy
    from ckptcore.operations.retire import retire as run
    from ckptcore.planning.request import Settings
    from ckptcore.utils.units import parse_size

    settings = Settings(parse_size(given["memory"]), given["workers"], given["device"])
    as_json = given["output"] is Output.JSON
    with open_catalog(given["catalog"] or default_url(), create=False) as catalog:
        found = run(
            catalog,
            Policy(keep_last, keep_every),
            scope,
            yes=yes,
            take=settings if fingerprint else None,
            means=settings,
            allowed=Allowed.of(accept_loss, cast=accept_cast),
            told=show.fate(as_json),
        )
    show.retired(found, as_json=as_json)
