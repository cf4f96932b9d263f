"""`ckptcore sweep`, `scrub`, `retire`: what keeps folders of checkpoints in order, from the command line.

They do what the scheduled flows do. Parse, call, show; errors are those of `ckptcore.cli`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptcore.options import ANSWER, DEVICE, KNOWN, MEANS, Again, DryRun, Output, RootNames, Settle, takes


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
    from ckptcore import tendoutput as show
    from ckptcore.catalog import default_url, open_catalog
    from ckptcore.convert import convert
    from ckptcore.durations import parse_duration
    from ckptcore.request import Settings
    from ckptcore.sizes import parse_size
    from ckptcore.sweep import sweep as run

    url = given["catalog"] or default_url()
    settings = Settings(parse_size(given["memory"]), given["workers"], given["device"],
                        fingerprint=fingerprint or None)  # fmt: skip
    as_json = given["output"] is Output.JSON
    with open_catalog(url) as catalog:
        found = run(
            catalog, lambda request: convert(request, settings, None, url), names or (), dry_run=dry_run,
            settle_s=parse_duration(settle), again=again, told=show.told(as_json),
        )  # fmt: skip
    show.swept(found, as_json=as_json)
    raise typer.Exit(found.exit_code)
