"""Run `ckptcore catalog alias|hold|obligation|root`: names, what must be kept, and folders to watch."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from ckptcore.cli.catalog_shared import As, Ref, Where, answer, clock, opened
from ckptcore.cli.options import Output, declared, group, takes
from ckptcore.errors import SourceUnreadable, UsageError
from ckptcore.store import local_path, near_place
from ckptcore.utils import terminal
from ckptcore.utils.foreign_text import InvalidText, load_json_object

alias_app = group("Manage names that refer to one checkpoint at a time.")
hold_app = group("Manage holds, which keep checkpoints from being deleted.")
obligation_app = group("Manage contents that must not go with their last copy.")
root_app = group("Manage watched roots: folders that are swept.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the alias.")]
RootName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the root.")]
Force = Annotated[
    bool, typer.Option("--force", help="Also what is damaged, a trainer's own save, or not proven to open.")
]

Accept = Annotated[
    list[str] | None,
    typer.Option(
        "--accept", metavar="CODE", help="Accept alarms of this code, such as norm-jumped (repeatable)."
    ),
]

_RETENTION = '{"keep_last": 3, "rest": "weights"}'
_JSON_EXAMPLES = {
    "--target": '{"to": "safetensors"}',
    "--also": '{"verb": "export", "dtype": "bf16", "destination": "/bf16/{run}/{name}"}',
    "--retention": _RETENTION,
    "JSON": _RETENTION,
}


@alias_app.command("set")
def set_alias(
    name: Name,
    ref: Ref,
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect",
            metavar="ID",
            help="Change it only if it refers to this checkpoint now; '' for a new name.",
        ),
    ] = None,
    force: Force = False,
    accept: Accept = None,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Set the checkpoint that a name refers to.

    What is damaged, a trainer's own save, not proven to open, or of a step with an alarm is refused.
    """
    from ckptcore.catalog import aliases

    codes = aliases.accepted_codes(accept or ())
    with opened(catalog) as catalog_db, catalog_db.writing() as conn:
        row = aliases.promote(conn, name, ref, expect, force=force, accept=codes)
    answer((row,), output)


@alias_app.command("history")
def alias_history(name: Name, catalog: Where = None, output: As = Output.TEXT) -> None:
    """List the changes of a name, newest first."""
    from ckptcore.catalog import aliases

    with opened(catalog) as catalog_db, catalog_db.reading() as conn:
        rows = aliases.history(conn, name)
    answer(rows, output)


@alias_app.command("rollback")
def roll_back_alias(
    name: Name, force: Force = False, catalog: Where = None, output: As = Output.TEXT
) -> None:
    """Let a name refer to the checkpoint that it referred to before."""
    from ckptcore.catalog import aliases

    with opened(catalog) as catalog_db, catalog_db.writing() as conn:
        current = aliases.get(conn, name).checkpoint
        row = aliases.promote(conn, name, aliases.previous(conn, name), current, force=force)
    answer((row,), output)


@alias_app.command("list")
def list_aliases(catalog: Where = None, output: As = Output.TEXT) -> None:
    """List all names and their checkpoints."""
    from ckptcore.catalog import aliases

    with opened(catalog) as catalog_db, catalog_db.reading() as conn:
        rows = aliases.every(conn)
    answer(rows, output)


@alias_app.command("remove")
def remove_alias(name: Name, catalog: Where = None, output: As = Output.TEXT) -> None:
    """Remove a name."""
    from ckptcore.catalog import aliases, audit

    with opened(catalog) as catalog_db, catalog_db.writing() as conn:
        row = aliases.remove(conn, name)
        audit.note(conn, clock(conn), "alias.remove", row.checkpoint, {"alias": name})
    _answer_for_programs((row,), output)


