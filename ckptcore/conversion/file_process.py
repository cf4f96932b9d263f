"""Write the files of a staged plan in several processes, each one file after the other.

Threads of one process wait for each other between short calls; processes do not. The process that has the
staging folder's lock hands out files, and gets receipts; its workers keep the lock's descriptor open, so that
no other run begins while one of them may still write.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptcore.checking.source_stamps import load as load_stamps
from ckptcore.conversion.staging.open_staging import staging_of_plan
from ckptcore.conversion.staging.staging import Staging
from ckptcore.core.file_sums import FileSums
from ckptcore.errors import CkptError
from ckptcore.execution.execute import files_writer
from ckptcore.execution.plan_run import Elsewhere
from ckptcore.execution.receipts import Receipt
from ckptcore.planning.plan import Plan, load_head
from ckptcore.planning.request import Settings
from ckptcore.reading.casting import PLAIN
from ckptcore.reading.checksums import RecordProgress, Records
from ckptcore.reading.payload import late_imports
from ckptcore.store import open_source_store
from ckptcore.utils.isolation import attempt
from ckptcore.utils.process_pool import Begun, ProcessPool, batches
from ckptcore.utils.workers import CountedMeter, ProgressMeter


@dataclass(frozen=True, slots=True)
class _Setup:
    """What a worker begins with. observe: whether it returns what it has read of the source's files."""

    plan_uri: str
    settings: Settings
    observe: bool


@dataclass(frozen=True, slots=True)
class _Report:
    """What a worker has read, at its end."""

    records: RecordProgress
    sums: FileSums | None


def elsewhere(
    staging: Staging,
    plan: Plan,
    indices: Sequence[int],
    settings: Settings,
    sums: FileSums | None,
    count: int,
) -> Elsewhere | None:
    """Return what writes files of a staged plan in other processes; None where threads of this one do.

    Args:
        staging: The staging folder; the caller has its lock.
        plan: The plan.
        indices: Of the files to write.
        settings: Memory, threads and device of all processes together.
        sums: Gets what was read of the source's files.
        count: Number of processes.
    """
    sizes = {index: plan.files[index].nbytes for index in indices}
    if staging.lock_fd is None:
        return None

    imports = late_imports(observed=sums is not None)
    # What torch alone casts or computes: importing it takes a second.
    imports += ["torch"] if plan.derived or any(cast[1:] not in PLAIN for cast in plan.cast) else []

    def write(indices: Sequence[int], records: Records, meter: ProgressMeter) -> dict[int, Receipt]:
        some = min(count, len(indices))
        setup = _Setup(staging.plan_uri, settings.of_processes(some), sums is not None)
        jobs = batches(indices, [sizes[index] for index in indices], some)
        assert staging.lock_fd is not None  # it was there
        try:
            with ProcessPool(__name__, [setup] * some, fds=[staging.lock_fd], imports=imports) as pool:
                written = [receipt for answer in pool.run(jobs, meter.add) for receipt in answer]
                reports: list[_Report] = pool.finish()
        except BaseException:
            # A worker that is slow to end is killed before it has discarded what it had begun.
            swept = attempt(staging.sweep_parts)
            if isinstance(swept, CkptError):
                logging.getLogger("ckptcore").warning("unfinished files stay: %s", swept.message)
            raise
        records.join([report.records for report in reports])
        for report in reports:
            if sums is not None and report.sums is not None:
                sums.add(report.sums)
        return {receipt.index: receipt for receipt in written}

    return write


def begin(setup: _Setup, finished: Callable[[int], None]) -> Begun:
    """Open the plan and its source in a worker."""
    staging = staging_of_plan(setup.plan_uri)
    plan, stamps = load_head(staging.plan), load_stamps(staging.plan) or {}
    source = open_source_store(plan.source, stamps)
    sums = FileSums() if setup.observe else None
    source.observer = sums
    run = staging.run(plan, source, stamps, setup.settings)
    records = Records(source, run.items, setup.settings.verify, run.scratch)
    write = files_writer(run, setup.settings, records, CountedMeter(finished))
    return write, lambda: _Report(records.progress(), sums)
