"""Parts that all `ckptcore catalog` commands share: options, the opened catalog, how an answer is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptcore.catalog import as_dict, default_url, open_catalog
from ckptcore.cli.options import Output
from ckptcore.utils import terminal

if TYPE_CHECKING:
    from datetime import datetime

    from ckptcore.catalog.catalog import Catalog


Where = Annotated[
    str | None,
    typer.Option(
        "--catalog",
        metavar="URL",
        envvar="CKPTCORE_CATALOG_URL",
        help="SQLAlchemy URL of the catalog, or path of a SQLite file.",
    ),
]
As = Annotated[Output, typer.Option("--output", help="Tables for people, JSON for programs.")]
Ref = Annotated[str, typer.Argument(metavar="ID", help="Id, beginning of an id, alias or URI.")]
Limit = Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Maximum number of rows.")]


def opened(url: str | None) -> Catalog:
    """Open the catalog of an option; a missing one is not created."""
    return open_catalog(url or default_url(), create=False)


def answer(value: Any, output: Output) -> None:
    """Print a value of the catalog, or a tuple of them."""
    if output is Output.JSON:
        write_json(value.as_dict() if hasattr(value, "as_dict") else as_dict(value))
        return
    from ckptcore.cli.catalog_render import render

    render(value)


def write_json(value: Any) -> None:
    """Print plain values as JSON."""
    terminal.write_json(value, indent=2)


def clock(conn: Any) -> datetime:
    """Return the time of the catalog (see `ckptcore.catalog.database.clock`)."""
    # Imported only now: SQLAlchemy takes a third of a second, which the help does not need.
    from ckptcore.catalog.database import clock

    return clock(conn)