@hold_app.command("place")
def place_hold(
    ref: Ref,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Who needs the checkpoint, and for what.")
    ],
    owner: Annotated[str, typer.Option("--owner", metavar="NAME", help="Person or team to ask.")] = "",
    until: Annotated[
        datetime | None,
        typer.Option(
            "--until", metavar="YYYY-MM-DD", help="Date (UTC) on which the hold ends.", formats=["%Y-%m-%d"]
        ),
    ] = None,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Keep a checkpoint from being deleted."""
    from ckptcore.catalog import audit, holds

    end = None if until is None else until.replace(tzinfo=UTC)
    with opened(catalog) as catalog_db, catalog_db.writing() as conn:
        now = clock(conn)
        hold = holds.place(conn, now, ref, reason, owner=owner, until=end)
        rows = holds.active(conn, now, ref)
        detail = {"hold": hold, "reason": reason, "until": None if end is None else f"{end:%Y-%m-%d}"}
        audit.note(conn, now, "hold.place", rows[0].checkpoint, detail)
    answer(rows, output)


@hold_app.command("list")
def list_holds(
    ref: Annotated[str | None, typer.Argument(metavar="ID", help="Only holds on this checkpoint.")] = None,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """List the holds that are in force."""
    from ckptcore.catalog import holds

    with opened(catalog) as catalog_db, catalog_db.reading() as conn:
        rows = holds.active(conn, clock(conn), ref)
    answer(rows, output)


@obligation_app.command("list")
def list_obligations(catalog: Where = None, output: As = Output.TEXT) -> None:
    """List what was deleted for a copy, and what of it is lost."""
    from ckptcore.custody.upkeep import listed, look_after

    with opened(catalog) as catalog_db:
        look_after(catalog_db)
        rows = listed(catalog_db)
    answer(rows, output)


@obligation_app.command("release")
def release_obligation(
    obligation: Annotated[str, typer.Argument(metavar="ID", help="Id of an obligation, or its beginning.")],
    accept_loss: Annotated[
        list[str],
        typer.Option("--accept-loss", metavar="GLOB", help="Contents to give up, by name (repeatable)."),
    ],
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Give contents up: then their last copy can be replaced."""
    from ckptcore.custody.upkeep import release

    with opened(catalog) as catalog_db:
        names = release(catalog_db, obligation, accept_loss)
    if output is Output.JSON:
        terminal.write_json({"given_up": list(names)}, indent=2)
        return
    terminal.line(f"given up: {', '.join(names)}")


@hold_app.command("release")
def release_hold(
    ref: Annotated[str, typer.Argument(metavar="HOLD", help="Id of a hold, or its beginning.")],
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """End a hold."""
    from ckptcore.catalog import audit, holds

    with opened(catalog) as catalog_db, catalog_db.writing() as conn:
        now = clock(conn)
        in_force = holds.active(conn, now)
        hold = holds.release(conn, now, ref)
        rows = tuple(row for row in in_force if row.id == hold)  # none: it was released before
        for row in rows:
            detail = {"hold": hold, "reason": row.reason, "owner": row.owner}
            audit.note(conn, now, "hold.release", row.checkpoint, detail)
    _answer_for_programs(rows, output)


Include = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="GLOB", help="Only checkpoints whose paths match (repeatable)."),
]
Destination = Annotated[
    str | None,
    typer.Option(
        "--destination",
        metavar="TEMPLATE",
        help="Where outputs go, made of {root}, {run}, {step}, {name} and {path}. "
        "Default: {root}/../exports/{run}/{name}.",
    ),
]
Verb = Annotated[str | None, typer.Option("--verb", metavar="VERB", help="consolidate, export or reshard.")]
Target = Annotated[
    str, typer.Option("--target", metavar="JSON", help="Further options of the conversion, as a JSON object.")
]
Also = Annotated[
    list[str] | None,
    typer.Option(
        "--also",
        metavar="JSON",
        help="A further output of every checkpoint: options of its conversion, with a destination of "
        "its own, as a JSON object (repeatable). With merge_last, merge_every and merge_decay: of each "
        "window of steps, their average.",
    ),
]
Retention = Annotated[
    str | None,
    typer.Option(
        "--retention",
        metavar="JSON",
        help="What retire keeps here: keep_last, keep_every, keep_best, rest, accept_loss; how many steps "
        "a sweep does not thin: keep_optimizer_last. A JSON object.",
    ),
]
_TARGET = declared("to", "mesh", "dtype", "config", to=None, mesh=None)
_of_root = takes(
    {
        "include": (Include, None),
        "destination": (Destination, None),
        "verb": (Verb, None),
        "target": (Target, "{}"),
        "also": (Also, None),
        "retention": (Retention, None),
        "catalog": (Where, None),
        "output": (As, Output.TEXT),
    },
    _TARGET,
)


