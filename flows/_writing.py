"""Writing: every file of a plan, in batches, on whatever machines the engine has.

A batch whose worker goes away is submitted once more: files that it had finished are recognised by
their receipts. After any other failure no further batch is begun; those that run are finished, and kept
for the next run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.futures import PrefectFuture, as_completed

from ckptcore.convert import Prepared
from ckptcore.errors import WorkerLost
from ckptcore.receipts import Receipt
from ckptcore.request import Settings
from ckptcore.sizes import show_size
from flows._batches import batches
from flows._engine import Crew, Engine, crew, is_lost
from tasks.logs import log
from tasks.progress import STOP
from tasks.write import write

MAX_WRITERS = 8  # tasks at a time in this process
LEAST_SHARE = 64 << 20  # bytes of the budget that a batch should have, or it writes in crumbs
TRIES = 2  # of a batch whose worker is lost


def write_all(prepared: Prepared, settings: Settings, batch_bytes: int, engine: Engine) -> None:
    """Every file of the plan; how far it is, in bytes, is an artifact.

    In this process the budget is cut into as many parts as batches run at a time; a worker elsewhere has
    the whole budget for each batch.
    """
    work = batches([file.nbytes for file in prepared.files], batch_bytes)
    width = min(settings.threads, MAX_WRITERS, len(work), settings.memory // LEAST_SHARE)
    width = max(width, 1)
    share = settings
    if engine.here:
        share = replace(settings, memory=settings.memory // width, workers=max(1, settings.threads // width))
    total, done = prepared.bytes_out, 0
    told = f"{show_size(total)} in {len(work)} batches"
    progress = cast("UUID", create_progress_artifact(0.0, "conversion-progress", told))
    STOP.clear()
    with crew(engine, width, settings.device) as running:
        try:
            for receipts in _finished(prepared, work, share, running):
                done += sum(receipt.nbytes for receipt in receipts)
                told = f"{show_size(done)} of {show_size(total)}"
                update_progress_artifact(progress, min(100.0, 100.0 * done / max(total, 1)), told)
        except Exception:
            raise
        except BaseException:  # Ctrl-C, or a cancellation: the running batches must not be waited for
            STOP.set()
            raise


def _finished(
    prepared: Prepared, work: list[range], settings: Settings, running: Crew
) -> Iterator[list[Receipt]]:
    """Receipts of batches as they finish; never more of them run than the crew has room for."""
    files = prepared.files
    waiting = list(reversed(work))
    open_: dict[PrefectFuture[list[Receipt]], tuple[range, int]] = {}

    def submit(batch: range, attempt: int) -> None:
        first, last = files[batch[0]].path, files[batch[-1]].path
        name = first if len(batch) == 1 else f"{first} .. {last}"
        future = running.submit(
            write,
            name=name,
            plan_uri=prepared.plan_uri,
            indices=[files[i].index for i in batch],
            nbytes=sum(files[i].nbytes for i in batch),
            settings=settings,
        )
        open_[future] = batch, attempt

    while waiting or open_:
        while waiting and len(open_) < running.slots:
            submit(waiting.pop(), 1)
        future = next(as_completed(list(open_)))
        batch, attempt = open_.pop(future)
        try:
            receipts = future.result()
        except Exception as error:
            if not is_lost(error):
                raise
            paths = ", ".join(files[i].path for i in batch)
            if attempt == TRIES:
                raise WorkerLost(f"the workers that wrote {paths} went away, {TRIES} times") from error
            log.warning("a worker went away while it wrote %s: once more", paths)
            submit(batch, attempt + 1)
            continue
        yield receipts
