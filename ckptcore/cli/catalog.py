"""Run `ckptcore catalog`: queries, lineage, tags, queues, SQL and `rebuild`.

Answers go to standard output, as tables of at most 100 columns or, with ``--output json``, as JSON.
`ckptcore.cli.main` turns errors into messages and exit codes.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from ckptcore.catalog import Kind, default_url, upgrade
from ckptcore.cli.catalog_names import alias_app, hold_app, obligation_app, root_app
from ckptcore.cli.catalog_shared import As, Limit, Ref, Where, answer, clock, opened, write_json
from ckptcore.cli.options import Output, group
from ckptcore.errors import CatalogError, UsageError
from ckptcore.utils import terminal
from ckptcore.utils.text import count

app = group("Query the catalog of checkpoints and conversions.")
app.add_typer(alias_app, name="alias")
app.add_typer(hold_app, name="hold")
app.add_typer(obligation_app, name="obligation")
app.add_typer(root_app, name="root")
inbox_app = group("List received events, and retry those that failed.")
outbox_app = group("List outgoing messages, and retry those that failed.")
app.add_typer(inbox_app, name="inbox")
app.add_typer(outbox_app, name="outbox")
RowId = Annotated[str | None, typer.Argument(metavar="ID", help="Id of a row, or its beginning.")]
Failed = Annotated[bool, typer.Option("--failed", help="All rows that have failed.")]


@app.command("upgrade")
def upgrade_(catalog: Where = None, output: As = Output.TEXT) -> None:
    """Migrate the catalog to this version's schema, or create it."""
    before, after = upgrade(catalog or default_url())
    if output is Output.JSON:
        write_json({"from": before, "to": after, "changed": before != after})
    elif before == after:
        terminal.line(f"the catalog is up to date (schema {after})")
    else:
        terminal.line(f"the catalog went from schema {before or 'none'} to {after}")