@root_app.command("add")
@_of_root
def add_root(
    name: RootName,
    uri: Annotated[str, typer.Argument(metavar="URI", help="Path or URL of the folder.")],
    **arguments: Any,
) -> None:
    """Watch a folder.

    `ckptcore sweep` converts the complete checkpoints below it.
    """
    from ckptcore.catalog import open_catalog
    from ckptcore.catalog import watched_roots as roots
    from ckptcore.operations.export_target import settled_all
    from ckptcore.operations.retention.root_retention import checked

    is_here = _is_here(uri)
    if not is_here:
        terminal.line(
            f"note: there is no folder {uri} on this machine yet; a sweep finds nothing there", err=True
        )
    forms = [
        _target_form(arguments),
        *(_object(also_target, "--also") for also_target in arguments["also"] or ()),
    ]
    targets = settled_all(forms, reads=is_here)
    retained = checked(_object(arguments["retention"] or "{}", "--retention"))
    with open_catalog(arguments["catalog"]) as catalog_db, catalog_db.writing() as conn:
        row = roots.add(
            conn,
            clock(conn),
            name,
            uri,
            include=arguments["include"] or (),
            targets=[each_target.as_dict() for each_target in targets],
            retention=retained,
        )
    answer((row,), arguments["output"])


@root_app.command("set")
@_of_root
def set_root(name: RootName, **arguments: Any) -> None:
    """Change settings of a watched folder.

    Those that are not named stay. Outputs stay, too: a sweep makes what the new settings ask for.
    """
    from ckptcore.catalog import watched_roots as roots
    from ckptcore.catalog.row_values import require_sound
    from ckptcore.operations.export_target import settled_all
    from ckptcore.operations.retention.root_retention import checked

    changes, also, retention = _target_form(arguments), arguments["also"], arguments["retention"]
    if not changes and arguments["include"] is None and also is None and retention is None:
        raise UsageError(
            f"no setting of {name} is named",
            hint=f"for example: ckptcore catalog root set {name} --dtype bf16",
        )
    with opened(arguments["catalog"]) as catalog_db, catalog_db.writing() as conn:
        row = roots.get(conn, name)
        require_sound(row)  # what an odd row asks for would be replaced by defaults
        further = row.also if also is None else [_object(also_target, "--also") for also_target in also]
        targets = settled_all([{**row.target, **changes}, *further], reads=_is_here(row.uri))
        row = roots.change(
            conn,
            name,
            include=arguments["include"],
            targets=[each_target.as_dict() for each_target in targets],
            retention=None if retention is None else checked(_object(retention, "--retention")),
        )
    answer((row,), arguments["output"])


@root_app.command("show")
def show_root(name: RootName, catalog: Where = None, output: As = Output.TEXT) -> None:
    """Show all settings of a watched folder, and its last sweep."""
    from ckptcore.catalog import watched_roots as roots

    with opened(catalog) as catalog_db, catalog_db.reading() as conn:
        row = roots.get(conn, name)
    answer(row, output)


