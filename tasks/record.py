"""Record: what does the catalog keep of a conversion?"""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from ckptcore.convert import register, settle
from ckptcore.finishing import Result
from ckptcore.manifest import Manifest
from ckptcore.register import Registration
from ckptcore.request import Settings
from tasks.logs import log
from tasks.retry import DELAYS, RETRIES, is_transient


@task(
    task_run_name="register",
    tags=["ckptcore"],
    retries=RETRIES,
    retry_delay_seconds=DELAYS,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def record(
    registration: Registration | None, result: Result, manifest: Manifest, settings: Settings
) -> Result:
    """The result with its id in the catalog; then nothing needs the staging folder any more."""
    known = register(registration, result, manifest, settings)
    settle(result.plan_uri)
    if known.conversion is not None:
        log.info("conversion %s is in the catalog", known.conversion)
    return known
