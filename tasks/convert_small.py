"""Convert a batch of small checkpoints in one task, and announce each of them."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import task
from prefect.tasks import MaterializingTask

from ckptcore.catalog import open_catalog
from ckptcore.conversion.batch import convert_batch
from ckptcore.conversion.publish import Result
from ckptcore.conversion.registration import Announcement
from ckptcore.errors import CkptError
from ckptcore.planning.request import Request, Settings
from ckptcore.utils.units import show_size
from tasks.assets import describe_output
from tasks.logs import log
from tasks.markdown_text import count
from tasks.retry import ONCE


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
