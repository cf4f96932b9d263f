"""Write: some files of a plan."""

from __future__ import annotations

from prefect import task

from ckptcore.conversion.pipeline import execute
from ckptcore.execution.receipts import Receipt
from ckptcore.planning.request import Settings
from ckptcore.utils.units import show_size
from tasks.logs import log
from tasks.progress import BatchProgress
from tasks.retry import STEP


@task(task_run_name="write {name}", **STEP)
def write(name: str, plan_uri: str, indices: list[int], nbytes: int, settings: Settings) -> list[Receipt]:
    """Receipts of the files ``indices``; those that are there already, and verified, are kept.

    name: what the run is called. nbytes: of these files. Receipts lie beside the files, so a run
    that was killed goes on behind its last whole file: nothing rests on Prefect's memory.
    """
    receipts = list(execute(plan_uri, indices, settings, BatchProgress(name, nbytes)))
    kept = sum(receipt.reused for receipt in receipts)
    told = f", {kept} of {len(indices)} files kept from an earlier run" if kept else ""
    log.info("%s: %s%s", name, show_size(nbytes), told)
    return receipts
