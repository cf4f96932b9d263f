"""Classify the checkpoints below a watched root, convert small ones together, and record the results."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import task
from prefect.tasks import MaterializingTask

from ckptcore.catalog import open_catalog
from ckptcore.catalog.watched_roots import RootRow
from ckptcore.conversion.batch import convert_batch
from ckptcore.conversion.publish import Result
from ckptcore.conversion.registration import Announcement
from ckptcore.errors import CkptError
from ckptcore.operations.automation.sweep import SweepSettings, look_through, note_swept, of_root
from ckptcore.operations.automation.sweep_items import SweepItem
from ckptcore.operations.automation.sweep_thin import thin_swept
from ckptcore.planning.request import Request, Settings
from ckptcore.utils.text import count
from ckptcore.utils.units import show_size
from tasks.artifacts import table_or_none
from tasks.assets import describe_output
from tasks.logs import log
from tasks.retry import ONCE


@task(task_run_name="look through {name}", **ONCE)
def look(name: str, root: RootRow, catalog: str | None, settings: SweepSettings) -> list[SweepItem]:
    """Return the checkpoints below a root, with the status of each. name: for the name of the task run."""
    with open_catalog(catalog) as catalog_db:
        items = list(look_through(catalog_db, root, settings))
    ready = sum(item.standing == "ready" for item in items)
    log.info("%s: %s, %d to convert", name, count(len(items), "checkpoint"), ready)
    return items


@task(task_run_name="thin {name}", **ONCE)
def thin(
    name: str,
    root: RootRow,
    items: Sequence[SweepItem],
    catalog: str | None,
    settings: SweepSettings,
    means: Settings,
) -> list[SweepItem]:
    """Thin the steps of a root by its retention; return those that changed, or could not."""
    with open_catalog(catalog) as catalog_db:
        steps = thin_swept(
            catalog_db, root, items, means, settle_s=settings.settle_s, dry_run=settings.dry_run
        )
        return list(of_root(root, steps))


@task(task_run_name="note {name}", **ONCE)
def note(name: str, root: RootRow, items: Sequence[SweepItem], catalog: str | None, dry_run: bool) -> None:
    """Record the results of a root, as an artifact and in the catalog."""
    rows = [
        {"standing": i.standing.value, "step": i.step, "checkpoint": i.source, "why": i.why or i.destination}
        for i in items
    ]
    table_or_none("sweep", rows, f"`{root.uri}`: {count(len(items), 'checkpoint')}")
    for item in items:
        if item.why and item.standing not in ("converted", "claimed"):
            log.warning("%s is %s: %s", item.source, item.standing.value, item.why)
    if not dry_run:
        with open_catalog(catalog) as catalog_db:
            note_swept(catalog_db, root, items)


@task(task_run_name="convert {name}", **ONCE)
def convert_small(
    name: str,
    requests: Sequence[Request],
    settings: Settings,
    catalog: str | None,
    announcement: Announcement,
    flow_run_id: str,
) -> list[Result | CkptError]:
    """Return for each request its output, or its error. name: for the name of the task run."""
    with open_catalog(catalog) as catalog_db:
        outcomes = convert_batch(
            requests,
            settings,
            catalog_db,
            catalog_url=catalog,
            announcement=announcement,
            flow_run_id=flow_run_id,
        )
    outputs = [outcome for outcome in outcomes if not isinstance(outcome, CkptError)]
    log.info(
        "%s: %s", count(len(outputs), "conversion"), show_size(sum(outcome.nbytes for outcome in outputs))
    )
    return outcomes


# With the assets of a conversion, as `tasks.record.record`.
announce = MaterializingTask(
    fn=describe_output,
    name="announce",
    assets=[],
    materialized_by="ckptcore",
    task_run_name="announce",
    **ONCE,
)
