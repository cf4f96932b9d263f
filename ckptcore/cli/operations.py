"""Run `ckptcore sweep`, `scrub`, `retire` and `gc`, which maintain folders of checkpoints.

They do what the scheduled flows do, with the same options (`ckptcore.operations.options`). Commands parse,
call and print; `ckptcore.cli.main` handles errors.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Annotated, Any

import typer

from ckptcore.cli.catalog_shared import As, Where, write_json
from ckptcore.cli.options import ANSWER, RUN, Output, RootNames, declared, takes
from ckptcore.operations.options import RetireOptions, ScrubOptions, SweepOptions, ThinOptions
from ckptcore.planning.options import Options, options_of, read_options
from ckptcore.utils import terminal
from ckptcore.utils.text import count


@takes(declared(*options_of(SweepOptions), of=SweepOptions), RUN, ANSWER)
def sweep(names: RootNames = None, **arguments: Any) -> None:
    """Convert new complete checkpoints below watched roots."""
    from ckptcore.catalog import default_url, open_catalog
    from ckptcore.catalog.training import facts_of_every
    from ckptcore.cli import render_operations as show
    from ckptcore.conversion.batch import convert_batch
    from ckptcore.conversion.pipeline import convert
    from ckptcore.conversion.registration import Announcement
    from ckptcore.operations.automation.sweep import SweepSettings
    from ckptcore.operations.automation.sweep import sweep as run
    from ckptcore.operations.automation.verified_exports import verifying, verifying_each

    options = read_options(SweepOptions, arguments)
    url = options.catalog or default_url()
    # False is the default, so it must not override the fingerprint of a root's target.
    settings = Options.of(arguments | {"fingerprint": options.fingerprint or None}).settings()
    announcement = Announcement(meta=facts_of_every(options.meta or ()).as_form())
    as_json = arguments["output"] is Output.JSON
    with open_catalog(url) as catalog:
        shared: dict[str, Any] = {"settings": settings, "catalog_url": url, "announcement": announcement}
        convert_one, convert_each = (
            partial(convert, **shared),
            partial(convert_batch, catalog=catalog, **shared),
        )
        outcome = run(
            catalog,
            verifying(convert_one, settings, url) if options.verify_export else convert_one,
            names or (),
            SweepSettings.of(options, settings),
            on_item=show.item_line(as_json),
            convert_each=verifying_each(convert_each, settings, url)
            if options.verify_export
            else convert_each,
        )
    show.swept(outcome, as_json=as_json)
    raise typer.Exit(outcome.exit_code)


@takes(declared(*options_of(ScrubOptions), of=ScrubOptions), ANSWER)
def scrub(**arguments: Any) -> None:
    """Verify registered checkpoints again, byte for byte.

    The checkpoints that were verified longest ago come first.
    """
    from ckptcore.catalog import default_url, open_catalog
    from ckptcore.cli import render_operations as show
    from ckptcore.operations.scrub import scrub as run
    from ckptcore.utils.units import parse_duration

    as_json = arguments["output"] is Output.JSON
    with open_catalog(arguments["catalog"] or default_url(), create=False) as catalog:
        outcome = run(
            catalog, arguments["share"], parse_duration(arguments["budget"]), on_look=show.looked(as_json)
        )
    show.scrubbed(outcome, as_json=as_json)
    raise typer.Exit(outcome.exit_code)


@takes(declared(*options_of(RetireOptions), of=RetireOptions), RUN, ANSWER)
def retire(
    scope: Annotated[
        str | None,
        typer.Argument(metavar="ROOT|RUN", help="Watched root or training run. Default: all roots."),
    ] = None,
    **arguments: Any,
) -> None:
    """Retire sources that a verified output fully replaces.

    This is a dry run by default. `--yes` sets sources aside for a grace period, `--purge` deletes those whose
    grace period is over. The newest steps and checkpoints on hold are kept. `ckptcore prune` is the same
    command.
    """
    from ckptcore.catalog import default_url, open_catalog
    from ckptcore.cli import render_operations as show
    from ckptcore.operations.retention.retire import retire as run
    from ckptcore.operations.retention.root_retention import rules
    from ckptcore.utils.units import parse_duration

    settings = Options(**{name: arguments[name] for name in RUN}).settings()
    asked = read_options(RetireOptions, arguments)
    policy, allowed = rules(asked)
    as_json = arguments["output"] is Output.JSON
    with open_catalog(arguments["catalog"] or default_url(), create=False) as catalog:
        outcome = run(
            catalog,
            policy,
            scope,
            yes=bool(arguments["yes"]),
            purging=arguments["purge"] and arguments["yes"] is not False,
            grace=timedelta(seconds=parse_duration(arguments["grace"])),
            fingerprint_settings=settings if arguments["fingerprint"] else None,
            verify_settings=settings,
            allowed=allowed,
            on_retired=show.fate(as_json),
            of_root=partial(rules, asked),
        )
    show.retired(outcome, as_json=as_json)


@takes(declared(*options_of(ThinOptions), of=ThinOptions), RUN, ANSWER)
def thin(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC...", help="Steps, by path or URL; or watched roots and runs, for all of their steps."
        ),
    ],
    **arguments: Any,
) -> None:
    """Remove the optimizer of steps, in their own place.

    This is a dry run by default. `--yes` writes each step anew beside its place without the optimizer, reads
    both, and lets them change places. The newest steps, and those that are written or held, stay as they are.
    """
    from ckptcore.catalog import default_url, open_catalog
    from ckptcore.cli import render_operations as show
    from ckptcore.operations.retention.thin import ThinRules
    from ckptcore.operations.retention.thin import thin as run
    from ckptcore.utils.units import parse_duration

    settings = Options(**{name: arguments[name] for name in RUN}).settings()
    rules = ThinRules(
        **({"drop": tuple(arguments["drop"])} if arguments["drop"] else {}),
        keep_last=arguments["keep_optimizer_last"],
        min_age_s=parse_duration(arguments["min_age"]),
        grace=timedelta(seconds=parse_duration(arguments["grace"])),
    )
    as_json = arguments["output"] is Output.JSON
    with open_catalog(arguments["catalog"] or default_url()) as catalog:
        outcome = run(
            catalog, sources, rules, settings, yes=bool(arguments["yes"]), on_item=show.thin_line(as_json)
        )
    show.thinned(outcome, as_json=as_json)
    raise typer.Exit(outcome.exit_code)


def gc(
    place: Annotated[str, typer.Argument(metavar="URL", help="A bucket, or a prefix in it.")],
    older_than: Annotated[
        str,
        typer.Option("--older-than", metavar="TIME", help="Keep what changed in this time (30m, 12h, 2d)."),
    ] = "1d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List, and remove nothing.")] = False,
    catalog: Where = None,
    output: As = Output.TEXT,
) -> None:
    """Remove what killed conversions left on S3.

    That is open uploads and staging prefixes. Only what a conversion recorded is removed; other open uploads
    are listed.
    """
    from ckptcore.operations.abandoned import collect
    from ckptcore.utils.units import parse_duration

    as_json = output is Output.JSON
    leftovers = collect(
        place,
        older_than_s=parse_duration(older_than),
        dry_run=dry_run,
        on_item=None if as_json else lambda i: terminal.line(f"{i.fate.value:12} {i.url}: {i.why}"),
        catalog=catalog,
    )
    if as_json:
        write_json([item.as_dict() for item in leftovers])
    else:
        removed = sum(item.fate.value in ("removed", "would-remove") for item in leftovers)
        verb = "would be removed" if dry_run else "removed"
        terminal.line(f"{count(len(leftovers), 'place')} found, {removed} {verb}")
    if any(item.fate.value == "unread" for item in leftovers):
        raise typer.Exit(1)
