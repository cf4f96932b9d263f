"""Read: what is stored at the source?"""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from ckptcore.convert import inspect
from ckptcore.manifest import Manifest
from ckptcore.sizes import show_size
from tasks.logs import log
from tasks.retry import DELAYS, RETRIES, is_transient
from tasks.words import count


@task(
    task_run_name="read {source}",
    tags=["ckptcore"],
    retries=RETRIES,
    retry_delay_seconds=DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def read(source: str, recover: bool = False, keep_quantized: bool = False) -> Manifest:
    """The manifest of ``source``: metadata only, no tensor byte is read."""
    found = inspect(source, recover, keep_quantized)
    told = f"{found.format}, {count(found.num_tensors, 'tensor')}, {show_size(found.nbytes)}"
    log.info("%s: %s", source, told)
    return found