@root_app.command("check")
def check_root(name: RootName, catalog: Where = None, output: As = Output.TEXT) -> None:
    """Check that a watched folder can be swept.

    Its options are checked, and the files that they name are read.
    """
    from ckptcore.catalog import watched_roots as roots
    from ckptcore.operations.export_target import check_root as check
    from ckptcore.store import open_source_store

    with opened(catalog) as catalog_db, catalog_db.reading() as conn:
        row = roots.get(conn, name)
    check(row)
    if not _is_here(row.uri):
        raise SourceUnreadable(
            f"there is no folder {row.uri} on this machine",
            hint=near_place(row.uri) or "check it on the machine that sweeps it, or remove the root",
        )
    open_source_store(row.uri)
    if output is Output.TEXT:
        terminal.line(f"{name} can be swept: its folder is there, and its settings can be used", err=True)
    answer(row, output)


@root_app.command("retain")
def retain_root(
    name: RootName,
    retention: Annotated[
        str,
        typer.Argument(
            metavar="JSON",
            help='What retire keeps here, such as {"keep_last": 3, "keep_every": 1000, "rest": "weights"}.',
        ),
    ],
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Replace what `ckptcore retire` keeps of a folder. An empty object removes it."""
    from ckptcore.catalog import watched_roots as roots
    from ckptcore.operations.retention.root_retention import checked

    policy = checked(_object(retention, "JSON"))
    with opened(catalog) as catalog_db, catalog_db.writing() as conn:
        row = roots.change(conn, name, retention=policy)
    answer((row,), output)


@root_app.command("list")
def list_roots(catalog: Where = None, output: As = Output.TEXT) -> None:
    """List all watched folders."""
    from ckptcore.catalog import watched_roots as roots

    with opened(catalog) as catalog_db, catalog_db.reading() as conn:
        rows = roots.every(conn)
    answer(rows, output)


@root_app.command("pause")
def pause_root(name: RootName, catalog: Where = None, output: As = Output.TEXT) -> None:
    """Pause sweeping a folder until `resume`."""
    _enable(name, False, catalog, output)


@root_app.command("resume")
def resume_root(name: RootName, catalog: Where = None, output: As = Output.TEXT) -> None:
    """Resume sweeping a folder."""
    _enable(name, True, catalog, output)


@root_app.command("remove")
def remove_root(name: RootName, catalog: Where = None, output: As = Output.TEXT) -> None:
    """Stop watching a folder."""
    from ckptcore.catalog import watched_roots as roots

    with opened(catalog) as catalog_db, catalog_db.writing() as conn:
        row = roots.remove(conn, name)
    _answer_for_programs((row,), output)


def _is_here(uri: str) -> bool:
    """Return whether a folder is on this machine, or is no folder of any machine."""
    path = local_path(uri)
    return path is None or path.is_dir()


def _target_form(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON form of a target, of the options that are named."""
    named = {name: arguments[name] for name in ("destination", "verb", *_TARGET)}
    if named["verb"] is None and named["mesh"] is not None:
        named["verb"] = "reshard"
    return _object(arguments["target"], "--target") | {k: v for k, v in named.items() if v is not None}


def _enable(name: str, enabled: bool, catalog: str | None, output: Output) -> None:
    from ckptcore.catalog import watched_roots as roots

    with opened(catalog) as catalog_db, catalog_db.writing() as conn:
        row = roots.enable(conn, name, enabled)
    answer((row,), output)


def _answer_for_programs(rows: tuple[object, ...], output: Output) -> None:
    """Print the rows that a command removed as JSON; a table of them would look like what is there."""
    if output is Output.JSON:
        answer(rows, output)


def _object(text: str, name: str) -> dict[str, Any]:
    hint = f"for example {_JSON_EXAMPLES[name]}"
    try:
        return load_json_object(text, finite=True)
    except InvalidText as error:
        raise UsageError(f"cannot parse {name}: {error}", hint=hint) from error
