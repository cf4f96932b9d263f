"""Write files of a plan: some of them, or a part of one, whose parts are joined when all are written."""

from __future__ import annotations

from prefect import task

from ckptcore.conversion.pipeline import FilePart, execute, execute_part
from ckptcore.conversion.pipeline import join as join_parts
from ckptcore.core.file_sums import FileSums
from ckptcore.execution.receipts import Receipt
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


@task(task_run_name="write {name}", **STEP)
def write_part(
    name: str, plan_uri: str, part: FilePart, settings: Settings, observe: bool = False
) -> FileSums | None:
    """Write one part. A verified part of an earlier run is kept.

    name: for the name of the task run. observe: see `write`.
    """
    sums = FileSums() if observe else None
    receipt = execute_part(plan_uri, part, settings, BatchProgress(name, part.nbytes), sums=sums)
    note = ", kept from an earlier run" if receipt.reused else ""
    log.info("%s: %s, bytes %d to %d%s", name, show_size(part.nbytes), part.begin, part.end, note)
    return sums


@task(task_run_name="join {name}", **STEP)
def join(name: str, plan_uri: str, index: int) -> Receipt:
    """Join a file whose parts are all written, and return its receipt. name: the file's path."""
    receipt = join_parts(plan_uri, index)
    log.info("%s: joined %s of verified parts", name, show_size(receipt.nbytes))
    return receipt
