"""Write some files of a plan."""

from __future__ import annotations

from prefect import task

from ckptcore.conversion.pipeline import execute
from ckptcore.core.file_sums import FileSums
from ckptcore.planning.request import Settings
from ckptcore.utils.units import show_size
from tasks.logs import log
from tasks.progress import BatchProgress
from tasks.retry import STEP


@task(task_run_name="write {name}", **STEP)
def write(
    name: str, plan_uri: str, indices: list[int], nbytes: int, settings: Settings, observe: bool = False
) -> FileSums | None:
    """Write the files `indices`. Verified files of an earlier run are kept.

    Receipts are beside the files, so a killed run continues after its last complete file without Prefect's
    state.

    Args:
        name: for the name of the task run.
        plan_uri: the saved plan.
        indices: the files, by their index in the plan.
        nbytes: the bytes of these files.
        settings: memory, threads and device.
        observe: return what was read of the source's files, for their digests.
    """
    sums = FileSums() if observe else None
    receipts = execute(plan_uri, indices, settings, BatchProgress(name, nbytes), sums=sums)
    reused_files = sum(receipt.reused for receipt in receipts)
    note = f", {reused_files} of {len(indices)} files kept from an earlier run" if reused_files else ""
    log.info("%s: %s%s", name, show_size(nbytes), note)
    return sums
