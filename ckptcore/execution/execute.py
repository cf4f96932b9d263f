"""Execute a plan: write its files within a memory budget, verified and digested on the way.

1. A file is cut into jobs of at most one tile (`ckptcore.planning.tiles`), in file order.
2. Workers take jobs of the open files in turn: gather the boxes from the source (CRC-32 of every range read),
   compare replicas, cast (a device: a batch), and write the tile at its place.
3. In file order, the worker that completes the next tile also digests it (BLAKE3), fills in checksums that
   the format stores behind the data, and frees the buffer.
4. The last tile's worker makes the file durable and writes its receipt.

Peak memory: the interpreter plus ``Settings.memory``: per worker 2 tiles in flight, one for casts
and one for strided reads, all reused; a quarter is for decoded items where items are compressed. Nothing
grows with a tensor's or the checkpoint's size.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ckptcore.errors import BudgetTooSmall, DiskFull
from ckptcore.execution.device import host_buffer, slots_on
from ckptcore.execution.expected_reads import expect_files, prove_files
from ckptcore.execution.file_writer import FileWork, open_writer, proven
from ckptcore.execution.parts import FilePart, jobs_of
from ckptcore.execution.plan_run import PlanRun
from ckptcore.execution.receipts import Receipt, seen_as, write_receipt
from ckptcore.execution.reuse import CompareWriter, DigestWriter, compare_writer, earlier
from ckptcore.execution.source_order import SourceOrder, ordered_jobs
from ckptcore.execution.tensor_filler import Workspace, expect
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import Budget, Job, Tiles, jobs, paged_buffer
from ckptcore.reading.checksums import Records
from ckptcore.reading.gather import Bytes
from ckptcore.reading.rereading import rereading
from ckptcore.store import BLOCK, FileWriter
from ckptcore.store.ahead import ReadsAhead
from ckptcore.utils.workers import Buffers, Progress, ProgressMeter, finishing, run_jobs

_log = logging.getLogger("ckptcore")
_Task = tuple[FileWork, Job, Bytes]
_Turn = tuple[FileWork, Iterator[Job], Job]
_MOST_ROWS = 1 << 16  # tensors and reads of open plans that allow one more; they take about 500 bytes each


@rereading
def execute_files(
    run: PlanRun,
    indices: Sequence[int],
    settings: Settings,
    *,
    part: FilePart | None = None,
    progress: Progress | None = None,
) -> tuple[Receipt, ...]:
    """Write output files of a plan.

    Args:
        run: The plan, and the stores it uses.
        indices: Indices of the files to write.
        settings: Memory, workers, device and checks.
        part: Write only this part of the one file in ``indices``; the receipt is the part's.
        progress: Called with the bytes that are written of the complete plan.

    Returns:
        The receipts of the files, in order.

    Raises:
        CkptError: The first error of any worker; finished files and receipts stay.
    """
    # One table of records for all files: a record may be read in parts by several of them.
    records = Records(run.source, run.items, settings.verify, run.scratch)
    # Before anything is written: what an earlier run finished is hashed, and counts as progress.
    earlier_receipts, doubted = earlier(run, indices, settings, part)
    # What an interrupted run read over a network was not proven, and cannot be any more.
    remote = isinstance(run.source, ReadsAhead)
    receipts = {i: receipt for i, receipt in earlier_receipts.items() if not (remote and receipt.pending)}
    for index, receipt in receipts.items():
        # Files of an earlier run may have read a record in part: it is verified when the rest is read.
        if receipt.pending and settings.verify:
            expect(run.load(index), receipt.pending, records)
    meter = ProgressMeter(progress, "write", run.total)
    reused_bytes = sum(receipt.nbytes for receipt in receipts.values())
    if reused_bytes:
        meter.add(reused_bytes)
    shared = _Shared(records, meter)
    # Doubtful files are computed once more and compared; what is equal need not be written.
    if doubted:
        budget, _ = expect_files(replace(run, uploads=None), list(doubted), settings, records)
        recomputed, _ = _Run(run, settings, shared, (budget, None), compare=True).finish(list(doubted))
        for index, receipt in recomputed.items():
            receipts[index] = replace(receipt, reused=True, stamp=doubted[index].stamp)
            write_receipt(run.receipts, run.digest, receipts[index])
    todo = [i for i in indices if i not in receipts]
    # Other processes write complete files; what they read is joined here.
    if todo and run.elsewhere is not None:
        receipts |= run.elsewhere(todo, records, meter)
    elif todo:
        schedule = expect_files(run, todo, settings, records, part)
        receipts |= _Run(run, settings, shared, schedule, part=part).finish(todo)[0]
    # The store's checksums last: they also cover what `finish` reads.
    # Records that only part of was read are read to their end, so that
    # each has been verified or has no checksum.
    records.finish(settings.threads)
    prove_files(run, indices, records)
    for index, receipt in receipts.items():
        # Its file was written before all of its records were verified; the receipt says so now.
        if receipt.pending:  # verified now by the reads for other files
            verified_count = sum(map(records.verified, receipt.pending))
            bits = receipt.proven if part is None else proven(run.load(index), records)
            receipts[index] = replace(
                receipt,
                verified=receipt.verified + verified_count,
                pending=(),
                unverified=receipt.unverified - verified_count,
                proven=bits,
            )
            write_receipt(run.receipts, run.digest, receipts[index])
    return tuple(receipts[i] for i in indices)


def files_writer(
    run: PlanRun, settings: Settings, records: Records, meter: ProgressMeter
) -> Callable[[Sequence[int]], tuple[Receipt, ...]]:
    """Return what writes output files by their indices, as one of several processes: see `PlanRun.elsewhere`.

    What others read the rest of stays open in ``records``. It raises the first error of any worker.
    """
    budget = Budget.of(settings)
    tiles = Tiles(partial(host_buffer, budget.tile, settings.device))
    shared = _Shared(records, meter, tiles)

    def write(indices: Sequence[int]) -> tuple[Receipt, ...]:
        written, _ = _Run(run, settings, shared, (budget, None)).finish(indices)
        tiles.take_back()
        return tuple(written[index] for index in indices)

    return write


@rereading
def recompute_files(
    run: PlanRun, indices: Sequence[int], settings: Settings, progress: Progress | None = None
) -> None:
    """Compute output files once more from the source, and compare them with the existing files.

    Nothing is written.

    Raises:
        OutputMismatch: A file holds other bytes than the source gives now.
    """
    records = Records(run.source, run.items, settings.verify, run.scratch)
    # Digests and sums are in the receipts already: only the bytes are compared here.
    means = replace(settings, digest=False, fingerprint=False, stats=False)
    budget, _ = expect_files(replace(run, uploads=None), indices, means, records)  # compared in file order
    shared = _Shared(records, ProgressMeter(progress, "verify", run.total))
    _, differing = _Run(run, means, shared, (budget, None), compare=True).finish(indices)
    for writer in differing:
        raise writer.mismatch()
    records.finish(settings.threads)
    prove_files(run, indices, records)


@dataclass(frozen=True, slots=True)
class _Shared:
    """What runs that follow each other in a process share. tiles: buffers that another run has used."""

    records: Records
    meter: ProgressMeter
    tiles: Tiles | None = None


class _Run:
    """The files that one group of workers makes, its buffers, and its shared state.

    ``schedule`` is as `expect_files` returns it: the budget, and the order of reads, None for that of files.
    ``compare`` compares the files with the existing ones instead of writing them.
    """

    def __init__(
        self,
        run: PlanRun,
        settings: Settings,
        shared: _Shared,
        schedule: tuple[Budget, SourceOrder | None],
        *,
        part: FilePart | None = None,
        compare: bool = False,
    ) -> None:
        self._run, self._settings = run, settings
        self._records, self._meter = shared.records, shared.meter
        self._part, self._compare = part, compare
        self._budget, self._order = schedule
        self._records.limit_decoded(self._budget.decoded)
        self._lock = threading.Lock()
        self._done: dict[int, Receipt] = {}
        self._open: dict[int, FileWork] = {}
        self._differing: dict[int, CompareWriter | DigestWriter] = {}
        # Two for each worker: one is filled while the other waits to be flushed in order.
        self._tiles = shared.tiles or Tiles(partial(host_buffer, self._budget.tile, settings.device))
        self._buffers = Buffers(self._tiles.take() for _ in range(2 * settings.threads))
        self._slots = slots_on(settings.device, self._budget.tile)

    def finish(self, indices: Sequence[int]) -> tuple[dict[int, Receipt], list[CompareWriter | DigestWriter]]:
        """Run to the end; return (receipts of files, differing files in order). Raises the first error."""
        tasks = self._tasks(indices)
        try:
            run_jobs(tasks, self._worker, threads=self._settings.threads, stop=self._buffers.close)
        except BaseException as error:  # also KeyboardInterrupt: the open files are discarded first
            with finishing():
                for work in self._open.values():
                    work.abort()
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error
        return self._done, [self._differing[index] for index in sorted(self._differing)]

    def _tasks(self, indices: Sequence[int]) -> Iterator[_Task]:
        """Yield the jobs of all files, each with its buffer.

        Buffers first, then jobs: the oldest job always has a buffer, so there is no deadlock.
        """
        ordered: tuple[int, ...] = ()
        if self._order is not None:
            ordered = self._order.indices
            yield from self._ordered_tasks(self._order)
        yield from self._tasks_in_turn(index for index in indices if index not in ordered)

    def _tasks_in_turn(self, indices: Iterator[int]) -> Iterator[_Task]:
        """Yield the jobs of some files in turn, one file for every two workers.

        The kernel lets one thread at a time write a file of a RAM disk, and the digest of a file is computed
        in its order: four workers in two files take 0.85 of the time of four in one. A file that is sent as
        a stream, or in parts, is alone, because its writer keeps bytes in memory. So is each file of a source
        that is read ahead: its reads are declared in file order, and in another one blocks are fetched again.
        Plans of many rows are in memory one after another, and so are decoded items of compressed files.
        """
        most = 1 if isinstance(self._run.source, ReadsAhead) else max(1, self._settings.threads // 2)
        turns: deque[_Turn] = deque()
        while True:
            while (
                len(turns) < most
                and _rows(turns) <= _MOST_ROWS
                and (index := next(indices, None)) is not None
            ):
                work, cut = self._opened(index)
                # A file that is decoded, streamed or uploaded in parts takes memory of its own.
                if work.decodes or work.writer.sequential or work.writer.part_size is not None:
                    most = 1
                turns.append((work, cut, next(cut)))  # every file has a job, even an empty one
            if not turns:
                return
            work, cut, job = turns.popleft()
            # Asked ahead, since the worker must know which job is the last before it is done.
            after = next(cut, None)
            if after is None:
                work.last_is(job.sequence)
            else:
                turns.append((work, cut, after))
            # None: an error has closed them, and no further job is begun.
            buffer = self._buffers.take()
            if buffer is None:
                return
            yield work, job, buffer

    def _ordered_tasks(self, order: SourceOrder) -> Iterator[_Task]:
        """Yield the jobs of files that follow their source; several files are open at the same time."""
        run, uploads = self._run, self._run.uploads
        assert uploads is not None  # only uploads take bytes in any order
        line = uploads.line(-(-order.open_bytes // max(order.part, 1)))
        works: dict[int, FileWork] = {}

        def opened(index: int) -> FilePlan:
            plan = run.load(index)
            run.require_unchanged(plan)
            writer = uploads.writer(index, plan.path, plan.nbytes, shared=line)
            works[index] = self._begun(plan, writer)
            return plan

        for index, job, last in ordered_jobs(order, opened, self._budget):
            work = works.pop(index) if last else works[index]
            if last:
                work.last_is(job.sequence)
            buffer = self._buffers.take()
            if buffer is None:
                return
            yield work, job, buffer

    def _opened(self, index: int) -> tuple[FileWork, Iterator[Job]]:
        run = self._run
        plan = run.load(index)
        run.require_unchanged(plan)
        writer = compare_writer(run, plan) if self._compare else open_writer(run, plan, self._part)
        work, part = self._begun(plan, writer), self._part
        if part is not None:
            return work, jobs_of(part, plan, self._budget)
        return work, jobs(plan, self._budget, work.strides)

    def _begun(self, plan: FilePlan, writer: FileWriter) -> FileWork:
        try:
            work = FileWork(plan, self._run.source, self._records, writer, self._settings, self._part)
        except BaseException:  # nothing else knows its writer yet
            with finishing():
                writer.abort()
            raise
        with self._lock:
            self._open[plan.index] = work
        return work

    def _worker(self) -> Callable[[_Task], None]:
        # A device never sees what is read and not yet in its place.
        scratch = self._tiles.take() if self._slots is None else paged_buffer(self._budget.tile)
        workspace = Workspace(scratch, self._tiles.take(), self._slots)
        # Compressed files use a part of the buffers: the rest of the budget is for decoded items.
        smaller_workspace = workspace.of(self._budget.beside_decoded.tile)

        def do(task: _Task) -> None:
            work, job, memory = task
            # Bytes have the same place in a block of memory as in one of the file: see `LocalWriter`.
            skew = (job.start - memory.ctypes.data) % BLOCK
            # If the skew leaves too little room, the buffer is used as it is.
            buffer = memory[skew:] if skew + job.nbytes <= len(memory) else memory
            work.fill(job, buffer, smaller_workspace if work.decodes else workspace)
            # The buffer may be given back by another worker, whose turn it is.
            work.flush_in_order(job, buffer, lambda _: self._buffers.give_back(memory))
            self._meter.add(job.nbytes)
            receipt = work.complete()
            if receipt is not None:
                self._finished(work, receipt)

        return do

    def _finished(self, work: FileWork, receipt: Receipt) -> None:
        run = self._run
        # Once more behind the last read: a file that was rewritten meanwhile proves nothing.
        run.require_unchanged(work.plan)
        writer = work.writer
        if isinstance(writer, CompareWriter | DigestWriter):
            # Equal or not is known only now, when the last byte was compared.
            if writer.differs:
                with self._lock:
                    self._differing[receipt.index] = writer
                    del self._open[receipt.index]
                return
        else:
            if receipt.uploaded is None:
                # The stamp of the finished file: it shows later whether this is still that very file.
                receipt = replace(receipt, stamp=seen_as(run.files, receipt))
            write_receipt(run.receipts, run.digest, receipt)
            _log.info("%s", _described(work, receipt))
        with self._lock:
            self._done[receipt.index] = receipt
            del self._open[receipt.index]

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, DiskFull) and "lacks" not in error.values:  # bytes, not inodes or a quota
            free = self._run.files.free_bytes()
            error.values.setdefault("free_bytes", free)
            free_text = f"{free} bytes are free, " if free is not None else ""
            error.message += f"; {free_text}{self._run.total} are needed in total"
            error.args = (error.message,)
        if isinstance(error, MemoryError):
            return BudgetTooSmall(f"cannot allocate the buffers: {error or 'allocation failed'}")
        return error


def _rows(turns: Iterable[_Turn]) -> int:
    return sum(len(work.plan.columns) + len(work.plan.op) for work, _, _ in turns)


def _described(work: FileWork, receipt: Receipt) -> str:
    """Return a log line for what was written."""
    timing = f"{receipt.seconds:.2f} s, BLAKE3 {receipt.digest}"
    part = work.part
    if part is None:
        return f"wrote {receipt.path}: {receipt.nbytes} bytes, {len(work.plan.columns)} tensors, {timing}"
    return (
        f"wrote part {part.number} of {part.of} of {receipt.path}: bytes {part.begin} to {part.end} "
        f"of {work.plan.nbytes}, {timing}"
    )
