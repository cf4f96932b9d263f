"""Writing: every file of a plan, on whatever machines the engine has.

Small files share a task, a batch; where several machines write, a file that is much larger than a batch is
written in parts, and joined when the last of them is there. A task whose worker goes away is submitted once
more: what it had finished is recognised by its receipts. After any other failure no further task is begun;
those that run are finished, and kept for the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.futures import PrefectFuture, as_completed

from ckptcore.conversion.pipeline import FilePart, Prepared, parts
from ckptcore.errors import WorkerLost
from ckptcore.planning.request import Settings
from ckptcore.utils.units import show_size
from flows._batches import batches
from flows._engine import Crew, Engine, crew, is_lost
from tasks.artifacts import shown
from tasks.join import join
from tasks.logs import log
from tasks.progress import STOP
from tasks.write import write
from tasks.write_part import write_part

MAX_WRITERS = 8  # tasks at a time in this process
LEAST_SHARE = 64 << 20  # bytes of the budget that a batch should have, or it writes in crumbs
TRIES = 2  # of a task whose worker is lost
LARGE = 2  # batches: a file of more is written in parts


@dataclass(frozen=True, slots=True)
class Work:
    """One task: what it is called, how it is submitted, and how many bytes are done with it.

    join: the file that waits for this part and its others, by index.
    """

    name: str
    nbytes: int
    start: Callable[[Crew], PrefectFuture[Any]]
    join: int | None = None


def write_all(prepared: Prepared, settings: Settings, batch_bytes: int, engine: Engine) -> None:
    """Every file of the plan; how far it is, in bytes, is an artifact.

    In this process the budget is cut into as many parts as tasks run at a time; a worker elsewhere has the
    whole budget, and as many threads, for each task.
    """
    share, width = settings, 1
    if engine.here:
        many = len(batches([file.nbytes for file in prepared.files], batch_bytes))
        width = max(min(settings.threads, MAX_WRITERS, many, settings.memory // LEAST_SHARE), 1)
        share = replace(settings, memory=settings.memory // width, workers=max(1, settings.threads // width))
    else:
        share = replace(
            settings, workers=settings.threads
        )  # the same everywhere, see `ckptcore.execution.parts`
        width = MAX_WRITERS
    work = _work(prepared, share, batch_bytes, large=not engine.here)
    total, done = prepared.bytes_out, 0
    told = f"{show_size(total)} in {len(work)} tasks"
    progress = shown(create_progress_artifact, 0.0, "conversion-progress", told)
    STOP.clear()
    with crew(engine, width, settings.device) as running:
        try:
            for nbytes in _finished(prepared, work, running):
                done += nbytes
                told = f"{show_size(done)} of {show_size(total)}"
                if progress is not None:
                    percent = min(100.0, 100.0 * done / max(total, 1))
                    shown(update_progress_artifact, cast("UUID", progress), percent, told)
        except Exception:
            raise
        except BaseException:  # Ctrl-C, or a cancellation: the running tasks must not be waited for
            STOP.set()
            raise


def _work(prepared: Prepared, settings: Settings, batch_bytes: int, *, large: bool) -> list[Work]:
    """Batches of files, and parts of large ones. large: whether a file may be written in parts."""
    found: list[Work] = []
    files = []
    for file in prepared.files:
        cut: tuple[FilePart, ...] = ()
        if large and file.nbytes > LARGE * batch_bytes:
            cut = parts(prepared.plan_uri, file.index, batch_bytes, settings)
        if len(cut) < 2:
            files.append(file)
            continue
        for n, part in enumerate(cut, 1):
            name = f"{file.path}, part {n} of {len(cut)}"
            start = _starting(write_part, name=name, plan_uri=prepared.plan_uri, part=part, settings=settings)
            found.append(Work(name, part.nbytes, start, file.index))
    for batch in batches([file.nbytes for file in files], batch_bytes):
        first, last = files[batch[0]].path, files[batch[-1]].path
        name = first if len(batch) == 1 else f"{first} .. {last}"
        nbytes = sum(files[i].nbytes for i in batch)
        indices = [files[i].index for i in batch]
        start = _starting(
            write, name=name, plan_uri=prepared.plan_uri, indices=indices, nbytes=nbytes, settings=settings
        )
        found.append(Work(name, nbytes, start))
    return found


def _starting(task: Any, **parameters: Any) -> Callable[[Crew], PrefectFuture[Any]]:
    return lambda running: running.submit(task, **parameters)


def _finished(prepared: Prepared, work: Sequence[Work], running: Crew) -> Iterator[int]:
    """Bytes of tasks as they finish; never more of them run than the crew has room for."""
    waiting = list(reversed(work))
    missing: dict[int, int] = {}  # parts that a file still waits for
    for one in work:
        if one.join is not None:
            missing[one.join] = missing.get(one.join, 0) + 1
    under_way: dict[PrefectFuture[Any], tuple[Work, int]] = {}
    while waiting or under_way:
        while waiting and len(under_way) < running.slots:
            one = waiting.pop()
            under_way[one.start(running)] = one, 1
        future = next(as_completed(list(under_way)))
        one, attempt = under_way.pop(future)
        try:
            future.result()
        except Exception as error:
            if not is_lost(error):
                raise
            if attempt == TRIES:
                raise WorkerLost(f"the workers that wrote {one.name} went away, {TRIES} times") from error
            log.warning("a worker went away while it wrote %s: once more", one.name)
            under_way[one.start(running)] = one, attempt + 1
            continue
        if one.join is not None:
            missing[one.join] -= 1
            if not missing[one.join]:
                file = prepared.files[one.join]
                start = _starting(join, name=file.path, plan_uri=prepared.plan_uri, index=file.index)
                waiting.append(Work(file.path, 0, start))
        yield one.nbytes
