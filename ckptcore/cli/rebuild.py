"""`ckptcore catalog rebuild`: the rows of a lost catalog, from the data. Parse, call, show."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptcore.cli.catalog_shared import As, Output, Where, write_json
from ckptcore.utils import terminal


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
            told=lambda line: terminal.line(line, err=True),
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
