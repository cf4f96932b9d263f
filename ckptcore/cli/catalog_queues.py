"""`ckptcore catalog inbox|outbox`: what waits or was given up, and how an operator puts it back."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import import_module
from typing import Annotated, Any

import typer

from ckptcore.cli.catalog_shared import As, Limit, Where, answer, opened, write_json
from ckptcore.cli.options import Output
from ckptcore.errors import UsageError
from ckptcore.utils import terminal

inbox_app = typer.Typer(no_args_is_help=True, help="Events that were taken in, and what became of them.")
outbox_app = typer.Typer(no_args_is_help=True, help="Messages to others, and whether they have arrived.")


def _verbs(app: typer.Typer, name: str) -> None:
    """The same two verbs for both queues. name: of the queue."""

    @app.command("list")
    def list_(
        state: Annotated[
            str | None, typer.Option("--state", help="waiting, taken, done or failed; default: all but done.")
        ] = None,
        limit: Limit = 50,
        catalog: Where = None,
        output: As = Output.TEXT,
    ) -> None:
        """What is not done, the newest first."""
        with opened(catalog) as found, found.reading() as conn:
            rows = _queue(name).listed(conn, state, limit)
        answer(rows, output)

    @app.command("again")
    def again(
        ref: Annotated[str | None, typer.Argument(metavar="ID", help="An id, or its beginning.")] = None,
        failed: Annotated[bool, typer.Option("--failed", help="All that have failed.")] = False,
        catalog: Where = None,
        output: As = Output.TEXT,
    ) -> None:
        """Put back what has failed: it is due now, and its tries are counted anew."""
        if (ref is None) is not failed:
            raise UsageError(
                "name one row, or all with --failed",
                hint=f"`ckptcore catalog {name} list --state failed` shows them",
            )
        with opened(catalog) as found, found.queueing() as conn:
            ids = _queue(name).retry(conn, datetime.now(UTC), ref)
        if output is Output.JSON:
            write_json({"put_back": list(ids)})
            return
        terminal.line(f"{len(ids)} put back" if ids else "nothing has failed")


def _queue(name: str) -> Any:
    # Only now: SQLAlchemy takes a third of a second, and help needs none of it.
    return getattr(import_module("ckptcore.catalog.queues"), name)


_verbs(inbox_app, "inbox")
_verbs(outbox_app, "outbox")
