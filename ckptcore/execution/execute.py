"""Executing: one FilePlan -> bytes, inside a memory budget, verified and digested on the way.

1. A file is cut into jobs of at most one tile (`ckptcore.execution.tiles`), in file order.
2. Workers take jobs in order: gather the boxes from the source (CRC-32 of every range read),
   compare replicas, cast on the device, and write the tile at its place.
3. In file order, whoever completes the next tile also digests it (BLAKE3), fills in checksums that
   the format stores behind the data, and hands the buffer back.
4. The last tile's worker makes the file durable and writes its receipt.

Peak memory: the interpreter plus ``Settings.memory``: 2 tiles a worker in flight, one for casts
and one for strided reads, all reused. Nothing grows with a tensor's or the checkpoint's size.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ckptcore.errors import BudgetTooSmall, DiskFull
from ckptcore.execution.device import host_buffer, lane_on
from ckptcore.execution.file_writer import FileWork, expect
from ckptcore.execution.part_writer import PartWork, proven
from ckptcore.execution.parts import Part, jobs_of
from ckptcore.execution.receipts import Receipt, seen_as, write_receipt
from ckptcore.execution.reuse import DryWork, confirmed, earlier
from ckptcore.execution.tiles import Job, jobs
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.request import Settings
from ckptcore.reading.checksums import Records
from ckptcore.store import Store
from ckptcore.utils.threads import work_together

Progress = Callable[[str, int, int], None]
Unchanged = Callable[[Sequence[str]], None]
_log = logging.getLogger("ckptcore")
_MIN_TILE = 64 << 10
_MAX_TILE = 256 << 20


def execute_files(
    load: Callable[[int], FilePlan],
    indices: Sequence[int],
    *,
    plan_digest: str,
    source: Store,
    files: Store,
    receipts: Store,
    settings: Settings,
    unchanged: Unchanged,
    items: int,
    scratch: str | None = None,
    progress: Progress | None = None,
    total: int = 0,
    part: Part | None = None,
) -> tuple[Receipt, ...]:
    """Writes the output files ``indices`` of a plan into ``files``; gives their receipts in order.

    load: gives the plan of a file by index. receipts: where finished files are recorded.
    unchanged: raises `SourceChanged` when one of these source files is not as it was planned. items: how many
    the source has.
    scratch: folder for decoded items. total: bytes of the whole plan, for progress. part: only this part of
    the one file that is named (`ckptcore.execution.parts`); the receipt is the part's.
    Raises the first error of any worker; finished files and receipts stay.
    """
    records = Records(source, items, settings.verify, scratch)
    bounds = (part.begin, part.end) if part is not None else None
    old = earlier(indices, plan_digest, files, receipts, settings, bounds)
    done = dict(old.kept)
    for index, receipt in done.items():
        if receipt.pending and settings.verify:
            expect(load(index), receipt.pending, records)
    moved = sum(receipt.nbytes for receipt in done.values())
    if moved and progress is not None:
        progress("write", moved, total)

    def run(todo: Sequence[int], *, dry: bool = False) -> dict[int, Receipt]:
        if not todo:
            return {}
        return _Run(
            load,
            todo,
            plan_digest,
            source,
            files,
            receipts,
            settings,
            scratch,
            progress,
            moved,
            total,
            unchanged,
            records,
            part,
            dry,
        ).finish()

    for index, made in run(list(old.doubted), dry=True).items():
        same = confirmed(old.doubted[index], made)
        if same is not None:
            write_receipt(receipts, plan_digest, same)
            done[index] = same
            moved += same.nbytes
    done |= run([i for i in indices if i not in done])
    records.finish(settings.threads)
    for index, receipt in done.items():
        if receipt.pending:  # what other files had to be waited for is proven now
            more = sum(map(records.verified, receipt.pending))
            bits = receipt.proven if part is None else proven(load(index), records)
            done[index] = replace(
                receipt,
                verified=receipt.verified + more,
                pending=(),
                unverified=receipt.unverified - more,
                proven=bits,
            )
            write_receipt(receipts, plan_digest, done[index])
    return tuple(done[i] for i in indices)


def tile_bytes(settings: Settings) -> int:
    """Bytes of one tile buffer under a budget; raises `BudgetTooSmall`."""
    # Two tiles in flight a worker, one to cast from, one to read strided data into.
    size = min(settings.memory // (4 * settings.threads), _MAX_TILE) // 4096 * 4096
    if size < _MIN_TILE:
        raise BudgetTooSmall(
            f"{settings.memory} bytes are too little for {settings.threads} workers: "
            f"each needs 4 tiles of at least {_MIN_TILE} bytes"
        )
    return size


class _Run:
    """The workers, buffers and shared state of one `execute_files` call."""

    def __init__(
        self,
        load: Callable[[int], FilePlan],
        todo: Sequence[int],
        plan_digest: str,
        source: Store,
        files: Store,
        receipts: Store,
        settings: Settings,
        scratch: str | None,
        progress: Progress | None,
        moved: int,
        total: int,
        unchanged: Unchanged,
        records: Records,
        part: Part | None,
        dry: bool,
    ) -> None:
        self._part, self._dry = part, dry
        self._settings, self._source, self._files, self._receipts = (settings, source, files, receipts)
        self._plan_digest, self._scratch, self._unchanged = plan_digest, scratch, unchanged
        self._records = records
        self._tile = tile_bytes(settings)
        self._progress, self._moved, self._total = progress, moved, total
        self._stream = self._jobs(load, todo)
        self._take, self._report = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._done: dict[int, Receipt] = {}
        self._open: dict[int, FileWork] = {}
        self._buffers: queue.SimpleQueue[np.ndarray[tuple[int], np.dtype[np.uint8]] | None] = (
            queue.SimpleQueue()
        )
        for _ in range(2 * settings.threads):
            self._buffers.put(host_buffer(self._tile, settings.device))

    def finish(self) -> dict[int, Receipt]:
        """Runs to the end; raises the first error."""
        try:
            work_together(self._settings.threads, self._work, self._halt)
        except BaseException as error:  # also KeyboardInterrupt: the files under way are dropped first
            self._fail(error)
        for work in self._open.values():
            work.abort()
        if self._error is not None:
            raise self._error
        return self._done

    def _jobs(self, load: Callable[[int], FilePlan], todo: Sequence[int]) -> Iterator[tuple[FileWork, Job]]:
        for index in todo:
            plan = load(index)
            self._unchanged([f.path for f in plan.files])
            means = (plan, self._source, self._files, self._settings, self._records, self._scratch)
            work = (
                PartWork(*means, self._part) if self._part else (DryWork if self._dry else FileWork)(*means)
            )
            self._open[index] = work
            pending = None
            cut = (plan, self._tile, self._settings.threads)
            for job in jobs(*cut) if self._part is None else jobs_of(self._part, *cut):
                if pending is not None:
                    yield work, pending
                pending = job
            assert pending is not None  # a file has at least one job, even an empty one
            work.last_is(pending.sequence)
            yield work, pending

    def _work(self) -> None:
        try:
            device = self._settings.device
            scratch, cast = host_buffer(self._tile, device), host_buffer(self._tile, device)
            lane = lane_on(device, self._tile)
            while not self._stop.is_set():
                buffer = self._buffers.get()
                if buffer is None:
                    break
                with self._take:  # buffers first, then jobs: the oldest job always holds a buffer
                    taken = None if self._stop.is_set() else next(self._stream, None)
                    if taken is None:
                        break
                work, job = taken
                began = time.perf_counter()
                work.fill(job, buffer, scratch, cast, lane)
                work.settle(job, buffer, self._buffers.put, time.perf_counter() - began)
                self._advance(job.nbytes)
                receipt = work.complete()
                if receipt is not None:
                    # Also behind the last read: a file that was rewritten meanwhile proves nothing.
                    self._unchanged([f.path for f in work.plan.files])
                    if not self._dry:
                        receipt = replace(receipt, stamp=seen_as(self._files, receipt))
                        write_receipt(self._receipts, self._plan_digest, receipt)
                        _log.info("%s", work.told(receipt))
                    with self._report:
                        self._done[receipt.index] = receipt
                        del self._open[receipt.index]
        except BaseException as error:  # carried to `finish`, which raises it
            self._fail(error)
        finally:
            self._buffers.put(None)  # wakes the next worker

    def _fail(self, error: BaseException) -> None:
        with self._report:
            if self._error is None:
                self._error = self._explain(error)
        self._halt()

    def _halt(self) -> None:
        self._stop.set()
        self._buffers.put(None)  # wakes a worker that waits for a buffer, which wakes the next

    def _explain(self, error: BaseException) -> BaseException:
        if isinstance(error, DiskFull):
            free = self._files.free_bytes()
            error.values.setdefault("free_bytes", free)
            error.message += f"; {free} bytes are free, {self._total} are needed in all"
            error.args = (error.message,)
        if isinstance(error, MemoryError):
            return BudgetTooSmall(f"no memory for the buffers: {error or 'allocation failed'}")
        return error

    def _advance(self, nbytes: int) -> None:
        if self._progress is not None:
            with self._report:
                self._moved += nbytes
                moved = self._moved
            self._progress("write", moved, self._total)