@app.command("restore")
def restore_(
    ref: Annotated[
        str, typer.Argument(metavar="REF", help="Its place, its id, or the folder that it was moved into.")
    ],
    to: Annotated[str, typer.Option("--to", metavar="NAME", help="Another name in the same folder.")] = "",
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Restore a checkpoint that was set aside."""
    from ckptcore.operations.retention.purge import restore

    with opened(catalog) as catalog_db:
        place = restore(catalog_db, ref, to)
    if output is Output.JSON:
        write_json({"restored": place})
        return
    terminal.line(f"restored {place}")


@app.command("list")
def list_(
    context: typer.Context,
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", help="Only this kind: source or derived.")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            metavar="STATE",
            help="Only this state: present, damaged, incomplete or replaced; with --conversions running, "
            "succeeded or failed.",
        ),
    ] = None,
    run: Annotated[str | None, typer.Option(metavar="NAME", help="Only this training run.")] = None,
    conversions: Annotated[
        bool, typer.Option("--conversions", help="List conversions instead, including failed ones.")
    ] = False,
    limit: Limit = 50,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """List checkpoints or conversions, newest first."""
    if conversions and (kind or run):
        raise UsageError(
            "--kind and --run cannot be used with --conversions: they select checkpoints",
            hint="leave out --conversions",
        )
    rows: Any = ()
    try:
        with opened(catalog) as catalog_db:
            if conversions:
                rows = catalog_db.conversions(limit, state=state)
            else:
                rows = catalog_db.list(limit, kind=kind, state=state, run=run)
    except CatalogError as error:
        named = getattr(context.get_parameter_source("catalog"), "name", "") == "COMMANDLINE"
        if named or not error.values.get("missing"):
            raise
        # Before the first conversion the list of the usual catalog is empty, which is no error.
        terminal.line(error.message, err=True)
    answer(rows, output)


@app.command()
def show(
    ref: Ref,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Show all details of one checkpoint or conversion."""
    with opened(catalog) as catalog_db:
        detail = catalog_db.show(ref, tensors=tensors)
    answer(detail, output)


@app.command()
def resolve(name: Ref, catalog: Where = None, output: As = Output.TEXT) -> None:
    """Print the path or URL of a checkpoint, for other programs."""
    with opened(catalog) as catalog_db:
        place = catalog_db.place_of(name)
    if place is None:
        raise UsageError(
            f"the catalog has no checkpoint {name}", hint="`ckptcore catalog list` shows ids and URIs"
        )
    if output is Output.JSON:
        terminal.write_json({"name": name, "uri": place})
    else:
        terminal.line(place)


@app.command()
def lineage(
    ref: Ref,
    up: Annotated[bool, typer.Option("--up", help="Only what it was made from.")] = False,
    down: Annotated[bool, typer.Option("--down", help="Only what was made from it.")] = False,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Show what a checkpoint was made from, and what of it."""
    with opened(catalog) as catalog_db:
        lines = catalog_db.lineage(ref, up=up or not down, down=down or not up)
    answer(lines, output)


What = Annotated[str, typer.Argument(metavar="WHAT", help="A file, a BLAKE3 digest or a URI.")]
OfFingerprint = Annotated[
    bool, typer.Option("--fingerprint", help="WHAT is a fingerprint: find every copy of the same values.")
]


@app.command()
def find(
    lookup_key: What, fingerprint: OfFingerprint = False, catalog: Where = None, output: As = Output.TEXT
) -> None:
    """Find the checkpoint, conversion and source of a file."""
    with opened(catalog) as catalog_db:
        origins = catalog_db.copies(lookup_key) if fingerprint else catalog_db.which(lookup_key)
    answer(origins, output)


@app.command()
def tag(
    ref: Ref,
    tags: Annotated[list[str], typer.Argument(metavar="KEY=VALUE", help="Tags to set; KEY= removes a tag.")],
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Set or remove tags of a checkpoint."""
    pairs = [word.partition("=") for word in tags]
    for key, equals, _ in pairs:
        if not equals or not key:
            raise UsageError(
                f"a tag must have the form KEY=VALUE (got {key!r})", hint="for example: eval.mmlu=71.3"
            )
    with opened(catalog) as catalog_db:
        for key, _, value in pairs:
            catalog_db.tag(ref, key, value or None)
        detail = catalog_db.show(ref, tensors=False)
    answer(detail, output)


@app.command()
def meta(
    ref: Ref,
    pairs: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE",
            help="Facts about its training: metrics.loss=2.31, git_commit=3f9a, user=ada, config.lr=3e-4.",
        ),
    ],
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Record facts about the training of a checkpoint.

    What was made from it inherits them.
    """
    from ckptcore.catalog.training import facts_of_pairs, unnamed_metrics

    facts = facts_of_pairs(pairs, "a fact")
    for name in unnamed_metrics(facts):
        terminal.line(f"note: {name} is recorded as a fact; a metric is metrics.{name}=VALUE", err=True)
    with opened(catalog) as catalog_db:
        catalog_db.describe(ref, facts)
        detail = catalog_db.show(ref, tensors=False)
    if output is Output.JSON:
        answer(detail, output)
    else:
        terminal.line(f"{ref}: {count(len(pairs), 'fact')} recorded")


@app.command()
def best(
    metric: Annotated[str, typer.Argument(metavar="METRIC", help="Name of the metric, such as eval_loss.")],
    run: Annotated[str | None, typer.Option(metavar="NAME", help="Only this training run.")] = None,
    highest: Annotated[
        bool, typer.Option("--highest", help="The highest value is the best. Default: the lowest.")
    ] = False,
    kind: Annotated[
        Kind | None, typer.Option(metavar="KIND", help="Only this kind: source or derived.")
    ] = None,
    limit: Limit = 10,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """List checkpoints by a metric, the best first."""
    with opened(catalog) as catalog_db:
        rows = catalog_db.best(metric, "max" if highest else "min", run=run, kind=kind, limit=limit)
    answer(rows, output)


@app.command()
def history(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the training run.")],
    tensor: Annotated[
        str | None, typer.Argument(metavar="[TENSOR]", help="Name of a tensor: its numbers at each step.")
    ] = None,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Show norms, changes and alarms of the measured steps of a run."""
    from ckptcore.comparison.step_history import read_history

    with opened(catalog) as catalog_db:
        run_history = read_history(catalog_db, run, tensors=tensor is not None)
    rows = run_history.tensor(tensor) if tensor is not None else None
    if output is Output.JSON:
        points = {} if rows is None else {"tensor": [{"step": s.step, **p.as_dict()} for s, p in rows]}
        write_json(run_history.as_dict() | points)
        return
    from ckptcore.cli.catalog_render import render_history

    render_history(run_history, rows)


@app.command()
def page(
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, help="Port; 0 picks a free one.")] = 8790,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Address to listen on. Elsewhere than on this machine, reading needs the token of a login.",
        ),
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="Name under which browsers reach it (repeatable)."),
    ] = None,
    catalog: Where = None,
) -> None:
    """Open the catalog as a page in the browser.

    Changes need a login, with the token that is printed, or that of CKPTCORE_PAGE_TOKEN.
    """
    import os
    import sys

    # A server lives long: it goes without what a command does to start and end fast.
    command = [sys.executable, "-m", "ckptcore.page", "--port", str(port), "--host", host]
    command += [argument for name in allow_host or () for argument in ("--allow-host", name)]
    url = catalog or default_url()
    if any("\0" in text for text in (*command, url)):
        raise UsageError("an option contains a NUL character", hint="remove it")
    # This process becomes the server: whatever ends the command ends it too. The URL, which may contain a
    # password, is no argument: those are visible to all users.
    os.execve(sys.executable, command, {**os.environ, "CKPTCORE_CATALOG_URL": url})


