"""`ckptcore catalog`: the catalog's questions and answers on the command line.

Answers go to stdout, as tables of at most 100 columns or, with ``--output json``, as JSON.
Errors are `CkptError`s, which the main command maps to words and exit codes.
"""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptcore.catalog import as_dict, default_url, open_catalog, upgrade
from ckptcore.errors import CatalogError, UsageError

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

app = typer.Typer(no_args_is_help=True, help="What was converted from what, when, and how it went.")


class Output(StrEnum):
    """How an answer is written."""

    TEXT = "text"
    JSON = "json"


Where = Annotated[
    str | None,
    typer.Option(
        "--catalog",
        metavar="URL",
        envvar="CKPTCORE_CATALOG_URL",
        help="SQLAlchemy URL, or the path of a SQLite file.",
    ),
]
As = Annotated[Output, typer.Option("--output", help="Tables for people, JSON for programs.")]
Ref = Annotated[str, typer.Argument(metavar="ID", help="An id, its beginning, or a URI.")]
Limit = Annotated[int, typer.Option("--limit", min=1, help="How many at most.")]


@app.command("upgrade")
def upgrade_(catalog: Where = None, output: As = Output.TEXT) -> None:
    """Bring the catalog to the schema of this version; make it where there is none."""
    before, after = upgrade(catalog or default_url())
    if output is Output.JSON:
        _json({"from": before, "to": after, "changed": before != after})
    elif before == after:
        print(f"the catalog is up to date (schema {after})")
    else:
        print(f"the catalog went from schema {before or 'none'} to {after}")


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
        with _opened(catalog) as found:
            if conversions:
                rows = found.conversions(limit, state=state)
            else:
                rows = found.list(limit, kind=kind, state=state, run=run)
    except CatalogError as error:
        if not error.values.get("missing"):
            raise
        # Before the first conversion the list is empty, which is no failure.
        print(error.message, file=sys.stderr)
    _answer(rows, output)


@app.command()
def show(
    ref: Ref,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """All about one checkpoint or one conversion."""
    with _opened(catalog) as found:
        detail = found.show(ref, tensors=tensors)
    _answer(detail, output)


@app.command()
def lineage(
    ref: Ref,
    up: Annotated[bool, typer.Option("--up", help="Only what it was made from.")] = False,
    down: Annotated[bool, typer.Option("--down", help="Only what was made from it.")] = False,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """What a checkpoint was made from, and what was made from it."""
    with _opened(catalog) as found:
        lines = found.lineage(ref, up=up or not down, down=down or not up)
    _answer(lines, output)


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
    with _opened(catalog) as found:
        origins = found.copies(what) if fingerprint else found.which(what)
    _answer(origins, output)


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
    with _opened(catalog) as found:
        for key, _, value in pairs:
            found.tag(ref, key, value or None)
        detail = found.show(ref, tensors=False)
    _answer(detail, output)


def _opened(url: str | None) -> Catalog:
    return open_catalog(url or default_url(), create=False)


def _answer(value: Any, output: Output) -> None:
    if output is Output.JSON:
        _json(as_dict(value))
        return
    from ckptcore.catalog.render import render

    render(value)


def _json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")
