"""Join: parts of a file, proven and made one."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from ckptcore.convert import join as join_parts
from ckptcore.receipts import Receipt
from ckptcore.sizes import show_size
from tasks.logs import log
from tasks.retry import DELAYS, RETRIES, is_transient


@task(
    task_run_name="join {name}",
    tags=["ckptcore"],
    retries=RETRIES,
    retry_delay_seconds=DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def join(name: str, plan_uri: str, index: int) -> Receipt:
    """The receipt of a file whose parts are all written. name: the file."""
    receipt = join_parts(plan_uri, index)
    log.info("%s: %s in parts, proven", name, show_size(receipt.nbytes))
    return receipt
