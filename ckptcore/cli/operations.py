"""`ckptcore sweep`, `scrub`, `retire`, `catalog rebuild`: keep folders of checkpoints in order.

They do what the scheduled flows do, with the same options (`ckptcore.operations.options`). Parse, call, show;
errors are those of `ckptcore.cli.main`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptcore.cli.catalog_shared import As, Where, write_json
from ckptcore.cli.options import ANSWER, RUN, Output, RootNames, declared, takes
from ckptcore.operations.options import RetireOptions, ScrubOptions, SweepOptions
from ckptcore.planning.options import Options, options_of
from ckptcore.utils import terminal


@takes(declared(*options_of(SweepOptions), of=SweepOptions), RUN, ANSWER)
def sweep(names: RootNames = None, **given: Any) -> None:
    """Converts what is complete and not yet converted below the watched roots."""
    from ckptcore.catalog import default_url, open_catalog
    from ckptcore.cli import render_operations as show
    from ckptcore.conversion.pipeline import convert
    from ckptcore.operations.sweep import sweep as run
    from ckptcore.utils.units import parse_duration

    url = given["catalog"] or default_url()
    settings = Options.of(given | {"fingerprint": given["fingerprint"] or None}).settings()
    as_json = given["output"] is Output.JSON
    with open_catalog(url) as catalog:
        found = run(
            catalog,
            lambda request: convert(request, settings, None, url),
            names or (),
            dry_run=given["dry_run"],
            settle_s=parse_duration(given["settle"]),
            retry_failed=given["again"],
            on_item=show.item_line(as_json),
        )
    show.swept(found, as_json=as_json)
    raise typer.Exit(found.exit_code)


@takes(declared(*options_of(ScrubOptions), of=ScrubOptions), ANSWER)
def scrub(**given: Any) -> None:
    """Is what the catalog knows still there, byte for byte? The longest unproven first."""
    from ckptcore.catalog import default_url, open_catalog
    from ckptcore.cli import render_operations as show
    from ckptcore.operations.scrub import scrub as run
    from ckptcore.utils.units import parse_duration

    as_json = given["output"] is Output.JSON
    with open_catalog(given["catalog"] or default_url(), create=False) as catalog:
        found = run(catalog, given["share"], parse_duration(given["budget"]), on_look=show.looked(as_json))
    show.scrubbed(found, as_json=as_json)
    raise typer.Exit(found.exit_code)


@takes(declared(*options_of(RetireOptions), of=RetireOptions), RUN, ANSWER)
def retire(
    scope: Annotated[
        str | None, typer.Argument(metavar="[ROOT|RUN]", help="A watched root or a run; default: all roots.")
    ] = None,
    **given: Any,
) -> None:
    """Deletes sources that a verified child proves to hold, but for the last ones and those people hold."""
    from ckptcore.catalog import default_url, open_catalog
    from ckptcore.cli import render_operations as show
    from ckptcore.operations.replacement import Allowed
    from ckptcore.operations.retention import Policy
    from ckptcore.operations.retire import retire as run

    settings = Options(**{name: given[name] for name in RUN}).settings()
    as_json = given["output"] is Output.JSON
    with open_catalog(given["catalog"] or default_url(), create=False) as catalog:
        found = run(
            catalog,
            Policy(given["keep_last"], given["keep_every"]),
            scope,
            yes=given["yes"],
            take=settings if given["fingerprint"] else None,
            means=settings,
            allowed=Allowed.of(given["accept_loss"], cast=given["accept_cast"]),
            on_retired=show.fate(as_json),
        )
    show.retired(found, as_json=as_json)


def rebuild(
    roots: Annotated[list[str], typer.Argument(metavar="ROOT...", help="Folders, or checkpoints.")],
    digests: Annotated[
        bool, typer.Option("--digests", help="Read every byte, to know each file by its digest again.")
    ] = False,
    made: Annotated[
        list[str] | None,
        typer.Option("--made", metavar="FOLDER", help="It holds what was made here; may be repeated."),
    ] = None,
    fingerprints: Annotated[
        bool, typer.Option("--fingerprints", help="Read every tensor, to know what was made from what.")
    ] = False,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Record every checkpoint that lies below folders, read from its own metadata."""
    from ckptcore.catalog import default_url, open_catalog
    from ckptcore.operations.rebuild_catalog import rebuild as run
    from ckptcore.planning.request import Settings

    take = Settings() if fingerprints else None
    with open_catalog(catalog or default_url()) as found:
        done = run(
            found,
            roots,
            made=made or (),
            digests=digests,
            take=take,
            on_place=lambda line: terminal.line(line, err=True),
        )
    if output is Output.JSON:
        write_json(done.as_dict())
        return
    linked = sum(r.made_from is not None for r in done.recorded)
    terminal.line(
        f"{len(done.recorded)} checkpoints recorded, {linked} of them with the source they were made from"
    )
    if done.left_out:
        terminal.line(f"{len(done.left_out)} places left out; `--output json` tells each with its reason")
