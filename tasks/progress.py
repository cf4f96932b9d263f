"""Show the progress of a batch as an artifact of its run, and end the batch when the run ends."""

from __future__ import annotations

import math
import threading
import time
from contextvars import copy_context
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from ckptcore.errors import Interrupted
from ckptcore.utils.units import show_size
from tasks.logs import log

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
