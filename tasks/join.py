"""Join: parts of a file, proven and made one."""

from __future__ import annotations

from prefect import task

from ckptcore.conversion.pipeline import join as join_parts
from ckptcore.execution.receipts import Receipt
from ckptcore.utils.units import show_size
from tasks.logs import log
from tasks.retry import STEP


@task(task_run_name="join {name}", **STEP)
def join(name: str, plan_uri: str, index: int) -> Receipt:
    """The receipt of a file whose parts are all written. name: the file."""
    receipt = join_parts(plan_uri, index)
    log.info("%s: %s in parts, proven", name, show_size(receipt.nbytes))
    return receipt
