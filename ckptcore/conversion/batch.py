"""Convert several small checkpoints at once: adapters, or steps of reinforcement learning.

A small conversion waits for disks most of its time: some 20 flushed files and folders for 10 MB of tensors. A
batch runs a few conversions side by side in threads, and records all of them in one transaction. Each keeps
its own row, its own staging folder and its own lock on the destination until that transaction is on disk, so
a killed batch is resumed like a killed conversion. One that fails does not stop the others.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptcore.conversion.pipeline import publishing, stopped
from ckptcore.conversion.publish import Result
from ckptcore.conversion.registration import (
    UNANNOUNCED,
    Announcement,
    Registration,
    fail,
    register_each,
    start_each,
)
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError, Interrupted, ended_by
from ckptcore.planning.request import Request, Settings
from ckptcore.planning.tiles import Budget
from ckptcore.utils.isolation import error_of
from ckptcore.utils.log_format import log_fields
from ckptcore.utils.spans import span
from ckptcore.utils.workers import run_jobs

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

MOST = 16  # conversions of a batch: what a killed process leaves claimed
WIDTH = 4  # of them side by side: they wait for disks more than for processors
_SHARE = 64 << 20  # bytes of the budget for each; with less it would write tiny pieces


@dataclass(slots=True)
class _Conversion:
    """One conversion of a batch, and what became of it."""

    registration: Registration
    lock: ExitStack = field(default_factory=ExitStack)  # keeps the destination locked
    manifests: list[Manifest] = field(default_factory=list)
    result: Result | None = None
    error: BaseException | None = None


def convert_batch(
    requests: Sequence[Request],
    settings: Settings,
    catalog: Catalog,
    *,
    catalog_url: str | None = None,
    announcement: Announcement = UNANNOUNCED,
    flow_run_id: str | None = None,
) -> list[Result | CkptError]:
    """Convert several checkpoints to destinations of their own.

    Args:
        requests: What to convert, and how; no destination may be inside another one.
        settings: Memory and threads of all together, and the device.
        catalog: The catalog that records the conversions.
        catalog_url: Its URL.
        announcement: What a user reports about the sources, for the catalog.
        flow_run_id: Id of the Prefect flow run, or None.

    Returns:
        For each request its published and recorded output, or its error. That is `Interrupted` for what the
        user stopped; what was published before is recorded.

    Raises:
        CatalogError: The catalog cannot record the begin: nothing was converted.
    """
    # What the batch before has left: commands collect garbage rarely, and a sweep is one command for
    # thousands of checkpoints.
    gc.collect(1)
    # Checked before anything is recorded as begun: a share may be too small for any conversion.
    width, share = _shares(settings, len(requests))
    # One connection for all of its transactions; it is not held while files are written.
    with catalog.kept_open():
        rows = [_Conversion(r) for r in start_each(requests, catalog, flow_run_id, announcement)]
        stop: BaseException | None = None
        try:
            # Errors of single conversions are in their rows: what arrives here stops the batch.
            run_jobs(iter(rows), lambda: lambda row: _publish(row, share, catalog_url), threads=width)
        except BaseException as error:  # raised below, once the catalog knows what was published
            stop = stopped(error)
        _record(rows, stop)
    if stop is not None and not isinstance(stop, Exception):
        # A signal is raised as it is, once it is recorded; other errors are in the rows.
        raise stop
    return [_outcome(row) for row in rows]


def _shares(settings: Settings, count: int) -> tuple[int, Settings]:
    """Return how many conversions run side by side, and the settings of each of them."""
    width = settings.workers or WIDTH
    # A memory budget of less than a share for each is used by fewer conversions.
    width = max(1, min(width, count, settings.memory // _SHARE))
    share = settings.share(width)
    Budget.of(share)
    return width, share


def _publish(row: _Conversion, settings: Settings, catalog_url: str | None) -> None:
    """Convert up to publishing. The destination stays locked."""
    request, lock = row.registration.request, ExitStack()
    log_values = {
        "source": request.source,
        "destination": request.destination,
        "conversion": row.registration.id,
    }
    try:
        with log_fields(**log_values), span("conversion", verb=request.verb, **log_values):
            stage = publishing(
                request, settings, None, catalog_url, manifests=row.manifests, source_record=row.registration
            )
            # The stage is left in `_record`: until then its destination stays locked.
            row.result = lock.enter_context(stage)
            row.lock = lock
    except BaseException as error:
        row.error = stopped(error)
        if not isinstance(row.error, Exception) or isinstance(row.error, Interrupted):
            raise  # a stop: no further conversion begins
        row.error = error_of(row.error)


def _record(rows: Sequence[_Conversion], stop: BaseException | None) -> None:
    """Record what was published in one transaction, then the failures; free every destination."""
    published = [row for row in rows if row.result is not None]
    # One commit for the batch: a commit of its own for each would wait for the disk each time.
    recorded = register_each(
        [(row.registration, row.result, row.manifests[0]) for row in published if row.result]
    )
    for row, outcome in zip(published, recorded, strict=True):
        if isinstance(outcome, CkptError):  # the staging folder stays, as after any error
            row.error = outcome
        else:
            row.result = outcome
        error = row.error
        try:
            # Leaving the stage removes the staging folder, or keeps it if there is an error.
            row.lock.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        except Exception as second:
            row.error = error_of(second)
    # Rows that were never begun when the batch stopped: they are recorded as running since `start_each`.
    for row in rows:
        if row.result is None and row.error is None:
            row.error = stop or Interrupted("the batch was stopped before it began")
        if row.error is not None:
            fail(row.registration, row.error, row.manifests[0] if row.manifests else None)


def _outcome(row: _Conversion) -> Result | CkptError:
    if row.error is not None:
        return ended_by(row.error)
    assert row.result is not None
    return row.result
