"""Write a part of a file whose other parts are written by other tasks."""

from __future__ import annotations

from prefect import task

from ckptcore.conversion.pipeline import FilePart, execute_part
from ckptcore.core.file_sums import FileSums
from ckptcore.planning.request import Settings
from ckptcore.utils.units import show_size
from tasks.logs import log
from tasks.progress import BatchProgress
from tasks.retry import STEP


@task(task_run_name="write {name}", **STEP)
def write_part(
    name: str, plan_uri: str, part: FilePart, settings: Settings, observe: bool = False
) -> FileSums | None:
    """Write one part. A verified part of an earlier run is kept.

    name: for the name of the task run. observe: see `tasks.write.write`.
    """
    sums = FileSums() if observe else None
    receipt = execute_part(plan_uri, part, settings, BatchProgress(name, part.nbytes), sums=sums)
    note = ", kept from an earlier run" if receipt.reused else ""
    log.info("%s: %s, bytes %d to %d%s", name, show_size(part.nbytes), part.begin, part.end, note)
    return sums
