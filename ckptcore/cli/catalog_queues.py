"""Run `ckptcore catalog inbox|outbox`: list what waits or has failed, and retry it."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from ckptcore.cli.catalog_shared import As, Limit, Where, answer, clock, opened, write_json
from ckptcore.cli.options import Output, group
from ckptcore.errors import UsageError
from ckptcore.utils import terminal
from ckptcore.utils.text import count

inbox_app = group("List received events, and retry those that failed.")
outbox_app = group("List outgoing messages, and retry those that failed.")


Ref = Annotated[str | None, typer.Argument(metavar="ID", help="Id of a row, or its beginning.")]
Failed = Annotated[bool, typer.Option("--failed", help="All rows that have failed.")]


def _add_commands(app: typer.Typer, name: str) -> None:
    """Give both queues the same commands. name: the name of the queue."""

    @app.command("list")
    def list_(
        state: Annotated[
            str | None,
            typer.Option(
                "--state",
                metavar="STATE",
                help="Only this state: waiting, taken, done or failed. Default: all but done.",
            ),
        ] = None,
        limit: Limit = 50,
        catalog: Where = None,
        output: As = Output.TEXT,
    ) -> None:
        """List the rows that are not done, newest first."""
        with opened(catalog) as catalog_db, catalog_db.reading() as conn:
            rows = _queue(name).listed(conn, state, limit)
            waiting = _queue(name).postponed(conn, clock(conn)) if name == "inbox" else ()
        answer(rows, output)
        for reason in waiting:
            terminal.line(str(reason), err=True)

    @app.command("retry")
    def retry(
        ref: Ref = None, failed: Failed = False, catalog: Where = None, output: As = Output.TEXT
    ) -> None:
        """Retry rows that have failed.

        They are due at once, and their attempts are counted from 0.
        """
        if (ref is None) is not failed:
            raise UsageError(
                "name one row, or pass --failed for all",
                hint=f"`ckptcore catalog {name} list --state failed` lists them",
            )
        with opened(catalog) as catalog_db, catalog_db.queueing() as conn:
            ids = _queue(name).retry(conn, clock(conn), ref)
        if output is Output.JSON:
            write_json({"put_back": list(ids)})
            return
        terminal.line(f"{count(len(ids), 'row')} due again" if ids else "nothing has failed")


def _queue(name: str) -> Any:
    # Imported only now: SQLAlchemy takes a third of a second, which the help does not need.
    return getattr(import_module("ckptcore.catalog.queues"), name)


_add_commands(inbox_app, "inbox")
_add_commands(outbox_app, "outbox")
