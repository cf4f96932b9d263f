"""Compute bytes of a plan's files when they are read, without writing them.

A file is cut into the same jobs as for writing (`ckptcore.planning.tiles`). A read computes the jobs that it
touches, and keeps them in a cache of bounded size, for readers that ask for the next few bytes. Readers that
need the same job at the same time share one computation. For a reader that goes from one job to the next, the
job behind that is computed meanwhile.

Memory: ``Settings.memory``. A half is for the buffers of workers, a half for the cache.
"""

from __future__ import annotations

import queue
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import numpy as np

from ckptcore.errors import CkptError
from ckptcore.execution.tensor_filler import TensorFiller, Workspace
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import Budget, Job, LiteralPart, jobs, paged_buffer
from ckptcore.reading.checksums import Records
from ckptcore.reading.gather import Bytes
from ckptcore.reading.rereading import rereading
from ckptcore.store import Store

_Key = tuple[str, int]  # path and number of a job


class VirtualFiles:
    """The files of a plan. Safe for threads.

    After an error of the source that stays, such as wrong checksums or a file that changed, every read raises
    it: what was read before and what would be read now are not of one checkpoint.

    Args:
        plans: Path -> plan of the file; without checksums behind its data.
        source: The checkpoint's folder.
        items: How many items the source's manifest has.
        settings: Memory, threads and checks.
        require_same: Called with paths of the source behind each read of it; raises `SourceChanged`.
    """

    def __init__(
        self,
        plans: Mapping[str, FilePlan],
        source: Store,
        items: int,
        settings: Settings,
        require_same: Callable[[Sequence[str]], None],
    ) -> None:
        settings = replace(settings, device="cpu", fingerprint=False, stats=False)
        budget = Budget.of(settings.within(settings.memory // 2))
        self._records = Records(source, items, settings.verify)
        self._records.limit_decoded(budget.decoded)
        self._files = {
            path: _File(plan, TensorFiller(plan, source, settings, self._records), budget)
            for path, plan in plans.items()
        }
        self._require_same = require_same
        self._workspaces: queue.LifoQueue[Workspace] = queue.LifoQueue()
        for _ in range(budget.threads):
            self._workspaces.put(Workspace(paged_buffer(budget.tile), paged_buffer(budget.tile)))
        self._smaller = budget.beside_decoded.tile
        self._room = settings.memory // 2
        self._cached: OrderedDict[_Key, Bytes] = OrderedDict()
        self._cached_bytes = 0
        self._computed: dict[_Key, Future[Bytes]] = {}  # by another thread, at this moment
        self._lock = threading.Lock()
        self._failure: CkptError | None = None
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="ahead")

    @property
    def unverified(self) -> int:
        """Count the stored items that were read, and not compared with a checksum so far."""
        return self._records.unverified

    def read(self, path: str, start: int, nbytes: int) -> bytes:
        """Return bytes ``[start, start + nbytes)`` of a file, fewer at its end.

        Raises:
            DamagedCheckpoint: Stored bytes do not match their checksum, or copies differ.
            SourceChanged: The source was rewritten since it was planned.
        """
        file = self._files[path]
        end = min(start + nbytes, file.plan.nbytes)
        pieces = []
        while start < end:
            number = file.job_at(start)
            if file.goes_on_to(number):
                self._ahead.submit(self._compute_ahead, path, file, number + 1)
            job, block = file.jobs[number], self._block(path, file, number)
            first, last = start - job.start, min(end - job.start, job.nbytes)
            pieces.append(block[first:last].tobytes())
            start = job.start + last
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Close what was resolved of the source."""
        self._ahead.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.filler.close()

    def _compute_ahead(self, path: str, file: _File, number: int) -> None:
        """Compute a job that may be asked for. An error that stays is raised by the next read, as any."""
        if file.last < number:  # else the reader was faster
            with suppress(CkptError):
                self._block(path, file, number)

    def _block(self, path: str, file: _File, number: int) -> Bytes:
        key = path, number
        with self._lock:
            if self._failure is not None:
                raise self._failure
            block = self._cached.get(key)
            if block is not None:
                self._cached.move_to_end(key)
                return block
            future = self._computed.get(key)
            mine = future is None
            if future is None:
                future = self._computed[key] = Future()
        if not mine:
            return future.result()
        try:
            block = self._compute(file, file.jobs[number])
        except BaseException as error:
            with self._lock:
                del self._computed[key]
                if isinstance(error, CkptError) and not error.transient and self._failure is None:
                    self._failure = error
            future.set_exception(error)
            raise
        with self._lock:
            del self._computed[key]
            self._cached[key] = block
            self._cached_bytes += len(block)
            while self._cached_bytes > self._room and len(self._cached) > 1:
                self._cached_bytes -= len(self._cached.popitem(last=False)[1])
        future.set_result(block)
        return block

    def _compute(self, file: _File, job: Job) -> Bytes:
        workspace = self._workspaces.get()
        try:
            return self._filled(file, job, workspace)
        finally:
            self._workspaces.put(workspace)

    @rereading
    def _filled(self, file: _File, job: Job, workspace: Workspace) -> Bytes:
        plan, filler = file.plan, file.filler
        if plan.items.codec.any():
            workspace = workspace.of(self._smaller)
        buffer = np.empty(job.nbytes, np.uint8)
        small = filler.fill_small(job.parts, buffer, workspace) if len(job.parts) > 1 else frozenset[int]()
        for first, part in job.parts:
            target = buffer[first : first + part.nbytes]
            if isinstance(part, LiteralPart):
                target[:] = np.frombuffer(plan.literals[part.literal].data, np.uint8)[part.begin : part.end]
            elif part.tensor not in small:
                filler.fill(part, target, workspace)
        # Behind the last read: bytes of a file that was rewritten meanwhile are not used.
        self._require_same([stored.path for stored in plan.files])
        return buffer


class _File:
    """One file: its plan, its reader, and its jobs once they are needed."""

    def __init__(self, plan: FilePlan, filler: TensorFiller, budget: Budget) -> None:
        self.plan, self.filler, self._budget = plan, filler, budget
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self.last = -2  # the first job alone may be all that is asked for: it has the header
        self.jobs: list[Job] = []

    def job_at(self, byte: int) -> int:
        """Return the number of the job that has a byte of the file."""
        with self._lock:
            if not self._starts:
                self.jobs = list(jobs(self.plan, self._budget, self.filler.strides))
                self._starts = [job.start for job in self.jobs]
        return bisect_right(self._starts, byte) - 1

    def goes_on_to(self, number: int) -> bool:
        """Note that a job is read; report whether the one before it was the last, and there is a next one.

        Reads of the same job again, as of one reader behind another, report it no more.
        """
        with self._lock:
            before, self.last = self.last, number
            return number == before + 1 and number + 1 < len(self.jobs)
