"""`ckptcore catalog`: the catalog's questions and answers on the command line.

Answers go to stdout, as tables of at most 100 columns or, with ``--output json``, as JSON.
Errors are `CkptError`s, which the main command maps to words and exit codes.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptcore.catalog import default_url, upgrade
from ckptcore.cli.catalog_names import alias_app, hold_app, root_app
from ckptcore.cli.catalog_queues import inbox_app, outbox_app
from ckptcore.cli.catalog_shared import As, Limit, Ref, Where, answer, opened, write_json
from ckptcore.cli.options import Output
from ckptcore.errors import CatalogError, UsageError
from ckptcore.utils import terminal

app = typer.Typer(no_args_is_help=True, help="What was converted from what, when, and how it went.")
app.add_typer(alias_app, name="alias")
app.add_typer(hold_app, name="hold")
app.add_typer(root_app, name="root")
app.add_typer(inbox_app, name="inbox")
app.add_typer(outbox_app, name="outbox")


@app.command("upgrade")
def upgrade_(catalog: Where = None, output: As = Output.TEXT) -> None:
    """Bring the catalog to the schema of this version; make it where there is none."""
    before, after = upgrade(catalog or default_url())
    if output is Output.JSON:
        write_json({"from": before, "to": after, "changed": before != after})
    elif before == after:
        terminal.line(f"the catalog is up to date (schema {after})")
    else:
        terminal.line(f"the catalog went from schema {before or 'none'} to {after}")


@app.command("list")
def list_(
    kind: Annotated[str | None, typer.Option(help="source or derived.")] = None,
    state: Annotated[
        str | None,
        typer.Option(
            help="present, damaged, incomplete or replaced; with --conversions: running, succeeded or failed."
        ),
    ] = None,
    run: Annotated[str | None, typer.Option(help="The name of a training run.")] = None,
    conversions: Annotated[
        bool, typer.Option("--conversions", help="Conversions instead, failed ones included.")
    ] = False,
    limit: Limit = 50,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Checkpoints (or conversions), the newest first."""
    if conversions and (kind or run):
        raise UsageError(
            "--kind and --run choose checkpoints, not conversions", hint="leave out --conversions"
        )
    rows: Any = ()
    try:
        with opened(catalog) as found:
            if conversions:
                rows = found.conversions(limit, state=state)
            else:
                rows = found.list(limit, kind=kind, state=state, run=run)
    except CatalogError as error:
        if not error.values.get("missing"):
            raise
        # Before the first conversion the list is empty, which is no failure.
        terminal.line(error.message, err=True)
    answer(rows, output)


@app.command()
def show(
    ref: Ref,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """All about one checkpoint or one conversion."""
    with opened(catalog) as found:
        detail = found.show(ref, tensors=tensors)
    answer(detail, output)


@app.command()
def lineage(
    ref: Ref,
    up: Annotated[bool, typer.Option("--up", help="Only what it was made from.")] = False,
    down: Annotated[bool, typer.Option("--down", help="Only what was made from it.")] = False,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """What a checkpoint was made from, and what was made from it."""
    with opened(catalog) as found:
        lines = found.lineage(ref, up=up or not down, down=down or not up)
    answer(lines, output)


@app.command()
def which(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="A file, a BLAKE3 digest, or a URI.")],
    fingerprint: Annotated[
        bool, typer.Option("--fingerprint", help="WHAT is a fingerprint: every copy of the same numbers.")
    ] = False,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Where a file comes from: its checkpoint, the conversion that wrote it, and its source."""
    with opened(catalog) as found:
        origins = found.copies(what) if fingerprint else found.which(what)
    answer(origins, output)


@app.command()
def tag(
    ref: Ref,
    tags: Annotated[list[str], typer.Argument(metavar="KEY=VALUE", help="KEY= removes it.")],
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Put tags on a checkpoint."""
    pairs = [word.partition("=") for word in tags]
    for key, equals, _ in pairs:
        if not equals or not key:
            raise UsageError(f"{key!r} is not KEY=VALUE", hint="for example: eval.mmlu=71.3")
    with opened(catalog) as found:
        for key, _, value in pairs:
            found.tag(ref, key, value or None)
        detail = found.show(ref, tensors=False)
    answer(detail, output)


@app.command()
def sql(
    statement: Annotated[str, typer.Argument(metavar="SELECT", help="One statement that reads.")],
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many rows at most.")] = 1000,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds until it is stopped.")] = 30,
    explain: Annotated[
        bool, typer.Option("--explain", help="How the database would answer it, instead.")
    ] = False,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Ask in SQL. The database itself refuses everything that is not reading."""
    from ckptcore.catalog.sql_query import ask

    found = ask(catalog or default_url(), statement, limit=limit, seconds=timeout, explain=explain)
    answer(found, output)
