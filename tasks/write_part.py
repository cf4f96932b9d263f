"""Write part: some bytes of a file that other tasks write too."""

from __future__ import annotations

from prefect import task

from ckptcore.conversion.pipeline import FilePart, execute_part
from ckptcore.execution.receipts import Receipt
from ckptcore.planning.request import Settings
from ckptcore.utils.units import show_size
from tasks.logs import log
from tasks.progress import BatchProgress
from tasks.retry import STEP


@task(task_run_name="write {name}", **STEP)
def write_part(name: str, plan_uri: str, part: FilePart, settings: Settings) -> Receipt:
    """The receipt of one part; one that is there already, and verified, is kept.

    name: what the run is called.
    """
    receipt = execute_part(plan_uri, part, settings, BatchProgress(name, part.nbytes))
    kept = ", kept from an earlier run" if receipt.reused else ""
    log.info("%s: %s, bytes %d to %d%s", name, show_size(part.nbytes), part.begin, part.end, kept)
    return receipt
