"""Verify the parts of a file and join them."""

from __future__ import annotations

from prefect import task

from ckptcore.conversion.pipeline import join as join_parts
from ckptcore.execution.receipts import Receipt
from ckptcore.utils.units import show_size
from tasks.logs import log
from tasks.retry import STEP


@task(task_run_name="join {name}", **STEP)
def join(name: str, plan_uri: str, index: int) -> Receipt:
    """Join a file whose parts are all written, and return its receipt. name: the file's path."""
    receipt = join_parts(plan_uri, index)
    log.info("%s: joined %s of verified parts", name, show_size(receipt.nbytes))
    return receipt
