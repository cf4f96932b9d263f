"""Run jobs in several threads, with one loop for everything that moves, compares or sums bytes.

- Threads take jobs from one shared iterator, under a lock, so it may open files and wait for a buffer.
- The first error of any thread, or Ctrl-C, stops all of them; it is raised when the last thread has ended.
- A thread runs in a copy of the caller's context, so its log records belong to the caller's run.
- Work that waits asks `failed`: it ends soon after an error of another thread.

`usable_cores` counts the cores for them: by the affinity of this process, and by its container's quota.
`Buffers` bounds the memory of jobs that outlive their turn; `ProgressMeter` counts finished bytes.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

Progress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, total bytes) by any thread; an error that it raises stops the work."""

Job = TypeVar("Job")
Buffer = TypeVar("Buffer")
_failed: ContextVar[Callable[[], bool] | None] = ContextVar("ckptcore_failed", default=None)

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return how many cores this process may keep busy, at least one.

    A container with a quota of half the time of a machine of 64 cores sees all of them, and has 32.
    """
    cores = len(os.sched_getaffinity(0))
    quota = _quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def failed() -> bool:
    """Report whether an error ends the jobs that the calling context belongs to.

    Threads that a job starts with a copy of its context belong to it. A good end of `run_jobs` is no error:
    what its threads began, such as reads ahead, may be waited for later.
    """
    ask = _failed.get()
    return ask is not None and ask()


@contextmanager
def finishing() -> Iterator[None]:
    """Do what must be done although the work has failed, such as ending a lease: `failed` is False."""
    token = _failed.set(None)
    try:
        yield
    finally:
        _failed.reset(token)


def run_jobs(
    jobs: Iterator[Job],
    prepare: Callable[[], Callable[[Job], None]],
    *,
    threads: int,
    stop: Callable[[], object] | None = None,
) -> None:
    """Run every job in one of several threads.

    Args:
        jobs: The jobs. Only one thread at a time requests the next one.
        prepare: Called once in each thread; returns a function that does one job, with buffers of its own.
        threads: Number of threads.
        stop: Called when the work ends, also after errors; wakes an iterator that waits in `Buffers.take`.

    Raises:
        BaseException: The first error of any thread, or the caller's (Ctrl-C), when all threads have ended.
    """
    _Pool(jobs, prepare, stop or _nothing).run(threads)


class Buffers(Generic[Buffer]):
    """Reused buffers: `take` waits until one is free."""

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self._free: queue.SimpleQueue[Buffer | None] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)

    def take(self) -> Buffer | None:
        """Wait for a buffer; return None when the work is stopped."""
        return self._free.get()

    def give_back(self, buffer: Buffer) -> None:
        """Return a buffer for the next job."""
        self._free.put(buffer)

    def close(self) -> None:
        """Wake the waiting thread. There is at most one, because one thread at a time takes a job."""
        self._free.put(None)


class ProgressMeter:
    """Counts the finished bytes of a stage. Safe for threads.

    Args:
        progress: Callback, or None.
        stage: What the bytes are counted for: ``write``, ``read``, ``compare``, ....
        total: Total bytes.
        done: Bytes that an earlier run has finished.
    """

    def __init__(self, progress: Progress | None, stage: str, total: int, nbytes_done: int = 0) -> None:
        self._progress, self._stage, self._total = progress, stage, total
        self._lock, self.done = threading.Lock(), nbytes_done

    def add(self, nbytes: int) -> None:
        """Count finished bytes. An error of the callback propagates, which stops the work."""
        if self._progress is None:
            return
        with self._lock:
            self.done += nbytes
            nbytes_done = self.done
        # Outside of the lock: a slow callback must not stop the other threads.
        self._progress(self._stage, min(nbytes_done, self._total), self._total)


class CountedMeter(ProgressMeter):
    """Passes finished bytes on as they are: another process adds up those of several."""

    def __init__(self, finished: Callable[[int], None]) -> None:
        super().__init__(None, "", 0)
        self._finished = finished

    def add(self, nbytes: int) -> None:
        """Pass finished bytes on."""
        self._finished(nbytes)


class _Pool(Generic[Job]):
    """The threads of one `run_jobs`, and their shared state."""

    def __init__(
        self, jobs: Iterator[Job], prepare: Callable[[], Callable[[Job], None]], stop: Callable[[], object]
    ) -> None:
        self._jobs, self._prepare, self._wake = jobs, prepare, stop
        self._take, self._stopped = threading.Lock(), threading.Event()
        self._errors: list[BaseException] = []  # appending is atomic; the first one is raised
        self._outer = _failed.get()

    def run(self, count: int) -> None:
        threads = [
            threading.Thread(target=copy_context().run, args=(self._work,), name=f"ckptcore-{n}", daemon=True)
            for n in range(count)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # with a time-out, so that Ctrl-C is seen
        except BaseException as error:  # raised below, when the threads have ended
            self._errors.append(error)
        finally:
            self._stop()
            for thread in threads:
                # A thread that was never started cannot be joined.
                if thread.ident is not None:
                    thread.join()
        if self._errors:
            raise self._errors[0]

    def _work(self) -> None:
        _failed.set(self._has_failed)  # in this thread's own context
        try:
            do = self._prepare()
            while (job := self._next()) is not None:
                do(job)
        except BaseException as error:  # `run` raises it
            self._errors.append(error)
            self._stop()

    def _next(self) -> Job | None:
        with self._take:
            return None if self._stopped.is_set() else next(self._jobs, None)

    def _has_failed(self) -> bool:
        return bool(self._errors) or (self._outer is not None and self._outer())

    def _stop(self) -> None:
        self._stopped.set()
        self._wake()


def _nothing() -> None:
    """Do nothing."""


@cache
def _quota() -> float | None:
    """Return the cores' worth of time that the control groups of this process leave it; None for all.

    Read once: a conversion asks a dozen times, and each answer is a dozen files, a tenth of the time of a
    small conversion.
    """
    quotas = [quota for group in _groups() if (quota := _of(group)) is not None]
    return min(quotas, default=None)


def _groups() -> list[Path]:
    """Return the folders of this process's control groups for processor time, and of those around them."""
    groups = [_GROUPS, _GROUPS / "cpu"]
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return groups
    for line in lines:
        _, controllers, path = line.split(":", 2)  # cgroups(7)
        if not controllers:
            root = _GROUPS
        elif "cpu" in controllers.split(","):
            root = _GROUPS / controllers
        else:
            continue
        inner = root / path.lstrip("/")
        groups += [group for group in (inner, *inner.parents) if root in (group, *group.parents)]
    return groups


def _of(group: Path) -> float | None:
    """Return the quota of one group, in cores: ``cpu.max`` of version 2, two files of version 1."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()[:2]
        except (OSError, ValueError):  # no such group, or one of the other version
            continue
        if quota.isdigit() and period.isdigit() and int(period):  # else "max", or -1
            return int(quota) / int(period)
    return None