@app.command()
def sql(
    statement: Annotated[str, typer.Argument(metavar="SELECT", help="One statement that only reads.")],
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Maximum number of rows.")] = 1000,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="SECONDS", min=0.1, help="Seconds after which the query is stopped."
        ),
    ] = 30,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the database's query plan instead.")
    ] = False,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Run a read-only SQL query. The database refuses every change."""
    from ckptcore.catalog.sql_query import ask

    query_answer = ask(catalog or default_url(), statement, limit=limit, seconds=timeout, explain=explain)
    answer(query_answer, output)


@app.command()
def rebuild(
    roots: Annotated[list[str], typer.Argument(metavar="ROOT", help="Folders to search, or checkpoints.")],
    digests: Annotated[
        bool, typer.Option("--digests", help="Read every byte, to record the digest of each file.")
    ] = False,
    output_folders: Annotated[
        list[str] | None,
        typer.Option("--made", metavar="FOLDER", help="Folder that holds outputs of ckptcore (repeatable)."),
    ] = None,
    fingerprints: Annotated[
        bool, typer.Option("--fingerprints", help="Read every tensor, to record what was made from what.")
    ] = False,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Record the checkpoints below folders in the catalog.

    Everything is read from the metadata of the checkpoints.
    """
    from ckptcore.catalog import default_url, open_catalog
    from ckptcore.operations.rebuild_catalog import rebuild as run
    from ckptcore.planning.request import Settings

    take = Settings() if fingerprints else None
    with open_catalog(catalog or default_url()) as catalog_db:
        report = run(
            catalog_db,
            roots,
            output_roots=output_folders or (),
            digests=digests,
            fingerprint_settings=take,
            on_place=lambda line: terminal.line(line, err=True),
        )
    if output is Output.JSON:
        write_json(report.as_dict())
        return
    linked = sum(r.made_from is not None for r in report.recorded)
    recorded, left = count(len(report.recorded), "checkpoint"), count(len(report.left_out), "place")
    terminal.line(f"{recorded} recorded, {linked} of them linked to their source")
    if report.left_out:
        terminal.line(f"{left} left out; `--output json` lists each with its reason")


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
        ref: RowId = None, failed: Failed = False, catalog: Where = None, output: As = Output.TEXT
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
