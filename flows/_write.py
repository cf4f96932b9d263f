"""Write every file of a plan with the tasks of an engine.

Small files share a task, a batch. On several machines, a file much larger than a batch is written in parts,
which are joined when the last of them is written. If a worker is lost, its task is submitted once more, and
files with receipts are not written again. After any other failure no further task is started; running tasks
are finished, and the next run keeps their files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from prefect import Task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.futures import PrefectFuture, as_completed

from ckptcore.conversion.pipeline import FilePart, Prepared, parts
from ckptcore.core.file_sums import FileSums
from ckptcore.errors import WorkerLost
from ckptcore.planning.request import Settings
from ckptcore.utils.units import show_size
from flows._engine import Engine, RunningEngine, is_lost, running_engine
from tasks.artifacts import artifact_later, key_of
from tasks.logs import log
from tasks.write import SECONDS, STOP, join, write, write_part

MAX_TASKS = 200  # a task costs 3-50 ms and 20 KiB of Prefect's database
BATCH_BYTES = 1 << 30  # seconds of work, so that the cost of a task is negligible
MAX_WRITERS = 8  # tasks at a time in this process
LEAST_SHARE = 64 << 20  # bytes of the budget for each task; with less it would write tiny pieces
ELSEWHERE = 4  # threads of a task on another worker, at most: how many cores that has is not known here
TRIES = 2  # for a task whose worker is lost
LARGE = 2  # batches: a larger file is written in parts


@dataclass(frozen=True, slots=True)
class Work:
    """One task, with its size in bytes.

    join: the index of the file that this part belongs to, or None.
    """

    nbytes: int
    task: Task[..., Any]
    parameters: Mapping[str, Any]
    join: int | None = None


def write_all(
    prepared: Prepared, settings: Settings, batch_bytes: int, engine: Engine, *, observe: bool = False
) -> list[FileSums]:
    """Write every file of the plan; an artifact shows the progress in bytes, after a while and at the end.

    In this process, tasks that run at the same time share the memory budget. A worker elsewhere has the full
    budget, and as many threads, for each task.

    Args:
        prepared: the plan.
        settings: memory, threads and device.
        batch_bytes: bytes of output in one task.
        engine: where tasks run.
        observe: whether tasks return what they read.

    Returns:
        What each task has read of the source's files, for their digests.
    """
    share, width = settings, 1
    if engine.here:
        many = len(batches([file.nbytes for file in prepared.files], batch_bytes))
        width = max(min(settings.threads, MAX_WRITERS, many, settings.memory // LEAST_SHARE), 1)
        share = settings.share(width)
    else:
        # The same on all workers, see `ckptcore.execution.parts`.
        share = replace(settings, workers=settings.workers or min(settings.threads, ELSEWHERE))
        width = MAX_WRITERS
    work = _work(prepared, share, batch_bytes, large=not engine.here, observe=observe)
    total, nbytes_written = prepared.bytes_out, 0
    key = key_of("conversion-progress", prepared.plan_uri)
    progress: Future[Any] | None = None
    read: list[FileSums] = []
    STOP.clear()
    with running_engine(engine, width, settings.device) as running:
        try:
            updated = time.monotonic()
            for nbytes, sums in _finished(prepared, work, running):
                nbytes_written += nbytes
                if sums is not None:
                    read.append(sums)
                # It takes as long as to write a small file: what is written at once is shown at its end only.
                if nbytes_written >= total or time.monotonic() > updated + SECONDS:
                    text = f"{show_size(nbytes_written)} of {show_size(total)}"
                    percent = min(100.0, 100.0 * nbytes_written / max(total, 1))
                    if progress is None:
                        progress = artifact_later(create_progress_artifact, percent, key, text)
                    else:
                        artifact_later(_show, progress, percent, text)
                    updated = time.monotonic()
        except Exception:
            raise
        except BaseException:  # Ctrl-C or a cancellation: do not wait for the running tasks
            STOP.set()
            raise
    return read


def _show(progress: Future[Any], percent: float, text: str) -> None:
    artifact: UUID | None = progress.result()  # it is sent already: artifacts are sent in order
    if artifact is not None:
        update_progress_artifact(artifact, percent, text)


def _work(
    prepared: Prepared, settings: Settings, batch_bytes: int, *, large: bool, observe: bool
) -> list[Work]:
    """Return tasks for batches of files and parts of large ones. large: whether to write files in parts."""
    tasks: list[Work] = []
    files = []
    shared = {"plan_uri": prepared.plan_uri, "settings": settings, "observe": observe}
    for file in prepared.files:
        cut: tuple[FilePart, ...] = ()
        if large and file.nbytes > LARGE * batch_bytes:
            cut = parts(prepared.plan_uri, file.index, batch_bytes, settings)
        # One part is a file: no join is needed, and it shares a batch.
        if len(cut) < 2:
            files.append(file)
            continue
        for n, part in enumerate(cut, 1):
            name = f"{file.path}, part {n} of {len(cut)}"
            tasks.append(Work(part.nbytes, write_part, {"name": name, "part": part, **shared}, file.index))
    for batch in batches([file.nbytes for file in files], batch_bytes):
        first, last = files[batch[0]].path, files[batch[-1]].path
        name = first if len(batch) == 1 else f"{first} .. {last}"
        nbytes = sum(files[i].nbytes for i in batch)
        indices = [files[i].index for i in batch]
        parameters = {"name": name, "indices": indices, "nbytes": nbytes, **shared}
        tasks.append(Work(nbytes, write, parameters))
    return tasks


def _finished(
    prepared: Prepared, work: Sequence[Work], running: RunningEngine
) -> Iterator[tuple[int, FileSums | None]]:
    """Yield the bytes of tasks as they finish, and what they have read; `running.slots` at a time at most."""
    # Reversed, because `pop` takes from the end; a join is appended, so it goes first.
    waiting = list(reversed(work))
    missing: dict[int, int] = {}  # file index -> parts that are not written yet
    for unit in work:
        if unit.join is not None:
            missing[unit.join] = missing.get(unit.join, 0) + 1
    under_way: dict[PrefectFuture[Any], tuple[Work, int]] = {}
    while waiting or under_way:
        while waiting and len(under_way) < running.slots:
            unit = waiting.pop()
            under_way[running.submit(unit.task, **unit.parameters)] = unit, 1
        future = next(as_completed(list(under_way)))
        unit, attempt = under_way.pop(future)
        try:
            result = future.result()
        except Exception as error:
            if not is_lost(error):
                raise
            if attempt == TRIES:
                raise WorkerLost(
                    f"cannot write {unit.parameters['name']}: {TRIES} workers in a row were lost"
                ) from error
            log.warning("a worker was lost while it wrote %s; retrying", unit.parameters["name"])
            under_way[running.submit(unit.task, **unit.parameters)] = unit, attempt + 1
            continue
        if unit.join is not None:
            missing[unit.join] -= 1
            if not missing[unit.join]:
                file = prepared.files[unit.join]
                parameters = {"name": file.path, "plan_uri": prepared.plan_uri, "index": file.index}
                waiting.append(Work(0, join, parameters))
        yield unit.nbytes, result if isinstance(result, FileSums) else None


def batches(sizes: Sequence[int], nbytes: int = BATCH_BYTES, most: int = MAX_TASKS) -> list[range]:
    """Return ranges of consecutive files, each of about `nbytes`, and at most `most` ranges.

    sizes: bytes of each file. A file larger than a batch is a batch of its own.

    >>> batches([4, 4, 4, 9, 1], nbytes=8)
    [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    >>> len(batches([1] * 10_000, nbytes=1)) <= MAX_TASKS
    True
    """
    # Two neighbours together exceed the limit, so n batches exceed n // 2 limits.
    limit = max(nbytes, -(-2 * sum(sizes) // (most - 1))) if len(sizes) > most else nbytes
    ranges: list[range] = []
    first, total = 0, 0
    for index, size in enumerate(sizes):
        if index > first and total + size > limit:
            ranges.append(range(first, index))
            first, total = index, 0
        total += size
    return [*ranges, range(first, len(sizes))] if sizes else []
