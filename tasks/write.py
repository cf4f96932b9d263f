"""Write files of a plan: some of them, or a part of one, whose parts are joined when all are written.

An artifact of a task shows its progress; the task ends when its run ends.
"""

from __future__ import annotations

import math
import threading
import time
from contextvars import copy_context
from typing import cast
from uuid import UUID

from prefect import task
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from ckptcore.conversion.pipeline import FilePart, execute, execute_part
from ckptcore.conversion.pipeline import join as join_parts
from ckptcore.core.file_sums import FileSums
from ckptcore.errors import Interrupted
from ckptcore.execution.receipts import Receipt
from ckptcore.planning.request import Settings
from ckptcore.utils.units import show_size
from tasks.logs import log
from tasks.retry import STEP

STOP = threading.Event()  # set when the run must end now; ckptcore checks it between any two tiles
SECONDS = 2.0  # between two updates; a faster batch has no artifact


class BatchProgress:
    """The `ckptcore.utils.workers.Progress` of one batch; safe to call from ckptcore's threads.

    Those threads have no run context, so the artifact is written in the context of the task that created this
    object.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        self._name, self._nbytes = name, nbytes
        self._context, self._one = copy_context(), threading.Lock()
        self._artifact: UUID | None = None
        self._next = time.monotonic() + SECONDS

    def __call__(self, stage: str, nbytes: int, total: int) -> None:
        """Show the bytes done of this batch; `total` is that of the complete plan. Raises `Interrupted`."""
        if STOP.is_set():
            raise Interrupted(f"{self._name} was stopped")
        if time.monotonic() < self._next or not self._one.acquire(blocking=False):
            return
        try:
            self._context.run(self._show, nbytes)
            self._next = time.monotonic() + SECONDS
        except Exception as error:  # the files are still written, whatever the server's error
            self._context.run(log.warning, "cannot show the progress of %s any more: %s", self._name, error)
            self._next = math.inf
        finally:
            self._one.release()

    def _show(self, nbytes: int) -> None:
        percent = min(100.0, 100.0 * nbytes / max(self._nbytes, 1))
        described = f"{self._name}: {show_size(nbytes)} of {show_size(self._nbytes)}"
        if self._artifact is None:
            self._artifact = cast("UUID", create_progress_artifact(percent, description=described))
        else:
            update_progress_artifact(self._artifact, percent, description=described)


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
